"""ModelState: all that a trace has read of a model besides arrays, to be compared with the model later."""

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

from ..errors import check_device

MOST_WATCHED = 1024  # most objects that are not modules, such as a model's arguments

# Values that are never changed in place: they are compared by equality, and not copied.
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
    """A snapshot of a model's structure, classes and plain attributes.

    It is compared with the model before every decode step, in a few flat passes that run in C. It keeps no module and
    no array alive. Plain attributes are compared by equality. Classes are compared attribute by attribute, so a
    replaced method is noticed; functions that methods call, and objects without a ``__dict__``, are not inspected.

    Args:
        model: a tree of modules, dicts and lists.

    Raises:
        StateNotKnown: it keeps arrays or modules in plain attributes or tuples, or more than 1,024 other objects.
    """

    def __init__(self, model: nn.Module) -> None:
        members = list(members_of(model))
        inner = [member for member in members if isinstance(member.value, dict | list)]
        holders = {id(each): each for each in [model, *(member.value for member in inner)]}
        modules = [each for each in holders.values() if isinstance(each, nn.Module)]
        # Modules are referenced weakly. Other dicts and lists cannot be: they are looked up in their holders.
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
        # Attributes of modules and of other objects: the live dicts, and copies made here.
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
        """Return the model's arrays, in the order of :func:`members_of`; None if anything else has changed."""
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
        except Exception as error:  # something is gone, or cannot be compared
            check_device(error)
        return None

    def _watch(self, attributes: dict[str, Any]) -> None:
        # `_no_grad`, the names of a module's frozen parameters, matters only in training: changes in place are ignored.
        then = {name: value if name == "_no_grad" else self._copy(value) for name, value in attributes.items()}
        self._attributes.append(attributes)
        self._attributes_then.append(then)

    def _copy(self, value: Any) -> Any:
        """Return what the value is compared with later: a copy if it can be changed in place."""
        if isinstance(value, mx.array | nn.Module):
            raise StateNotKnown(f"a plain attribute or a tuple holds a value of type {type(value).__name__}")
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
                raise StateNotKnown(f"the model refers to more than {MOST_WATCHED} objects that are not modules")
            if isinstance(attributes := getattr(value, "__dict__", None), dict):
                self._watch(attributes)
        return value


class _Places:
    """Places of some values in a model: container and key.

    Args:
        members: the values.
        numbers: number of each container, by id.
    """

    def __init__(self, members: Sequence[Member], numbers: dict[int, int]) -> None:
        self._owners = _picker([numbers[id(member.holder)] for member in members])
        self._keys = [member.key for member in members]

    def values(self, containers: list[Any]) -> Iterable[Any]:
        """Return the present values. Iterating over them raises LookupError if one is missing."""
        return map(getitem, self._owners(containers), self._keys)


def _picker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function from a list to its items at these indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: [values[index] for index in indices]


def members_of(model: nn.Module) -> Iterator[Member]:
    """Yield every value in a model's modules, dicts and lists; one that is held in several places, at each of them."""
    seen = {id(model)}
    holders: list[Any] = [model]
    for holder in holders:  # grows meanwhile
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield Member(holder, key, value)
            if isinstance(value, dict | list) and id(value) not in seen:
                seen.add(id(value))
                holders.append(value)


@contextmanager
def substituted(model: nn.Module, arrays: Sequence[mx.array]) -> Iterator[None]:
    """Replace a model's arrays, in the order of :func:`members_of`, within a ``with`` block."""
    places = [member for member in members_of(model) if isinstance(member.value, mx.array)]

    def put(values: Iterable[mx.array]) -> None:
        for (holder, key, _), value in zip(places, values, strict=True):
            (dict if isinstance(holder, dict) else list).__setitem__(holder, key, value)

    try:
        put(arrays)
        yield
    finally:
        put(member.value for member in places)
