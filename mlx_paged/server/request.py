"""ServerRequest: one request, from its body to the engine, and what its answer has to be (Constraint)."""

from __future__ import annotations

import functools
import importlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ..engine.sampling.params import SamplingParams
from ..grammar.compiler import GrammarSource
from ..grammar.grammar import CompiledGrammar
from .errors import prompt_too_long

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


class PromptLimits(NamedTuple):
    """Limits on the work for one prompt.

    Attributes:
        tokens: most tokens; None: no limit.
        of_model: whether ``tokens`` is the model's context length, rather than what the memory budget holds.
    """

    tokens: int | None = None
    of_model: bool = False

    def check(self, num_tokens: int, *, at_least: bool = False) -> None:
        """Raise RequestRefused (400) for more tokens than allowed."""
        if self.tokens is None or num_tokens <= self.tokens:
            return
        why = "the whole KV cache budget holds no more; raise kv_cache_memory (--kv-cache-memory) or shorten the prompt"
        if self.of_model:
            why = "the model's context length"
        number = f"at least {num_tokens}" if at_least else str(num_tokens)
        raise prompt_too_long(f"{number} tokens > {self.tokens} maximum: {why}")


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
