"""What the APIs share: endpoints, and parameters of the bodies as pydantic models, with their names and ranges,
constraints on answers in the form of OpenAI's chats, and which parameters are ignored or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from ...config import MAX_PROMPT_LOOKUP
from ...engine.sampling.params import SamplingParams
from ...grammar.compiler import ANY_OBJECT, GrammarSource
from ..answers import Form, Head
from ..errors import invalid
from ..request import Constraint, ServerRequest, Tool, Tools

if TYPE_CHECKING:
    from ..texts import LoadedTexts

MAX_TOKENS = 1 << 24
MAX_CONTEXT = 1 << 20
MAX_STOP_CHARACTERS = 16_000  # of all stop strings together
MAX_SALT_LENGTH = 1000
TOKEN_ID_LIMIT = 1 << 24  # exclusive
MAX_CHOICES = 128  # answers to one prompt
MAX_ANSWERS = 256  # answers to one request
MAX_PENALTY = 1e4
LEAST_REPETITION_PENALTY = 1e-3
MAX_PRIORITY = 1 << 20
MAX_TOOLS = 1024
MAX_STOPS = 1024
MAX_REFERENCES = 1024  # items of type item_reference
T = TypeVar("T")
Several = Annotated[list[T], Field(fail_fast=True)]  # a list that is checked up to its first fault
ToolList = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TOOLS)]


# Parameters that clients send and that no API here supports. An API that has a field of the name uses that instead.
NO_EFFECT = {  # accepted, whatever the value
    **dict.fromkeys(("user", "metadata", "safety_identifier"), "a label for records only"),
    "prompt_cache_retention": "prefixes are kept as memory allows",
    "prompt_cache_options": "prefixes are found by their tokens",
    "service_tier": "there is only one tier",
    "add_generation_prompt": "false with `continue_final_message`, else true",
    "prediction": "would change only the speed; use `prompt_lookup`",
    "verbosity": "not passed to the model",
    "betas": "there are no beta features",
    "context_management": "messages are used as sent",
    "truncation": "a prompt that is too long is refused",
    "max_tool_calls": "there are no built-in tools",
}
REFUSED: dict[str, tuple[Any, ...]] = {  # why, and the values that change nothing and are accepted
    "store": ("answers are kept by `/v1/responses` only", False),
    "modalities": ("answers are always text", ["text"]),
    "audio": ("answers are always text",),
    "image": ("answers are always text",),
    "function_call": ("use tool_choice", "none"),
    "functions": ("use tools", []),
    "moderation": ("there is no such service",),
    "web_search_options": ("there is no such tool",),
    "best_of": ("ask for `n` answers with `logprobs`", 1),
    "suffix": ("only text after the prompt is generated", ""),
    "container": ("there are no containers",),
    "diagnostics": ("there is no such service",),
    "inference_geo": ("there is only one location",),
    "mcp_servers": ("there are no built-in tools", []),
    "speed": ("there is only one speed", "standard"),
    "thread": ("there are no threads; send the whole history",),
    "user_profile_id": ("there are no user profiles",),
    "workspace_id": ("there are no workspaces",),
    "background": ("there is no background mode", False),
    "background_options": ("there is no background mode",),
    "conversation": ("use previous_response_id",),
    "prompt": ("there are no stored prompts",),
    "access_programs": ("there is no such service",),
}


class Body(BaseModel):
    """A body or an object in one. Unknown fields are kept apart; see :func:`ignored_in`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    def unused(self) -> list[str]:
        """Return the names of known parameters that have no effect on this request."""
        return []


class Endpoint(NamedTuple):
    """A POST endpoint that generates.

    Attributes:
        path: path of its URL.
        summary: summary in the OpenAPI description.
        body: pydantic model of the body.
        request, form: make the request from a body, and the form of its answers.
        aliases: other paths.
    """

    path: str
    summary: str
    body: type[Body]
    request: Callable[[Any, Mapping[str, Any]], ServerRequest]
    form: Callable[[Head, Any], Form]
    aliases: tuple[str, ...] = ()


class Computation(NamedTuple):
    """A POST endpoint that generates nothing.

    Attributes:
        path, summary, body, aliases: as for an :class:`Endpoint`.
        answer: makes the answer from the body and the model's texts. It is called in a worker thread.
    """

    path: str
    summary: str
    body: type[Body]
    answer: Callable[[Any, LoadedTexts], dict[str, Any]]
    aliases: tuple[str, ...] = ()


