"""Parsing of tool calls that are incomplete: still streaming, or without the marker, end or arguments they need."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import TextParts

BEGIN, END = "<function=", "</function>"  # of Qwen3-Coder's calls; it often omits the marker before them
OBJECT = '{"name":'  # start of a call in JSON
MAX_HELD_CHARACTERS = 1 << 16  # characters held back while they may be a call
MAX_HEAD_CHARACTERS = 1000  # characters of a call before its arguments
CLOSINGS = ("", END, "}", "}}", "]}}")
_NAME = re.compile(r"\s*([\w.:-]+)\s*(?:\(\s*\))?\s*")


def names_of(tools: Any) -> frozenset[str]:
    """Return the names of the tools' functions."""
    functions = (tool.get("function") for tool in tools or () if isinstance(tool, dict))
    return frozenset(str(each.get("name")) for each in functions if isinstance(each, dict))


def loose_calls(
    text: str, names: Collection[str], parse: Callable[[str], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the calls in a text that ``parse`` rejects: a call without its end, or a bare function name.

    Args:
        text: a call that the model has finished.
        names: names of the tools.
        parse: the model's parser.

    Raises:
        Exception: the text is no call.
    """
    bare = _NAME.fullmatch(text)
    if bare is not None and bare[1] in names:
        return [{"name": bare[1], "arguments": {}}]
    if text.count("<parameter=") != text.count("</parameter>"):
        raise ValueError("an argument was cut off")
    for closing in CLOSINGS[1:]:
        for read in (parse, _read):
            try:
                calls = read(text.rstrip() + closing)
            except Exception:  # parsers raise any exception
                continue
            if calls and all(call.get("name") in names for call in calls):
                return calls
    return _known(_read(text), names)


def _read(text: str) -> list[dict[str, Any]]:
    """Parse calls in JSON or in Qwen3-Coder's tags. Raises ValueError."""
    begin = text.find(BEGIN)
    if begin < 0:
        value = json.loads(text)
        return [each.get("function", each) for each in (value if isinstance(value, list) else [value])]
    if text.count("<parameter=") != text.count("</parameter>"):
        raise ValueError("an argument was cut off")
    name, _, rest = text[begin + len(BEGIN) :].partition(">")
    given = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", rest, re.DOTALL)
    return [{"name": name.strip(), "arguments": {key: _value(value) for key, value in given}}]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _known(calls: list[dict[str, Any]], names: Collection[str]) -> list[dict[str, Any]]:
    if not calls or any(call.get("name") not in names for call in calls):
        raise ValueError("the call names no tool of the request")
    return calls


def local_schema(given: Any, root: Mapping[str, Any]) -> Any:
    """Return a schema, or the one in ``root`` that its ``$ref`` leads to."""
    for _ in range(8):
        if not isinstance(given, dict) or not isinstance(given.get("$ref"), str):
            break
        found: Any = root
        for part in given["$ref"].removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        given = found
    return given


def types_of(given: Any, root: Mapping[str, Any], depth: int = 0) -> set[str] | None:
    """Return the JSON types that a schema allows; None: not known. References are resolved in ``root``."""
    given = local_schema(given, root)
    if not isinstance(given, dict) or depth > 8:
        return None
    values = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    if (named := given.get("type")) is not None:
        return {named} if isinstance(named, str) else set(named)
    found = [types_of(each, root, depth + 1) for each in given.get("anyOf") or given.get("oneOf") or ()]
    return None if not found or None in found else set().union(*filter(None, found))


def _type_of(value: Any) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))


_TYPES: tuple[tuple[Any, str], ...] = (
    *((type(None), "null"), (bool, "boolean"), (int, "integer"), (float, "number")),
    *((str, "string"), (dict, "object"), (object, "array")),
)


def with_types(call: dict[str, Any], tools: Any) -> dict[str, Any]:
    """Return a call with its arguments converted to the types in its tool's schema. Where a model writes arguments as
    bare text, parsers guess, and may read a string as a number or null."""
    functions = (tool.get("function") or {} for tool in tools or ())
    schema = next((each.get("parameters") for each in functions if each.get("name") == call.get("name")), None)
    properties, arguments = (schema or {}).get("properties"), call.get("arguments")
    if not isinstance(properties, dict) or not isinstance(arguments, dict):
        return call
    typed = {key: _typed(value, types_of(properties.get(key), schema or {})) for key, value in arguments.items()}
    return {**call, "arguments": typed}


def _typed(value: Any, types: set[str] | None) -> Any:
    def fits(value: Any) -> bool:
        kind = _type_of(value)
        return kind in (types or ()) or (kind == "integer" and "number" in (types or ()))

    if types is None or fits(value):
        return value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except ValueError:
            return value
        return read if fits(read) else value
    return json.dumps(value, ensure_ascii=False) if "string" in types else value


