"""Answers: the answers to a request, split into text, reasoning and tool calls, in the format of its API.

An AnswerResponse sends them as JSON, or as server-sent events with keep-alive comments in between.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from .answer_reader import AnswerReader
from .errors import refusal_of
from .http import SOCKET_SECONDS, RequestLog, json_response
from .request import ServerRequest
from .requests.pieces import Delta, Echo, Event, Form, Piece, Token, Usage
from .work import ClientGone, Generated, Scores, Work

if TYPE_CHECKING:
    from .texts import LoadedTexts

T = TypeVar("T")


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
        self._first_at: float | None = None
        self._has_begun = False
        self.progress = "keepalive"

    @property
    def are_over(self) -> bool:
        return not self._num_open

    def add(self, items: Sequence[Any]) -> None:
        """Add items from the engine."""
        for item in items:
            if isinstance(item, Generated):
                self._first_at = time.monotonic() if self._first_at is None else self._first_at
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
            events += self._form.begin(self.usage(), self._echoes())
        pieces, self._pieces = self._pieces, []
        events += [event for piece in pieces for event in self._form.piece(piece)]
        return events + self._form.end(self.usage()) if self.are_over else events

    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        by_answer: dict[int, list[Piece]] = {index: [] for index in range(len(self._answers))}
        for piece in self._pieces:
            by_answer[piece.index].append(piece)
        answers = [Piece.joined(by_answer[index]) for index in by_answer]
        return self._form.whole(answers, self.usage(), self._echoes())

    def note_in(self, log: RequestLog) -> None:
        """Set the token counts and the time to the first token in the log entry."""
        usage = self.usage()
        log.prompt, log.cached, log.generated = usage.prompt, usage.cached, usage.completion
        if self._first_at is not None:
            log.first_token = self._first_at - self.request.asked_at

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

    def _echoes(self) -> list[Echo]:
        """Return the prompt that each answer begins with; none without ``echo``."""
        request = self.request
        prompts = [self._echo(number) for number in range(len(request.prompts))] if request.echo else []
        return [echo for echo in prompts for _ in range(request.n)]

    def _echo(self, number: int) -> Echo:
        given, (first, *rest) = self.request.inputs[number], self.request.prompts[number].tokens
        text = given if isinstance(given, str) else self._texts.decode([first, *rest])
        if (scores := self._scores.get(number)) is None:
            return Echo(text)
        token = self._answers[0].token
        scored = zip(rest, scores.logprobs, scores.top, strict=True)
        return Echo(text, [token(first, None), *(token(*each) for each in scored)])


# The response -------------------------------------------------------------------------------------------------------

BEAT_SECONDS = 1.0  # without a write, after which a keep-alive comment is sent
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class AnswerResponse(Response):
    """The HTTP response with a request's answers. An event stream starts with the first event, or after a second:
    errors found before that still get their HTTP status.

    Args:
        work: carries the answers to the client.
        answers: the answers, fed from the work.
        form: the API's response format.
        log: log entry of the request.
        headers: additional headers.
    """

    def __init__(
        self,
        work: Work,
        answers: Answers,
        form: Form,
        log: RequestLog,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers)
        self._work, self._answers, self._form, self._log = work, answers, form, log
        self._given = headers
        self._has_begun = False
        self._last = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response. Raises ClientGone, and other errors only while the response can still get a status."""
        self._send_message = send
        try:
            if self._answers.request.streams:
                await self._stream_events()
                return
            while not self._answers.are_over:
                await self._run(self._answers.add, await self._work.receive())
            whole = await run_in_threadpool(lambda: json_response(self._answers.whole(), headers=self._given))
            await whole(scope, receive, send)
        except Exception as error:
            if not self._has_begun or isinstance(error, ClientGone):
                raise
            refusal = refusal_of(error)
            self._log.refuse(refusal)
            await self._write(events_text(self._form.failed(refusal)))
            await self._write(b"", more=False)
        finally:
            self._work.close()
            self._answers.note_in(self._log)

    async def _stream_events(self) -> None:
        while not self._answers.are_over:
            try:
                items = await self._work.receive(BEAT_SECONDS)
                is_end = not self._has_begun or any(isinstance(each, Generated) and each.finish for each in items)
                text = await self._run(self._text, items, is_long=is_end and self._form.repeats_body)
                if text:
                    await self._write(text)
            except TimeoutError:
                pass
            if time.monotonic() - self._last >= BEAT_SECONDS:
                await self._write(f": {self._answers.progress}\n\n".encode())
        await self._write(b"", more=False)

    async def _run(self, call: Callable[[Sequence[Any]], T], items: Sequence[Any], *, is_long: bool = False) -> T:
        """Call a function; in a worker thread if it takes long, as texts of tokens with log-probabilities do."""
        if is_long or self._answers.request.wants_logprobs:
            return await run_in_threadpool(call, items)
        return call(items)

    def _text(self, items: Sequence[Any]) -> bytes:
        self._answers.add(items)
        return events_text(self._answers.events())

    async def _write(self, raw: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in self._given.items())]
            await self._send_message({"type": "http.response.start", "status": 200, "headers": headers})
        self._last = time.monotonic()
        try:
            async with asyncio.timeout(SOCKET_SECONDS):
                await self._send_message({"type": "http.response.body", "body": raw, "more_body": more})
        except TimeoutError:
            raise ClientGone from None


def events_text(events: Iterable[Event]) -> bytes:
    """Return events as they are sent to the client."""
    text = ""
    for event in events:
        data = event.data if isinstance(event.data, str) else json.dumps(event.data, allow_nan=False)
        text += f"data: {data}\n\n" if event.name is None else f"event: {event.name}\ndata: {data}\n\n"
    return text.encode()
