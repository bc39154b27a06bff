"""Registry of the values kept per model (pools, layouts, configuration, ...); they are dropped with the model."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# By id(model), because modules are dicts and cannot be hashed: a weak reference to the model, and its values by kind.
_kept: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


class ByModel(Generic[T]):
    """A registry of one kind of value per model; an entry is dropped with its model.

    Args:
        what: name of the kind, which is the key in :func:`kept_of`.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def get(self, model: Any) -> T | None:
        """Return the model's value, or None."""
        return _values_of(model).get(self.what)

    def put(self, model: Any, value: T) -> T:
        """Keep a value for the model and return it."""
        key = id(model)
        # setdefault is atomic: threads share one entry.
        entry = _kept.setdefault(key, (weakref.ref(model, lambda _: _kept.pop(key, None)), {}))
        entry[1][self.what] = value
        return value

    def clear(self) -> None:
        """Drop the values of all models."""
        for _, values in list(_kept.values()):
            values.pop(self.what, None)

    def models(self) -> list[Any]:
        """Return the models that have a value."""
        found = [ref() for ref, values in list(_kept.values()) if self.what in values]
        return [model for model in found if model is not None]


def kept_of(model: Any) -> dict[str, Any]:
    """Return a copy of all values kept for a model or a pool, by kind.

    Example:
        >>> sorted(kept_of(model))
        ['layouts', 'lock of calls', 'pools']
    """
    return dict(_values_of(model))


def _values_of(model: Any) -> dict[str, Any]:
    """Return the model's own dict of values, or a new empty one that is not kept."""
    entry = _kept.get(id(model))
    return entry[1] if entry is not None and entry[0]() is model else {}
