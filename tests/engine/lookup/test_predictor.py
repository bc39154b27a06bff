"""Predictor and NgramIndex propose what followed the latest tokens before, and nothing while predictions fail."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.drafts import look_up
from mlx_paged.drafts.look_up import LEAST_CHANCE, MOST_COMPARED, SIZES, NgramIndex, Predictor
from mlx_paged.engine.proposer import NextTokens
from mlx_paged.engine.request import RequestOptions
from tests.support.models.drafting import EveryStep
from tests.support.requests import request_of

ANY = 64


def predictor_of(tokens: list[int], most: int) -> Predictor:
    """Return a predictor that has indexed all of the row's tokens."""
    predictor = Predictor(list(tokens), most)
    predictor.index(1 << 20)
    return predictor


def index_of(tokens: list[int], at_once: int = 1 << 20) -> NgramIndex:
    index = NgramIndex(list(tokens))
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


def test_longer_repetitions_raise_the_chances() -> None:
    text = np.random.default_rng(0).permutation(400).tolist()
    predictor = predictor_of([*text, *text[:3]], 16)
    before = predictor.drafts(0, ANY)
    feed(predictor, text[3:60])
    after = predictor.drafts(0, ANY)
    assert sum(before.chances) < 6
    assert after.tokens == text[60:76] and sum(after.chances) > 14
    assert predictor.num_tokens == 460


def test_unlikely_tokens_are_not_proposed() -> None:
    found = predictor_of([*range(90), 5, 6], 64).drafts(0, ANY)
    assert len(found.tokens) < 60 and min(found.chances) >= LEAST_CHANCE


def test_repeating_cycle_is_continued() -> None:
    predictor = predictor_of([9, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2], 7)
    assert predictor.drafts(0, ANY).tokens == [1, 2, 1, 2, 1, 2, 1]
    assert predictor_of([4, 7, 7, 7, 7, 7, 7, 7, 7], 3).drafts(1, ANY).tokens == [7, 7, 7]


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


@pytest.mark.parametrize("skipped", [0, 1])
def test_drafts_are_right_when_the_text_is_repeated(skipped: int) -> None:
    text = np.random.default_rng(2).integers(0, 50, 120).tolist()
    predictor = predictor_of(text, 5)
    hits = total = 0
    for place in itertools.takewhile(lambda p: p < 100, itertools.count()):
        found = predictor.drafts(skipped, ANY)
        for offset, token in enumerate([] if found is None else found.tokens):
            total += 1
            hits += token == text[place + skipped + offset]
        predictor.add(text[place])
    assert total > 300 and hits / total > 0.9


FEW = st.lists(st.integers(0, 3), max_size=40)


def by_hand(tokens: list[int]) -> tuple[int, int] | None:
    """Return what :meth:`NgramIndex.find` should: the last earlier occurrence of the last 3, or else 2, tokens."""
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


def test_a_single_token_is_no_match() -> None:
    assert index_of([1, 2, 1]).find() is None
    assert index_of([5, 1, 2, 9, 1, 2]).find() == (3, 2)


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
    original = NgramIndex.index

    def count(self: NgramIndex, most: int) -> int:
        found = original(self, most)
        counts.append(found)
        return found

    monkeypatch.setattr(NgramIndex, "index", count)
    rows = [request_of(uid, 1) for uid in range(3)]
    for row in rows:
        row.history, row.options = list(range(3000)), RequestOptions(prompt_lookup=4)
    proposer = look_up.LookUp(EveryStep())
    proposer.add(rows)
    assert not counts
    totals = []
    for _ in range(12):
        counts.clear()
        proposer.propose(rows, NextTokens(mx.zeros(3), None), 5000, is_alone=True)
        totals.append(sum(counts))
    assert totals[:8] == [look_up.INDEXED_A_STEP] * 8 and sum(totals) == 3 * 3000 and totals[-1] == 0
