"""StopStrings against the plain definition: the whole text, cut at the least position at which a stop string occurs."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_paged.serve.stops.stop_strings import StopStrings


def cut_of(text: str, stops: list[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def pieces_of(text: str, borders: list[int]) -> list[str]:
    ends = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


few = st.text(alphabet="ab", max_size=30) | st.text(alphabet="abc é🙂\u0301\n", max_size=40) | st.text(max_size=40)
borders = st.lists(st.integers(0, 60), max_size=40)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text, and stop strings, most of them cut out of it, perhaps with an end that the text does not have."""
    text = draw(few)
    stops = []
    for _ in range(draw(st.integers(0, 6))):
        begin, length = draw(st.integers(0, len(text))), draw(st.integers(1, 8))
        stop = text[begin : begin + length] + draw(st.sampled_from(["", "", "", "b", "x"]))
        stops.append(stop or draw(st.text(alphabet="ab", min_size=1, max_size=4)))
    return text, stops


@settings(max_examples=500, deadline=None)
@given(cases(), borders)
@example(("abcde", ["bcde", "cd"]), [4])
@example(("abcdx", ["bcde", "cd"]), [4])
@example(("abcd", ["bcde", "cd"]), [2])
@example(("aaab", ["aab", "ab"]), [1, 2, 3])
@example(("e\u0301!", ["\u0301"]), [1])
def test_the_text_is_cut_before_the_first_stop_string(case: tuple[str, list[str]], ends: list[int]) -> None:
    text, stops = case
    expected = cut_of(text, stops)
    searched = StopStrings(stops)
    shown = taken = ""
    for piece in pieces_of(text, ends):
        taken += piece
        shown += searched.feed(piece)
        assert expected.startswith(shown)
        # No more is held back than a stop string begins with, or what follows a stop string that may yet be the first.
        held = taken[len(shown) :]
        assert searched.is_found or not held or any(stop.startswith(held) or stop in held for stop in stops)
    assert searched.is_found <= (len(expected) < len(text) or any(stop in text for stop in stops))
    shown += searched.finish()
    assert shown == expected
    assert searched.is_found == any(stop in text for stop in stops)
    assert searched.cut == (len(expected) if searched.is_found else None)


@settings(max_examples=300, deadline=None)
@given(cases(), borders, borders)
def test_borders_do_not_matter(case: tuple[str, list[str]], ends: list[int], others: list[int]) -> None:
    text, stops = case
    found = []
    for each in (ends, others):
        searched = StopStrings(stops)
        found.append("".join(searched.feed(piece) for piece in pieces_of(text, each)) + searched.finish())
    assert found[0] == found[1]


def test_what_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    searched = StopStrings(["stop here"])
    assert searched.feed("Do not sto") == "Do not "
    assert searched.feed("w it, st") == "stow it, "
    assert searched.feed("o") == ""
    assert searched.feed("p her") == "" and not searched.is_found
    assert searched.feed("e, or there") == "" and searched.is_found
    assert searched.feed("more") == searched.finish() == ""
    assert searched.cut == len("Do not stow it, ")


def test_an_end_that_only_begins_a_stop_string_is_shown_when_the_text_ends() -> None:
    searched = StopStrings(["###"])
    assert searched.feed("a ##") == "a "
    assert searched.finish() == "##"
    assert not searched.is_found and searched.cut is None


def test_without_stop_strings_everything_is_shown() -> None:
    searched = StopStrings([])
    assert searched.feed("text") == "text" and searched.finish() == "" and not searched.is_found


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_many_long_strings_take_no_longer_for_a_character() -> None:
    """Steps back in the strings, counted: no more than one for each character, however much of them matches."""
    stops = ["a" * length + "b" for length in range(900, 910)] + [chr(0x4E00 + n) for n in range(2000)]
    searched = StopStrings(stops)
    steps = 0

    class Counted(list[int]):
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    searched._fallback = Counted(searched._fallback)
    rng = random.Random(0)
    text = "".join(rng.choice(["a" * 899, "c", "a"]) for _ in range(30))
    assert searched.feed(text) + searched.finish() == text
    assert steps <= len(text)
