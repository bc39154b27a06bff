"""One registry of what is kept of each model, as long as the model is there: its pools, layouts, configuration, ..."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# By id, because modules are dicts and cannot be hashed: the model, and its values by what they are.
_kept: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


class ByModel(Generic[T]):
    """One kind of value that is kept of models; an entry goes when its model does.

    Args:
        what: the values are, in :func:`kept_of`.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def get(self, model: Any) -> T | None:
        """Return the model's value, or None."""
        return _values_of(model).get(self.what)

    def put(self, model: Any, value: T) -> T:
        """Keep a value. Returns it."""
        key = id(model)
        entry = _kept.setdefault(key, (weakref.ref(model, lambda _: _kept.pop(key, None)), {}))  # of threads, one's
        entry[1][self.what] = value
        return value

    def forget(self, model: Any) -> None:
        """Drop the model's value, if there is one."""
        _values_of(model).pop(self.what, None)

    def clear(self) -> None:
        """Drop the values of all models."""
        for _, values in list(_kept.values()):
            values.pop(self.what, None)

    def __len__(self) -> int:
        return sum(self.what in values for _, values in list(_kept.values()))


def kept_of(model: Any) -> dict[str, Any]:
    """Return what is kept of a model, by what it is; of a pool, likewise.

    Example:
        >>> sorted(kept_of(model))
        ['layouts', 'pools']
    """
    return dict(_values_of(model))


def _values_of(model: Any) -> dict[str, Any]:
    """Return the model's values, to be changed where there are any."""
    entry = _kept.get(id(model))
    return entry[1] if entry is not None and entry[0]() is model else {}
