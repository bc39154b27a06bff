"""parse_body(): the JSON body of a completion request, checked, so that what follows need not be."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from .api.parameters import Endpoint
from .refusal import RequestRefused, invalid

MAX_BODY_BYTES = 64 << 20
MAX_VALUES = 1 << 18  # in a body: parsing takes memory and the interpreter for each
SMALL_BYTES = 1 << 20  # of a body, whose values need not be counted
MOST_NOTED = 1000  # names in the log of parameters that are not known


def parse_body(raw: bytes, endpoint: Endpoint, *, ignores_unknown: bool = False) -> dict[str, Any]:
    """The parameters of a request; those that are null are left out, as if they had not been given.

    Args:
        raw: the body.
        endpoint: whose parameters they are.
        ignores_unknown: parameters that are not in its table pass, with one warning for each name in the log.

    Raises:
        RequestRefused: with status 400, naming the parameter, or 413.
    """
    if len(raw) > SMALL_BYTES and not _has_few_values(raw):
        raise RequestRefused(413, f"a request body holds at most {MAX_VALUES:,} values")
    given = load_object(raw, "the request body")
    unknown = sorted(name for name in given if given[name] is not None and name not in endpoint.parameters)
    if unknown and not ignores_unknown:
        raise invalid(f"{unknown[0]} is not a parameter of {endpoint.path}", unknown[0])
    for name in unknown:
        _note_ignored(name, endpoint.path)
    return check_parameters({name: value for name, value in given.items() if name not in unknown}, endpoint)


def _note_ignored(name: str, path: str) -> None:
    if len(_ignored) < MOST_NOTED and (name, path) not in _ignored:
        _ignored.add((name, path))
        logging.warning("%.100r is not a parameter of %s, and is ignored", name, path)


_ignored: set[tuple[str, str]] = set()


def check_parameters(given: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The parameters that are not null, types and ranges checked.

    Args:
        given: what a client or a user has written; names that are not in the endpoint's table pass.
        endpoint: whose parameters they are.

    Raises:
        RequestRefused: with status 400, naming the parameter.
    """
    body = {name: value for name, value in given.items() if value is not None}
    for name, value in body.items():
        if name in endpoint.parameters:
            endpoint.parameters[name].check(name, value)
    for name in endpoint.required:
        if name not in body:
            raise invalid(f"{name} is required", name)
    if "stream_options" in body and not body.get("stream"):
        raise invalid("stream_options is allowed with stream alone", "stream_options")
    if isinstance(body.get("seed"), int):
        body["seed"] %= 1 << 64
    for name in ("xtc_probability", "xtc_threshold"):  # mlx-lm takes floats only
        if name in body:
            body[name] = float(body[name])
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
