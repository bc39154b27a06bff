"""PreparedRequest: a request whose prompt has been made before it comes to the thread that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm import server as upstream

from .prompt_job import MadePrompt


@dataclass
class PreparedRequest(upstream.CompletionRequest):  # type: ignore[misc]
    """mlx-lm's request, and:

    Attributes:
        made: its prompt; None: it has not been made yet.
        salt: only requests with the same one share prefixes.
    """

    made: MadePrompt | None = None
    salt: str | None = None


class RenderedTokenizer:
    """A tokenizer for a prompt with images, whose chat template has been rendered before."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._wrapped, self._text = tokenizer, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __len__(self) -> int:
        return len(self._wrapped)

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        return self._text
