"""Engine: each request gets its own tokens, each once, whatever other requests do."""

import copy
import weakref
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.engine.scheduler import ScheduledStep
from mlx_paged.errors import RequestTooLargeError
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.models.toy_engine import (
    BLOCK_SIZE,
    VOCAB,
    ToyEngine,
    answer,
    caches_of,
    greedy,
    make_pool,
    prompt_of,
)
from tests.support.without_collector import without_collector

LENGTHS = (1, 5, 23, 40, 3, 16, 17)


def assert_answered(engine: ToyEngine, uid: int, prompt: list[int], num_tokens: int) -> None:
    tokens = answer(prompt, num_tokens)
    assert engine.tokens(uid) == tokens
    assert [response.finish_reason for response in engine.responses[uid]] == [None] * (num_tokens - 1) + ["length"]
    # The last token is delivered without computing the one after it.
    assert engine.responses[uid][-1].all_tokens == [*prompt, *tokens]
    assert engine.progress[uid][-1] == (len(prompt), len(prompt))
    assert engine.progress[uid] == sorted(set(engine.progress[uid])), "progress is reported once per step"


def assert_released(engine: ToyEngine) -> None:
    """Drop the responses, of which the last one of a request holds its cache; then no blocks are held."""
    engine.responses.clear()
    engine.pool.check_integrity()
    assert engine.pool.stats().live_blocks == 0


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_requests_get_their_solo_answers_in_a_batch_of_limited_size(most: int) -> None:
    pool = make_pool()
    engine = ToyEngine(pool, completion_batch_size=most)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    uids = [engine.add(prompt, max_tokens=6 + i) for i, prompt in enumerate(prompts)]
    engine.run()
    for i, (uid, prompt) in enumerate(zip(uids, prompts, strict=True)):
        assert_answered(engine, uid, prompt, 6 + i)
    assert max(engine.model.call_sizes) in (most, len(LENGTHS)), "they decode together"
    assert not engine.failures and not engine.step()
    assert_released(engine)


# Memory -----------------------------------------------------------------------------------------------------------


def test_each_row_has_its_own_sampler_and_processors() -> None:
    """They are called for a row alone, as by mlx-lm, also a sampler that several rows share."""
    engine, shapes, contexts = ToyEngine(make_pool()), [], []
    prompts = [prompt_of(length, seed=length) for length in (6, 15, 9, 1)]
    (first,) = answer(prompts[1], 1)

    def shared(logprobs: mx.array) -> mx.array:
        shapes.append(logprobs.shape)
        assert mx.allclose(mx.logsumexp(logprobs, axis=-1), mx.zeros(logprobs.shape[0]), atol=1e-5)
        return mx.argmax(logprobs[:1], axis=-1)

    def forbid(tokens: mx.array, logits: mx.array) -> mx.array:
        contexts.append(tokens.tolist())
        return mx.where(mx.arange(VOCAB) == first, -1e9, logits)

    options: list[dict[str, Any]] = [{"sampler": shared}, {"processors": [forbid]}, {"sampler": shared}, {}]
    uids = [engine.add(prompt, max_tokens=5, **own) for prompt, own in zip(prompts, options, strict=True)]
    engine.run()
    assert set(shapes) == {(1, VOCAB)}
    assert first not in engine.tokens(uids[1])
    assert contexts[:5] == [[*prompts[1], *engine.tokens(uids[1])[:n]] for n in range(5)]
    for index in (0, 2, 3):
        assert engine.tokens(uids[index]) == answer(prompts[index], 5)
    # If all rows share a sampler it is called once, and for each row if its result has another shape.
    uids = [engine.add(prompt, max_tokens=5, sampler=shared) for prompt in prompts]
    engine.run()
    assert [engine.tokens(uid) for uid in uids] == [answer(prompt, 5) for prompt in prompts]
    assert (4, VOCAB) in shapes


MOST = 9 * BLOCK_SIZE - 1  # a token is computed ahead of the one that is delivered


@pytest.mark.parametrize("num_tokens", [MOST, MOST + 1])
def test_request_larger_than_budget_is_refused(num_tokens: int) -> None:
    pool = make_pool(num_blocks=10)  # including the null block
    engine = ToyEngine(pool)
    prompt = prompt_of(num_tokens)
    if num_tokens > MOST:
        with pytest.raises(RequestTooLargeError):
            engine.add(prompt, max_tokens=1)
        assert not engine.step()
    else:
        uid = engine.add(prompt, max_tokens=1)
        engine.run()
        assert_answered(engine, uid, prompt, 1)
    small = engine.add(prompt_of(3), max_tokens=3)
    engine.run()
    assert engine.tokens(small) == answer(prompt_of(3), 3)


