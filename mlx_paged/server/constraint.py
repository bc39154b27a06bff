"""constraint_of(): the constraint that a request puts on its answer: a format of the text, or tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..grammar.compiler import ANY_OBJECT, GrammarSource
from .errors import invalid

FORMATS = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHOICE_STRINGS = 10_000


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


def constraint_of(body: Mapping[str, Any], *, chat: bool) -> Constraint | None:
    """Return the constraint that a request's parameters put on its answer; None: there is none.

    Args:
        body: the parameters that are not null.
        chat: whether the API has tools.

    Raises:
        RequestRefused: with status 400, naming the parameter.
    """
    tools = tools_of(body) if chat else None
    found = _response_format(body.get("response_format"))
    if "structured_outputs" in body:
        if found is not None:
            raise invalid("response_format and structured_outputs cannot both be given", "structured_outputs")
        found = _structured_outputs(body["structured_outputs"])
    if found is None:
        return None if tools is None else Constraint(None, "tools", None, tools)
    if chat and body.get("tools") and body.get("tool_choice") != "none":
        return found._replace(tools=tools or tools_of(body, always=True))
    return found


def _response_format(given: Any) -> Constraint | None:
    name = "response_format"
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        raise invalid(f"{name} must be an object with a type", name)
    kind = given["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return _json(ANY_OBJECT, name)
    if kind != "json_schema":
        raise invalid(f"{name}.type must be text, json_object or json_schema", name)
    described = given.get("json_schema")
    where = f"{name}.json_schema"
    if not isinstance(described, dict):
        raise invalid(f"{where} must be an object with a schema", name)
    for key, type_, words in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "a boolean"),
    ):
        if described.get(key) is not None and not isinstance(described[key], type_):
            raise invalid(f"{where}.{key} must be {words}", name)
    if not isinstance(described.get("schema"), dict):
        raise invalid(f"{where}.schema must be an object", name)
    return _json(described["schema"], f"{where}.schema")


def _structured_outputs(given: Any) -> Constraint:
    name = "structured_outputs"
    chosen = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    if len(chosen) != 1 or not set(chosen) <= set(FORMATS):
        raise invalid(f"{name} must be an object with exactly one of {', '.join(FORMATS)}", name)
    ((kind, value),) = chosen.items()
    where = f"{name}.{kind}"
    if kind == "json_object":
        if value is not True:
            raise invalid(f"{where} must be true", name)
        return _json(ANY_OBJECT, name)
    if kind == "json":
        if not isinstance(value, dict):
            raise invalid(f"{where} must be a JSON schema object", name)
        return _json(value, where)
    if kind == "choice":
        is_list = isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
        if not is_list or len(value) > MAX_CHOICE_STRINGS:
            raise invalid(f"{where} must be a list of 1 to {MAX_CHOICE_STRINGS:,} non-empty strings", name)
        return Constraint(GrammarSource.choice(value), where)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where} must be a non-empty string", name)
    return Constraint(GrammarSource.regex(value) if kind == "regex" else GrammarSource.lark(value), where)


def _json(schema: Any, param: str) -> Constraint:
    try:
        return Constraint(GrammarSource.json(schema), param, schema)
    except RecursionError:
        raise invalid(f"{param} is nested too deeply", param.partition(".")[0]) from None


def tools_of(body: Mapping[str, Any], *, always: bool = False) -> Tools | None:
    """Return the tool calls that a request requires or constrains; None: calls are free.

    Args:
        body: the request's parameters; ``tools`` is a list of objects.
        always: also return tools that the request neither requires nor constrains.

    Raises:
        RequestRefused: with status 400.
    """
    choice, parallel = body.get("tool_choice", "auto"), body.get("parallel_tool_calls", True)
    name = "tool_choice"
    allowed: list[str] | None = None  # names
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        given = choice.get("allowed_tools")
        if not isinstance(given, dict) or not isinstance(given.get("tools"), list):
            raise invalid(f"{name}.allowed_tools must be an object with a mode and tools", name)
        choice, allowed = given.get("mode"), [_named(tool) for tool in given["tools"]]
        if choice not in ("auto", "required"):
            raise invalid(f"{name}.allowed_tools.mode must be auto or required", name)
    elif isinstance(choice, dict):
        choice, parallel, allowed = "required", False, [_named(choice)]
    elif choice not in ("none", "auto", "required"):
        raise invalid(f"{name} must be none, auto, required, or an object that names a function", name)
    given = body.get("tools") or []
    required = choice == "required"
    if choice == "none" or not given:
        if required:
            raise invalid(f"{name} requires a call, but tools is empty", name)
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
                raise invalid(f"{name} names a tool that is not in tools: {each!r}", name)
        tools = [by_name[each] for each in dict.fromkeys(allowed)]
        if not tools:
            raise invalid(f"{name}.allowed_tools.tools must not be empty", name)
    return Tools(tools, required, parallel, any(strict))


def _named(given: Any) -> str:
    """Return the name of the function in an object of ``tool_choice``."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type") != "function" or not isinstance(function.get("name"), str):
        raise invalid(
            "tool_choice must name a function: an object of type function whose function has a name", "tool_choice"
        )
    return str(function["name"])


def _tool(index: int, tool: Mapping[str, Any], *, checked: bool) -> Tool:
    where = f"tools[{index}].function"
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where} must be an object with a name", "tools")
    schema = function.get("parameters") or ANY_OBJECT
    if not isinstance(schema, dict):
        raise invalid(f"{where}.parameters must be a JSON schema object", "tools")
    return Tool(function["name"], schema if checked else ANY_OBJECT, f"{where}.parameters")
