"""Keeping what a request has computed fails: its client is told, and the others' answers go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.patches.server.answer_queue import AnswerQueue
from mlx_paged.patches.server.served_batch import Served, ServedBatch
from tests.support.answers import answers
from tests.support.models.builders import build, prompt_of


class BrokenCache:
    """A prompt cache that fails for one kind of entry."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def insert_cache(self, model: Any, tokens: list[int], caches: Any, *, cache_type: str) -> None:
        if cache_type == self.kind:
            self.kind = ""  # the first one only
            raise OSError("no room")


class Detokenizer:
    last_segment = ""

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...


@pytest.mark.parametrize("kind", ["assistant", "system"])
def test_a_client_is_told_when_keeping_its_prefix_fails(kind: str) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    model = build("llama")
    batch = object.__new__(ServedBatch)
    batch.owner = SimpleNamespace(cli_args=SimpleNamespace(prompt_cache_size=None, prompt_cache_bytes=None))
    batch.tokenizer, batch.key, batch._num_computed = None, "model", 0
    batch.prompt_cache, batch.stats = BrokenCache(kind), SimpleNamespace(count_computed=lambda count: None)
    batch.generator = PagedBatchGenerator(model, prefill_step_size=16)
    segments = [[prompt_of(12, seed=n).tolist(), prompt_of(5, seed=n).tolist()] for n in range(2)]
    uids = batch.generator.insert_segments(segments, [3, 3])
    queues = [AnswerQueue() for _ in uids]
    ctx = SimpleNamespace(_should_stop=False, prompt_cache_count=0)
    batch.served = {
        uid: Served(queue, ctx, Detokenizer(), ["assistant", "system"], 0, salt=None)
        for uid, queue in zip(uids, queues, strict=True)
    }
    while batch.served:
        batch.step()
    told = [answers(queue) for queue in queues]
    failed = [found for found in told if isinstance(found[-1], OSError)]
    assert len(failed) == 1
    (whole,) = [found for found in told if found not in failed]
    assert whole[-1] is None and len([a for a in whole if hasattr(a, "token")]) == 3
    del told, failed, whole
    pool = mlx_paged.pool_of(model)
    mx.synchronize()
    pool.collect()
    pool.check_integrity()
    assert not batch.generator._engine.requests


def test_tokens_of_one_step_behind_a_stop_string_are_nobodys() -> None:
    told: list[Any] = []

    class Queue:
        is_wanted = True
        is_stopped = property(lambda self: len(told) >= 2)
        put = staticmethod(told.append)

    logprobs = mx.zeros((10,))
    step = [SimpleNamespace(uid=1, token=n, finish_reason=None, logprobs=logprobs, num_cached=0) for n in range(3)]
    finished: list[int] = []
    batch = object.__new__(ServedBatch)
    batch.owner = SimpleNamespace(cli_args=SimpleNamespace(prompt_cache_size=None, prompt_cache_bytes=None))
    batch.tokenizer, batch._num_computed = None, 0
    batch.stats = SimpleNamespace(count_computed=lambda count: None)
    batch.generator = SimpleNamespace(
        next=lambda: ([], step), computed_prompt_tokens=0, shares_prefixes=True, finish=finished.extend
    )
    ctx = SimpleNamespace(prompt_cache_count=0)
    batch.served = {1: Served(Queue(), ctx, Detokenizer(), [], 0, salt=None)}
    batch.step()
    assert [answer and answer.token for answer in told] == [0, 1, None]
    assert finished == [1] and not batch.served
