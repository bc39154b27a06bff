"""StoppedTokens with the demo model's tokenizer cuts the text of all tokens before the first stop string."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from mlx_paged.server.stops import StoppedTokens
from tests.server.test_stop_strings import cut_of

pytestmark = pytest.mark.demo_model


@pytest.fixture(scope="module")
def tokenizer(demo_model_folder: Path) -> Any:
    return load(demo_model_folder)


texts = st.text(alphabet="abc é🙂\n.", min_size=1, max_size=30) | st.text(min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@example(" aa", [(0, 3), (1, 1)])  # streaming drops the first space
@given(texts, st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=3))
def test_text_of_all_tokens_is_cut_before_the_first_stop_string(
    tokenizer: Any, text: str, spans: list[tuple[int, int]]
) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(tokens)
    assume(whole)  # the tokenizer knows no token for some control characters
    stops = [stop for begin, length in spans if (stop := whole[begin % len(whole) :][:length])]
    answer = StoppedTokens(tokenizer, stops)
    for token in tokens:
        if answer.add(token):
            break
    assert answer.text() == (cut_of(whole, stops), True)


def test_add_returns_true_for_the_token_that_completes_a_stop_string(tokenizer: Any) -> None:
    tokens = tokenizer.encode("The capital of France is Paris.", add_special_tokens=False)
    answer = StoppedTokens(tokenizer, ["apital", "Paris"])
    assert [answer.add(token) for token in tokens[:2]] == [False, True]
    assert answer.text() == ("The c", True)


def test_whole_text_is_returned_if_no_stop_string_occurs(tokenizer: Any) -> None:
    tokens = tokenizer.encode(" A word and a half-", add_special_tokens=False)
    for stops in ([], ["##", "-#"]):
        answer = StoppedTokens(tokenizer, stops)
        assert not any([answer.add(token) for token in tokens])
        assert answer.text() == (" A word and a half-", False) and answer.tokens == tokens


def test_an_empty_stop_string_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        StoppedTokens(tokenizer, [""])
