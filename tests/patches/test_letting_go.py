"""Dropped batches, rows, responses and failures free what they held at once, without the cyclic collector."""

import importlib
import types
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig, PoolExhaustedError, RequestFailedError
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.server.engine_loop import EngineLoop, Row
from mlx_paged.server.memory import MemoryWatch
from mlx_paged.server.report import ServerStats
from mlx_paged.server.request import ModelKey, Prompt, ServerRequest
from mlx_paged.server.served_batch import ServedBatch
from mlx_paged.server.work import Outbox, Work
from tests.support.caches import batch_over
from tests.support.models.batch_runs import generator, kv_budget
from tests.support.models.builders import build, greedy, perturbed, prompt_of
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


def test_a_dropped_generator_frees_its_blocks_and_rows_at_once(model: Any) -> None:
    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:30]], [20, 20])
    for _ in range(4):
        gen.next()
    assert live_blocks(model) > 0
    gone = [weakref.ref(each) for each in (gen._engine, gen._engine.scheduler, *gen._engine.requests.values())]
    del gen
    assert live_blocks(model) == 0
    assert [ref() for ref in gone] == [None] * 4


def test_abandoned_generators_leave_the_whole_budget_to_the_next(model: Any) -> None:
    with_blocks(model, 10)
    for _ in range(4):
        gen = generator(model)
        gen.insert([PROMPT, PROMPT], [20, 20])
        for _ in range(3):
            gen.next()
        del gen
        gen = generator(model)
        gen.insert([PROMPT + PROMPT], [9])
        assert not drain(gen)
        del gen


def test_error_in_batch_generate_frees_the_blocks(model: Any) -> None:
    def bad(tokens: Any, logits: mx.array) -> mx.array:
        raise ValueError("bad grammar")

    batch_generate = importlib.import_module("mlx_lm.generate").batch_generate
    for _ in range(3):
        with pytest.raises(RequestFailedError, match="bad grammar"):
            batch_generate(model, plain_tokenizer(), [PROMPT, PROMPT], max_tokens=3, logits_processors=[bad])
        assert live_blocks(model) == 0


def test_closed_and_dropped_single_runs_free_their_blocks(model: Any) -> None:
    steps = generate_step(mx.array(PROMPT), model, max_tokens=20)
    next(steps)
    del steps
    assert live_blocks(model) == 0
    responses = stream_generate(model, plain_tokenizer(), mx.array(PROMPT), max_tokens=20)
    next(responses)
    responses.close()
    assert live_blocks(model) == 0


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


# Responses ------------------------------------------------------------------------------------------------------------


def test_dropped_responses_are_forgotten_by_the_engine(model: Any) -> None:
    gen = generator(model)
    for _ in range(5):
        gen.insert([[1, 2, 3]] * 20, [1] * 20)
        assert not drain(gen)
        assert len(gen._engine.memory.finished) == 0
    gen.insert([PROMPT, PROMPT[:9]], [2, 2])
    kept = [response for _ in range(2) for response in gen.next_generated()]
    assert len(gen._engine.memory.finished) == 2
    assert live_blocks(model) == 4 + 1
    del kept[-1]
    assert len(gen._engine.memory.finished) == 1


def test_finished_response_holds_only_its_own_row(model: Any) -> None:
    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:9]], [2, 5])
    finished = []
    while generated := gen.next_generated():
        finished += [response for response in generated if response.finish_reason is not None]
    engine = weakref.ref(gen._engine)
    del gen, generated
    assert engine() is None
    assert finished[0].prompt_cache[0].offset == 62
    del finished[1]
    assert live_blocks(model) == 4


# Failures -------------------------------------------------------------------------------------------------------------


def frames_of(error: BaseException) -> int:
    """Return how many tracebacks an error and its causes keep."""
    count, parts = 0, [error]
    while parts:
        part = parts.pop()
        count += part.__traceback__ is not None
        parts += [each for each in (part.__cause__, part.__context__) if each is not None]
    return count


def raising_after(calls: int) -> Callable[..., mx.array]:
    count = [0]

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        count[0] += 1
        if count[0] > calls:
            try:
                raise KeyError("no such rule")
            except KeyError:
                raise ValueError("bad grammar")  # noqa: B904
        return logits

    return processor


def test_a_failed_request_keeps_no_frames(model: Any) -> None:
    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:30]], [9, 9], logits_processors=[[raising_after(3)], None])
    (error,) = drain(gen)
    assert "raise KeyError" in "\n".join(error.__cause__.__notes__)  # the traceback is kept as a note
    assert frames_of(error) == 0
    gone = weakref.ref(gen._engine)
    del gen
    assert gone() is None
    assert live_blocks(model) == 0


