"""Requests of a server as ranks tell them to each other, and where their answers go on each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from mlx_lm import server as upstream

from ....engine.grammar.compiler import GrammarSource
from ....engine.ranks.ranks import Ranks
from ....serve.constraints.constraint import Constraint
from ....serve.constraints.tools import Tool, Tools
from ....serve.prompt_maker import PromptSetup
from ....serve.prompt_messages import MadePrompt
from ....serve.refusal import invalid
from ..answer_queue import NOBODY, AnswerQueue
from ..prepared_request import PreparedRequest

# Of the requests in one message. A body of a request is 64 MB or less.
MOST_MESSAGE_CHARACTERS = 128 << 20


class SharedQueue(AnswerQueue):
    """Of a request that all ranks compute: whether it is still wanted changes only between their turns.

    Attributes:
        is_wanted: set on all ranks in the same turn.
    """

    is_wanted: bool = True  # type: ignore[assignment]


class SilentQueue(SharedQueue):
    """Of a rank that has no clients: takes the answer, finds its stop strings, and keeps nothing."""

    def _put(self, item: Any) -> None:
        pass


class SharedRequest(NamedTuple):
    """A request with the queue of its answer, as a loop's ``pending`` holds it."""

    queue: SharedQueue
    request: PreparedRequest
    args: upstream.GenerationArguments


class ComingRequests:
    """Requests that rank 0 has told of and that wait until every rank has their grammars.

    Rank 0 has compiled them before; the others compile them in a thread, and no step waits for that. All ranks make the
    same calls in the same steps, so a request begins in the same step on all.

    Args:
        ranks: that compute the model together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waiting: dict[int, tuple[SharedRequest, Future[None] | None]] = {}
        self._compiler: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SharedRequest]:
        return (request for request, _ in self._waiting.values())

    def add(self, requests: Iterable[SharedRequest], setup: PromptSetup) -> list[SharedRequest]:
        """Return those that have no grammar; begin to compile the others', but on rank 0, which has done so.

        Args:
            requests: that have come.
            setup: of the model.
        """
        free = []
        for each in requests:
            if each.request.constraint is None:
                free.append(each)
                continue
            future = None
            if self._ranks.rank > 0:
                if self._compiler is None:
                    self._compiler = ThreadPoolExecutor(1, "grammars")
                future = self._compiler.submit(each.request.constrain, setup, each.queue, is_checked=True)
            self._waiting[each.queue.number] = each, future
        return free

    def ready(self) -> list[SharedRequest]:
        """Return those whose grammars every rank has; those for which a rank has none are refused on all."""
        if not self._waiting:
            return []
        done = [(number, future) for number, (_, future) in self._waiting.items() if future is None or future.done()]
        mine = {str(number): None if future is None else _fault(future) for number, future in done}
        of_all = self._ranks.exchange(mine)
        ready = []
        for number in [number for number in self._waiting if all(str(number) in each for each in of_all)]:
            request, _ = self._waiting.pop(number)
            fault = next((each[str(number)] for each in of_all if each[str(number)] is not None), None)
            if fault is not None:
                request.queue.put(invalid(fault))
            else:
                ready.append(request)
        return ready

    def drop_gone(self) -> None:
        """Forget requests whose clients have gone."""
        for request in list(self):
            if not request.queue.is_wanted:
                _, future = self._waiting.pop(request.queue.number)
                if future is not None:
                    future.cancel()

    def close(self) -> list[SharedRequest]:
        """End the thread, and return the requests that still wait."""
        if self._compiler is not None:
            self._compiler.shutdown(wait=False, cancel_futures=True)
        left, self._waiting = list(self), {}
        return left


def _fault(future: Future[None]) -> str | None:
    error = future.exception()
    return None if error is None else f"{type(error).__name__}: {error}"


def queue_of(
    stop_words: Iterable[str], is_stalled: Callable[[], bool] = NOBODY.is_stalled, *, is_shared: bool
) -> AnswerQueue:
    """For an answer to a client."""
    return (SharedQueue if is_shared else AnswerQueue)(stop_words, is_stalled)


class Descriptions:
    """Requests in values of JSON, for one message. Copies of a request share their prompt, grammar and biases in it.

    Attributes:
        parts: what requests refer to by index.
        requests: in their order.
        size: of all of them in JSON, in characters.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.size = 0
        self._known: dict[int, tuple[int, Any]] = {}  # by id(), with the object, which keeps the id its own

    def add(self, queue: AnswerQueue, request: PreparedRequest, args: upstream.GenerationArguments) -> bool:
        """Return False, with nothing added, if the message would be larger than :data:`MOST_MESSAGE_CHARACTERS`."""
        made = request.made
        assert made is not None
        shared: list[tuple[Any, Callable[[], Any]]] = [
            (made, lambda: [made.tokens, made.segments, made.segment_types, made.initial_state]),
            (request.constraint, lambda: request.constraint),
            (args.logits, lambda: dataclasses.asdict(args.logits)),
            (args.stop_words, lambda: args.stop_words),
        ]
        others = {each.name: getattr(args, each.name) for each in dataclasses.fields(args)}
        del others["logits"], others["stop_words"]
        others |= {name: dataclasses.asdict(others[name]) for name in ("model", "sampling")}
        told = {"number": queue.number, "salt": request.salt, "prompt_lookup": request.prompt_lookup, "args": others}
        new = [(source, describe()) for source, describe in shared if id(source) not in self._known]
        size = len(json.dumps([told, [value for _, value in new]], ensure_ascii=False))
        if self.size + size > MOST_MESSAGE_CHARACTERS:
            return False
        self.size += size
        for source, value in new:
            self._known[id(source)] = len(self.parts), source
            self.parts.append(value)
        self.requests.append({**told, "parts": [self._known[id(source)][0] for source, _ in shared]})
        return True

    def told(self) -> dict[str, Any]:
        """Return the message's value."""
        return {"parts": self.parts, "requests": self.requests}


def requests_of(told: dict[str, Any]) -> list[SharedRequest]:
    """Return the requests of :class:`Descriptions`, without their grammars, on a rank without clients."""
    return [_request_of(each, *(told["parts"][index] for index in each["parts"])) for each in told["requests"]]


def _request_of(told: dict[str, Any], made: Any, constraint: Any, logits: Any, stop_words: Any) -> SharedRequest:
    args = _arguments({**told["args"], "logits": logits, "stop_words": stop_words})
    queue = SilentQueue(args.stop_words)
    queue.number = told["number"]
    request = PreparedRequest("text", "", [], None, None, made=MadePrompt(*made), salt=told["salt"])
    request.prompt_lookup = told["prompt_lookup"]
    request.constraint = _constraint(constraint)
    return SharedRequest(queue, request, args)


def _arguments(told: dict[str, Any]) -> upstream.GenerationArguments:
    logits = dict(told["logits"])
    if logits["logit_bias"] is not None:  # JSON's keys are strings
        logits["logit_bias"] = {int(token): bias for token, bias in logits["logit_bias"].items()}
    parts = {
        "model": upstream.ModelDescription(**told["model"]),
        "sampling": upstream.SamplingArguments(**told["sampling"]),
        "logits": upstream.LogitsProcessorArguments(**logits),
    }
    return upstream.GenerationArguments(**{**told, **parts})


def _constraint(told: list[Any] | None) -> Constraint | None:
    if told is None:
        return None
    answer, param, schema, tools = told
    if tools is not None:
        tools = Tools([Tool(*each) for each in tools[0]], *tools[1:])
    return Constraint(None if answer is None else GrammarSource(*answer), param, schema, tools)
