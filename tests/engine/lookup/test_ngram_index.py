"""NgramIndex: where the latest tokens have stood before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.engine.drafts import look_up
from mlx_paged.engine.drafts.look_up import MOST_COMPARED, SIZES, NgramIndex

FEW = st.lists(st.integers(0, 3), max_size=40)


def by_hand(tokens: list[int]) -> tuple[int, int] | None:
    """What :meth:`NgramIndex.find` says: the last place before the end where 3, or else 2, of the last tokens stand."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                same = 0
                while same < min(end, MOST_COMPARED) and tokens[end - same - 1] == tokens[len(tokens) - same - 1]:
                    same += 1
                return end, same
    return None


@given(prompt=FEW, rest=FEW)
def test_the_last_place_of_the_longest_run_is_found(prompt: list[int], rest: list[int]) -> None:
    index = NgramIndex(prompt)
    assert index.find() == by_hand(prompt)
    for count, token in enumerate(rest, 1):
        index.add(token)
        assert index.find() == by_hand(prompt + rest[:count])
    assert index.tokens == prompt + rest


@settings(deadline=None)
@given(prompt=FEW, rest=st.lists(FEW, max_size=5))
def test_tokens_that_come_together_are_indexed_as_one_by_one(prompt: list[int], rest: list[list[int]]) -> None:
    index, tokens = NgramIndex(prompt), list(prompt)
    for more in rest:
        index.extend(more)
        tokens += more
        assert index.tokens == tokens and index.find() == by_hand(tokens)


def test_a_single_token_is_no_match() -> None:
    assert NgramIndex([1, 2, 1]).find() is None
    assert NgramIndex([5, 1, 2, 9, 1, 2]).find() == (3, 2)


def test_of_a_very_long_prompt_the_end_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_up, "MOST_AT_ONCE", 6)
    assert NgramIndex([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]).find() is None
    assert NgramIndex([7, 7, 7, 7, 1, 2, 9, 9, 1, 2]).find() == (6, 2)
