"""parse_body(): the JSON body of a completion request, checked, so that what follows need not be."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..config import MAX_PROMPT_LOOKUP
from .refusal import RequestRefused, invalid

MAX_BODY_BYTES = 64 << 20
MAX_VALUES = 1 << 18  # in a body: parsing takes memory and the interpreter for each
SMALL_BYTES = 1 << 20  # of a body, whose values need not be counted
MAX_TOKENS = 1 << 24
MAX_STOP_CHARACTERS = 16_000  # of all stop strings together
MAX_SALT_LENGTH = 1000
MAX_PENALTY = 1e4
MAX_CONTEXT = 1 << 20


def parse_body(raw: bytes, path: str) -> dict[str, Any]:
    """The parameters of a request; those that are null are left out, as if they had not been given.

    Parameters that are not known pass: clients send what other servers know.

    Args:
        raw: the body.
        path: the endpoint's.

    Raises:
        RequestRefused: with status 400, naming the parameter, or 413.
    """
    if len(raw) > SMALL_BYTES and not _has_few_values(raw):
        raise RequestRefused(413, f"a request body holds at most {MAX_VALUES:,} values")
    return check_parameters(load_object(raw, "the request body"), chat=path.endswith("/chat/completions"))


def check_parameters(given: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """The parameters that are not null, types and ranges checked; those that are not known pass.

    Args:
        given: what a client or a user has written.
        chat: whether ``messages`` are needed, and not a ``prompt``.

    Raises:
        RequestRefused: with status 400, naming the parameter.
    """
    body = {name: value for name, value in given.items() if value is not None}
    for name, check in _CHECKS.items():
        if name in body:
            check(name, body[name])
    if isinstance(body.get("seed"), int):
        body["seed"] %= 1 << 64
    for name in ("xtc_probability", "xtc_threshold"):  # mlx-lm takes floats only
        if name in body:
            body[name] = float(body[name])
    if body.get("n", 1) != 1:
        raise invalid("n must be 1: one answer for each request", "n")
    if chat:
        _check_messages(body.get("messages"))
    elif not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise invalid("prompt must be a string that is not empty", "prompt")
    return body


def _has_few_values(raw: bytes) -> bool:
    """Whether JSON text holds no more than MAX_VALUES values, found without parsing it."""
    if raw.count(b'"') - raw.count(b'\\"') > 4 * MAX_VALUES:
        return False
    structure = _STRING.sub(b"", raw)
    return sum(map(structure.count, (b",", b"[", b"{"))) <= MAX_VALUES


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def load_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object from UTF-8 text.

    Args:
        raw: the text.
        what: it is, for messages.

    Raises:
        RequestRefused: with status 400.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        text = raw.decode()
        text.encode()
        body = json.loads(text, parse_constant=refuse)
        # Escapes can spell half a character, which no tokenizer takes.
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError:
        raise invalid(f"{what} is not UTF-8 text") from None
    except RecursionError:
        raise invalid(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"{what} is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(f"{what} must be a JSON object")
    return body


# Types and ranges -------------------------------------------------------------------------------------------------

_Check = Callable[[str, Any], None]


def _number(low: float, high: float) -> _Check:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{name} must be a number", name)
        if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
            raise invalid(f"{name} must be from {low:g} to {high:g}", name)

    return check


def _whole(low: int, high: int) -> _Check:
    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(f"{name} must be a whole number", name)
        if not low <= value <= high:
            raise invalid(f"{name} must be from {low} to {high}", name)

    return check


def _of_type(kind: type, words: str) -> _Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise invalid(f"{name} must be {words}", name)

    return check


def _stop(name: str, value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise invalid(f"{name} must be a string or a list of strings, none of them empty", name)
    if sum(map(len, words)) > MAX_STOP_CHARACTERS:
        raise invalid(f"{name}: at most {MAX_STOP_CHARACTERS} characters", name)


def _cache_salt(name: str, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_SALT_LENGTH:
        raise invalid(f"{name} must be a string of 1 to {MAX_SALT_LENGTH} characters", name)


def _logit_bias(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(f"{name} must be an object of token ids and numbers", name)
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit()):
            raise invalid(f"{name}: {key!r} is not a token id", name)
        _number(-1e4, 1e4)(f"{name}[{key}]", bias)


def _stream_options(name: str, value: Any) -> None:
    if not isinstance(value, dict) or not isinstance(value.setdefault("include_usage", False), bool):
        raise invalid(f"{name} must be an object, its include_usage true or false", name)


def _objects(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid(f"{name} must be a list of objects", name)


def _logprobs(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false; top_logprobs says how many", name)


_string, _flag, _object = _of_type(str, "a string"), _of_type(bool, "true or false"), _of_type(dict, "an object")
_CHECKS: Mapping[str, _Check] = {
    "model": _string,
    "draft_model": _string,
    "adapters": _string,
    "stream": _flag,
    "stream_options": _stream_options,
    "logprobs": _logprobs,
    "top_logprobs": _whole(-1, 11),
    "max_tokens": _whole(1, MAX_TOKENS),
    "max_completion_tokens": _whole(1, MAX_TOKENS),
    "n": _whole(1, MAX_CONTEXT),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _whole(0, MAX_CONTEXT),
    "min_p": _number(0, 1),
    "xtc_probability": _number(0, 1),
    "xtc_threshold": _number(0, 0.5),
    "repetition_penalty": _number(0, MAX_PENALTY),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "repetition_context_size": _whole(0, MAX_CONTEXT),
    "presence_context_size": _whole(0, MAX_CONTEXT),
    "frequency_context_size": _whole(0, MAX_CONTEXT),
    "num_draft_tokens": _whole(0, 64),
    "prompt_lookup": _whole(0, MAX_PROMPT_LOOKUP),
    "seed": _whole(-(1 << 63), (1 << 64) - 1),
    "stop": _stop,
    "logit_bias": _logit_bias,
    "tools": _objects,
    "parallel_tool_calls": _flag,
    "role_mapping": _object,
    "chat_template_kwargs": _object,
    "cache_salt": _cache_salt,
}


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list that is not empty", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"{where} must be an object with a role", "messages")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                    raise invalid(f"{where}.content: each part must be an object with a type", "messages")
                if part["type"] == "text" and not isinstance(part.get("text"), str):
                    raise invalid(f"{where}.content: a part of type text must have a text", "messages")
        elif content is not None and not isinstance(content, str):
            raise invalid(f"{where}.content must be a string or a list of parts", "messages")
        calls = message.get("tool_calls")
        if calls is not None:
            _objects(f"{where}.tool_calls", calls)
