"""What is learnt of answers while they are generated, before it has a client's form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Token(NamedTuple):
    """A token with its log-probability.

    Attributes:
        id: of the vocabulary.
        name: as the tokenizer calls it.
        text: that it stands for alone.
        logprob: None for the first token of a prompt.
        top: the likeliest at its place, the likeliest first; their own ``top`` is empty.
    """

    id: int
    name: str
    text: str
    logprob: float | None
    top: tuple[Token, ...] = ()


@dataclass
class Piece:
    """A part of one answer, or all of it.

    Attributes:
        index: of the answer among those to the request.
        text, reasoning: that were written.
        calls: tool calls, as OpenAI's chats have them, each with its ``index``.
        tokens: with log-probabilities, if they are wanted.
        finish: why the answer ends: ``stop``, ``length`` or ``tool_calls``; None: it goes on.
        stop: the stop string that has ended it.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    @classmethod
    def joined(cls, pieces: Iterable[Piece]) -> Piece:
        """All pieces of one answer, in order."""
        whole = cls()
        for piece in pieces:
            whole.index = piece.index
            whole.text += piece.text
            whole.reasoning += piece.reasoning
            whole.calls += piece.calls
            whole.tokens += piece.tokens
            whole.finish, whole.stop = piece.finish, piece.stop
        return whole


class Usage(NamedTuple):
    """Tokens of a request: each prompt counts once, all answers that were generated count.

    Attributes:
        prompt: of the prompts.
        cached: of these, found in the prefix cache.
        completion: of the answers.
        reasoning: of these, reasoning.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Head(NamedTuple):
    """What every answer begins with; ``id`` is without the form's prefix, ``created`` in seconds."""

    id: str
    model: str
    created: int
    fingerprint: str