class ModelParameters(Body):
    """Which model answers."""

    model: str | None = Field(None, description="a name listed by `/v1/models`; default: the model of `--model`")
    adapters: str | None = Field(None, description="as in mlx-lm; requires `--allow-any-model`")
    draft_model: str | None = Field(None, description="as in mlx-lm; requires `--allow-any-model`")
    num_draft_tokens: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="as in mlx-lm; requires a draft model or `--mtp`"
    )
    draft: bool | None = Field(None, description="mlx_paged only; `false`: no drafts by a draft model or `--mtp`")


def _check_repetition(value: float) -> float:
    """Return the penalty if it is in range: a smaller divisor would make logits infinite."""
    if 0 < value < LEAST_REPETITION_PENALTY:
        raise ValueError(f"must be 0 or at least {LEAST_REPETITION_PENALTY}")
    return value


def _checked_bias(value: dict[str, Any]) -> dict[int, float]:
    """Return ``logit_bias`` by token id, checked up to its first fault: pydantic would list all of them."""
    for token, bias in value.items():
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"keys must be token ids, got {token[:80]!r}")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"values must be numbers from -{MAX_BIAS} to {MAX_BIAS}")
    return {int(token): float(bias) for token, bias in value.items()}


def or_none(value: Any) -> Any:
    """Return None for -1, which clients send for "no limit"."""
    return None if value == -1 and type(value) is int else value


_TOKEN = re.compile(r"[0-9]{1,8}")
MAX_BIAS = 10_000
_BIAS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "propertyNames": {"pattern": "^[0-9]{1,8}$"},
}
Bias = Annotated[dict[str, Any], AfterValidator(_checked_bias), WithJsonSchema(_BIAS_SCHEMA)]
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1), AfterValidator(lambda seed: seed % (1 << 64))]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Context = Annotated[int, Field(ge=0, le=MAX_CONTEXT)]


class SamplingParameters(Body):
    """How tokens are chosen, and other options of the engine."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_CONTEXT), AfterValidator(lambda k: max(0, k))] | None = Field(
        None, description="0 and -1: off"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=MAX_PENALTY), AfterValidator(_check_repetition)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_context_size: Context | None = None
    presence_context_size: Context | None = None
    frequency_context_size: Context | None = None
    logit_bias: Bias | None = None
    seed: Seed | None = Field(None, description="the i-th of `n` answers (from 0) uses seed + i")
    prompt_lookup: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOOKUP)] | None = Field(
        None, description="mlx_paged only; most drafts per step"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = Field(
        None, description="only requests with the same salt share prefixes"
    )
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        None, description="lower numbers are admitted first, and preempt higher ones"
    )

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters: the fields that SamplingParams has, too.

        Args:
            defaults: values of the command line for fields that are not given.

        Raises:
            ConfigError: a value is out of range.
        """
        known = SamplingParams.__dataclass_fields__
        given = {name: value for name, value in vars(self).items() if name in known and value is not None}
        return SamplingParams(**{**defaults, **given})


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def check_not_empty(value: Any) -> Any:
    if not value:
        raise ValueError("must not be empty")
    return value


def check_stops(value: str | list[str] | None) -> list[str] | None:
    """Return the stop strings as a list, without empty ones, which clients send for "none"."""
    stops = [each for each in ([value] if isinstance(value, str) else value or ()) if each]
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise ValueError(f"must have at most {MAX_STOP_CHARACTERS} characters in all")
    return stops or None


Stops = Annotated[Several[str], Field(max_length=MAX_STOPS)]
StopField = Annotated[str | Stops | None, AfterValidator(check_stops)]
Tokens = Annotated[Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None, BeforeValidator(or_none)]


# Constraints on answers; other APIs than chats translate theirs -----------------------------------------------------

MAX_CHOICE_STRINGS = 10_000
NotEmpty = Annotated[str, Field(min_length=1)]


class TextFormat(Body):
    type: Literal["text"] = "text"


class ObjectFormat(Body):
    type: Literal["json_object"] = "json_object"


class NamedSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class SchemaFormat(Body):
    type: Literal["json_schema"] = "json_schema"
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    """The form of Responses and Messages."""

    type: Literal["json_schema"] = "json_schema"


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's parameter."""

    schema_of_json: dict[str, Any] | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: NotEmpty | None = None
    choice: Annotated[Several[NotEmpty], Field(min_length=1, max_length=MAX_CHOICE_STRINGS)] | None = None
    grammar: NotEmpty | None = None

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if sum(value is not None for value in vars(self).values()) != 1:
            raise ValueError("must have exactly one of json, json_object, regex, choice, grammar")
        return self

    def constraint(self) -> Constraint:
        where = "structured_outputs"
        if self.regex is not None:
            return Constraint(GrammarSource("regex", self.regex), f"{where}.regex")
        if self.choice is not None:
            return Constraint(GrammarSource.choice(self.choice), f"{where}.choice")
        if self.grammar is not None:
            return Constraint(GrammarSource("lark", self.grammar), f"{where}.grammar")
        return _json(ANY_OBJECT if self.schema_of_json is None else self.schema_of_json, f"{where}.json")


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[Several[NamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"] = "allowed_tools"
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


class AnswerParameters(Body):
    """What the text of an answer has to be."""

    response_format: ResponseFormat | None = Field(None, description="`text`, `json_object` or `json_schema`")
    structured_outputs: StructuredOutputs | None = Field(None, description="as in vLLM")

    def constraint(self) -> Constraint | None:
        """Return the constraint on the answer; None: there is none. Raises RequestRefused (400)."""
        form = self.response_format
        if self.structured_outputs is not None:
            if form is not None and not isinstance(form, TextFormat):
                raise invalid("response_format and structured_outputs cannot both be given", "structured_outputs")
            return self.structured_outputs.constraint()
        if isinstance(form, ObjectFormat):
            return _json(ANY_OBJECT, "response_format")
        if isinstance(form, SchemaFormat):
            return _json(form.json_schema.json_schema, "response_format.json_schema.schema")
        return None


class ToolParameters(AnswerParameters):
    """What the text of an answer has to be, and which tools it may or must call."""

    tools: ToolList[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="`false`: only the first call is returned")

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the model is shown: none with ``tool_choice`` none."""
        return (None if self.tool_choice == "none" else self.tools) or None

    def constraint(self) -> Constraint | None:
        """Return the constraint on the answer and its calls; None: there is none. Raises RequestRefused (400)."""
        found, tools = super().constraint(), self.constrained_tools()
        if found is None:
            return None if tools is None else Constraint(None, "tools", None, tools)
        if self.shown_tools:
            return found._replace(tools=tools or self.constrained_tools(always=True))
        return found

    def constrained_tools(self, *, always: bool = False) -> Tools | None:
        """Return the tool calls that the request requires or constrains; None: calls are free.

        Args:
            always: also return tools that the request neither requires nor constrains.

        Raises:
            RequestRefused: with status 400.
        """
        asked, parallel = self.tool_choice, self.parallel_tool_calls is not False
        choice = asked if isinstance(asked, str) else "required"
        allowed: list[str] | None = None  # names
        if isinstance(asked, AllowedChoice):
            choice, allowed = asked.allowed_tools.mode, [each.function.name for each in asked.allowed_tools.tools]
        elif isinstance(asked, NamedTool):
            parallel, allowed = False, [asked.function.name]
        given, required = self.shown_tools, asked is not None and choice == "required"
        if not given:
            if required:
                raise invalid("tool_choice requires a call, but tools is empty", "tool_choice")
            return None
        strict = [isinstance(f := tool.get("function"), dict) and f.get("strict") is True for tool in given]
        if not (required or any(strict) or always or allowed is not None):
            return None
        tools = [
            _tool(index, tool, checked=required or is_strict)
            for index, (tool, is_strict) in enumerate(zip(given, strict, strict=True))
        ]
        if allowed is not None:
            by_name = {tool.name: tool for tool in reversed(tools)}
            for each in allowed:
                if each not in by_name:
                    raise invalid(f"tool_choice names a tool that is not in tools: {each!r}", "tool_choice")
            tools = [by_name[each] for each in dict.fromkeys(allowed)]
        return Tools(tools, required, parallel, any(strict))


def _json(schema: Any, param: str) -> Constraint:
    try:
        return Constraint(GrammarSource.json(schema), param, schema)
    except RecursionError:
        raise invalid(f"{param} is nested too deeply", param.partition(".")[0]) from None


def _tool(index: int, tool: Mapping[str, Any], *, checked: bool) -> Tool:
    where = f"tools[{index}].function"
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where} must be an object with a name", "tools")
    schema = function.get("parameters") or ANY_OBJECT
    if not isinstance(schema, dict):
        raise invalid(f"{where}.parameters must be a JSON schema object", "tools")
    return Tool(function["name"], schema if checked else ANY_OBJECT, f"{where}.parameters")
