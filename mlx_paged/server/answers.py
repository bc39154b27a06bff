"""Answers: the answers to a request, split into text, reasoning and tool calls, in the format of its API.

An AnswerResponse sends them as JSON, or as server-sent events with keep-alive comments in between.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from .answer_stream import AnswerStream, Begun, ClientGone, Generated, Scores
from .calls import ArgumentStream, LooseParts, loose_calls, names_of, openai_call
from .errors import refusal_of
from .http import SOCKET_SECONDS, RequestLog, json_response
from .request import ServerRequest
from .requests.pieces import Echo, Event, Form, Piece, Token, Usage

if TYPE_CHECKING:
    from .backend import ModelTexts


class Answer:
    """One answer to a request, fed token by token.

    Args:
        index: its position among the request's answers.
        request: the request that it answers.
        texts: the model's tokenizer and parsers.
        streams: whether arguments of tool calls are sent while they are generated.

    Attributes:
        num_cached: prompt tokens that came from the prefix cache; None: the answer has not begun.
        num_tokens: tokens generated so far.
        num_reasoning: reasoning tokens among them.
    """

    def __init__(self, index: int, request: ServerRequest, texts: ModelTexts, *, streams: bool = False) -> None:
        self.index = index
        self.num_cached: int | None = None
        self.num_tokens = self.num_reasoning = 0
        self._request, self._texts = request, texts
        constraint = request.constraint
        self._state = request.prompt_of(index).initial_state
        # Constrained text without tools is not parsed for calls: it may contain what looks like one.
        self._parts = texts.parts(self._state, has_calls=constraint is None or constraint.tools is not None)
        self._names = names_of(request.tools)
        if self._names and (constraint is None or constraint.answer is None):
            self._parts = LooseParts(self._parts, self._names)
        self._call = ""
        self._streams, self._arguments = streams, ArgumentStream()
        self._num_calls = 0
        self._text = self._reasoning = ""
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[Token] = []
        self._num_shown = 0  # tokens in earlier pieces

    def next(self, said: Generated) -> Piece | None:
        """Add the next token. Return the piece that can be sent now, or None; the last token always gives a piece."""
        if self._request.has_no_answer:
            return Piece(self.index, finish="length")
        if self.num_tokens == 0 and self._request.echo and said.num_shown is None:
            # The answer continues its prompt's text: restore the leading space that mlx-lm drops.
            begins_apart = self._texts.decode([said.token]).startswith(" ") and not said.text.startswith(" ")
            self._text = " " if begins_apart else ""
        for state, text in self._parts.feed(said.text):
            self._add(state, text)
        self.num_tokens += 1
        self.num_reasoning += self._state == "reasoning"
        if said.logprob is not None and self._request.top_logprobs is not None:
            self._tokens.append(self.token(said.token, said.logprob, said.top))
        if said.finish is not None:
            return self._last(said)
        if not (self._text or self._reasoning or self._calls):
            return None
        return self._piece()

    def _last(self, said: Generated) -> Piece:
        is_whole = said.finish == "stop" and said.stop is None
        if isinstance(self._parts, LooseParts) and not is_whole:
            self._parts.cut_off()
        self._add(*self._parts.flush())
        if self._state == "tool":
            self._end_call(is_whole=is_whole)
        if said.num_shown is not None:
            del self._tokens[max(0, said.num_shown - self._num_shown) :]
        piece = self._piece()
        piece.finish = "tool_calls" if said.finish == "stop" and self._num_calls else said.finish
        piece.stop = said.stop
        return piece

    def _add(self, state: str, text: str) -> None:
        if self._state == "tool" and state != "tool":
            self._end_call(is_whole=True)
        if state == "reasoning":
            self._reasoning += text
        elif state == "tool":
            self._call += text
            if self._streams and not (self._request.calls_once and self._num_calls and not self._arguments.name):
                self._add_arguments(self._arguments.feed(text))
        elif state == "normal":
            self._text += text
        self._state = state

    def _end_call(self, *, is_whole: bool) -> None:
        """End the current tool call. One that cannot be parsed becomes text, as the model wrote it."""
        text, self._call = self._call, ""
        arguments, self._arguments = self._arguments, ArgumentStream()
        if arguments.name in self._names:
            if is_whole and arguments.missing:
                self._continue_call(arguments.missing)
            return
        if not text and not is_whole:
            return
        if self._request.calls_once and self._num_calls:
            return
        try:
            calls = [openai_call(call) for call in self._parsed(text, is_whole=is_whole)]
        except Exception as error:  # parsers raise any exception
            logging.warning("cannot parse a tool call; sending it as text: %s: %.200s", type(error).__name__, error)
            self._text += f"{self._texts.call_start or ''}{text}"
            return
        for call in calls[: 1 if self._request.calls_once else None]:
            self._calls.append({**call, "index": self._num_calls})
            self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        """Add more arguments of the current call to the next piece; the first ones come with the function's name."""
        arguments = self._arguments
        if not text or arguments.name not in self._names:
            return
        if not arguments.is_name_sent:
            arguments.is_name_sent = True
            self._calls.append({**openai_call({"name": arguments.name}), "index": self._num_calls})
            self._calls[-1]["function"]["arguments"] = text
            self._num_calls += 1
        else:
            self._continue_call(text)

    def _continue_call(self, text: str) -> None:
        if self._calls:
            self._calls[-1]["function"]["arguments"] += text
        else:
            self._calls.append({"index": self._num_calls - 1, "function": {"arguments": text}})

    def _parsed(self, text: str, *, is_whole: bool) -> list[dict[str, Any]]:
        """Return the calls in a text; ``is_whole``: the model finished the call. Raises Exception if there are none."""
        parse = lambda given: self._texts.parse_calls(given, self._request.tools)  # noqa: E731
        try:
            return parse(text)
        except Exception:
            if not is_whole:
                raise
            return loose_calls(text, self._names, parse)

    def _piece(self) -> Piece:
        piece = Piece(self.index, self._text, self._reasoning, self._calls, self._tokens)
        self._num_shown += len(self._tokens)
        self._text = self._reasoning = ""
        self._calls, self._tokens = [], []
        return piece

    def token(self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()) -> Token:
        likeliest = tuple(Token(other, *self._texts.token(other), value) for other, value in top)
        return Token(token_id, *self._texts.token(token_id), logprob, likeliest)


