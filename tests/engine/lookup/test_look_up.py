"""LookUp over a model whose tokens are known in advance: rows get the same tokens, whatever is proposed."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_paged
from mlx_paged.cache.batch import Batch, NotPackableError
from mlx_paged.drafts import look_up
from mlx_paged.drafts.look_up import LEAST_CHANCE, MOST_COMPARED, SIZES, Predictor
from mlx_paged.engine.request import RequestOptions
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick
from tests.support.models.drafting import EveryStep
from tests.support.models.oracle import Oracle, oracles
from tests.support.models.toy_engine import VOCAB, ToyEngine, answer, make_pool, prompt_of
from tests.support.requests import request_of

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
    prompts = PROMPTS[:num_rows]
    reference = ToyEngine(make_pool(window=window))
    uids = [reference.add(prompt, max_tokens=40) for prompt in prompts]
    reference.run()
    expected = [reference.tokens(uid) for uid in uids]
    pool = make_pool(window=window)
    toy = Engine(pool, completion_batch_size=20)
    for prompt, tokens in zip(prompts, expected, strict=True):
        toy.ask(prompt, 40)
        oracle.answers[tuple(prompt)] = tokens
    toy.run()
    assert [toy.tokens(uid) for uid in uids] == expected
    assert all(toy.responses[u][-1].all_tokens == p + t for u, p, t in zip(uids, prompts, expected, strict=True))
    stats = pool.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert len(toy.model.call_sizes) < 40 + 2 * num_rows, "fewer calls than tokens"
    check_left(pool, toy)


@pytest.mark.parametrize(
    ("num_tokens", "drafted"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 5), (7, 6), (11, 10), (25, 21)]
)
def test_answer_ends_at_max_tokens_and_drafts_are_counted(
    num_tokens: int, drafted: int, oracle: type[Oracle], monkeypatch: Any
) -> None:
    """A step has up to 5 drafts, no more than tokens are left, and a token of the model's own."""
    monkeypatch.setattr(oracle, "right", staticmethod(lambda place: MOST))
    pool = make_pool()
    toy = Engine(pool)
    toy.ask(PROMPTS[2], num_tokens)
    toy.run()
    last, stats = toy.responses[0][-1], pool.stats()
    assert toy.tokens(0) == answer(PROMPTS[2], num_tokens)
    assert (last.finish_reason, last.all_tokens) == ("length", PROMPTS[2] + toy.tokens(0))
    assert stats.drafted_tokens == stats.accepted_tokens == drafted
    assert toy.engine.counters.generation_tokens == num_tokens
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


@pytest.mark.parametrize("num_blocks", [12, 14, 17])
def test_without_free_blocks_nothing_is_proposed(num_blocks: int, oracle: type[Oracle]) -> None:
    """Nobody is preempted for a draft."""
    drafts = []
    for blocks, lookup in ((num_blocks, 0), (num_blocks, MOST), (None, MOST)):
        pool = make_pool(blocks)
        toy = Engine(pool)
        for prompt in PROMPTS[1:4]:
            toy.ask(prompt, 12, lookup=lookup)
        toy.run()
        assert [toy.tokens(uid) for uid in range(3)] == [answer(prompt, 12) for prompt in PROMPTS[1:4]]
        drafts.append((pool.preemptions, pool.stats().drafted_tokens))
        check_left(pool, toy)
    (plain, _), (tight, few), (_, many) = drafts
    assert tight <= plain and 0 < few < many


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
    toy.ask(PROMPTS[4], 12)
    toy.ask(PROMPTS[5], 12, sampler=lambda logprobs: mx.argmax(logprobs, axis=-1))
    toy.run()
    assert [toy.tokens(uid) for uid in range(6)] == [answer(prompt, 12) for prompt in PROMPTS[:6]]
    assert pool.stats().accepted_tokens > 0
    # The row with a processor is in the same calls; its processor sees each token once.
    assert [len(tokens) for tokens in seen[:12]] == list(range(len(PROMPTS[3]), len(PROMPTS[3]) + 12))
    assert seen[11] == [*PROMPTS[3], *toy.tokens(first)[:11]]


def test_rows_are_not_looked_at_while_drafts_cannot_pay(oracle: type[Oracle], monkeypatch: Any) -> None:
    monkeypatch.setattr(EveryStep, "may_choose", lambda self, num_rows: False)
    monkeypatch.setattr(oracle, "follow", lambda self, row: pytest.fail("looked at"))
    pool = make_pool()
    toy = Engine(pool)
    toy.ask(PROMPTS[0], 12)
    toy.run()
    assert pool.stats().drafted_tokens == 0 and toy.tokens(0) == answer(PROMPTS[0], 12)


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


ANY = 64


def predictor_of(tokens: list[int], most: int) -> Predictor:
    """Return a predictor that has indexed all of the row's tokens."""
    predictor = Predictor(list(tokens), most)
    predictor.index(1 << 20)
    return predictor


def index_of(tokens: list[int], at_once: int = 1 << 20) -> Predictor:
    index = Predictor(list(tokens), 1)
    while index.index(at_once):
        pass
    return index


