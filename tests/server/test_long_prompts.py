"""Prompts that are far too long are refused by their beginning; all others are encoded whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm.utils import load_tokenizer

from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.request import ChatInput, Input
from mlx_paged.server.texts import LoadedTexts

pytestmark = pytest.mark.demo_model

CONTEXT = 1000


@pytest.fixture
def texts(demo_model_folder: Path) -> LoadedTexts:
    weights = SimpleNamespace(
        key=None,
        tokenizer=load_tokenizer(demo_model_folder),
        model=None,
        config={"max_position_embeddings": CONTEXT},
    )
    return LoadedTexts(weights, {}, None)


def asked(text: str, kind: str) -> Input:
    return text if kind == "text" else ChatInput([{"role": "user", "content": text}], continues=kind == "continued")


@pytest.mark.parametrize("kind", ["text", "chat", "continued"])
def test_only_the_beginning_of_a_far_too_long_prompt_is_encoded(texts: LoadedTexts, kind: str) -> None:
    with pytest.raises(RequestRefused, match=r"prompt is too long: at least 1\d{3} tokens > 1000 maximum"):
        texts.make_prompt(asked("word " * 100_000, kind))
    with pytest.raises(RequestRefused, match=r"prompt is too long: 1[0-3]\d\d tokens > 1000 maximum"):
        texts.make_prompt(asked("word " * 1100, kind))


@pytest.mark.parametrize("kind", ["text", "chat", "continued"])
def test_prompt_of_long_tokens_that_fits_is_not_refused(texts: LoadedTexts, kind: str) -> None:
    text = "=" * 64 * 900
    assert 200 < len(texts.make_prompt(asked(text, kind)).tokens) <= CONTEXT
