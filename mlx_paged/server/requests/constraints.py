"""Parameters that constrain answers, in the form of OpenAI's chats; other APIs translate theirs to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...grammar.compiler import ANY_OBJECT, GrammarSource
from ..constraint import Constraint, Tool, Tools
from ..errors import invalid
from .fields import Body, Several, ToolList

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
            return Constraint(GrammarSource.regex(self.regex), f"{where}.regex")
        if self.choice is not None:
            return Constraint(GrammarSource.choice(self.choice), f"{where}.choice")
        if self.grammar is not None:
            return Constraint(GrammarSource.lark(self.grammar), f"{where}.grammar")
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