class Answers:
    """All answers to one request, built from the items of its stream.

    Args:
        request: the request, with its prompts.
        texts: the model's tokenizer and parsers.
        form: the API's response format.
        streams: whether the answers are sent while they are generated.
    """

    def __init__(self, request: ServerRequest, texts: ModelTexts, form: Form, *, streams: bool = False) -> None:
        self._request, self._texts, self._form = request, texts, form
        self._answers = [Answer(index, request, texts, streams=streams) for index in range(request.num_answers)]
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
            elif isinstance(item, Begun):
                self._answers[item.answer].num_cached = item.num_cached
            elif isinstance(item, Scores):
                self._scores[item.prompt] = item
            else:
                self.progress = f"keepalive {item.done}/{item.total}"

    def events(self) -> list[Event]:
        """Return the events for what was added since the last call. There are none until all answers have begun,
        because the first event may report the cached prompt tokens."""
        events: list[Event] = []
        if not self._has_begun:
            if any(answer.num_cached is None for answer in self._answers):
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
            log.first_token = self._first_at - self._request.asked_at

    def usage(self) -> Usage:
        """Return the token counts so far; a prompt's cached tokens are the fewest that any of its answers had."""
        request, answers = self._request, self._answers
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
        request = self._request
        prompts = [self._echo(number) for number in range(len(request.prompts))] if request.echo else []
        return [echo for echo in prompts for _ in range(request.n)]

    def _echo(self, number: int) -> Echo:
        given, (first, *rest) = self._request.inputs[number], self._request.prompts[number].tokens
        text = given if isinstance(given, str) else self._texts.decode([first, *rest])
        if (scores := self._scores.get(number)) is None:
            return Echo(text)
        token = self._answers[0].token
        scored = zip(rest, scores.logprobs, scores.top, strict=True)
        return Echo(text, [token(first, None), *(token(*each) for each in scored)])


