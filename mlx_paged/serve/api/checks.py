"""Checks of parameters: types and ranges, and the same as JSON schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..refusal import invalid

MAX_TOKENS = 1 << 24
MAX_CONTEXT = 1 << 20
MAX_STOP_CHARACTERS = 16_000  # of all stop strings together
MAX_SALT_LENGTH = 1000
MAX_TOKEN_ID = 1 << 24


@dataclass(frozen=True)
class Check:
    """Raises RequestRefused (400), naming the parameter, for a value that cannot be used.

    Attributes:
        check: of the name and the value.
        schema: what it lets pass, as a JSON schema, or more than that.
    """

    check: Callable[[str, Any], None]
    schema: dict[str, Any]

    def __call__(self, name: str, value: Any) -> None:
        self.check(name, value)


def number(low: float, high: float) -> Check:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{name} must be a number", name)
        if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
            raise invalid(f"{name} must be from {low:g} to {high:g}", name)

    return Check(check, {"type": "number", "minimum": low, "maximum": high})


def whole(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(f"{name} must be a whole number", name)
        if not low <= value <= high:
            raise invalid(f"{name} must be from {low} to {high}", name)

    return Check(check, {"type": "integer", "minimum": low, "maximum": high})


def _of_type(kind: type, words: str, schema: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise invalid(f"{name} must be {words}", name)

    return Check(check, {"type": schema})


def one_of(*values: Any) -> Check:
    """One of these values, which are JSON."""

    def check(name: str, value: Any) -> None:
        if not any(type(value) is type(known) and value == known for known in values):
            raise invalid(f"{name} must be {' or '.join(json.dumps(known) for known in values)}", name)

    return Check(check, {"enum": list(values)})


def refused(why: str) -> Check:
    """Nothing: the parameter is known, and what it asks for is not there."""

    def check(name: str, value: Any) -> None:
        raise invalid(f"{name} is not supported: {why}", name)

    return Check(check, {"type": "null"})


def keys(name: str, value: dict[str, Any], known: set[str]) -> None:
    """Raise RequestRefused (400) for a key of an object that nobody would read."""
    for key in sorted(set(value) - known):
        if value[key] is not None:
            raise invalid(f"{name}.{key} is not supported", name)


string, flag = _of_type(str, "a string", "string"), _of_type(bool, "true or false", "boolean")
object_, list_ = _of_type(dict, "an object", "object"), _of_type(list, "a list", "array")


def _stop(name: str, value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise invalid(f"{name} must be a string or a list of strings, none of them empty", name)
    if sum(map(len, words)) > MAX_STOP_CHARACTERS:
        raise invalid(f"{name}: at most {MAX_STOP_CHARACTERS} characters", name)


def _strings(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise invalid(f"{name} must be a list of strings, none of them empty", name)
    _stop(name, value)


def _cache_salt(name: str, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_LENGTH:
        raise invalid(f"{name} must be a string of 1 to {MAX_SALT_LENGTH} characters", name)


def _logit_bias(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object of token ids and numbers", name)
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit()):
            raise invalid(f"{name}: {key!r} is not a token id", name)
        number(-1e4, 1e4)(f"{name}[{key}]", bias)


def _stream_options(name: str, value: Any) -> None:
    is_right = isinstance(value, dict) and all(
        value.get(key) is None or isinstance(value[key], bool) for key in ("include_usage", "include_obfuscation")
    )
    if not is_right:
        raise invalid(f"{name} must be an object, its include_usage true or false", name)
    keys(name, value, {"include_usage", "include_obfuscation"})


def _objects(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid(f"{name} must be a list of objects", name)


def _logprobs_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false; top_logprobs says how many", name)


def _logprobs(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        whole(0, 20)(name, value)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _token_ids(name: str, value: Any) -> None:
    if not _is_token_ids(value) or not all(0 <= token < MAX_TOKEN_ID for token in value):
        raise invalid(f"{name} must be a list of token ids that is not empty", name)


def _prompt(name: str, value: Any) -> None:
    prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise invalid(f"{name} must be a string that is not empty, token ids, or a list of such", name)
    for prompt in prompts:
        if isinstance(prompt, list):
            _token_ids(name, prompt)
        elif not isinstance(prompt, str) or not prompt:
            raise invalid(f"{name} must be a string that is not empty, token ids, or a list of such", name)


def prompts_of(value: Any) -> list[str | list[int]]:
    """The prompts of a ``prompt`` that was checked."""
    return [value] if isinstance(value, str) or _is_token_ids(value) else list(value)


def _tool_choice(name: str, value: Any) -> None:
    if not isinstance(value, dict) and value not in ("none", "auto", "required"):
        raise invalid(f"{name} must be none, auto, required, or an object that names a function", name)


def _messages(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise invalid(f"{name} must be a list that is not empty", name)
    for index, message in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"{where} must be an object with a role", name)
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                    raise invalid(f"{where}.content: each part must be an object with a type", name)
                if part["type"] == "text" and not isinstance(part.get("text"), str):
                    raise invalid(f"{where}.content: a part of type text must have a text", name)
        elif content is not None and not isinstance(content, str):
            raise invalid(f"{where}.content must be a string or a list of parts", name)
        calls = message.get("tool_calls")
        if calls is not None:
            _objects(f"{where}.tool_calls", calls)


_INTEGERS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID - 1}}
_TEXT = {"type": "string", "minLength": 1}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_TEXT_OR_PARTS = {"oneOf": [{"type": "string"}, _OBJECTS]}

stop = Check(_stop, {"oneOf": [_TEXT, {"type": "array", "items": _TEXT}]})
strings = Check(_strings, {"type": "array", "items": _TEXT})
cache_salt = Check(_cache_salt, {"type": "string", "minLength": 1, "maxLength": MAX_SALT_LENGTH})
logit_bias = Check(
    _logit_bias,
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -1e4, "maximum": 1e4},
    },
)
stream_options = Check(
    _stream_options, {"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]}}}
)
objects = Check(_objects, _OBJECTS)
logprobs_flag = Check(_logprobs_flag, {"type": "boolean"})
logprobs = Check(_logprobs, {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 20}]})
token_ids = Check(_token_ids, _INTEGERS)
prompt = Check(
    _prompt, {"anyOf": [_TEXT, _INTEGERS, {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _INTEGERS]}}]}
)
tool_choice = Check(_tool_choice, {"oneOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})
messages = Check(
    _messages,
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {"type": "string"}, "content": {"anyOf": [_TEXT_OR_PARTS, {"type": "null"}]}},
        },
    },
)


_ROLES = {"enum": ["user", "assistant", "system"]}
messages_of_claude = Check(
    _messages,
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": _ROLES, "content": _TEXT_OR_PARTS},
            "additionalProperties": False,
        },
    },
)


def text_or_objects(name: str, value: Any) -> None:
    if not isinstance(value, str):
        _objects(name, value)
    if not value:
        raise invalid(f"{name} must not be empty", name)


content = Check(text_or_objects, _TEXT_OR_PARTS)
