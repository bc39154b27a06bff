"""Batches with a draft model, compared with stock mlx-lm's greedy answers."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx_paged
from mlx_paged.drafts import look_up
from mlx_paged.drafts.depth import Depth
from mlx_paged.patches.generate import drafting
from scripts.support import model_configs
from tests.support.models import builders
from tests.support.models.batch_runs import generator, run_requests

DRAFTS = 4


class EveryStep(Depth):
    """A depth that drafts as many tokens as allowed in every step."""

    def choose(self, rows: Any, num_rows: int) -> list[int]:
        self.pays = True
        return [len(row.chances) for row in rows]

    def may_choose(self, num_rows: int) -> bool:
        return True


@contextmanager
def in_every_step() -> Iterator[None]:
    """Let generators that are made in this context draft in every step."""
    with (
        mock.patch.object(drafting, "new_depth", EveryStep),
        mock.patch.object(look_up, "depth_of", lambda pool, ranks: EveryStep()),
        mock.patch.object(drafting, "depth_of", lambda pool, ranks: EveryStep()),
    ):
        yield


def built(name: str) -> Any:
    """Return a model of one of the kinds, if "wide" with head sizes that the kernels take, or of one of mlx-lm's
    modules."""
    kind = name.removeprefix("wide ")
    if kind in builders.KINDS:
        return builders.build(kind, **({} if kind == name else {"head_dim": 64}))
    return model_configs.build(name.removesuffix("-of-mlx-lm"))


@functools.cache
def model_of(name: str) -> Any:
    return built(name)


def noisy(name: str, scale: float) -> Any:
    """Return a copy of the model with noise on its weights, ``scale`` times their size."""
    copy = built(name)
    copy.update(model_of(name).parameters())
    return builders.with_noise(copy, scale)


def vocab_of(name: str) -> int:
    return builders.VOCAB if name.removeprefix("wide ") in builders.KINDS else model_configs.VOCAB


def prompts_of(name: str, lengths: Sequence[int]) -> list[list[int]]:
    return [(builders.prompt_of(n, seed=n) % vocab_of(name)).tolist() for n in lengths]


def drafting_generator(model: Any, draft: Any, **options: Any) -> Any:
    """Make a generator that drafts in every step."""
    with in_every_step():
        return generator(model, draft_model=draft, **{"num_draft_tokens": DRAFTS, **options})


def drafted(model: Any, draft: Any, prompts: Sequence[list[int]], num_tokens: Sequence[int], **rest: Any) -> Any:
    """Run requests with a draft model in every step. Returns their outcomes and the generator."""
    made = {name: rest.pop(name) for name in ("completion_batch_size", "prefixes", "num_draft_tokens") if name in rest}
    gen = drafting_generator(model, draft, **made)
    return run_requests(gen, prompts, num_tokens, **rest), gen


def check_nothing_left(gen: Any, model: Any, draft: Any) -> None:
    """Assert that no row holds anything of either model and only prefixes hold blocks of the draft model."""
    proposer = gen._engine.drafts.proposer
    assert not proposer.rows
    for each in (model, draft):
        mlx_paged.pool_of(each).check_integrity()
    assert mlx_paged.pool_of(model).stats().live_blocks == 0
    held = mlx_paged.pool_of(draft).stats()
    assert held.live_blocks == held.cached_blocks
