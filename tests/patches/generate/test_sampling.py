"""Sampling in batches: recognised samplers, seeds, and what a step computes, fetches and keeps."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.request import RequestOptions
from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.errors import RequestFailedError
from mlx_paged.patches.registry import fingerprint
from mlx_paged.patches.samplers import KNOWN, known_processors, known_sampler
from tests.support.models import batch_runs
from tests.support.models.batch_runs import Outcome, collect, generator, model_of
from tests.support.models.builders import prompt_of

NEW = 12


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    yield
    mlx_paged.remove_patches()


def prompts_of(count: int) -> list[list[int]]:
    return [prompt_of(5 + 3 * (index % 4), seed=index).tolist() for index in range(count)]


def answers(gen: Any, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    return batch_runs.answers(gen, prompts, [NEW] * len(prompts), **options)


# What is recognised -----------------------------------------------------------------------------------------------


def test_samplers_carry_their_parameters() -> None:
    assert known_sampler(make_sampler(0.0)) == {} == known_sampler(sample_utils.greedy_sampler)
    given = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "min_tokens_to_keep": 2, "top_k": 40}
    given |= {"xtc_probability": 0.5, "xtc_threshold": 0.2, "xtc_special_tokens": [3]}
    assert known_sampler(make_sampler(0.7, 0.9, 0.05, 2, 40, 0.5, 0.2, [3])) == given
    assert SamplingParams(**(known_sampler(make_sampler(1.5, top_p=1.0)) or {})).temperature == 1.5
    penalties = {"repetition_penalty": 1.1, "repetition_context_size": 7, "frequency_penalty": 0.5}
    found = known_processors(make_logits_processors({5: 1.5}, **penalties))
    assert found == {**penalties, "frequency_context_size": 20, "logit_bias": {5: 1.5}}
    assert known_processors([]) == {} == known_processors(make_logits_processors(None, 0.0))


def test_other_samplers_and_processors_are_not_recognised() -> None:
    def sampler(logprobs: mx.array) -> mx.array:
        return mx.argmax(logprobs, axis=-1)

    assert known_sampler(sampler) is None
    assert known_sampler(lambda x: sample_utils.apply_top_p(x, 0.5)) is None
    assert known_processors([lambda tokens, logits: logits]) is None
    ours = make_logits_processors({5: 1.5}, 1.1)
    assert known_processors(ours[::-1]) is None and known_processors([*ours, ours[1]]) is None
    assert all(fingerprint(getattr(sample_utils, name)) == known for name, known in KNOWN.items())


def test_parameters_that_mlx_lm_refuses_fail_only_their_row() -> None:
    gen = generator(model_of("llama"))
    samplers = [make_sampler(0.0), make_sampler(1.0, top_k=10**6), make_sampler(0.0), make_sampler(1.0, min_p=2.0)]
    prompts = prompts_of(4)
    expected = answers(generator(model_of("llama")), prompts[:1])
    uids = gen.insert(prompts, [NEW] * 4, samplers=samplers)
    failed, tokens = {}, []
    while True:
        try:
            responses = gen.next_generated()
        except RequestFailedError as error:
            failed[error.uid] = str(error)
            continue
        if not responses:
            break
        tokens += [response.token for response in responses if response.uid == uids[0]]
    assert set(failed) == {uids[1], uids[3]} and "top_k" in failed[uids[1]] and "min_p" in failed[uids[3]]
    assert tokens == expected[0]


# Seeds ------------------------------------------------------------------------------------------------------------


def settings() -> list[tuple[Any, list[Any]]]:
    """Return samplers and processors; those that mlx-lm makes before the patches do not carry their parameters."""
    return [
        (make_sampler(1.0), []),
        (make_sampler(0.8, top_p=0.9), make_logits_processors(repetition_penalty=1.3)),
        (make_sampler(1.2, top_k=30, min_p=0.01), make_logits_processors({3: 2.0}, frequency_penalty=0.3)),
        (make_sampler(1.0, xtc_probability=0.5, xtc_threshold=0.01), []),
    ]


def seeded(count: int) -> dict[str, Any]:
    known = settings()
    chosen = [known[index % 4] for index in range(count)]
    return {
        "samplers": [sampler for sampler, _ in chosen],
        "logits_processors": [processors for _, processors in chosen],
        "options": [RequestOptions(seed=1000 + index // 3) for index in range(count)],
    }


def test_seed_gives_the_same_tokens_alone_and_in_any_batch() -> None:
    model, prompts, options = model_of("llama"), prompts_of(32), seeded(32)
    whole = answers(generator(model), prompts, **options)
    for size, firsts in ((1, (0, 2, 31)), (2, (10, 30)), (8, (16,))):
        for first in firsts:
            part = slice(first, first + size)
            mx.random.seed(first)  # has no effect
            of_part = {name: values[part] for name, values in options.items()}
            assert answers(generator(model), prompts[part], **of_part) == whole[part], (size, first)
    assert len({tuple(tokens) for tokens in whole}) == 32


def test_seed_gives_the_same_tokens_after_preemption() -> None:
    model, prompts, options = model_of("llama"), prompts_of(4), seeded(4)
    expected = answers(generator(model), prompts, **options)

    gen = generator(model)
    outcomes = {uid: Outcome() for uid in gen.insert(prompts, [NEW] * 4, **options)}
    for step in itertools.count():
        parts = gen.next()
        if not any(parts):
            break
        collect(outcomes, *parts)
        running = gen._engine.scheduler.running
        if step % 3 == 1 and len(running) > 1:
            gen._engine.scheduler.preempt(running[step % len(running)])
    assert [outcome.tokens for outcome in outcomes.values()] == expected
    assert gen.preemptions >= 3


def test_rows_without_a_seed_draw_from_the_global_state() -> None:
    model, prompts = model_of("llama"), prompts_of(3)
    options = {
        "samplers": [make_sampler(1.0)] * 3,
        "options": [RequestOptions(), RequestOptions(seed=4), RequestOptions()],
    }
    runs = []
    for seed in (1, 1, 2):
        mx.random.seed(seed)
        runs.append(answers(generator(model), prompts, **options))
    assert runs[0] == runs[1]
    assert runs[0][1] == runs[2][1] and runs[0][0] != runs[2][0] and runs[0][2] != runs[2][2]


# What a step does -------------------------------------------------------------------------------------------------


TRANSFERS = ("tolist", "item", "__array__", "__dlpack__", "__bool__", "__int__", "__float__", "__index__")


class Watch:
    """Count evaluations, normalisations and reads by the host, except those of the pool (mlx_paged/kv)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = {"eval": 0, "async_eval": 0, "logsumexp": 0, "transfer": 0}
        for name in ("eval", "async_eval", "logsumexp"):
            monkeypatch.setattr(mx, name, self._counting(name, getattr(mx, name)))
        for name in TRANSFERS:
            monkeypatch.setattr(mx.array, name, self._counting("transfer", getattr(mx.array, name)))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += not sys._getframe(1).f_globals["__name__"].startswith("mlx_paged.kv.")
            return function(*args, **kwargs)

        return counted