def feed(predictor: Predictor, tokens: list[int]) -> None:
    for token in tokens:
        predictor.add(token)


def test_tokens_that_followed_before_are_proposed_up_to_the_limit() -> None:
    text = list(range(30))
    predictor = predictor_of([*text, 5, 6, 7], 4)
    found = predictor.drafts(0, ANY)
    assert found is not None and found.tokens == [8, 9, 10, 11]
    assert 1 > found.chances[0] > found.chances[1] > found.chances[3] > 0
    assert predictor.drafts(0, 2).tokens == [8, 9]
    assert predictor.drafts(1, ANY).tokens == [9, 10, 11, 12], "after a token that is being computed"
    assert predictor.drafts(1, ANY).chances[:2] == found.chances[1:3]
    assert predictor.drafts(0, 0) is None and predictor_of(text, 4).drafts(0, ANY) is None
    likely = predictor_of([*range(90), 5, 6], 64).drafts(0, ANY)
    assert len(likely.tokens) < 60 and min(likely.chances) >= LEAST_CHANCE
    assert predictor_of([9, *[1, 2] * 5], 7).drafts(0, ANY).tokens == [1, 2, 1, 2, 1, 2, 1]


def test_longer_repetitions_raise_the_chances() -> None:
    text = np.random.default_rng(0).permutation(400).tolist()
    predictor = predictor_of([*text, *text[:3]], 16)
    before = predictor.drafts(0, ANY)
    feed(predictor, text[3:60])
    after = predictor.drafts(0, ANY)
    assert sum(before.chances) < 6
    assert after.tokens == text[60:76] and sum(after.chances) > 14
    assert len(predictor.tokens) == 460


def test_a_row_stops_proposing_while_its_predictions_fail() -> None:
    rng = np.random.default_rng(1)
    predictor = predictor_of([], 8)
    gains = []
    for another in range(1000, 1300):  # the pair repeats, followed by another token each time
        feed(predictor, [1, 2])
        found = predictor.drafts(0, ANY)
        gains.append(0.0 if found is None else found.chances[0])
        predictor.add(another)
    assert max(gains[1:4]) > 0.25 and max(gains[-50:]) == 0
    text = rng.permutation(200).tolist()
    feed(predictor, [*text, *text[:30]])
    assert predictor.drafts(0, ANY).tokens == text[30:38]


FEW = st.lists(st.integers(0, 3), max_size=40)


def by_hand(tokens: list[int]) -> tuple[int, int] | None:
    """Return what :meth:`Predictor.find` should: the last earlier occurrence of the last 3, or else 2, tokens."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                same = 0
                while same < min(end, MOST_COMPARED) and tokens[end - same - 1] == tokens[len(tokens) - same - 1]:
                    same += 1
                return end, same
    return None


@settings(deadline=None)
@given(prompt=FEW, rest=FEW, at_once=st.integers(1, 9))
def test_last_occurrence_of_the_longest_ngram_is_found(prompt: list[int], rest: list[int], at_once: int) -> None:
    index = index_of(prompt, at_once)
    assert index.find() == by_hand(prompt)
    for count, token in enumerate(rest, 1):
        index.add(token)
        assert index.find() == by_hand(prompt + rest[:count])
    assert index.tokens == prompt + rest


def test_only_the_end_of_a_very_long_prompt_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_up, "MOST_INDEXED", 6)
    assert index_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]).find() is None
    assert index_of([7, 7, 7, 7, 1, 2, 9, 9, 1, 2]).find() == (6, 2)


def test_a_prompt_is_indexed_from_its_end_some_tokens_at_a_time() -> None:
    text = np.random.default_rng(3).permutation(4000).tolist()
    late, early = ([*text, *text[place : place + 3]] for place in (3500, 500))
    predictor = Predictor(late, 4)
    assert not predictor.expects and predictor.index(1000) == 1000
    assert predictor.drafts(0, ANY).tokens == text[3503:3507]
    predictor = Predictor(early, 4)
    counts = [predictor.index(1000) for _ in range(5)]
    assert counts == [1000, 1000, 1000, 1000, 2] and predictor.drafts(0, ANY).tokens == text[503:507]
    assert predictor.index(1000) == 0


def test_a_step_indexes_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows have long prompts, and only in steps that may have drafts."""
    counts: list[int] = []
    original = Predictor.index

    def count(self: Predictor, most: int) -> int:
        found = original(self, most)
        counts.append(found)
        return found

    monkeypatch.setattr(Predictor, "index", count)
    rows = [request_of(uid, 1) for uid in range(3)]
    for row in rows:
        row.history, row.options = list(range(3000)), RequestOptions(prompt_lookup=4)
    proposer = look_up.LookUp(EveryStep())
    proposer.add(rows)
    assert not counts
    totals = []
    for _ in range(12):
        counts.clear()
        proposer.propose(rows, mx.zeros(3), 5000, is_alone=True)
        totals.append(sum(counts))
    assert totals[:8] == [look_up.INDEXED_A_STEP] * 8 and sum(totals) == 3 * 3000 and totals[-1] == 0
