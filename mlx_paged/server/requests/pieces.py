"""Pieces of answers as they are generated, and the forms in which clients receive them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from ..errors import RequestRefused

FORBIDDEN_LOGPROB = float("-inf")  # of tokens that the grammar does not allow; JSON cannot express it


class Token(NamedTuple):
    """A token with its log-probability.

    Attributes:
        id: index in the vocabulary.
        text: the token decoded by itself.
        bytes: its UTF-8 bytes, which may be part of a character.
        logprob: None for the first token of a prompt.
        top: the most likely tokens at its position, most likely first; their own ``top`` is empty.
    """

    id: int
    text: str
    bytes: bytes
    logprob: float | None
    top: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Call:
    """A tool call; ``index`` is its place among the answer's calls, ``id`` names it for the tool's result."""

    index: int
    name: str
    id: str


@dataclass
class Delta:
    """The next part of an answer: some text, some reasoning, or some of a call's arguments.

    Attributes:
        kind: ``text``, ``reasoning`` or ``call``.
        text: the text, or the arguments as JSON; may be empty.
        call: the call that the arguments are of.
        is_first, is_last: the call begins, or ends; one that does not end is not whole.
        tokens: tokens with log-probabilities, if requested.
    """

    kind: str
    text: str = ""
    call: Call | None = None
    is_first: bool = False
    is_last: bool = False
    tokens: list[Token] = field(default_factory=list)


@dataclass
class Piece:
    """A part of one answer, or all of it.

    Attributes:
        index: index of the answer in the request.
        deltas: what it consists of, in order.
        finish: why the answer ended: ``stop``, ``length`` or ``tool_calls``; None: it goes on.
        stop: the stop string that ended it.
    """

    index: int = 0
    deltas: list[Delta] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None

    @classmethod
    def joined(cls, pieces: Iterable[Piece]) -> Piece:
        """Return all pieces of one answer, in order, as one."""
        whole = cls()
        for piece in pieces:
            whole.index, whole.finish, whole.stop = piece.index, piece.finish, piece.stop
            whole.deltas += piece.deltas
        return whole

    def folded(self) -> list[Delta]:
        """Return the deltas, those of the same text, reasoning or call that follow each other as one."""
        said = (each for each in self.deltas if each.text or each.is_first or each.is_last or each.tokens)
        runs = groupby(said, key=lambda delta: (delta.kind, delta.call))
        return [_joined(list(run)) for _, run in runs]

    @property
    def text(self) -> str:
        return self._all("text")

    @property
    def reasoning(self) -> str:
        return self._all("reasoning")

    @property
    def tokens(self) -> list[Token]:
        return [token for delta in self.deltas for token in delta.tokens]

    def _all(self, kind: str) -> str:
        return "".join(delta.text for delta in self.deltas if delta.kind == kind)


def _joined(deltas: list[Delta]) -> Delta:
    first, last = deltas[0], deltas[-1]
    tokens = [token for delta in deltas for token in delta.tokens]
    text = "".join(delta.text for delta in deltas)
    return Delta(first.kind, text, first.call, first.is_first, last.is_last, tokens)


class Usage(NamedTuple):
    """Token counts of a request: each prompt counts once, every generated answer counts.

    Attributes:
        prompt: tokens of the prompts.
        cached: those of them that were found in the prefix cache.
        completion: tokens of the answers.
        reasoning: those of them that are reasoning.
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
    """Fields common to all objects of an answer; ``id`` is without the form's prefix, ``created`` in Unix seconds."""

    id: str
    model: str
    created: int
    fingerprint: str


class Echo(NamedTuple):
    """A prompt that its answers begin with; ``tokens`` are its tokens with log-probabilities, if requested."""

    text: str
    tokens: Sequence[Token] = ()


class Event(NamedTuple):
    """One event of a stream; ``data`` is a JSON value, or a string that is sent as it is."""

    data: Any
    name: str | None = None


class Form(Protocol):
    """Formats the answers to one request for one API.

    Attributes:
        repeats_body: the first and last events repeat what the body may be full of; they are made in a worker thread.
    """

    repeats_body: bool

    def begin(self, usage: Usage, echoes: Sequence[Echo]) -> list[Event]:
        """Return the first events of a stream; ``usage`` is what is known by then."""
        ...

    def piece(self, piece: Piece) -> list[Event]:
        """Return the events of a piece; the last one of each answer says why it ended."""
        ...

    def end(self, usage: Usage) -> list[Event]:
        """Return the last events of a stream, after all pieces."""
        ...

    def failed(self, refusal: RequestRefused) -> list[Event]:
        """Return the last events of a stream that failed."""
        ...

    def whole(self, answers: Sequence[Piece], usage: Usage, echoes: Sequence[Echo]) -> dict[str, Any]:
        """Return the body of a response that is not a stream; ``answers`` are in the order of their indices."""
        ...


def content_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities in the format of OpenAI's chats, plus token ids as in mlx-lm."""
    return {
        "content": [
            {
                **_logprob_entry(token),
                "top_logprobs": [_logprob_entry(other) for other in token.top if other.logprob != FORBIDDEN_LOGPROB],
            }
            for token in tokens
        ]
    }


def _logprob_entry(token: Token) -> dict[str, Any]:
    return {"id": token.id, "token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
