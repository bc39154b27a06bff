"""Tools: which calls an answer has to make, and a grammar of them."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..engine.grammar.compiler import ANY_OBJECT, GrammarSource, json_in_lark, text_in_lark
from .errors import invalid

MAX_TOOL_ORDERS = 256  # sets of tools


class Tool(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: of the function.
        schema: of its arguments.
        param: where the request says so.
    """

    name: str
    schema: Any
    param: str


class Tools(NamedTuple):
    """The calls of an answer.

    Attributes:
        callable: what may be called.
        required: the answer is a call, or several.
        parallel: several may follow one another.
        strict: the answer's calls are constrained although none is required.
    """

    callable: Sequence[Tool]
    required: bool
    parallel: bool
    strict: bool


class ToolFormat(NamedTuple):
    """How a model writes a call: ``start``, a JSON object of name and arguments or Qwen3-Coder's tags, ``end``.

    Attributes:
        start, end: as they stand in a Lark grammar.
        trigger: the token that ``start`` is, or None if it is text.
        is_tagged: the call is tags, one for each argument.
    """

    start: str
    end: str
    trigger: int | None
    is_tagged: bool = False


class ToolOrders:
    """The order in which each set of tools first came: a client that sends them in another finds its prefixes again.
    Keeps the latest sets."""

    def __init__(self) -> None:
        self._orders: OrderedDict[tuple[Any, ...], list[bytes]] = OrderedDict()

    def steady(self, tools: list[dict[str, Any]], salt: str | None) -> list[dict[str, Any]]:
        """Return the tools in the order that they first came in from those who share prefixes."""
        digests = [hashlib.sha256(json.dumps(tool, sort_keys=True).encode()).digest() for tool in tools]
        key = (salt, *sorted(digests))
        order = self._orders.setdefault(key, digests)
        self._orders.move_to_end(key)
        if len(self._orders) > MAX_TOOL_ORDERS:
            self._orders.popitem(last=False)
        by_digest = dict(zip(digests, tools, strict=True))
        return [by_digest[digest] for digest in order]


def tools_of(body: Mapping[str, Any], *, always: bool = False) -> Tools | None:
    """Return the calls that a request asks for, or of which it wants the arguments to be right; None: it leaves them
    free.

    Args:
        body: of the request; ``tools`` is a list of objects.
        always: tools that nothing is asked of count as well.

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
            raise invalid(f"{name} asks for a call, and there are no tools", name)
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
                raise invalid(f"{name}: there is no tool {each!r}", name)
        tools = [by_name[each] for each in dict.fromkeys(allowed)]
        if not tools:
            raise invalid(f"{name}.allowed_tools.tools must not be empty", name)
    return Tools(tools, required, parallel, any(strict))


def _named(given: Any) -> str:
    """Return the name of the function that an object names."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or given.get("type") != "function" or not isinstance(function.get("name"), str):
        raise invalid("tool_choice must name a function: type function, and function with a name", "tool_choice")
    return str(function["name"])


def _tool(index: int, tool: Mapping[str, Any], *, checked: bool) -> Tool:
    where = f"tools[{index}].function"
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where} must be an object with a name", "tools")
    schema = function.get("parameters") or ANY_OBJECT
    if not isinstance(schema, dict):
        raise invalid(f"{where}.parameters must be a JSON schema, an object", "tools")
    return Tool(function["name"], schema if checked else ANY_OBJECT, f"{where}.parameters")


def calls(tools: Tools, form: ToolFormat, *, answer: Any = None, is_triggered: bool = False) -> GrammarSource:
    """Return a grammar of the calls.

    Args:
        tools: what may be called.
        form: how the model writes a call.
        answer: a JSON schema: the answer may be of that instead; None: it has to be a call.
        is_triggered: the grammar begins behind the token that begins a call, and ends with that call.
    """
    lines = []
    body = '"\\n"? call "\\n"? ' + form.end
    if is_triggered:
        lines.append(f"start: {body}")
    else:
        several = ' ("\\n"? one)*' if tools.parallel else ""
        lines.append(f"start: one{several}" + ("" if answer is None else " | answer"))
        lines.append(f"one: {form.start} {body}")
        if answer is not None:
            lines.append(f"answer: {json_in_lark(answer)}")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools.callable))))
    if form.is_tagged:
        lines.append('free: "<parameter=" KEY ">\\n" text')
        lines += [r"KEY: /[^<>\s]+/", r"text[lazy]: /(?s:.*)\n<\/parameter>\n/"]
    for index, tool in enumerate(tools.callable):
        if form.is_tagged:
            lines += _tagged(index, tool)
            continue
        begin = text_in_lark('{"name": ' + json.dumps(tool.name, ensure_ascii=False) + ', "arguments": ')
        lines.append(f'call_{index}: {begin} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: {json_in_lark(tool.schema)}")
    return GrammarSource("tools", "\n".join(lines))


def _tagged(index: int, tool: Tool) -> list[str]:
    """Return the lines of a call in Qwen3-Coder's tags, with its arguments in the schema's order."""
    schema = tool.schema
    properties = schema.get("properties")
    terms, lines = [], []
    for number, (name, given) in enumerate(properties.items() if isinstance(properties, dict) else ()):
        begin = text_in_lark(f"<parameter={name}>\n")
        lines.append(f"value_{index}_{number}: {_value(given, schema)}")
        is_required = name in (schema.get("required") or ())
        terms.append(f"({begin} value_{index}_{number}){'' if is_required else '?'}")
    if not terms and schema.get("additionalProperties") is not False:
        terms.append("free*")
    begin = text_in_lark(f"<function={tool.name}>\n")
    return [f'call_{index}: {begin} {" ".join(terms)} "</function>"', *lines]


def _value(given: Any, schema: Mapping[str, Any]) -> str:
    """Return an argument and its end as terms of a Lark grammar: text for strings, JSON for what has another type."""
    end = text_in_lark("\n</parameter>\n")
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        return "text"
    if given["type"] != "string":
        return f"{json_in_lark({**given, **({'$defs': schema['$defs']} if '$defs' in schema else {})})} {end}"
    choices = given.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return f"({' | '.join(map(text_in_lark, choices))}) {end}"
    return "text"
