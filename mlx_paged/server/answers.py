"""Answers to a request: split into text, reasoning and tool calls as they are generated, for the form of an API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .answer_reader import AnswerReader, Delta, Token
from .errors import RequestRefused
from .request import Generated, Scores, ServerRequest

if TYPE_CHECKING:
    from .texts import LoadedTexts


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

    def begin(self, usage: Usage) -> list[Event]:
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

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not a stream; ``answers`` are in the order of their indices."""
        ...


# From the engine ---------------------------------------------------------------------------------------------------


class Answer:
    """One answer to a request, fed token by token.

    Args:
        index: its position among the request's answers.
        request: the request that it answers.
        texts: the model's tokenizer and marks.

    Attributes:
        num_cached: prompt tokens that came from the prefix cache; None: the answer has not begun.
        num_tokens: tokens generated so far.
        num_reasoning: reasoning tokens among them.
    """

    def __init__(self, index: int, request: ServerRequest, texts: LoadedTexts) -> None:
        self.index = index
        self.num_cached: int | None = None
        self.num_tokens = self.num_reasoning = 0
        self._request, self._texts = request, texts
        self._reader = AnswerReader(
            texts.marks,
            request.prompt_of(index).initial_state,
            tools=request.tools,
            is_free=request.constraint is None or request.constraint.answer is None,
            streams=request.streams,
            calls_once=request.calls_once,
        )
        self._tokens: list[Token] = []  # not sent yet
        self._num_sent = 0  # tokens in earlier pieces

    def next(self, said: Generated) -> Piece | None:
        """Add the next token. Return the piece that can be sent now, or None; the last token always gives a piece."""
        if said.num_cached is not None:
            self.num_cached = said.num_cached
        if self._request.has_no_answer:
            return Piece(self.index, finish="length")
        text, is_last = said.text, said.finish is not None
        if self.num_tokens == 0 and self._request.echo and said.num_shown is None and not text.startswith(" "):
            # The answer continues its prompt's text: restore the leading space that mlx-lm drops.
            text = " " * self._texts.decode([said.token]).startswith(" ") + text
        deltas = self._reader.feed(text, is_last=is_last)
        self.num_tokens += 1
        self.num_reasoning += self._reader.state == "reasoning"
        if said.logprob is not None and self._request.top_logprobs is not None:
            self._tokens.append(self.token(said.token, said.logprob, said.top))
        if said.num_shown is not None:
            del self._tokens[max(0, said.num_shown - self._num_sent) :]
        if not deltas and not is_last:
            return None
        if self._tokens:
            deltas = deltas or [Delta("text")]
            deltas[-1].tokens = self._tokens
            self._num_sent, self._tokens = self._num_sent + len(self._tokens), []
        reader = self._reader
        calls = said.finish == "stop" and reader.num_calls and not reader.is_call_cut
        return Piece(self.index, deltas, "tool_calls" if calls else said.finish, said.stop)

    def token(self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> Token:
        likeliest = tuple(Token(other, *self._texts.token(other), value) for other, value in top)
        return Token(token_id, *self._texts.token(token_id), logprob, likeliest)


class Answers:
    """All answers to one request, built from the items of its stream.

    Args:
        request: the request, with its prompts.
        texts: the model's tokenizer and parsers.
        form: the API's response format.
    """

    def __init__(self, request: ServerRequest, texts: LoadedTexts, form: Form) -> None:
        self.request, self._texts, self._form = request, texts, form
        self._answers = [Answer(index, request, texts) for index in range(request.num_answers)]
        self._pieces: list[Piece] = []  # not sent yet
        self._scores: dict[int, Scores] = {}
        self._num_open = request.num_answers
        self.first_at: float | None = None
        self._has_begun = False
        self.progress = "keepalive"

    @property
    def are_over(self) -> bool:
        return not self._num_open

    def add(self, items: Sequence[Any]) -> None:
        """Add items from the engine."""
        for item in items:
            if isinstance(item, Generated):
                if self.first_at is None:
                    self.first_at = time.monotonic()
                    self._pieces += self._echoes()
                self._num_open -= item.finish is not None
                if (piece := self._answers[item.answer].next(item)) is not None:
                    self._pieces.append(piece)
            elif isinstance(item, Scores):
                self._scores[item.prompt] = item
            else:
                self.progress = f"keepalive {item.done}/{item.total}"

    def events(self) -> list[Event]:
        """Return the events for what was added since the last call. There are none until an answer has begun, because
        the first event may report the cached prompt tokens."""
        events: list[Event] = []
        if not self._has_begun:
            if all(answer.num_cached is None for answer in self._answers):
                return []
            self._has_begun = True
            events += self._form.begin(self.usage())
        pieces, self._pieces = self._pieces, []
        events += [event for piece in pieces for event in self._form.piece(piece)]
        return events + self._form.end(self.usage()) if self.are_over else events

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        by_answer: dict[int, list[Piece]] = {index: [] for index in range(len(self._answers))}
        for piece in self._pieces:
            by_answer[piece.index].append(piece)
        answers = [Piece.joined(by_answer[index]) for index in by_answer]
        return self._form.whole(answers, self.usage())

    def usage(self) -> Usage:
        """Return the token counts so far; a prompt's cached tokens are the fewest that any of its answers had."""
        request, answers = self.request, self._answers
        cached = 0
        for first in range(0, len(answers), request.n):
            known = [answer.num_cached for answer in answers[first : first + request.n]]
            cached += min((number for number in known if number is not None), default=0)
        prompt = sum(len(each.tokens) for each in request.prompts)
        if request.has_no_answer:
            return Usage(prompt, cached)
        return Usage(prompt, cached, sum(a.num_tokens for a in answers), sum(a.num_reasoning for a in answers))

    def _echoes(self) -> list[Piece]:
        """Return the prompt that each answer begins with, as the first piece of it; none without ``echo``."""
        request = self.request
        prompts = [self._echo(number) for number in range(len(request.prompts))] if request.echo else []
        return [Piece(index, [prompts[index // request.n]]) for index in range(len(prompts) * request.n)]

    def _echo(self, number: int) -> Delta:
        given, (first, *rest) = self.request.inputs[number], self.request.prompts[number].tokens
        text = given if isinstance(given, str) else self._texts.decode([first, *rest])
        if (scores := self._scores.get(number)) is None:
            return Delta("text", text)
        token = self._answers[0].token
        scored = zip(rest, scores.logprobs, scores.top, strict=True)
        return Delta("text", text, tokens=[token(first, None), *(token(*each) for each in scored)])
