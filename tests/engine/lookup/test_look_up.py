"""LookUp over a model whose tokens are known in advance: rows get the same tokens, whatever is proposed."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_paged
from mlx_paged.cache.batch import Batch, NotPackableError
from mlx_paged.drafts import look_up
from mlx_paged.engine.draft_steps import DraftSteps
from mlx_paged.engine.request import RequestOptions
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick
from tests.support.models.drafting import EveryStep
from tests.support.models.oracle import Oracle, oracles
from tests.support.models.toy_engine import VOCAB, ToyEngine, answer, greedy, make_pool, prompt_of

MOST = 5


@pytest.fixture
def oracle() -> Iterator[type[Oracle]]:
    """Make rows propose their own next tokens, partly right."""
    with oracles(VOCAB) as fresh:
        yield fresh


class Engine(ToyEngine):
    """An engine whose requests propose what the oracle says."""

    def ask(self, prompt: Sequence[int], num_tokens: int, *, lookup: int = MOST, **options: Any) -> int:
        look_up.Predictor.answers[tuple(prompt)] = answer(prompt, num_tokens + MOST + 2)  # type: ignore[attr-defined]
        uid = self.add(prompt, max_tokens=num_tokens, **options)
        self.engine.requests[uid].options = RequestOptions(prompt_lookup=lookup)
        return uid


def check_left(pool: BlockPool, toy: ToyEngine) -> None:
    """Assert that only the last responses hold blocks."""
    pool.check_integrity()
    assert not toy.engine.drafts.proposer.rows
    for responses in toy.responses.values():
        if responses:
            responses[-1].drop_cache()
    assert pool.stats().live_blocks == 0


PROMPTS = [prompt_of(length, seed=length) for length in (1, 6, 15, 16, 2, 31, 8, 3, 12, 5, 9, 17, 4, 7, 11, 10, 14)]


@pytest.mark.parametrize(
    ("window", "num_rows"), quick(crossed([None, 7], [1, 2, 5, 17]), (None, 1), (7, 2), (None, 5), (None, 17))
)  # fmt: skip
def test_rows_get_their_own_tokens(num_rows: int, window: int | None, oracle: type[Oracle]) -> None:
    if window is not None:
        reference = ToyEngine(make_pool(window=window))
        for prompt in PROMPTS[:num_rows]:
            reference.add(prompt, max_tokens=40)
        reference.run()
        expected = [reference.tokens(uid) for uid in range(num_rows)]
        for prompt, tokens in zip(PROMPTS, expected, strict=False):
            oracle.answers[tuple(prompt)] = tokens
    else:
        expected = [answer(prompt, 40) for prompt in PROMPTS[:num_rows]]
    pool = make_pool(window=window)
    toy = Engine(pool, completion_batch_size=20)
    for prompt, tokens in zip(PROMPTS[:num_rows], expected, strict=True):
        uid = toy.ask(prompt, 40)
        oracle.answers[tuple(prompt)] = tokens
        assert uid == len(toy.responses) - 1
    toy.run()
    assert [toy.tokens(uid) for uid in range(num_rows)] == expected
    assert all(r.all_tokens == [*p, *t] for r, p, t in zip(_last(toy), PROMPTS, expected, strict=False))
    stats = pool.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert len(toy.model.call_sizes) < 40 + 2 * num_rows, "fewer calls than tokens"
    check_left(pool, toy)


def _last(toy: ToyEngine) -> list[Any]:
    return [responses[-1] for responses in toy.responses.values()]


def test_drafted_and_accepted_tokens_are_counted(oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "right", staticmethod(lambda place: MOST))
    pool = make_pool()
    toy = Engine(pool)
    uid = toy.ask(PROMPTS[1], 25)
    toy.run()
    stats = pool.stats()
    # 5 drafts after the prompt, then 6 tokens a step, of which one is the model's own, and 2 in the last step.
    assert stats.drafted_tokens == stats.accepted_tokens == 5 + 3 * 5 + 1
    assert toy.engine.counters.generation_tokens == len(toy.tokens(uid)) == 25
    assert "21 of 21 draft(s) accepted" in str(stats)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 6, 7, 11])
def test_answer_ends_at_max_tokens(num_tokens: int, oracle: type[Oracle], monkeypatch: Any) -> None:
    monkeypatch.setattr(oracle, "right", staticmethod(lambda place: MOST))
    pool = make_pool()
    toy = Engine(pool)
    toy.ask(PROMPTS[2], num_tokens)
    toy.run()
    last = toy.responses[0][-1]
    assert toy.tokens(0) == answer(PROMPTS[2], num_tokens)
    assert (last.finish_reason, last.all_tokens) == ("length", PROMPTS[2] + toy.tokens(0))
    check_left(pool, toy)


@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_among_accepted_ones_ends_the_answer_there(
    place: int, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "right", staticmethod(lambda place: MOST))
    expected = answer(PROMPTS[3], 20)
    count = iter(range(100))
    pool = make_pool()
    tree = PrefixCache(pool)
    toy = Engine(pool, prefixes=SharedPrefixes(tree))
    toy.ask(PROMPTS[3], 20, stops_at=lambda token: next(count) == place)
    other = toy.ask(PROMPTS[4], 20)
    toy.run()
    last = toy.responses[0][-1]
    assert toy.tokens(0) == expected[: place + 1] and last.finish_reason == "stop"
    assert last.all_tokens == PROMPTS[3] + expected[: place + 1]
    (cache,) = last.request.caches
    assert cache.offset == cache.table.length == len(last.all_tokens) == last.request.length
    assert toy.tokens(other) == answer(PROMPTS[4], 20)
    # The cached prefix ends with the last whole block of the answer.
    held = SharedPrefixes(tree).match([*PROMPTS[3], *expected]).length
    assert held == (len(PROMPTS[3]) + place + 1) // pool.block_size * pool.block_size
    uid = toy.ask([*PROMPTS[3], *expected[: place + 1], 5, 6], 6)
    toy.run()
    assert toy.tokens(uid) == answer([*PROMPTS[3], *expected[: place + 1], 5, 6], 6)
    pool.check_integrity()


def test_rows_join_and_leave_while_others_propose(oracle: type[Oracle]) -> None:
    pool = make_pool()
    toy = Engine(pool, completion_batch_size=3)
    rng = np.random.default_rng(3)
    lengths = [int(n) for n in rng.integers(1, 30, len(PROMPTS))]
    for index, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        toy.ask(prompt, length, lookup=MOST if index % 3 else 0)
        for _ in range(int(rng.integers(0, 4))):
            toy.step()
    toy.run()
    assert [toy.tokens(uid) for uid in range(len(PROMPTS))] == [
        answer(prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    assert pool.stats().accepted_tokens > 0
    check_left(pool, toy)


def test_preempted_requests_continue_with_look_up(oracle: type[Oracle]) -> None:
    pool = make_pool(22)
    toy = Engine(pool)
    for prompt in PROMPTS[:6]:
        toy.ask(prompt, 30)
    toy.run()
    assert [toy.tokens(uid) for uid in range(6)] == [answer(prompt, 30) for prompt in PROMPTS[:6]]
    stats = pool.stats()
    assert stats.preemptions > 0 and stats.accepted_tokens > 0
    check_left(pool, toy)


@pytest.mark.parametrize("num_blocks", [12, 14, 17])
def test_without_free_blocks_nothing_is_proposed(
    num_blocks: int, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[bool] = []
    original = DraftSteps.step

    def step(self: DraftSteps, others: Any) -> Any:
        has_room = self._has_room
        self._has_room = lambda growth: rooms.append(has_room(growth)) or rooms[-1]  # type: ignore[func-returns-value]
        before = pool.stats().live_blocks, pool.preemptions, len(rooms)
        found = original(self, others)
        self._has_room = has_room
        assert pool.preemptions == before[1]
        if rooms[before[2] :] == [False]:
            assert found is None and pool.stats().live_blocks == before[0]
        return found

    monkeypatch.setattr(DraftSteps, "step", step)
    pool = make_pool(num_blocks)
    toy = Engine(pool)
    for prompt in PROMPTS[1:4]:
        toy.ask(prompt, 12)
    toy.run()
    assert [toy.tokens(uid) for uid in range(3)] == [answer(prompt, 12) for prompt in PROMPTS[1:4]]
    assert True in rooms and False in rooms
    check_left(pool, toy)


@pytest.mark.parametrize("steps", [2, 3, 4, 6])
def test_cancelled_rows_do_not_affect_the_others(steps: int, oracle: type[Oracle]) -> None:
    pool = make_pool()
    toy = Engine(pool)
    for prompt in PROMPTS[:4]:
        toy.ask(prompt, 40)
    for _ in range(steps):
        toy.step()
    before = toy.tokens(2)
    toy.engine.remove([0, 2])
    assert set(map(lambda row: row.uid, toy.engine.drafts.proposer.rows)) <= {1, 3}
    toy.run()
    assert toy.tokens(2) == before == answer(PROMPTS[2], len(before))
    assert [toy.tokens(uid) for uid in (1, 3)] == [answer(PROMPTS[uid], 40) for uid in (1, 3)]
    check_left(pool, toy)


def test_failed_call_fails_the_rows_in_it(oracle: type[Oracle]) -> None:
    pool = make_pool()
    toy = Engine(pool)
    for prompt in PROMPTS[:3]:
        toy.ask(prompt, 30)
    for _ in range(3):
        toy.step()
    said = answer(PROMPTS[1], 30)
    toy.model.poison = next(t for t in said[len(toy.tokens(1)) + 2 :] if t not in (*PROMPTS[0], *PROMPTS[2]))
    toy.run()
    for uid, prompt in enumerate(PROMPTS[:3]):
        expected = answer(prompt, 30)
        if uid in toy.failures:
            assert toy.tokens(uid) == expected[: len(toy.tokens(uid))]
        else:
            assert toy.tokens(uid) == expected
    assert 1 in toy.failures
    check_left(pool, toy)


def test_look_up_stops_for_a_model_that_cannot_pack(oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotPackableError("it does something else")

    monkeypatch.setattr(Batch, "commit", refuse)
    pool = make_pool()
    toy = Engine(pool)
    toy.ask(PROMPTS[0], 20)
    with pytest.warns(mlx_paged.NotPagedWarning, match="drafts are switched off .* it does something else"):
        toy.run()
    assert toy.tokens(0) == answer(PROMPTS[0], 20) and toy.engine.batch.proposer is None
    check_left(pool, toy)


def test_rows_with_custom_samplers_or_processors_do_not_propose(oracle: type[Oracle]) -> None:
    pool = make_pool()
    toy = Engine(pool)
    toy.ask(PROMPTS[0], 12, processors=[lambda tokens, logits: logits])
    toy.ask(PROMPTS[1], 12, sampler=lambda logprobs: mx.argmax(logprobs, axis=-1))
    toy.ask(PROMPTS[2], 12, lookup=0)
    toy.run()
    assert pool.stats().drafted_tokens == 0
    seen: list[list[int]] = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    first = toy.ask(PROMPTS[3], 12, processors=[note])
    second = toy.ask(PROMPTS[4], 12)
    toy.run()
    assert [toy.tokens(uid) for uid in range(5)] == [answer(prompt, 12) for prompt in PROMPTS[:5]]
    assert pool.stats().accepted_tokens > 0 and toy.tokens(second)
    # The row with a processor is in the same calls; its processor sees each token once.
    assert [len(tokens) for tokens in seen[:12]] == list(range(len(PROMPTS[3]), len(PROMPTS[3]) + 12))
    assert seen[11] == [*PROMPTS[3], *toy.tokens(first)[:11]]


def test_a_sampler_that_raises_fails_its_row_alone(oracle: type[Oracle]) -> None:
    def sampler(logprobs: mx.array) -> mx.array:
        if len(toy.tokens(1)) >= 4:
            raise ValueError("no more")
        return greedy(logprobs)

    pool = make_pool()
    toy = Engine(pool)
    toy.ask(PROMPTS[0], 20)
    toy.ask(PROMPTS[1], 20, sampler=sampler)
    toy.run()
    assert toy.tokens(0) == answer(PROMPTS[0], 20) and list(toy.failures) == [1]
    assert pool.stats().accepted_tokens > 0
    check_left(pool, toy)


def test_rows_are_not_looked_at_while_drafts_cannot_pay(oracle: type[Oracle], monkeypatch: Any) -> None:
    monkeypatch.setattr(EveryStep, "may_choose", lambda self, num_rows: False)
    monkeypatch.setattr(oracle, "follow", lambda self, row: pytest.fail("looked at"))
    pool = make_pool()
    toy = Engine(pool)
    toy.ask(PROMPTS[0], 12)
    toy.run()
    assert pool.stats().drafted_tokens == 0 and toy.tokens(0) == answer(PROMPTS[0], 12)


def test_batches_over_one_pool_share_their_depth() -> None:
    pool = make_pool()
    first, second = (ToyEngine(pool).engine.drafts.proposer for _ in range(2))
    assert first.depth is second.depth is not ToyEngine(make_pool()).engine.drafts.proposer.depth


def test_interleaved_batches_do_not_time_each_others_steps(
    oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines take steps in turns; the time between the steps of one is not the time of a step."""
    begun: list[bool] = []
    depth = EveryStep()
    original = depth.begin
    monkeypatch.setattr(look_up, "depth_of", lambda pool, ranks: depth)
    monkeypatch.setattr(
        depth, "begin", lambda num_rows, *, is_like_last: begun.append(is_like_last) or original(1, is_like_last=False)
    )
    pool = make_pool()
    engines = [Engine(pool), Engine(pool)]
    for toy in engines:
        toy.ask(PROMPTS[1], 40)
    for _ in range(4):
        for toy in engines:
            toy.step()
    assert len(begun) > 4 and not any(begun)
    for _ in range(3):
        engines[0].step()
    assert begun[-2:] == [True, True]


@pytest.mark.parametrize("limit", ["MOST_TOKENS", "MOST_READS"])
def test_step_keeps_to_its_limits_of_tokens_and_reads(
    limit: str, oracle: type[Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_up, limit, {"MOST_TOKENS": 8, "MOST_READS": 100}[limit])
    toy = Engine(make_pool())
    for prompt in PROMPTS[:3]:
        toy.ask(prompt, 20)
    toy.run()
    assert [toy.tokens(uid) for uid in range(3)] == [answer(prompt, 20) for prompt in PROMPTS[:3]]
    assert 3 < max(toy.model.call_sizes) <= 8 if limit == "MOST_TOKENS" else toy.pool.stats().drafted_tokens > 0


def test_nothing_is_looked_up_without_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("looked up")

    monkeypatch.setattr(look_up.LookUp, "propose", fail)
    toy = Engine(make_pool())
    toy.add(PROMPTS[0], max_tokens=12)
    toy.run()
    assert toy.tokens(0) == answer(PROMPTS[0], 12)
