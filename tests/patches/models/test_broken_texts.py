"""If a kernel text that a later step needs does not compile, every request continues over gathered blocks."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.attention import dispatch
from mlx_paged.engine import compiled_step
from mlx_paged.engine.request import RequestOptions
from mlx_paged.kernels.trial import KernelKey
from tests.support.cases import quick, slow
from tests.support.kernels.broken_texts import Launched, broken_texts
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.batch_runs import Outcome, generator, run_all
from tests.support.models.builders import VOCAB, build, perturbed, prompt_of
from tests.support.models.oracle import oracles

pytestmark = pytest.mark.usefixtures("no_fall_through")
KINDS = ["llama", "llama-sliding", "gemma3"]
# With 4 KV heads and more, 256 tokens are one partition (docs/adr/0085).
MODELS = {kind: build(kind, head_dim=64, num_key_value_heads=6) for kind in KINDS}


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "prepares_plans", lambda: False)


def many_rows(key: KernelKey) -> bool:
    return key.body == "paged_decode" and "ends" not in key.small_inputs


def several_partitions(key: KernelKey) -> bool:
    return dict(key.constants).get("SINGLE") is False


def merge(key: KernelKey) -> bool:
    return key.body == "merge_partitions"


def solo(model: Any, prompt: mx.array, count: int) -> list[int]:
    return [token for token, _ in generate_step(prompt, model, max_tokens=count)]


@contextmanager
def one_text_broken(model: Any, is_broken: Callable[[KernelKey], bool], **config: Any) -> Iterator[Launched]:
    """Apply the patches over stand-in kernels. At the end, check that the broken text was tried once, one warning was
    given, the dispatch has the reason for gathering, and no block is live."""
    with fake_kernels(), broken_texts(is_broken) as launched, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        mlx_paged.apply_patches(PagedConfig(block_size=8, **config))
        yield launched
        assert sum(map(is_broken, launched.texts)) == 1, "it was tried once, and never launched in a step"
        off = [str(warning.message) for warning in given if " is off: " in str(warning.message)]
        assert len(off) == 1 and "it does not compile" in off[0]
        choices = mlx_paged.dispatch_counts()
        assert any(choice.path == "gather" and "it does not compile" in choice.reason for choice in choices)
        assert any(choice.path == "kernel" for choice in choices)
        pool = mlx_paged.pool_of(model)
        assert any(why for group in pool.groups for why in group.unsupported.values())
        pool.check_integrity()
        assert pool.stats().live_blocks == 0
        mlx_paged.remove_patches()


@pytest.mark.parametrize(
    ("is_broken", "kind", "patience"),
    quick([(a, *b) for a in [several_partitions, merge] for b in [("llama", 0), ("gemma3", 10**6)]],
    (several_partitions, "llama", 0), (merge, "gemma3", 1000000))
)  # fmt: skip
def test_generation_continues_when_its_table_grows_past_one_partition(
    monkeypatch: pytest.MonkeyPatch, kind: str, patience: int, is_broken: Callable[[KernelKey], bool]
) -> None:
    """With compiled steps and without; 32 blocks of 8 are one partition, more of them are several."""
    monkeypatch.setattr(compiled_step, "PATIENCE", patience)
    model, prompt = MODELS[kind], prompt_of(240)
    stock = solo(model, prompt, 40)
    with one_text_broken(model, is_broken, kernel="on"):
        assert solo(model, prompt, 40) == stock


@pytest.mark.parametrize(("kind", "patience"), slow(("llama", 0), ("llama-sliding", 10**6), ("gemma3", 10**6)))
def test_batch_continues_when_it_gets_more_rows(monkeypatch: pytest.MonkeyPatch, kind: str, patience: int) -> None:
    monkeypatch.setattr(compiled_step, "PATIENCE", patience)
    model = MODELS[kind]
    prompts = [prompt_of(5 + 9 * row, seed=row) for row in range(9)]
    stock = [solo(model, prompt, 20) for prompt in prompts]
    with one_text_broken(model, many_rows):
        gen = generator(model)
        outcomes: dict[int, Outcome] = {}
        for part in (prompts[:3], prompts[3:]):
            uids = gen.insert([prompt.tolist() for prompt in part], [20] * len(part))
            outcomes.update((uid, Outcome()) for uid in uids)
            for _ in range(6):
                _, generated = gen.next()
                for response in generated:
                    outcomes[response.uid].tokens.append(response.token)
        run_all(gen, outcomes)
        assert [outcome.tokens for outcome in outcomes.values()] == stock
        assert all(outcome.reason == "length" for outcome in outcomes.values())


@pytest.mark.parametrize("kind", slow(*KINDS))
def test_rows_with_drafts_continue(kind: str) -> None:
    """Rows with drafts have different numbers of tokens in a launch, whose text is the first that fails to compile."""
    model = MODELS[kind]
    prompts = [prompt_of(length, seed=length).tolist() for length in (3, 5, 7, 8)]
    stock = [solo(model, mx.array(prompt), 26) for prompt in prompts]
    with oracles(VOCAB) as oracle, one_text_broken(model, many_rows):
        assert solo(model, mx.array(prompts[0]), 12) == stock[0][:12]
        oracle.answers.update({tuple(prompt): tokens for prompt, tokens in zip(prompts, stock, strict=True)})
        gen = generator(model)
        asked = [RequestOptions(), *[RequestOptions(prompt_lookup=4)] * 3]
        counts = [20, 12, 12, 12]  # the last tokens of the first are decoded one by one
        uids = gen.insert_segments([[prompt] for prompt in prompts], counts, options=asked)
        outcomes = {uid: Outcome() for uid in uids}
        run_all(gen, outcomes)
        expected = [tokens[:count] for tokens, count in zip(stock, counts, strict=True)]
        assert [outcome.tokens for outcome in outcomes.values()] == expected
        assert mlx_paged.pool_of(model).stats().accepted_tokens > 0


def test_verification_of_drafts_continues() -> None:
    model, draft, prompt = MODELS["llama"], perturbed("llama", 0.02, head_dim=64), prompt_of(60)

    def run() -> list[int]:
        return [t for t, _, _ in speculative_generate_step(prompt, model, draft, num_draft_tokens=7, max_tokens=40)]

    stock = run()
    with one_text_broken(model, many_rows):
        assert run() == stock


def test_text_is_tried_while_mlx_traces_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled step has 8 rows more than the batch, and so needs another text."""
    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    monkeypatch.setattr(compiled_step, "padded_rows", lambda num_rows: num_rows + 8)
    model, prompt = MODELS["llama"], prompt_of(20)
    stock = solo(model, prompt, 12)
    for is_broken in (many_rows, lambda key: False):
        with traceable_kernels(), broken_texts(is_broken) as launched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mlx_paged.apply_patches(PagedConfig(block_size=8))
            got = solo(model, prompt, 12)
            assert any(many_rows(key) for key in launched.texts)
            assert got == stock if is_broken is many_rows else got[:2] == stock[:2]
            mlx_paged.remove_patches()
