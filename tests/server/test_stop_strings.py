"""StopScanner against the plain definition: the whole text, cut at the first position of a stop string."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_paged.server.request import StopScanner
from tests.support.server.answers import cut_of


def pieces_of(text: str, borders: list[int]) -> list[str]:
    ends = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


few = st.text(alphabet="ab", max_size=30) | st.text(alphabet="abc é🙂\u0301\n", max_size=40) | st.text(max_size=40)
borders = st.lists(st.integers(0, 60), max_size=40)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw a text and stop strings, most of them pieces of it, some with an ending that the text lacks."""
    text = draw(few)
    stops = []
    for _ in range(draw(st.integers(0, 6))):
        begin, length = draw(st.integers(0, len(text))), draw(st.integers(1, 8))
        stop = text[begin : begin + length] + draw(st.sampled_from(["", "", "", "b", "x"]))
        stops.append(stop or draw(st.text(alphabet="ab", min_size=1, max_size=4)))
    return text, stops


@settings(max_examples=200, deadline=None)
@given(cases(), borders)
@example(("abcde", ["bcde", "cd"]), [4])
@example(("abcdx", ["bcde", "cd"]), [4])
@example(("abcd", ["bcde", "cd"]), [2])
@example(("aaab", ["aab", "ab"]), [1, 2, 3])
@example(("e\u0301!", ["\u0301"]), [1])
def test_the_text_is_cut_before_the_first_stop_string(case: tuple[str, list[str]], ends: list[int]) -> None:
    text, stops = case
    expected = cut_of(text, stops)
    searched = StopScanner(stops)
    shown = taken = ""
    for piece in pieces_of(text, ends):
        taken += piece
        shown += searched.feed(piece)
        assert expected.startswith(shown)
        # Held back is only the beginning of a stop string, or what follows one that may yet be the first.
        held = taken[len(shown) :]
        assert searched.found or not held or any(stop.startswith(held) or stop in held for stop in stops)
    assert (searched.found is not None) <= (len(expected) < len(text) or any(stop in text for stop in stops))
    shown += searched.feed("", is_last=True)
    assert shown == expected
    assert (searched.found is not None) == any(stop in text for stop in stops)
    assert searched.found is None or text.startswith(searched.found, len(expected))


def test_many_stop_strings_cost_no_more_than_few() -> None:
    """At most two stop strings are looked at for each character."""
    asked = []

    class Stop(str):
        def startswith(self, *given: Any) -> bool:
            asked.append(self)
            return super().startswith(*given)

    stops = [Stop("a" * length + "b") for length in range(90, 100)] + [Stop(chr(0x4E00 + n)) for n in range(1000)]
    searched, text = StopScanner(stops), ("a" * 89 + "c") * 3
    assert "".join(searched.feed(character) for character in text) == text
    assert 0 < len(asked) <= 2 * len(text)
