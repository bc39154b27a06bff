"""A request: what it asks (ServerRequest), the way of its answers to the client (Work), and one answer while the engine
computes it (Row)."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import time
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ..engine.sampling.params import SamplingParams
from ..errors import without_frames
from ..grammar.compiler import GrammarSource
from ..grammar.grammar import CompiledGrammar

_numbers = itertools.count(1)


class ModelKey(NamedTuple):
    """Paths or hub names of a model, its adapter and its draft model."""

    model: str | None = None
    adapter: str | None = None
    draft: str | None = None


@dataclass
class ChatInput:
    """A chat that a prompt is made from.

    Attributes:
        messages: in the format of OpenAI's chats.
        tools: tools that the model may call.
        template_kwargs: variables of the chat template, as the client sent them.
        role_mapping: mlx-lm's parameter, for models without a template.
        continues: the answer continues the last message, an assistant's.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    role_mapping: dict[str, Any] | None = None
    continues: bool = False


Input = str | list[int] | ChatInput


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens.

    Attributes:
        tokens: all tokens of the prompt.
        segments: the same tokens in parts: system messages, history, the beginning of reasoning; see mlx-lm's server.
        segment_types: type of each part.
        initial_state: state in which the answer begins: ``normal`` or ``reasoning``.
        vision: the prompt's images as the model takes them; None: no images.
    """

    tokens: list[int]
    segments: list[list[int]]
    segment_types: list[str]
    initial_state: str = "normal"
    vision: Any = None

    @classmethod
    def of_tokens(cls, tokens: list[int]) -> Prompt:
        return cls(tokens, [tokens], ["assistant"])


class Tool(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: name of the function.
        schema: JSON schema of its arguments.
        param: where the schema is in the request.
    """

    name: str
    schema: Any
    param: str


class Tools(NamedTuple):
    """The tool calls that an answer may or must have.

    Attributes:
        callable: the tools that may be called.
        required: whether the answer must be one or more calls.
        parallel: whether several calls may follow each other.
        strict: whether calls are constrained even if none is required.
    """

    callable: Sequence[Tool]
    required: bool
    parallel: bool
    strict: bool


class Constraint(NamedTuple):
    """The constraint on an answer, independent of the model.

    Attributes:
        answer: grammar of its text; None: any text.
        param: the parameter that requires it.
        schema: JSON schema of ``answer``, if it has one.
        tools: required or constrained tool calls; None: there are none.
    """

    answer: GrammarSource | None
    param: str
    schema: Any = None
    tools: Tools | None = None


