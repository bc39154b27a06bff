"""What a line of a prompts file may say, checked; the names and ranges are those of the server's API."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ..config import MAX_PROMPT_LOOKUP
from ..server.errors import invalid

MAX_TOKENS, MAX_CONTEXT, MAX_STOP_CHARACTERS, MAX_PENALTY = 1 << 24, 1 << 20, 16_000, 1e4
_PENALTY, _CONTEXT = (-MAX_PENALTY, MAX_PENALTY), (0, MAX_CONTEXT)
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "repetition_penalty": (0, MAX_PENALTY),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}
WHOLE: dict[str, tuple[int, int]] = {
    "top_k": _CONTEXT,
    "repetition_context_size": _CONTEXT,
    "presence_context_size": _CONTEXT,
    "frequency_context_size": _CONTEXT,
    "prompt_lookup": (0, MAX_PROMPT_LOOKUP),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "max_tokens": (1, MAX_TOKENS),
    "max_completion_tokens": (1, MAX_TOKENS),
    "n": (1, 1),
}


def load_object(raw: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object from UTF-8 text.

    Args:
        raw: the text.
        what: it is, for messages.

    Raises:
        RequestRefused: it is not one.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        body = json.loads(raw.decode(), parse_constant=refuse)
        json.dumps(body, ensure_ascii=False).encode()  # escapes can spell half a character, which no tokenizer takes
    except UnicodeError:
        raise invalid(f"{what} is not UTF-8 text") from None
    except RecursionError:
        raise invalid(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise invalid(f"{what} is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise invalid(f"{what} must be a JSON object")
    return body


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not null. Raises RequestRefused, naming the one that cannot be used."""
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if name in NUMBERS:
            _number(name, value, *NUMBERS[name])
        elif name in WHOLE:
            _number(name, value, *WHOLE[name], whole=True)
        elif name == "stop":
            _stop(value)
        elif name == "logit_bias":
            _logit_bias(value)
        elif name == "messages":
            _messages(value)
        elif name == "prompt" and (not isinstance(value, str) or not value):
            raise invalid("prompt must be a string that is not empty", "prompt")
    if "seed" in values:
        values["seed"] %= 1 << 64
    return values


def _number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number:
        raise invalid(f"{name} must be a {'whole ' if whole else ''}number, got {value!r:.100}", name)
    if not low <= value <= high or not math.isfinite(value):
        allowed = f"{low}" if low == high else f"from {low:g} to {high:g}"
        raise invalid(f"{name} must be {allowed}, got {value}", name)


def _stop(value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise invalid("stop must be a string or a list of strings, none of them empty", "stop")
    if sum(map(len, words)) > MAX_STOP_CHARACTERS:
        raise invalid(f"stop must have at most {MAX_STOP_CHARACTERS} characters", "stop")


def _logit_bias(value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid("logit_bias must be an object of token ids and numbers", "logit_bias")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 9):
            raise invalid(f"logit_bias: {key[:100]!r} is not a token id", "logit_bias")
        _number(f"logit_bias[{key}]", bias, -1e4, 1e4)


def _messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise invalid("messages must be a list that is not empty", "messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f"messages[{index}] must be an object with a role", "messages")
        if not isinstance(message.get("content"), str | list | None):
            raise invalid(f"messages[{index}].content must be a string or a list of parts", "messages")
