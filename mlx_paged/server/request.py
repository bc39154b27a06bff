"""ServerRequest: one request, from its body to the engine."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from ..engine.grammar.grammar import CompiledGrammar
from ..engine.sampling.params import SamplingParams
from .constraint import Constraint
from .stops import StopList

_numbers = itertools.count(1)


class ModelKey(NamedTuple):
    """Which weights answer: places of a model, its adapter and a draft model."""

    model: str | None = None
    adapter: str | None = None
    draft: str | None = None


@dataclass
class ChatInput:
    """What a prompt is made from, where it is a chat.

    Attributes:
        messages: as in OpenAI's chats.
        tools: what the model may call.
        template_kwargs: variables of the chat template, as the client sent them.
        role_mapping: of mlx-lm, for models without a template.
        continues: the last message is an answer that goes on.
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
        tokens: of the whole prompt.
        segments: the same in parts: system messages, history, the beginning of reasoning; see mlx-lm's server.
        segment_types: what the parts are.
        initial_state: ``normal`` or ``reasoning``: what the answer begins in.
        vision: images as the model takes them; None: there are none.
    """

    tokens: list[int]
    segments: list[list[int]]
    segment_types: list[str]
    initial_state: str = "normal"
    vision: Any = None

    @classmethod
    def of_tokens(cls, tokens: list[int]) -> Prompt:
        return cls(tokens, [tokens], ["assistant"])


@dataclass
class ServerRequest:
    """What a client asks for, in the words of no API.

    Attributes:
        inputs: what its prompts are made from.
        model: which answers; None: the one of the command line.
        sampling: how tokens are chosen; the seed of the i-th answer is that of the request and i.
        max_tokens: of an answer; None: as many as there is room for.
        n: answers to each prompt that are told.
        best_of: answers to each prompt that are generated.
        echo: answers begin with their prompts.
        top_logprobs: how many of the likeliest tokens are told with each; None: log-probabilities are not wanted.
        scores_prompt: log-probabilities of the prompt's own tokens are wanted, too.
        has_no_answer: only the prompt is wanted.
        calls_once: no answer has more than one tool call.
        stops: strings that end an answer.
        constraint: what the answer has to be, for any model.
        grammar: the same for this model's tokens.
        salt: only requests with the same one share prefixes.
        prompt_lookup: most tokens proposed in a step; None: as configured.
        thinking_budget: tokens of reasoning after which its end is forced; None: it has no bound.
        num_draft_tokens: most tokens that a draft model proposes in a step; None: as configured.
        priority: less is earlier.
        keeps: part of the prompt that prefixes of others are evicted before: ``system``, ``prompt`` or none.
        client: whose name the API key has; requests of different clients are admitted in turns.
        prompts: made of the inputs.
        number: in the order they came.
        asked_at: seconds of the monotonic clock.
        id: as the client is told it, and the log.
    """

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)

    inputs: Sequence[Input]
    model: ModelKey | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    n: int = 1
    best_of: int = 1
    echo: bool = False
    top_logprobs: int | None = None
    scores_prompt: bool = False
    has_no_answer: bool = False
    calls_once: bool = False
    stops: StopList | None = None
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
        return len(self.inputs) * self.best_of

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Tools of a chat, for whoever reads its calls."""
        (first, *_) = self.inputs
        return first.tools if isinstance(first, ChatInput) else None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or self.best_of > self.n

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of one of the answers."""
        return self.prompts[index // self.best_of]

    def num_kept(self, prompt: Prompt) -> int:
        """Return how many tokens at the prompt's beginning are to be kept."""
        if self.keeps == "system" and prompt.segment_types[0] == "system":
            return len(prompt.segments[0])
        return len(prompt.tokens) if self.keeps else 0

    def sampling_of(self, index: int) -> SamplingParams:
        """Return how the tokens of one of the answers are chosen."""
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=(seed + index % self.best_of) % (1 << 64))

    # Over ranks -----------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """Return the request in values of JSON, for other ranks: each prompt once, whatever the number of answers."""
        told: dict[str, Any] = _adapter().dump_python(self, mode="json", include=set(_TOLD))
        return {**told, "stops": None if self.stops is None else self.stops.strings}

    @classmethod
    def from_description(cls, told: Mapping[str, Any]) -> ServerRequest:
        """Return the request that :meth:`described` tells of, without its grammar."""
        stops = None if told["stops"] is None else StopList(told["stops"])
        return _adapter().validate_python(
            {**told, "inputs": [prompt["tokens"] for prompt in told["prompts"]], "stops": stops}
        )


_TOLD = (
    *("number", "prompts", "sampling", "constraint", "max_tokens", "n", "best_of", "top_logprobs"),
    *("salt", "prompt_lookup", "priority", "client", "thinking_budget", "keeps"),
)


@functools.cache
def _adapter() -> TypeAdapter[ServerRequest]:
    return TypeAdapter(ServerRequest)