@dataclass
class ServerRequest:
    """A client's request, independent of the API that it came through.

    Attributes:
        inputs: texts, token ids or chats, one for each prompt.
        model: model that answers; None: the one of the command line.
        sampling: sampling parameters; the i-th answer to a prompt (from 0) uses the request's seed + i.
        max_tokens: most tokens of an answer; None: what fits.
        n: answers for each prompt.
        echo: answers begin with their prompts.
        top_logprobs: number of most likely tokens returned with each token; None: no log-probabilities.
        scores_prompt: also return log-probabilities of the prompt's tokens.
        has_no_answer: return only the prompt.
        calls_once: return only the first tool call of an answer.
        streams: the answers are sent while they are generated.
        stops: strings that end an answer.
        constraint: what the answer has to be, for any model.
        grammar: the constraint compiled for this model's tokens.
        salt: only requests with the same salt share prefixes.
        prompt_lookup: most tokens proposed in a step by prompt lookup; None: as configured.
        thinking_budget: tokens of reasoning after which its end is forced; None: no limit.
        num_draft_tokens: most tokens that a draft model proposes in a step; None: as configured.
        priority: lower numbers are admitted first.
        keeps: part of the prompt that is evicted after other prefixes: ``system``, ``prompt`` or "" for none.
        client: name of the client; requests of different clients are admitted in turns.
        prompts: prompts made from the inputs.
        number: rises with each request of the process.
        asked_at: time of arrival, in seconds of the monotonic clock.
        id: name of the request in the header x-request-id and the log.
    """

    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}

    inputs: Sequence[Input]
    model: ModelKey | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    n: int = 1
    echo: bool = False
    top_logprobs: int | None = None
    scores_prompt: bool = False
    has_no_answer: bool = False
    calls_once: bool = False
    streams: bool = False
    stops: tuple[str, ...] = ()
    constraint: Constraint | None = None
    grammar: CompiledGrammar | None = None
    salt: str | None = None
    prompt_lookup: int | None = None
    thinking_budget: int | None = None
    num_draft_tokens: int | None = None
    priority: int = 0
    keeps: str = ""
    client: str = ""
    prompts: list[Prompt] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_numbers))
    asked_at: float = field(default_factory=time.monotonic)
    id: str = ""

    @property
    def num_answers(self) -> int:
        return len(self.inputs) * self.n

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Tools of the first input if it is a chat, to parse calls with."""
        (first, *_) = self.inputs
        return first.tools if isinstance(first, ChatInput) else None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of one of the answers."""
        return self.prompts[index // self.n]

    def num_kept(self, prompt: Prompt) -> int:
        """Return the number of leading tokens of the prompt to keep (see ``keeps``)."""
        if self.keeps == "system" and prompt.segment_types[0] == "system":
            return len(prompt.segments[0])
        return len(prompt.tokens) if self.keeps else 0

    def sampling_of(self, index: int) -> SamplingParams:
        """Return the sampling parameters of one of the answers."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + index % self.n) % (1 << 64))

    # Over ranks -----------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return the request as JSON values, for other ranks; each prompt once, whatever the number of answers."""
        fields: dict[str, Any] = _adapter().dump_python(self, mode="json", include=set(_FIELDS_FOR_RANKS))
        return fields

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> ServerRequest:
        """Return the request that :meth:`described` has described, without its grammar."""
        inputs = [prompt["tokens"] for prompt in description["prompts"]]
        return _adapter().validate_python({**description, "inputs": inputs})  # type: ignore[no-any-return]


_FIELDS_FOR_RANKS = (
    *("number", "prompts", "sampling", "constraint", "max_tokens", "n", "top_logprobs", "stops"),
    *("salt", "prompt_lookup", "priority", "client", "thinking_budget", "keeps"),
)


@functools.cache
def _adapter() -> Any:
    return importlib.import_module("pydantic").TypeAdapter(ServerRequest)


# To the client -----------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """Prefill progress: ``done`` of ``total`` prompt tokens of an answer are computed."""

    done: int
    total: int


class Generated(NamedTuple):
    """The next token of an answer.

    Attributes:
        answer: index among the request's answers.
        token: token id.
        text: text that can be shown now.
        finish: why the answer ends here, ``stop`` or ``length``; None: it continues.
        stop: the stop string that ends it.
        logprob, top: log-probability of the token, and ``(id, log-probability)`` of the most likely ones, if requested.
        num_shown: with the last token, how many tokens are part of the answer, without an end token or those from a
            stop string on; None: all.
        num_cached: with the first token, how many tokens of the prompt came from the prefix cache.
    """

    answer: int
    token: int
    text: str
    finish: str | None = None
    stop: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    num_shown: int | None = None
    num_cached: int | None = None


class Scores(NamedTuple):
    """Log-probabilities of a prompt's tokens from the second on, and the most likely tokens at these positions."""

    prompt: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class ClientGone(Exception):
    """The client has closed its connection."""


class Work:
    """A request in the engine thread, and the items for its client in order, until an error or the reader ends them.

    Args:
        request: the request; None: only the model's texts are wanted, to make prompts with.
        key: the model that it needs; None: the present one.
        loop: the event loop of its client; None: this rank has no clients.
        is_shared: several ranks compute it, so they notice only between turns, together, that its client has gone.

    Attributes:
        is_open: whether the client is connected and wants more.
        is_gone: it has failed, or, on several ranks, all of them know that its client has gone.
        num_tokens: tokens generated so far.
        state: ``queued``, ``scoring``, ``scored``, ``batched`` or ``alone``.
    """

    def __init__(
        self,
        request: ServerRequest | None,
        key: ModelKey | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.request, self.key, self.loop, self.is_shared = request, key, loop, is_shared
        self.is_open, self.is_gone = True, False
        self.num_tokens = 0
        self.state = "queued"
        self._watch: asyncio.Task[None] | None = None
        self._items: list[Any] = []
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Return whether the engine is to go on with it."""
        return not self.is_gone and (self.is_shared or self.is_open)

    # In the event loop ----------------------------------------------------------------------------------------

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Fail with ClientGone when the client disconnects.

        Args:
            receive: ASGI's; the request's body has been read.
        """

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.fail(ClientGone())

        self._watch = asyncio.create_task(until_gone())

    def feed(self, items: list[Any]) -> None:
        """Add items from the engine thread; an exception among them ends the work."""
        for item in items:
            if isinstance(item, BaseException):
                self.fail(item)
            elif self._error is None:
                self._items.append(item)
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """End the work and drop later items; earlier ones are still read, unless the client has gone."""
        if self._error is None:
            self._error, self.is_open = without_frames(error), False
            if isinstance(error, ClientGone):
                self._items.clear()
            self._arrived.set()

    async def receive(self, seconds: float | None = None) -> list[Any]:
        """Return all unread items, waiting up to ``seconds`` for the first.

        Raises:
            TimeoutError: there was none in that time.
            Exception: the error that ended the work.
        """
        if not self._items and self._error is None:
            self._arrived.clear()
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Tell the engine thread that nothing more is wanted, and drop unread items."""
        self.is_open = False
        if self._watch is not None:
            self._watch.cancel()
        self._items.clear()


class Outbox:
    """Items of one step, delivered together so that the event loop wakes once. For the engine thread."""

    def __init__(self) -> None:
        self._waiting: dict[Work, list[Any]] = {}

    def put(self, work: Work, item: Any) -> None:
        """Add an item for a client; dropped on ranks without clients."""
        if work.loop is not None:
            self._waiting.setdefault(work, []).append(item)

    def fail(self, work: Work, error: BaseException) -> None:
        work.is_open = False
        self.put(work, without_frames(error))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        loop = next(iter(waiting)).loop if waiting else None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, waiting)


def _deliver(waiting: dict[Work, list[Any]]) -> None:
    for work, items in waiting.items():
        work.feed(items)


# An answer in the engine -------------------------------------------------------------------------------------------


class StopScanner:
    """Cuts the text of one answer before the first stop string, however the text is divided into pieces.

    The first stop string is the one that begins first. Text is held back only while a stop string may still begin in
    it. A step's time hardly depends on the number of stop strings.

    Args:
        stops: strings that are not empty.

    Attributes:
        found: the stop string that ended the answer; the longest of several that begin there.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._known = sorted(stops), frozenset(stops)
        self._lengths = sorted({len(stop) for stop in stops}, reverse=True) or [0]
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """Add the next text, and return what can be shown now.

        Args:
            text: next text of the answer.
            is_last: nothing follows.
        """
        if self.found is not None:
            return ""
        held, place = self._held + text, 0
        while place < len(held):
            rest = held[place : place + self._lengths[0]]
            self.found = next((rest[:length] for length in self._lengths if rest[:length] in self._known), None)
            if self.found is not None or (not is_last and self._may_begin_with(rest)):
                break
            place += 1
        self._held = held[place:]
        return held[:place]

    def _may_begin_with(self, text: str) -> bool:
        """Return whether a stop string longer than ``text`` begins with it."""
        place = bisect_right(self._stops, text)
        return place < len(self._stops) and self._stops[place].startswith(text)


class Row:
    """One answer that is being computed: decodes its tokens and looks for stop strings."""

    def __init__(self, work: Work, index: int, detokenizer: Any) -> None:
        assert work.request is not None
        self.work, self.index = work, index
        self.request: ServerRequest = work.request
        self.num_tokens = 0
        self.has_started = False
        self.last_at: float | None = None  # time of its last token
        self._detokenizer = detokenizer
        self._scanner = StopScanner(work.request.stops) if work.request.stops else None
        self._starts: list[int] = []  # of the tokens' texts, in characters; only with log-probabilities
        self._length = self._num_characters = 0  # of the text, and of its part that was shown

    @property
    def name(self) -> str:
        """The request's number, followed by the answer's if there are several."""
        request = self.request
        return f"{request.number}.{self.index + 1}" if request.num_answers > 1 else str(request.number)

    def next(self, response: Any, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Generated:
        """Add the next token. Return the item for the client.

        Args:
            response: token and finish reason, and its text if mlx-lm has decoded it.
        """
        finish, text = response.finish_reason, getattr(response, "text", None)
        self.num_tokens += 1
        if text is None:
            if finish != "stop":  # an end token has no text
                self._detokenizer.add_token(response.token)
            if finish is not None:
                self._detokenizer.finalize()
            text = self._detokenizer.last_segment
        stop, num_shown = None, self.num_tokens - 1 if finish == "stop" else None
        if self._scanner is not None:
            if self.request.wants_logprobs:
                self._starts.append(self._length)
            self._length += len(text)
            text = self._scanner.feed(text, is_last=finish is not None)
            self._num_characters += len(text)
            stop = self._scanner.found
            if stop is not None:
                finish, num_shown = "stop", bisect_left(self._starts, self._num_characters)
        return Generated(self.index, response.token, text, finish, stop, logprob, top, num_shown)