class LooseParts:
    """Splitter of an answer's text that also finds tool calls without a marker.

    Args:
        parts: the model's splitter.
        names: names of the tools; calls of other functions are text.
    """

    def __init__(self, parts: TextParts, names: Collection[str]) -> None:
        self._parts, self._names = parts, names
        self._held, self._is_first = "", True  # no text but white space so far

    def feed(self, text: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for state, part in self._parts.feed(text):
            if state == "normal":
                self._held += part
                found += [("normal", ""), *self._scan()]  # "" ends a call before it, whatever is held
            else:
                found += [*self._release(), (state, part)]
        return found

    def flush(self) -> tuple[str, str]:
        state, rest = self._parts.flush()
        if state != "normal":
            return state, rest
        held, self._held = self._held + rest, ""
        return ("tool", held) if self._is_call(held) else ("normal", held)

    def cut_off(self) -> None:
        """Treat the rest as text, because the model did not finish the answer."""
        self._names = frozenset()

    def _scan(self) -> list[tuple[str, str]]:
        """Return the parts of the held text that are known to be text or a call."""
        found: list[tuple[str, str]] = []
        while self._held:
            begin = self._held.find(BEGIN)
            if begin > 0:
                found.append(self._text(begin))
            elif begin == 0:
                end = self._held.find(END)
                if end < 0:
                    return found if len(self._held) < MAX_HELD_CHARACTERS else [*found, *self._release()]
                call, self._held = self._held[: end + len(END)], self._held[end + len(END) :]
                found += [("tool" if self._is_call(call) else "normal", call), ("normal", "")]
            elif self._is_first and _may_begin(self._held.lstrip(), OBJECT) and len(self._held) < MAX_HELD_CHARACTERS:
                return found  # decided at the answer's end
            else:
                pending = next((n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n])), 0)
                if len(self._held) > pending:
                    found.append(self._text(len(self._held) - pending))
                return found
        return found

    def _text(self, end: int) -> tuple[str, str]:
        text, self._held = self._held[:end], self._held[end:]
        self._is_first = self._is_first and not text.strip()
        return "normal", text

    def _release(self) -> list[tuple[str, str]]:
        return [self._text(len(self._held))] if self._held else []

    def _is_call(self, text: str) -> bool:
        text = text.strip()
        if not text.startswith((BEGIN, "{")):
            return False
        for closing in CLOSINGS:
            try:
                return bool(_known(_read(text + closing), self._names))
            except (ValueError, AttributeError, RecursionError):
                continue
        return False


def _may_begin(text: str, mark: str) -> bool:
    text = re.sub(r"^\{\s+", "{", text).replace('" :', '":', 1)
    return text.startswith(mark) or mark.startswith(text)


def openai_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a model's call in the format of OpenAI's chats: the arguments are a JSON object as text.

    Raises:
        ValueError: it names no function.
    """
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not name:
        raise ValueError("the call names no function")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else {"value": arguments}
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        arguments = {"value": arguments}
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # ValueError: it contains a lone surrogate
    return {
        "function": {"name": name, "arguments": text},
        "type": "function",
        "id": str(call.get("id") or f"call_{uuid.uuid4().hex[:24]}"),
    }


class ArgumentStream:
    """The arguments of a tool call in JSON or gpt-oss's format, streamed while the model writes it.

    Attributes:
        name: name of the function; None: not known yet, or the call has another format.
        missing: brackets that close the arguments; empty inside a string, which cannot be closed.
        is_name_sent: whether the name has been sent.
    """

    _HEADS = re.compile(
        r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
        r"|([^\s<>{}]+)<\|message\|>\s*(?=\{)"
    )

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_name_sent = False
        self._head = ""
        self._open: list[str] = []  # brackets that close the open ones
        self._is_string = self._is_escaped = self._is_over = False

    @property
    def missing(self) -> str:
        return "" if self._is_string else "".join(reversed(self._open))

    def feed(self, text: str) -> str:
        """Add text of the call. Return the arguments in it."""
        if self.name is None and len(self._head) < MAX_HEAD_CHARACTERS:
            self._head += text
            if (found := self._HEADS.match(self._head)) is None:
                return ""
            self.name = found[1] or found[2]
            text = self._head[found.end() :]
        if self.name is None or self._is_over:
            return ""
        for place, character in enumerate(text):
            self._follow(character)
            if not self._open:
                self._is_over = True
                return text[: place + 1]
        return text

    def _follow(self, character: str) -> None:
        if self._is_string:
            if self._is_escaped or character == "\\":
                self._is_escaped = not self._is_escaped
            elif character == '"':
                self._is_string = False
        elif character == '"':
            self._is_string = True
        elif character in "{[":
            self._open.append("}" if character == "{" else "]")
        elif character in "}]" and self._open:
            self._open.pop()
