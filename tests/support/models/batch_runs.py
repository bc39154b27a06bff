"""Runs of the batch generator, and the solo runs of stock mlx-lm to compare them with."""

import contextlib
import functools
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np

import mlx_paged
from mlx_paged.engine import engine
from tests.support.models.builders import KINDS, build, greedy, prompt_of
from tests.support.models.recurrent import build_recurrent

mlx_lm_generate = importlib.import_module("mlx_lm.generate")  # the name mlx_lm.generate is a function
TOLERANCE = 1e-4


class Spec(NamedTuple):
    """A request: a random prompt of ``length`` tokens, ``num_tokens`` to generate."""

    length: int
    num_tokens: int
    seed: int = 0

    @property
    def prompt(self) -> list[int]:
        return prompt_of(self.length, seed=self.seed).tolist()


class Outcome:
    """What a request delivered."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[np.ndarray] = []
        self.reason: str | None = None
        self.all_tokens: list[int] | None = None
        self.progress: list[tuple[int, int]] = []
        self.num_cached = 0


@functools.cache
def model_of(kind: str, **changes: Any) -> Any:
    return build(kind, **changes) if kind in KINDS else build_recurrent(kind)


@functools.cache
def solo(kind: str, spec: Spec, **changes: Any) -> tuple[list[int], np.ndarray]:
    """Return stock mlx-lm's greedy tokens and log-probabilities of one request alone."""
    assert not mlx_paged.is_applied(), "compute stock runs before the patches are applied"
    return greedy(model_of(kind, **changes), prompt_of(spec.length, seed=spec.seed), spec.num_tokens)


def make_solos(kind: str, specs: Sequence[Spec]) -> None:
    for spec in specs:
        solo(kind, spec)


def generator(model: Any, **options: Any) -> Any:
    """Make the BatchGenerator to which mlx-lm's name is bound now: the patches replace it."""
    return mlx_lm_generate.BatchGenerator(model, **options)


@contextlib.contextmanager
def with_packs(packs: bool | None) -> Iterator[None]:
    """Have generators made here compute prompts in packs, if their model can, or not; None: as on this device."""
    default = engine.packs_by_default
    with mock.patch.object(engine, "packs_by_default", default if packs is None else lambda pool: packs):
        yield


def packing_generator(model: Any, most: int, **options: Any) -> Any:
    """Make a generator whose prompts go through the model in packs of up to ``most`` tokens, whether or not rows
    decode."""
    with with_packs(True):
        gen = generator(model, **options)
    if gen._engine.packs:
        gen._engine.scheduler.token_budget = most
    return gen


def insert(gen: Any, specs: list[Spec], outcomes: dict[int, Outcome]) -> list[int]:
    uids = gen.insert([spec.prompt for spec in specs], [spec.num_tokens for spec in specs])
    outcomes.update((uid, Outcome()) for uid in uids)
    return uids


def collect(outcomes: dict[int, Outcome], prompts: Sequence[Any], generated: Sequence[Any]) -> None:
    for response in prompts:
        outcomes[response.uid].progress.append(tuple(response.progress))
    for response in generated:
        outcome = outcomes[response.uid]
        assert outcome.reason is None, "a token after the last one"
        outcome.tokens.append(response.token)
        outcome.logprobs.append(np.array(response.logprobs.astype(mx.float32)))
        outcome.reason, outcome.all_tokens = response.finish_reason, response.all_tokens
        outcome.num_cached = getattr(response, "num_cached", 0)  # mlx-lm's own responses have none


def run_all(gen: Any, outcomes: dict[int, Outcome]) -> None:
    while True:
        prompts, generated = gen.next()
        if not prompts and not generated:
            return
        collect(outcomes, prompts, generated)


def run_requests(gen: Any, prompts: Sequence[list[int]], num_tokens: Sequence[int], **options: Any) -> list[Outcome]:
    """Insert requests, run to the end, and return what each delivered."""
    outcomes = {uid: Outcome() for uid in gen.insert(list(prompts), list(num_tokens), **options)}
    run_all(gen, outcomes)
    return list(outcomes.values())


def answers(gen: Any, prompts: Sequence[list[int]], num_tokens: Sequence[int], **options: Any) -> list[list[int]]:
    """Like `run_requests`, but return only the tokens."""
    return [outcome.tokens for outcome in run_requests(gen, prompts, num_tokens, **options)]


def check(kind: str, spec: Spec, outcome: Outcome) -> None:
    """Assert that the request delivered its solo run's tokens, each once, with their log-probabilities."""
    tokens, logprobs = solo(kind, spec)
    assert outcome.tokens == tokens
    assert np.abs(np.stack(outcome.logprobs) - logprobs).max() < TOLERANCE
    assert outcome.reason == "length"
    assert outcome.all_tokens == spec.prompt + tokens
    assert [done for done, _ in outcome.progress] == sorted(done for done, _ in outcome.progress)
    assert outcome.progress[-1] == (spec.length, spec.length)


def check_released(kind: str) -> None:
    gc.collect()
    assert_released(model_of(kind))


def assert_released(model: Any, cached: int = 0) -> None:
    """Assert that the model's pool is intact and exactly ``cached`` of its blocks are held."""
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().live_blocks == cached


def fall_throughs(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the call's result and the messages of its NotPagedWarnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in caught if issubclass(w.category, mlx_paged.NotPagedWarning)]


def kv_budget(model: Any, num_blocks: int, block_size: int) -> int:
    """Return the bytes of ``num_blocks`` blocks of a model whose layers all have the builders' shape."""
    return num_blocks * block_size * len(model.layers) * 2 * 2 * 32 * 4
