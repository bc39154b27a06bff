"""place_of_fault(): where in a JSON schema something is that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
SHARED = ("$defs", "definitions")  # what references of any part lead to
MOST_TRIALS = 200


def place_of_fault(schema: Any, fault: str, fault_of: Callable[[Any], str]) -> str:
    """A JSON pointer, ``#`` for the whole, to the innermost part that has the same fault alone.

    Args:
        schema: parsed.
        fault: what is wrong with it.
        fault_of: says what is wrong with a schema, or nothing.
    """
    place, part, trials = "#", schema, 0
    visited = {place}
    while isinstance(part, dict):
        for where, child in _parts(schema, place, part):
            trials += 1
            if trials > MOST_TRIALS:
                return place
            if where not in visited and fault_of(_alone(schema, child)) == fault:
                place, part = where, child
                visited.add(place)
                break
        else:
            return place
    return place


def _parts(schema: Any, place: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each schema within one, or that it refers to, and where it is."""
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = schema
        for name in reference[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        if target is not None:
            yield reference, target
    for key in OF_SCHEMAS:
        if key not in SHARED and isinstance(part.get(key), dict):
            yield from ((f"{place}/{key}/{escaped(name)}", child) for name, child in part[key].items())
    for key in LISTS:
        if isinstance(part.get(key), list):
            yield from ((f"{place}/{key}/{index}", child) for index, child in enumerate(part[key]))
    yield from ((f"{place}/{key}", part[key]) for key in SINGLE if key in part)


def _alone(schema: Any, part: Any) -> Any:
    shared = {key: schema[key] for key in SHARED if key in schema}
    return {**shared, **part} if isinstance(part, dict) else part


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return json.dumps(name)[1:-1].replace("~", "~0").replace("/", "~1")