def test_failing_sampler_of_several_rows_leaves_no_blocks(model: Any) -> None:
    def bad(logprobs: mx.array) -> mx.array:
        raise ValueError(f"{logprobs.shape[0]} rows")

    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:30], PROMPT[:9]], [9, 9, 9], samplers=[bad, bad, None])
    assert sorted(error.uid for error in drain(gen)) == [0, 1]
    del gen
    assert live_blocks(model) == 0


def test_failing_model_call_leaves_no_blocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gen = generator(model)
    gen.insert([PROMPT, PROMPT[:30], PROMPT[:9]], [9, 9, 9])
    gen.next_generated()
    layer = type(model.layers[0])
    monkeypatch.setattr(layer, "__call__", lambda *args, **kwargs: 1 / 0)
    assert len(drain(gen)) == 3
    del gen
    assert live_blocks(model) == 0


def test_preempted_requests_leave_no_blocks(model: Any) -> None:
    with_blocks(model, 12)
    gen = generator(model)
    gen.insert([PROMPT[:20]] * 4, [90] * 4)
    assert not drain(gen) and gen.preemptions
    assert live_blocks(model) == 0


def test_request_that_outgrows_the_budget_leaves_no_blocks(model: Any) -> None:
    with_blocks(model, 6)
    gen = generator(model)
    gen.insert([PROMPT], [200])
    (error,) = drain(gen)
    assert isinstance(error.__cause__, PoolExhaustedError)
    del error
    assert live_blocks(model) == 0
    with pytest.raises(PoolExhaustedError):
        for _ in generate_step(mx.array(PROMPT), model, max_tokens=200):
            pass
    assert live_blocks(model) == 0


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


def test_dropped_prompt_cache_store_frees_its_blocks(model: Any) -> None:
    store = PagedPromptCache()
    for length in (40, 41):
        caches, rest = store.fetch_nearest_cache("model", PROMPT[:length])
        caches = caches or upstream.make_prompt_cache(model)
        greedy(model, mx.array(rest), 3, prompt_cache=caches)
        store.insert_cache("model", PROMPT[:length], caches)
    del caches, store
    assert live_blocks(model) == 0


def test_closed_served_batch_frees_failed_requests_and_itself(model: Any) -> None:
    options = ("decode_concurrency", "prompt_concurrency", "prefill_step_size")
    cli_args = types.SimpleNamespace(**dict.fromkeys(options, 64))
    models: Any = types.SimpleNamespace(cli_args=cli_args, prompt_cache=PagedPromptCache())
    weights: Any = types.SimpleNamespace(
        model=model, key=ModelKey("model"), tokenizer=plain_tokenizer(), draft_model=None
    )
    loop = EngineLoop(models, SimpleQueue(), ServerStats(), MemoryWatch(0.0), lambda: False)
    batch = loop.batch = ServedBatch(
        models.prompt_cache, weights, models.cli_args, mx.default_stream(mx.default_device())
    )
    processors = [[raising_after(0)], [raising_after(0)]]
    uids = batch.insert([PROMPT, PROMPT[:30]], [9, 9], logits_processors=processors)
    told: list[Any] = []
    for uid in uids:
        work = Work(ServerRequest([PROMPT], prompts=[Prompt.of_tokens(PROMPT)]), None, client_loop(told))
        loop.rows[uid] = Row(work, 0, None)
    while loop.rows:
        loop._step()
    errors = [item for items in told for each in items.values() for item in each if isinstance(item, Exception)]
    assert [frames_of(error) for error in errors] == [0, 0]
    del work
    told.clear()  # it refers to the works, and they to it
    gone = weakref.ref(batch), weakref.ref(batch._engine)
    loop.close_batch(None)
    del batch
    models.prompt_cache = None
    assert [ref() for ref in gone] == [None, None]
    assert live_blocks(model) == 0


def client_loop(told: list[Any]) -> Any:
    """Stand-in for a client's event loop; ``told`` collects what it would get."""
    return types.SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=lambda _, items: told.append(items))


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
    work = Work(None, None, client_loop(told))
    outbox = Outbox()
    assert serve(outbox)() is None
    outbox.flush()
    ((error,),) = told[0].values()
    assert 'raise ValueError("no prompt")' in error.__notes__[0]  # for the log
    told.clear()  # it refers to the work, and that to it
