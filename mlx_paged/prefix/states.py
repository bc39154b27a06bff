"""SavedStates: the states of a checkpoint in the form of a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx


class SavedStates(NamedTuple):
    """States of a checkpoint in the form of a file. They become caches when a sequence adopts them.

    Attributes:
        text: JSON list of each cache's class and state, with names in place of arrays.
        arrays: the arrays by name.
    """

    text: str
    arrays: dict[str, mx.array]

    @classmethod
    def of(cls, caches: Sequence[Any]) -> SavedStates:
        """Return the states of caches that have mlx-lm's attribute ``state``."""
        arrays: dict[str, mx.array] = {}
        described = [[type(cache).__name__, _described(cache.state, arrays)] for cache in caches]
        return cls(json.dumps(described), arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def fill(self, caches: Sequence[Any]) -> list[Any]:
        """Give the states to ``caches``, fresh ones of the same classes, and return them.

        Raises:
            ValueError: the caches are of other classes, or the text is not JSON.
        """
        described = json.loads(self.text)
        if [name for name, _ in described] != [type(cache).__name__ for cache in caches]:
            raise ValueError("the states belong to other layers")
        for cache, (_, state) in zip(caches, described, strict=True):
            cache.state = _value(state, self.arrays)
        return list(caches)


def _described(value: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(value, mx.array):
        name = f"s{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, list):
        return [_described(each, arrays) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_described(each, arrays) for each in value]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"a state with {type(value).__name__} cannot be written")


def _value(described: Any, arrays: dict[str, mx.array]) -> Any:
    if isinstance(described, dict):
        if "array" in described:
            return mx.array(arrays[described["array"]])  # a copy: caches write into their arrays
        return tuple(_value(each, arrays) for each in described["tuple"])
    if isinstance(described, list):
        return [_value(each, arrays) for each in described]
    return described