def test_cache_of_a_finished_request_is_dropped_for_others() -> None:
    pool = make_pool(num_blocks=10)
    engine = ToyEngine(pool)
    first = engine.add(prompt_of(20), max_tokens=4)
    engine.run()
    last = engine.responses[first][-1]
    assert last.request is not None and pool.stats().live_blocks > 0
    second = engine.add(prompt_of(24, seed=1), max_tokens=4)
    engine.run()
    assert last.request is None, "its cache was never used"
    assert_answered(engine, second, prompt_of(24, seed=1), 4)


def test_a_finished_cache_makes_room_if_blocks_are_gone_after_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may take blocks between the plan and the step."""
    pool = make_pool(num_blocks=13)
    engine = ToyEngine(pool)
    first = engine.add(prompt_of(14), max_tokens=2)
    engine.run()
    uid = engine.add(prompt_of(6, seed=1), max_tokens=16)
    plan, taken = engine.engine.scheduler.plan, list[int]()

    def plan_and_take() -> ScheduledStep:
        step = plan()
        length = engine.engine.requests[uid].length
        if not taken and length > 6 and length % BLOCK_SIZE == 0:  # the step needs another block
            taken.extend(pool.allocate(0, pool.memory.room()[0]))
        return step

    monkeypatch.setattr(engine.engine.scheduler, "plan", plan_and_take)
    engine.run()
    assert taken and engine.responses[first][-1].request is None
    assert_answered(engine, uid, prompt_of(6, seed=1), 16)


# Prefixes ---------------------------------------------------------------------------------------------------------


# Requests that go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_removed_request_holds_no_blocks_and_sends_no_response(num_steps: int) -> None:
    pool = make_pool()
    engine = ToyEngine(pool)
    gone = engine.add(prompt_of(20), max_tokens=30)
    stays = engine.add(prompt_of(6, seed=1), max_tokens=12)
    for _ in range(num_steps):
        engine.step()
    engine.engine.remove([gone, 77])
    said = len(engine.responses[gone])
    engine.run()
    assert len(engine.responses[gone]) == said
    assert_answered(engine, stays, prompt_of(6, seed=1), 12)
    assert_released(engine)


@pytest.mark.parametrize("finished", [False, True])
def test_prefix_of_a_removed_request_is_reused(finished: bool) -> None:
    """Whole blocks, whether the request finished or was cancelled."""
    pool = make_pool()
    engine = ToyEngine(pool, prefixes=SharedPrefixes(PrefixCache(pool)))
    prompt = prompt_of(18)
    uid = engine.add(prompt, max_tokens=30)
    while len(engine.tokens(uid)) < 5:
        engine.step()
    engine.engine.remove([uid], finished=finished)
    later = [*prompt, *answer(prompt, 20)]
    second = engine.add(later, max_tokens=2)
    engine.run()
    found = engine.responses[second][0].num_cached
    assert found >= (len(prompt) + 5) // BLOCK_SIZE * BLOCK_SIZE
    assert engine.tokens(second) == answer(later, 2)


def test_extracted_cache_is_an_independent_copy() -> None:
    pool = make_pool()
    engine = ToyEngine(pool)
    prompt = prompt_of(6)
    uid = engine.add(prompt, max_tokens=20)
    while len(engine.tokens(uid)) < 4:
        engine.step()
    caches, tokens = engine.engine.extract(uid)
    assert tokens == [*prompt, *answer(prompt, 20)][: len(tokens)] and caches[0].offset == len(tokens)
    engine.run()
    assert_answered(engine, uid, prompt, 20)
    again = engine.add([5], caches=copy.deepcopy(caches), history=tokens, max_tokens=6)
    engine.run()
    assert engine.tokens(again) == answer([*tokens, 5], 6)


# Failures ---------------------------------------------------------------------------------------------------------


def raising(*_: Any) -> Any:
    raise ValueError("out of luck")


def after(calls: int, then: Any) -> Any:
    """Return a sampler, or matcher, that calls ``then`` after ``calls`` calls."""
    left = [calls]

    def called(value: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return then(value)
        return greedy(value) if isinstance(value, mx.array) else False

    return called


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "sampler at first": ({"sampler": after(0, raising)}, "out of luck"),
    "sampler later": ({"sampler": after(3, raising)}, "out of luck"),
    "matcher": ({"stops_at": after(3, raising)}, "out of luck"),
    "processor": ({"processors": [raising]}, "out of luck"),
}
RESULTS: dict[str, Any] = {
    "none": None,
    "a list": [3],
    "a scalar": mx.array(3),
    "two dimensions": mx.array([[3]]),
    "too many": mx.array([3, 4]),
    "floats": mx.array([3.0]),
}
for name, result in RESULTS.items():
    FAULTS[f"sampler returns {name}"] = {"sampler": lambda _, result=result: result}, "must return"
    FAULTS[f"processor returns {name}"] = {"processors": [lambda *_, result=result: result]}, "must return"


@pytest.mark.parametrize(("options", "message"), FAULTS.values(), ids=FAULTS)
def test_failed_request_is_reported_once_and_the_others_continue(options: dict[str, Any], message: str) -> None:
    pool = make_pool()
    engine = ToyEngine(pool)
    before = engine.add(prompt_of(9), max_tokens=10)
    bad = engine.add(prompt_of(12, seed=1), max_tokens=10, **options)
    later = engine.add(prompt_of(14, seed=2), max_tokens=10)
    engine.run()
    assert set(engine.failures) == {bad}
    assert message in str(engine.failures[bad])
    assert engine.tokens(bad) == answer(prompt_of(12, seed=1), 10)[: len(engine.tokens(bad))]
    assert_answered(engine, before, prompt_of(9), 10)
    assert_answered(engine, later, prompt_of(14, seed=2), 10)
    assert_released(engine)


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_model_call_that_raises_fails_the_requests_in_it(where: str) -> None:
    """Prompts have calls of their own."""
    engine = ToyEngine(make_pool())
    prompts = [[0, 0, 0], [1, 2, 3], [4, 5]]
    answers = [answer(prompt, 10) for prompt in prompts]
    said = prompts[1][1] if where == "prompt" else next(t for t in answers[1] if t not in answers[0] + answers[2])
    others = {token for i in (0, 2) for token in (*prompts[i], *answers[i])}
    assert said not in others, "the poison would hit others"
    engine.model.poison = said
    uids = [engine.add(prompt, max_tokens=10) for prompt in prompts]
    engine.run()
    assert set(engine.failures) == ({uids[1]} if where == "prompt" else set(uids))
    assert all("poisoned" in str(error) for error in engine.failures.values())
    engine.model.poison = None
    later = engine.add(prompts[0], max_tokens=10)
    engine.run()
    assert_answered(engine, later, prompts[0], 10)
    engine.pool.check_integrity()


def test_failure_of_a_removed_request_is_not_reported() -> None:
    engine = ToyEngine(make_pool())
    bad = engine.add(prompt_of(4), max_tokens=4, sampler=raising)
    engine.engine.next()  # its prompt
    engine.engine.remove([bad])
    engine.run()
    assert not engine.failures


# Its end ----------------------------------------------------------------------------------------------------------


def test_dropped_engine_is_freed_at_once_with_all_its_blocks() -> None:
    pool = make_pool()
    with without_collector():
        engine = ToyEngine(pool)
        engine.add(prompt_of(20), max_tokens=20)
        engine.add(prompt_of(8), max_tokens=20)
        for _ in range(5):
            engine.step()
        assert pool.stats().live_blocks > 0
        gone = weakref.ref(engine.engine)
        del engine
        assert gone() is None
    assert pool.stats().live_blocks == 0
    caches = caches_of(pool)
    assert caches[0].offset == 0


def test_prefix_to_be_adopted_does_not_count_as_evictable() -> None:
    """Otherwise a request is admitted over and over, and preempted in the same step."""
    pool = make_pool(num_blocks=40)
    tree = PrefixCache(pool)
    prefix = prompt_of(20 * BLOCK_SIZE, seed=3)
    engine = ToyEngine(pool, prefixes=SharedPrefixes(tree))
    first = engine.add(prefix, max_tokens=1)
    engine.run()
    assert engine.responses[first][-1].drop_cache()
    assert tree.reclaimable(0) >= 20
    running = engine.add(prompt_of(17 * BLOCK_SIZE, seed=4), max_tokens=24)
    while not engine.responses[running]:
        engine.step()
    hits = tree.hit_tokens
    waiting = engine.add([*prefix, 1, 2, 3], max_tokens=4)
    engine.run()
    assert engine.engine.scheduler.preemptions == 0 and tree.hit_tokens - hits <= len(prefix)
    assert engine.tokens(waiting) == answer([*prefix, 1, 2, 3], 4)
    assert engine.tokens(running) == answer(prompt_of(17 * BLOCK_SIZE, seed=4), 24)
