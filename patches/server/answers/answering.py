"""Answering: generates all answers to a request and tells them in the client's form, whole or as a stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mlx_lm import server as upstream

from ....serve.api.completions import Echo
from ....serve.api.form import Form
from ....serve.api.pieces import Piece, Token, Usage
from ....serve.http.connection import Connection
from ....serve.http.event_stream import BEAT_SECONDS, EventStream
from ..answer_queue import AnswerQueue, ClientSide
from ..prepared_request import PreparedRequest, has_images
from .answer import Answer, Names
from .choices import Choices
from .order import Order

if TYPE_CHECKING:
    from ..response_generator import PagedResponseGenerator

MakeForm = Callable[[Sequence[Echo]], Form]  # from what the answers begin with


class Answering:
    """One request.

    Args:
        generator: of the server's answers.
        connection: to the client.
        order: what is asked for.
        make_form: of the answers.
    """

    def __init__(
        self, generator: PagedResponseGenerator, connection: Connection, order: Order, make_form: MakeForm
    ) -> None:
        self._generator = generator
        self._connection = connection
        self._order = order
        self._make_form = make_form
        self._answers: dict[int, Answer] = {}
        self._progress = "keepalive"
        self._names: Names | None = None
        self._begin: Callable[[], EventStream]
        self._events: EventStream | None = None
        self._lock = threading.Lock()
        self._num_accepted, self._accepted_at = 0, 0.0  # sequences whose prompts are made, and when the last one was

    def whole(self) -> dict[str, Any]:
        """All answers at once.

        Raises:
            RequestRefused: the request is not served.
            ConnectionAbortedError: the client has gone.
        """
        order = self._order
        pieces: dict[int, list[Piece]] = {}
        with closing(iter(self._choices())) as items:
            for index, item in items:
                piece = self._take(index, item)
                if piece is not None:
                    pieces.setdefault(index, []).append(piece)
        answers = [Piece.joined(pieces[index]) for index in range(len(self._answers))]
        best = self._best()
        told = [answers[index] for index in best]
        for number, answer in enumerate(told):
            answer.index = number
        return self._make_form(self._echoes(best) if order.echo else ()).whole(told, self._usage())

    def stream(self, begin: Callable[[], EventStream]) -> None:
        """All answers, piece by piece. Raises as ``whole`` does.

        Args:
            begin: sends what a stream begins with; called once the request is accepted.
        """
        self._begin = begin
        self._connection.beat = self._beat
        try:
            self._stream()
        finally:
            self._connection.beat = None

    # Inside ---------------------------------------------------------------------------------------------------

    def _stream(self) -> None:
        form: Form | None = None
        early: list[Piece] = []  # before all answers have begun
        with closing(iter(self._choices())) as items:
            for index, item in items:
                piece = self._take(index, item)
                stream = self._begun()
                if form is None and len(self._answers) == self._num_choices:
                    form = self._make_form(self._echoes(self._best()) if self._order.echo else ())
                    stream.form = form
                    stream.send(form.begin(self._usage()))
                if piece is not None:
                    early.append(piece)
                if form is not None and early:
                    stream.send([event for piece in early for event in form.piece(piece)])
                    early.clear()
        assert form is not None
        stream = self._begun()
        stream.send(form.end(self._usage()))
        stream.close()

    def _begun(self) -> EventStream:
        if self._events is None:
            self._events = self._begin()
            self._events.form = self._make_form(())  # words what may fail before there is anything to tell
        return self._events

    def _beat(self) -> None:
        """Signs of life, once nothing but time stands before the answer: whoever computes may be busy with others."""
        if self._events is not None:
            self._events.beat(self._progress)
        elif self._num_accepted == self._num_choices and time.monotonic() - self._accepted_at >= BEAT_SECONDS:
            self._begun().comment(self._progress)

    def _note_progress(self, done: int, total: int) -> None:
        self._progress = f"keepalive {done}/{total}"

    def _note_accepted(self) -> None:
        """By any thread."""
        with self._lock:
            self._accepted_at = time.monotonic()
            self._num_accepted += 1

    @property
    def _num_choices(self) -> int:
        return len(self._order.prompts) * self._order.best_of

    def _choices(self) -> Choices:
        order = self._order
        if order.best_of > 1:
            self._make_prompts()
        side = ClientSide(self._note_accepted, lambda: self._events is not None and self._events.is_stalled)
        return Choices(self._generator, order.choices(), self._connection.client_is_gone, self._note_progress, side)

    def _make_prompts(self) -> None:
        """Each prompt once, for all answers to it."""
        order = self._order
        for number, request in enumerate(order.prompts):
            extras = order.extras[number]
            if extras.made is None:
                prepared = PreparedRequest(**vars(request), **extras._asdict())
                made = self._generator.make_prompt(AnswerQueue(), prepared, order.args, self._connection.client_is_gone)
                order.extras[number] = extras._replace(made=made)

    def _take(self, index: int, item: Any) -> Piece | None:
        """What can be told of an answer."""
        if isinstance(item, upstream.GenerationContext):
            order = self._order
            if order.wants_tokens and self._names is None:
                tokenizer = self._generator.model_provider.tokenizer
                self._names = Names(tokenizer, with_texts=order.num_top is not None)
            request = order.prompts[index // order.best_of]
            self._answers[index] = Answer(
                index,
                item,
                request.tools,
                self._names,
                shows_end=order.num_top is None,
                is_hidden=order.has_no_answer,
                calls_once=order.calls_once,
                decode=self._generator.model_provider.tokenizer.decode if order.echo else None,
            )
            return None
        answer = self._answers[index]
        return answer.finish() if item is None else answer.take(item)

    def _best(self) -> list[int]:
        """Which answers are told."""
        order = self._order
        if order.best_of == order.n:
            return list(range(len(self._answers)))
        best = []
        for first in range(0, len(self._answers), order.best_of):
            candidates = range(first, first + order.best_of)
            best += sorted(candidates, key=lambda index: -self._answers[index].mean_logprob)[: order.n]
        return best

    def _usage(self) -> Usage:
        """Of what is known by now."""
        answers, best_of = self._answers, self._order.best_of
        prompt = cached = 0
        for first in range(0, len(self._order.prompts) * best_of, best_of):
            known = [answers[index].ctx for index in range(first, first + best_of) if index in answers]
            if known:
                prompt += len(known[0].prompt)
                cached += max(0, min(ctx.prompt_cache_count for ctx in known))
        if self._order.has_no_answer:
            return Usage(prompt, cached)
        return Usage(
            prompt,
            cached,
            sum(answer.num_tokens for answer in answers.values()),
            sum(answer.num_reasoning for answer in answers.values()),
        )

    def _echoes(self, told: Sequence[int]) -> list[Echo]:
        order, tokenizer = self._order, self._generator.model_provider.tokenizer
        echoes: dict[int, Echo] = {}
        for index in told:
            number = index // order.best_of
            if number not in echoes:
                tokens = self._answers[index].ctx.prompt
                text = order.prompts[number].prompt or tokenizer.decode(tokens)
                echoes[number] = Echo(text, self._scored(tokens, number))
        return [echoes[index // order.best_of] for index in told]

    def _scored(self, tokens: Sequence[int], number: int) -> list[Token]:
        scoring, names = self._order.extras[number].scoring, self._names
        if scoring is None or scoring.logprobs is None or names is None:
            return []
        first = names.token(tokens[0], None)
        return [
            first,
            *(
                names.token(token, logprob, names.described(top))
                for token, logprob, top in zip(tokens[1:], scoring.logprobs, scoring.top, strict=True)
            ),
        ]


def takes_text_only(generator: PagedResponseGenerator, messages: Any) -> bool:
    """Whether a chat has images and the model cannot take them."""
    return generator.model_provider.processor is None and has_images(messages)