@pytest.mark.parametrize("setting", [*range(4), "greedy"])
def test_step_evaluates_once_fetches_once_and_never_normalises(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, processors = (make_sampler(0.0), []) if setting == "greedy" else settings()[setting]
    gen = generator(model_of("llama"))
    gen.insert(prompts_of(3), [40] * 3, samplers=[sampler] * 3, logits_processors=[processors] * 3)
    for _ in range(4):
        gen.next_generated()
    watch = Watch(monkeypatch)
    for _ in range(5):
        gen.next_generated()
    assert watch.counts == {"eval": 0, "async_eval": 5, "logsumexp": 0, "transfer": 5}


def test_kept_responses_hold_only_their_own_rows() -> None:
    model = model_of("llama")
    vocab, batch, steps = model.args.vocab_size, 16, 30
    gen = generator(model)
    gen.insert([prompt_of(4, seed=index).tolist() for index in range(batch)], [steps] * batch)
    kept, others = [], []
    for _ in range(steps // 2):
        responses = gen.next_generated()
        kept.append(responses[3])
        others.append(np.array(responses[3].logprobs))
    del responses
    gen.next_generated()
    steps_held = {id(response._logprobs._logits) for response in kept}
    sizes = [response._logprobs._logits.shape for response in kept]
    assert sizes[:-2] == [(1, vocab)] * (len(kept) - 2) and len(steps_held) == len(kept)
    for response, logprobs in zip(kept, others, strict=True):
        np.testing.assert_array_equal(np.array(response.logprobs), logprobs)
    while gen.next_generated():
        pass
    assert all(response._logprobs._logits.shape == (1, vocab) for response in kept)
