"""long_numbers(): the numbers of a JSON schema that whoever reads it may read as their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from .schema_fault import escaped

# So many digits, and powers of ten, are read exactly by every parser that reckons in doubles.
DIGITS, POWER = 15, 22


def long_numbers(schema: Any, place: str = "#") -> Iterator[tuple[str, float]]:
    """Numbers with more digits or larger powers, wherever they stand, and a JSON pointer to each.

    Args:
        schema: parsed.
        place: of it.
    """
    if isinstance(schema, float):
        _, digits, power = Decimal(repr(schema)).normalize().as_tuple()
        if len(digits) > DIGITS or not isinstance(power, int) or abs(power) > POWER:
            yield place, schema
    elif isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from long_numbers(each, f"{place}/{index}")
    elif isinstance(schema, dict):
        for name, each in schema.items():
            yield from long_numbers(each, f"{place}/{escaped(name)}")
