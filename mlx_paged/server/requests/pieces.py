"""What is learnt of answers while they are generated, and the form that a client gets them in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..errors import RequestRefused

LEAST = float("-inf")  # of tokens that the answer's grammar does not allow, and JSON has no word for


class Token(NamedTuple):
    """A token with its log-probability.

    Attributes:
        id: of the vocabulary.
        text: that it stands for alone.
        bytes: UTF-8 of the text, or the part of a character that the token is.
        logprob: None for the first token of a prompt.
        top: the likeliest at its place, the likeliest first; their own ``top`` is empty.
    """

    id: int
    text: str
    bytes: bytes
    logprob: float | None
    top: tuple[Token, ...] = ()


@dataclass
class Piece:
    """A part of one answer, or all of it.

    Attributes:
        index: of the answer among those to the request.
        text, reasoning: that were written.
        calls: tool calls, as OpenAI's chats have them, each with its ``index``; without an ``id``, more of the
            arguments of one that has begun.
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
        """Return all pieces of one answer, in order, as one."""
        whole = cls()
        texts, reasonings = [], []
        for piece in pieces:
            whole.index = piece.index
            texts.append(piece.text)
            reasonings.append(piece.reasoning)
            whole.calls += piece.calls
            whole.tokens += piece.tokens
            whole.finish, whole.stop = piece.finish, piece.stop
        whole.text, whole.reasoning = "".join(texts), "".join(reasonings)
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
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }


class Head(NamedTuple):
    """What every answer begins with; ``id`` is without the form's prefix, ``created`` in seconds."""

    id: str
    model: str
    created: int
    fingerprint: str


class Echo(NamedTuple):
    """A prompt, which its answers begin with; ``tokens`` have log-probabilities if these are wanted."""

    text: str
    tokens: Sequence[Token] = ()


class Event(NamedTuple):
    """One event of a stream; ``data`` is JSON, or text as it is."""

    data: Any
    name: str | None = None


class Form(Protocol):
    """How the answers to one request look to a kind of client."""

    def begin(self, usage: Usage, echoes: Sequence[Echo]) -> list[Event]:
        """Return what a stream begins with; of the usage, what is known by then."""
        ...

    def piece(self, piece: Piece) -> list[Event]:
        """Return a part of a stream; the last one of each answer says why it ends."""
        ...

    def end(self, usage: Usage) -> list[Event]:
        """Return what a stream ends with, after the last pieces."""
        ...

    def failed(self, refusal: RequestRefused) -> list[Event]:
        """Return what a stream ends with if it fails."""
        ...

    def whole(self, answers: Sequence[Piece], usage: Usage, echoes: Sequence[Echo]) -> dict[str, Any]:
        """Return the answers without a stream, in the order of their indices."""
        ...


def content_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities as OpenAI's chats have them, with the tokens' ids as in mlx-lm."""
    return {
        "content": [
            {**_told(token), "top_logprobs": [_told(other) for other in token.top if other.logprob != LEAST]}
            for token in tokens
        ]
    }


def _told(token: Token) -> dict[str, Any]:
    return {"id": token.id, "token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
