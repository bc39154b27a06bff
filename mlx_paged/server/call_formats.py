"""The formats in which models write tool calls, and the values of arguments by their schemas."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

HARMONY_TOKENS = {"<|channel|>", "<|message|>", "<|start|>", "<|return|>", "<|call|>"}
NAME = r"""[^\s<>"'(){}\[\],=]{1,256}"""  # of a function or an argument, as a regular expression


class CallForm(NamedTuple):
    """The text format of a model's calls. In it, NAME stands for the function's name, ``~`` for an optional line break,
    and ``#`` for a number.

    Attributes:
        begin, end: text around the arguments.
        key: text before an argument, with KEY for its name and TYPE for its type; empty: the arguments are one JSON
            object.
        value_end: text after an argument. Strings are written as they are, other types as JSON.
        repeats: one pair of call marks may enclose several calls.
        comma: separator of arguments, and of repeated calls.
        around: text around the repeated calls.
        quote: text on both sides of a string; empty: strings end with ``value_end``.
        strings: regular expression of a string between quotes.
        containers: how objects and arrays are written: as ``json``, or ``bare``, with keys and strings like those of
            arguments.
        names: regular expression of the names and keys that the parser can read.
        read_begin, read_end: regular expressions of ``begin`` and ``end`` where models vary them; empty: they do not.
        block: text around a JSON object that may replace the arguments; empty: none may.
        cdata: whether a string may be between ``<![CDATA[`` and ``]]>``.
    """

    begin: str
    end: str
    key: str = ""
    value_end: str = ""
    repeats: bool = False
    comma: str = ""
    around: tuple[str, str] = ("", "")
    quote: str = ""
    strings: str = "(?s:.*)"
    containers: str = "json"
    names: str = ""
    read_begin: str = ""
    read_end: str = ""
    block: tuple[str, str] = ("", "")
    cdata: bool = False


SPACE = r"\s{0,40}"  # bounded, so that a flood of white space is not read again and again
_JSON_PARTS = (r"\{", '"name"', ":", r'"(?P<name>[^"\\]{1,256})"', ",", '"(?:arguments|parameters)"', ":", r"(?=\{)")
_JSON_BEGIN = SPACE.join(_JSON_PARTS)
_JSON_END = rf'(?:{SPACE},{SPACE}"\w{{1,40}}"{SPACE}:{SPACE}"[^"\\]{{0,200}}")?{SPACE}\}}'
FORMS = {  # by the module that defines mlx-lm's parser; laguna uses glm47's
    "json_tools": CallForm('{"name": "NAME", "arguments": ', "}", read_begin=_JSON_BEGIN, read_end=_JSON_END),
    "qwen3_coder": CallForm("<function=NAME>\n", "</function>", "<parameter=KEY>\n", "\n</parameter>\n"),
    "glm47": CallForm("NAME~", "", "<arg_key>KEY</arg_key>~<arg_value>", "</arg_value>~"),
    "longcat": CallForm(
        "NAME~", "", "<longcat_arg_key>KEY</longcat_arg_key>~<longcat_arg_value>", "</longcat_arg_value>~"
    ),
    "minimax_m2": CallForm('<invoke name="NAME">~', "</invoke>", '<parameter name="KEY">', "</parameter>~", True),
    "muse_spark": CallForm(
        '<atem:invoke name="NAME">~', "</atem:invoke>", '<atem:parameter name="KEY">', "</atem:parameter>~", True
    ),
    "minicpm5": CallForm('"NAME">~', "", '<param name="KEY">', "</param>~", cdata=True),
    "kimi_k2": CallForm(
        "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        repeats=True,
        read_begin=rf"<\|tool_call_begin\|>{SPACE}(?P<id>(?:functions\.)?(?P<name>{NAME}):\d{{1,999}})"
        rf"{SPACE}<\|tool_call_argument_begin\|>{SPACE}(?=\{{)",
    ),
    "kimi_k3": CallForm(
        '<|open|>call tool="NAME" index="#"<|sep|>~',
        "<|close|>call<|sep|>",
        '<|open|>argument key="KEY" type="TYPE"<|sep|>',
        "<|close|>argument<|sep|>~",
        repeats=True,
        block=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
    ),
    "mistral": CallForm(
        "NAME[ARGS]",
        "",
        read_begin=rf"(?P<name>{NAME}+){SPACE}(?:\[CALL_ID\]{SPACE}(?P<id>\w{{1,64}}){SPACE})?\[ARGS\]{SPACE}(?=\{{)",
    ),
    "pythonic": CallForm(
        *("NAME(", ")", "KEY="),
        repeats=True,
        comma=", ",
        around=("[", "]"),
        quote='"',
        strings=r'([^"\\\x00-\x1f]|\\["\\nrt])*',
        names=r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*",
    ),
    "gemma4": CallForm(
        *("call:NAME{", "}", "KEY:"), repeats=True, comma=",", quote='<|"|>', containers="bare", names=r"[\w-]+"
    ),
    "function_gemma": CallForm(*("call:NAME{", "}", "KEY:"), comma=",", quote="<escape>", names=r"\w+"),
}
MISTRAL_LIST = FORMS["json_tools"]._replace(repeats=True, comma=", ", around=("[", "]"))


class TextMarks(NamedTuple):
    """The marks that divide a model's answers.

    Attributes:
        states: for each state of the text (``normal``, ``reasoning``, those of mlx-lm's response formats) its marks and
            the states that they lead to.
        call_start, call_end: marks around calls; empty: the model has none.
        form: format of the calls; None: the model has none.
        has_channels: the answers are in OpenAI's Harmony format (gpt-oss).
    """

    states: Mapping[str, Mapping[str, str]]
    call_start: str = ""
    call_end: str = ""
    form: CallForm | None = None
    has_channels: bool = False


def call_form(tokenizer: Any) -> CallForm | None:
    """Return the format of a model's calls, found by the parser of mlx-lm's tokenizer; None: it is not known."""
    package, _, name = (getattr(tokenizer.tool_parser, "__module__", None) or "").rpartition(".")
    if package != "mlx_lm.tool_parsers" or name not in FORMS:
        return None
    if name == "mistral" and "[ARGS]" not in tokenizer.get_vocab():  # older models write a JSON list
        return MISTRAL_LIST
    return FORMS[name]


def text_marks(tokenizer: Any) -> TextMarks:
    """Return the marks of the model that a tokenizer of mlx-lm belongs to."""
    if tokenizer.get_vocab().keys() >= HARMONY_TOKENS:
        return TextMarks({"normal": {}}, has_channels=True)
    states: dict[str, dict[str, str]] = {"normal": {}}
    if tokenizer.has_thinking:
        states["normal"][tokenizer.think_start] = "reasoning"
        states["reasoning"] = {tokenizer.think_end: "normal"}
    states["normal"] |= {mark: "normal" for mark in tokenizer.structural_markers or ()}
    for state, edges in tokenizer.response_transitions.items():
        states.setdefault(state, {}).update((mark, target) for mark, target in edges if target != "tool")
    form = call_form(tokenizer)
    if form is None:
        return TextMarks(states)
    return TextMarks(states, tokenizer.tool_call_start, tokenizer.tool_call_end or "", form)


# Arguments and their schemas ------------------------------------------------------------------------------------------


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


def argument(written: str, types: set[str] | None, *, is_string: bool | None = None) -> str:
    """Return an argument as JSON, with numbers as the model wrote them.

    Args:
        written: the argument's text.
        types: JSON types that the tool's schema allows; None: not known.
        is_string: whether the format marks it as a string; None: the format does not say.
    """
    string = json.dumps(written, ensure_ascii=False)
    if types == {"string"} or (is_string and (types is None or "string" in types)):
        return string
    for read in (_json_value, _python_value):
        try:
            text, value = read(written.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if types is None or _fits(value, types):
            return text
    return written if is_string is False and "string" not in (types or ()) else string


def _fits(value: Any, types: set[str]) -> bool:
    kind = _type_of(value)
    is_whole = kind == "number" and value.is_integer() and "integer" in types
    return kind in types or is_whole or (kind == "integer" and "number" in types)


def _json_value(text: str) -> tuple[str, Any]:
    return text, sendable(text)


def _python_value(text: str) -> tuple[str, Any]:
    value = ast.literal_eval(text)
    return _json_of(value), value


def _json_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def sendable(text: str) -> Any:
    """Return a JSON text's value. Raises ValueError if it has none, or one that cannot be sent on as JSON."""
    value = json.loads(text)
    _json_of(value).encode()  # ValueError: infinity, or a lone surrogate
    return value


def members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, each as the text that it is written in. Raises ValueError if it is none."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("not a JSON object")
    found: dict[str, str] = {}
    decode = json.JSONDecoder().raw_decode
    place = _skip(text, text.index("{") + 1, ",")
    while text[place] != "}":
        key, place = decode(text, place)
        begin = _skip(text, place, ":")
        _, place = decode(text, begin)
        found[key] = text[begin:place]
        place = _skip(text, place, ",")
    return found


def _skip(text: str, place: int, mark: str) -> int:
    while text[place].isspace() or text[place] == mark:
        place += 1
    return place


def object_of(arguments: Mapping[str, str]) -> str:
    """Return arguments, each as JSON, as one JSON object."""
    inner = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return f"{{{inner}}}"


def checked_arguments(text: str | None) -> str:
    """Return the arguments of a call as a JSON object; they may be missing, or a string that holds the object.

    Raises:
        ValueError: they are no object, or cannot be sent as JSON.
    """
    value = None if text is None or not text.strip() else json.loads(text)
    if isinstance(value, str):
        text = value
        value = json.loads(text) if text.strip() else None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise ValueError("the arguments are no object")
    assert text is not None
    sendable(text)
    return text


def python_arguments(source: str) -> dict[str, str]:
    """Return the keyword arguments of a call in Python, each as JSON. Raises Exception if they are no literals."""
    call = ast.parse(f"f({source})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not keyword arguments")
    return {str(each.arg): _json_of(ast.literal_eval(each.value)) for each in call.keywords}
