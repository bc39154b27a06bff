"""Dropped batches, rows, responses and failures free what they held at once, without the cyclic collector."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig, PoolExhaustedError, RequestFailedError
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.server.request import Outbox, Work
from tests.support.caches import batch_over
from tests.support.models.batch_runs import generator, kv_budget
from tests.support.models.builders import build, perturbed, prompt_of
from tests.support.models.tokenizers import plain_tokenizer
from tests.support.without_collector import without_collector

BLOCK = 16
PROMPT = prompt_of(60).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(autouse=True)
def collector_off(model: Any) -> Iterator[None]:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=64 << 20))
    with without_collector():
        yield


def live_blocks(model: Any) -> int:
    return mlx_paged.pool_of(model).stats().live_blocks


def with_blocks(model: Any, num_blocks: int) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=kv_budget(model, num_blocks, BLOCK)))


def drain(gen: Any) -> list[RequestFailedError]:
    """Run to the end; return the errors."""
    failed = []
    while True:
        try:
            if not gen.next_generated():
                return failed
        except RequestFailedError as error:
            failed.append(error.with_traceback(None))  # its traceback has this frame, and so the list


# Generators -----------------------------------------------------------------------------------------------------------


def test_speculative_runs_free_the_blocks_of_both_models(model: Any) -> None:
    draft = perturbed("llama", 0.15)
    responses = stream_generate(model, plain_tokenizer(), mx.array(PROMPT), max_tokens=20, draft_model=draft)
    next(responses)
    next(responses)
    assert live_blocks(model) > 0 and live_blocks(draft) > 0
    del responses
    assert live_blocks(model) == live_blocks(draft) == 0
    gone = weakref.ref(draft), weakref.ref(mlx_paged.pool_of(draft))
    del draft
    assert gone[0]() is None and gone[1]() is None


# Failures -------------------------------------------------------------------------------------------------------------


def frames_of(error: BaseException) -> int:
    """Return how many tracebacks an error and its causes keep."""
    count, parts = 0, [error]
    while parts:
        part = parts.pop()
        count += part.__traceback__ is not None
        parts += [each for each in (part.__cause__, part.__context__) if each is not None]
    return count


def raising(tokens: mx.array, logits: mx.array) -> mx.array:
    """Fail after a few tokens, from within a handler: the error has a context."""
    if len(tokens) > len(PROMPT) + 2:
        try:
            raise KeyError("no such rule")
        except KeyError:
            raise ValueError("bad grammar")  # noqa: B904
    return logits


def test_a_failed_request_keeps_no_frames(model: Any) -> None:
    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:30]], [9, 9], logits_processors=[[raising], None])
    (error,) = drain(gen)
    assert "raise KeyError" in "\n".join(error.__cause__.__notes__)  # the traceback is kept as a note
    assert frames_of(error) == 0
    gone = weakref.ref(gen._engine)
    del gen
    assert gone() is None
    assert live_blocks(model) == 0


def test_request_that_outgrows_the_budget_leaves_no_blocks(model: Any) -> None:
    with_blocks(model, 6)
    gen = generator(model)
    gen.insert([PROMPT], [200])
    (error,) = drain(gen)
    assert isinstance(error.__cause__, PoolExhaustedError)
    del error
    assert live_blocks(model) == 0
    budget = mlx_paged.pool_of(model).memory_budget
    with pytest.raises(PoolExhaustedError, match=f"{budget:,} bytes") as caught:
        for _ in generate_step(mx.array(PROMPT), model, max_tokens=200):
            pass
    assert caught.value.budget_bytes == budget and caught.value.blocks_needed >= 1
    del caught
    assert live_blocks(model) == 0 and mlx_paged.pool_of(model).stats().bytes_reserved <= budget


def test_batch_cache_that_runs_out_of_blocks_leaves_none(model: Any) -> None:
    """This happens to callers that use batch caches directly."""
    with_blocks(model, 5)
    rows = [upstream.make_prompt_cache(model) for _ in range(2)]
    for row in rows:
        model(mx.array([PROMPT[:32]]), cache=row)
    with pytest.raises(PoolExhaustedError):
        batch_over(rows)
    del rows, row
    assert live_blocks(model) == 0


# Prefixes and servers -------------------------------------------------------------------------------------------------


def test_dropped_batch_leaves_only_the_blocks_of_the_prefix_cache(model: Any) -> None:
    store = PagedPromptCache()
    upstream.make_prompt_cache(model)
    gen = PagedBatchGenerator(model, prefixes=store.shared_prefixes("model", mlx_paged.pool_of(model)))
    gen.insert([PROMPT, PROMPT[:40], PROMPT + PROMPT], [3, 9, 20])
    for _ in range(8):
        gen.next()
    del gen
    stats = mlx_paged.pool_of(model).stats()
    assert stats.live_blocks == stats.cached_blocks > 0
    del store
    assert live_blocks(model) == 0


def test_error_sent_to_a_client_keeps_no_frames() -> None:
    class Held:
        pass

    def serve(outbox: Outbox) -> weakref.ref[Held]:
        held = Held()
        try:
            raise ValueError("no prompt")
        except ValueError as error:
            outbox.fail(work, error)
        return weakref.ref(held)

    told: list[Any] = []
    loop: Any = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=lambda _, items: told.append(items))
    work = Work(None, None, loop)
    outbox = Outbox()
    assert serve(outbox)() is None
    outbox.flush()
    ((error,),) = told[0].values()
    assert 'raise ValueError("no prompt")' in error.__notes__[0]  # for the log
    told.clear()  # it refers to the work, and that to it
