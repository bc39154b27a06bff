"""Write random JSON schemas that hypothesis-jsonschema draws, for eval_grammar.py.

    pip install hypothesis-jsonschema "hypothesis<6.130"   # in an environment of its own
    python scripts/grammar/random_schemas.py --count 300 > schemas.json
    python scripts/grammar/eval_grammar.py --dequantize --schemas-file schemas.json

What is drawn are instances of a schema of schemas: objects, arrays, strings, numbers, enumerations, constants and
alternatives, with any names and any constants, three levels deep. Names of required properties are put in
afterwards, as no schema can say that they are some of an object's own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis_jsonschema import from_schema

SCALAR = {"type": ["string", "integer", "number", "boolean", "null"], "maxLength": 20, "minimum": -1e9, "maximum": 1e9}


def _number(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _kind(name: str, **fields: Any) -> dict[str, Any]:
    """A schema of schemas of one type; fields are there or not, but for those in ``properties``."""
    properties = {"type": {"const": name}, **fields}
    required = ["type", *(field for field in ("properties", "items") if field in fields)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schema_of_schemas(depth: int) -> dict[str, Any]:
    """Of anything, with so many levels below."""
    kinds: list[dict[str, Any]] = [
        _kind("string", minLength=_number(0, 3), maxLength=_number(3, 15)),
        _kind("integer", minimum=_number(-50, 0), maximum=_number(1, 100)),
        _kind("number", minimum=_number(-50, 0), exclusiveMaximum=_number(1, 100)),
        {"enum": [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]},
        _one("enum", {"type": "array", "items": SCALAR, "minItems": 1, "maxItems": 4, "uniqueItems": True}),
        _one("const", SCALAR),
    ]
    if depth:
        inner = schema_of_schemas(depth - 1)
        kinds += [
            object_schemas(inner),
            _kind("array", items=inner, minItems=_number(0, 2), maxItems=_number(2, 3)),
            _one("anyOf", {"type": "array", "items": inner, "minItems": 1, "maxItems": 3}),
        ]
    return {"anyOf": kinds}


def _one(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: value}, "required": [name], "additionalProperties": False}


def object_schemas(inner: dict[str, Any]) -> dict[str, Any]:
    named = {"type": "object", "propertyNames": {"maxLength": 12}, "additionalProperties": inner}
    named |= {"minProperties": 1, "maxProperties": 3}
    return _kind("object", properties=named, additionalProperties={"const": False})


def _settled(part: Any, rng: random.Random) -> Any:
    """Some of each object's properties are required, and strings have characters of the first two planes: others, most
    of them private, tokenizers may have no bytes for."""
    if isinstance(part, str):
        return "".join(character if ord(character) < 0x20000 else chr(ord(character) % 0xD800) for character in part)
    if isinstance(part, list):
        return [_settled(each, rng) for each in part]
    if not isinstance(part, dict):
        return part
    settled = {_settled(name, rng): _settled(each, rng) for name, each in part.items()}
    if settled.get("type") == "object":
        settled["required"] = [name for name in settled["properties"] if rng.random() < 0.7]
    return settled


def schemas(count: int, number: int) -> list[dict[str, Any]]:
    """So many, each another one."""
    found: dict[str, dict[str, Any]] = {}

    @seed(number)
    @settings(
        max_examples=count + count // 3,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(from_schema(object_schemas(schema_of_schemas(1))))
    def collect(schema: dict[str, Any]) -> None:
        found.setdefault(json.dumps(schema, sort_keys=True), schema)

    collect()
    rng = random.Random(number)
    chosen = rng.sample(sorted(found), min(count, len(found)))
    return [_settled(json.loads(text), rng) for text in chosen]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    json.dump(schemas(arguments.count, arguments.seed), sys.stdout, indent=1)
