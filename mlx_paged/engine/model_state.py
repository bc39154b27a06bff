"""ModelState: what a trace of a model has read of it besides arrays, compared with the model as it is now."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import getitem, is_, itemgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

MOST_WATCHED = 1024  # objects that are no modules, such as a model's arguments

# What is the same as long as it is equal, and is never changed in place.
_CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), mx.Dtype, type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, functools.partial,
)  # fmt: skip


class StateNotKnown(Exception):
    """A model keeps something whose changes cannot be noticed."""


class Member(NamedTuple):
    """A value in a model: ``holder[key]``. Holders are modules, dicts and lists."""

    holder: Any
    key: Any
    value: Any


class ModelState:
    """The structure, classes and plain attributes of a model when this was made.

    Compared with the model before every decode step, so it is a few flat passes, in functions that run in C. No module
    and no array is kept alive: what is replaced is free to go. Plain attributes count as the same if they are equal.
    Classes are compared attribute by attribute, so a method that is replaced is seen; functions that the methods call,
    and objects without a ``__dict__``, are not looked into.

    Args:
        model: a tree of modules, dicts and lists.

    Raises:
        StateNotKnown: it keeps arrays or modules in plain attributes or in tuples.
    """

    def __init__(self, model: nn.Module) -> None:
        members = list(members_of(model))
        inner = [member for member in members if isinstance(member.value, dict | list)]
        holders = {id(each): each for each in [model, *(member.value for member in inner)]}
        modules = [each for each in holders.values() if isinstance(each, nn.Module)]
        # Modules are referred to weakly; other dicts and lists, which cannot be, are found where they are held.
        plain = {id(member.value): member for member in inner if not isinstance(member.value, nn.Module)}
        containers = [*modules, *(member.value for member in plain.values())]
        numbers = {id(each): number for number, each in enumerate(containers)}
        constants = [member for member in members if not isinstance(member.value, dict | list | mx.array)]
        self._modules = list(map(weakref.ref, modules))
        self._plain = [(numbers[id(member.holder)], member.key) for member in plain.values()]
        self._types = list(map(type, containers))
        self._lengths = list(map(len, containers))
        self._inner = _Places(inner, numbers)
        self._inner_then = _picker([numbers[id(member.value)] for member in inner])
        self._arrays = _Places([member for member in members if isinstance(member.value, mx.array)], numbers)
        self._constants = _Places(constants, numbers)
        # Of modules, and of objects that are none: attributes as they are now, and as they were.
        self._attributes: list[dict[str, Any]] = []
        self._attributes_then: list[dict[str, Any]] = []
        self._seen: dict[int, Any] = {}
        for module in modules:
            self._watch(vars(module))
        self._constants_then = [self._copy(member.value) for member in constants]
        classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__ if cls not in (dict, object))
        self._classes = list(map(vars, classes))
        self._classes_then = list(map(dict, self._classes))

    def arrays_of(self, model: nn.Module) -> list[mx.array] | None:
        """Return the model's arrays, in the order of :func:`members_of`; None if anything else is not what it was."""
        try:
            containers: list[Any] = [module() for module in self._modules]
            if containers[0] is not model:
                return None
            for holder, key in self._plain:
                containers.append(containers[holder][key])
            if (
                list(map(type, containers)) == self._types
                and list(map(len, containers)) == self._lengths
                and all(map(is_, self._inner.values(containers), self._inner_then(containers)))
                and self._attributes == self._attributes_then
                and self._classes == self._classes_then
                and list(self._constants.values(containers)) == self._constants_then
            ):
                return list(self._arrays.values(containers))
        except Exception:  # something is not there any more, or cannot be compared
            pass
        return None

    def _watch(self, attributes: dict[str, Any]) -> None:
        # Of a module's own two, `_no_grad` says what to train, and is changed in place.
        then = {name: value if name == "_no_grad" else self._copy(value) for name, value in attributes.items()}
        self._attributes.append(attributes)
        self._attributes_then.append(then)

    def _copy(self, value: Any) -> Any:
        """Return what the value is compared with later on: of what can be changed in place, a copy."""
        if isinstance(value, mx.array | nn.Module):
            raise StateNotKnown(f"{type(value).__name__} in a plain attribute or a tuple")
        if isinstance(value, types.MethodType):
            self._copy(value.__self__)
        elif isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._copy(each)
        if isinstance(value, _CONSTANTS):
            return value
        if isinstance(value, dict):
            return {key: self._copy(each) for key, each in value.items()}
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return kind(self._copy(each) for each in value)
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            if len(self._seen) > MOST_WATCHED:
                raise StateNotKnown(f"more than {MOST_WATCHED} objects that are no modules")
            if isinstance(attributes := getattr(value, "__dict__", None), dict):
                self._watch(attributes)
        return value


class _Places:
    """Places of some values in a model.

    Args:
        members: of the model.
        numbers: of the containers, by id.
    """

    def __init__(self, members: Sequence[Member], numbers: dict[int, int]) -> None:
        self._owners = _picker([numbers[id(member.holder)] for member in members])
        self._keys = [member.key for member in members]

    def values(self, containers: list[Any]) -> Iterable[Any]:
        """Return what is there now. Raises LookupError, when iterated over, where there is nothing."""
        return map(getitem, self._owners(containers), self._keys)


def _picker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function from a list to its items at these indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: [values[index] for index in indices]


def members_of(model: nn.Module) -> Iterator[Member]:
    """Every value in a model's modules, dicts and lists, those that are held in several places at each of them."""
    seen = {id(model)}
    holders: list[Any] = [model]
    for holder in holders:  # which grows meanwhile
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield Member(holder, key, value)
            if isinstance(value, dict | list) and id(value) not in seen:
                seen.add(id(value))
                holders.append(value)


@contextmanager
def substituted(model: nn.Module, arrays: Sequence[mx.array]) -> Iterator[None]:
    """Put other arrays into a model, in the order of :func:`members_of`, for the time of a ``with`` block."""
    places = [member for member in members_of(model) if isinstance(member.value, mx.array)]

    def put(values: Iterable[mx.array]) -> None:
        for (holder, key, _), value in zip(places, values, strict=True):
            (dict if isinstance(holder, dict) else list).__setitem__(holder, key, value)

    try:
        put(arrays)
        yield
    finally:
        put(member.value for member in places)
