"""ByModel: what is kept of each model as long as the model is there."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByModel(Generic[T]):
    """Values by model. By id, because modules are dicts and cannot be hashed; an entry goes when its model does."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, model: Any) -> T | None:
        entry = self._entries.get(id(model))
        return entry[1] if entry is not None and entry[0]() is model else None

    def put(self, model: Any, value: T) -> T:
        """Keep a value. Returns it."""
        entries, key = self._entries, id(model)
        entries[key] = (weakref.ref(model, lambda _: entries.pop(key, None)), value)
        return value

    def forget(self, model: Any) -> None:
        """Drop the model's value, if there is one."""
        self._entries.pop(id(model), None)

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