# The response -------------------------------------------------------------------------------------------------------

BEAT_SECONDS = 1.0  # without a write, after which a keep-alive comment is sent
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Client:
    """A client that waits for its answer; watches for its disconnect. For the event loop.

    Args:
        receive: ASGI's; the request body has been read.

    Attributes:
        stream: carries the answer; fails with ClientGone when the client disconnects.
    """

    def __init__(self, receive: Any) -> None:
        self.stream = AnswerStream()
        self._receive = receive
        self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stream.fail(ClientGone())

    def close(self) -> None:
        """Stop watching, and close the stream."""
        self._watch.cancel()
        self.stream.close()


class AnswerResponse(Response):
    """The HTTP response with a request's answers. An event stream starts with the first event, or after a second:
    errors found before that still get their HTTP status.

    Args:
        client: the client that waits for it.
        answers: the answers, fed from the client's stream.
        form: the API's response format.
        log: log entry of the request.
        headers: additional headers.
        work: the engine's record of the request, kept alive here because the engine thread lists it weakly.
        streams: whether the response is an event stream.
    """

    def __init__(
        self,
        client: Client,
        answers: Answers,
        form: Form,
        log: RequestLog,
        headers: dict[str, str],
        work: Any,
        *,
        streams: bool,
    ) -> None:
        super().__init__(headers=headers)
        self._client, self._stream, self._work = client, client.stream, work
        self._answers, self._form, self._log, self._given, self._streams = answers, form, log, headers, streams
        self._has_begun = False
        self._last = time.monotonic()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response. Raises ClientGone, and other errors only while the response can still get a status."""
        self._send_message = send
        try:
            if self._streams:
                await self._stream_events()
                return
            while not self._answers.are_over:
                self._answers.add(await self._stream.receive())
            whole = await run_in_threadpool(lambda: json_response(self._answers.whole(), headers=self._given))
            await whole(scope, receive, send)
        except Exception as error:
            if not self._has_begun or isinstance(error, ClientGone):
                raise
            refusal = refusal_of(error)
            self._log.refuse(refusal)
            await self._write_text(events_text(self._form.failed(refusal)))
            await self._write(b"", more=False)
        finally:
            self._client.close()
            self._answers.note_in(self._log)

    async def _stream_events(self) -> None:
        while not self._answers.are_over:
            try:
                self._answers.add(await self._stream.receive(BEAT_SECONDS))
                is_apart = self._form.repeats_body and (not self._has_begun or self._answers.are_over)
                await self._write_text(await run_in_threadpool(self._text) if is_apart else self._text())
            except TimeoutError:
                pass
            if time.monotonic() - self._last >= BEAT_SECONDS:
                await self._write(f": {self._answers.progress}\n\n".encode())
        await self._write(b"", more=False)

    def _text(self) -> bytes:
        return events_text(self._answers.events())

    async def _write_text(self, text: bytes) -> None:
        if text:
            await self._write(text)

    async def _write(self, raw: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in self._given.items())]
            await self._send_message({"type": "http.response.start", "status": 200, "headers": headers})
        self._last = self._stream.writing_since = time.monotonic()
        try:
            async with asyncio.timeout(SOCKET_SECONDS):
                await self._send_message({"type": "http.response.body", "body": raw, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        finally:
            self._stream.writing_since = None


def events_text(events: Iterable[Event]) -> bytes:
    """Return events as they are sent to the client."""
    return "".join(map(event_text, events)).encode()


def event_text(event: Event) -> str:
    data = event.data if isinstance(event.data, str) else json.dumps(event.data, allow_nan=False)
    return f"data: {data}\n\n" if event.name is None else f"event: {event.name}\ndata: {data}\n\n"
