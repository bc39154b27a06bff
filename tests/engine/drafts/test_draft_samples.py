"""Sampled answers have the same distribution with and without a draft model: two samples, compared by chi-square."""

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import PagedConfig
from tests.support.cases import slow
from tests.support.models.batch_runs import generator
from tests.support.models.builders import build
from tests.support.models.drafting import in_every_step

PROMPT, POSITIONS, ROWS = [1, 2, 3], 3, 50
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temp": 1.0}, {}),
    "top-p": ({"temp": 0.8, "top_p": 0.8}, {}),
    "min-p": ({"temp": 1.3, "min_p": 0.15}, {}),
    "penalties": ({"temp": 1.0}, {"repetition_penalty": 1.6, "presence_penalty": 0.5}),
}


def sizes() -> tuple[Any, Any]:
    """Return a model with a vocabulary of 6 tokens, and a draft model that often disagrees."""
    shape = {"vocab_size": 6, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 32}
    model, draft = build("llama", **shape), build("llama", **shape)
    model.lm_head.weight = model.lm_head.weight * 1.5
    draft.update(model.parameters())
    mx.random.seed(2)
    draft.update(tree_map(lambda w: w + 0.5 * mx.std(w) * mx.random.normal(w.shape), draft.parameters()))
    mx.eval(model.parameters(), draft.parameters())
    return model, draft


def drawn(gen: Any, number: int, options: dict[str, Any], penalties: dict[str, Any]) -> Counter[tuple[int, ...]]:
    """Return how often each answer was sampled."""
    found: Counter[tuple[int, ...]] = Counter()
    sampler, processors = make_sampler(**options), make_logits_processors(None, **penalties)
    for begin in range(0, number, 2000):
        count = min(2000, number - begin)
        rest = {"samplers": [sampler] * count, "logits_processors": [processors] * count}
        uids = gen.insert_segments([[PROMPT]] * count, [POSITIONS] * count, **rest)
        answers: dict[int, list[int]] = {uid: [] for uid in uids}
        while any(parts := gen.next()):
            for response in parts[1]:
                answers[response.uid].append(response.token)
        found.update(map(tuple, answers.values()))
    return found


@pytest.mark.timeout(3600)  # 200,000 answers, twice, take some 8 minutes of CPU time
@pytest.mark.parametrize(
    ("case", "number"),
    [
        ("penalties", 500),
        *slow(*((case, number) for case in CASES for number in (2000, 200_000))),
    ],
)
def test_samples_have_the_same_distribution_with_drafts(case: str, number: int) -> None:
    model, draft = sizes()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    mx.random.seed(11)
    plain = drawn(generator(model, completion_batch_size=ROWS), number, *CASES[case])
    with in_every_step():
        gen = generator(model, draft_model=draft, num_draft_tokens=2, completion_batch_size=ROWS)
    found = drawn(gen, number, *CASES[case])
    stats = mlx_paged.pool_of(model).stats()
    assert 0.1 < stats.accepted_tokens / stats.drafted_tokens < 0.95
    common = [answer for answer in plain | found if plain[answer] + found[answer] >= 16]
    counts = np.array([[each[answer] for answer in common] for each in (plain, found)], float)
    rest = np.array([[number], [number]]) - counts.sum(axis=1, keepdims=True)  # rare answers count together
    a, b = np.concatenate([counts, rest], axis=1)
    chi_square = float(((a - b) ** 2 / np.maximum(a + b, 1)).sum())
    freedom = len(common)
    assert freedom > 10
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom), f"{chi_square} with {freedom} degrees of freedom"
