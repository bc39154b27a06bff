"""ModelState: the modules and arrays that a trace has of a model, to be compared with the model later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import getitem, is_, itemgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn


class Member(NamedTuple):
    """A value in a model: ``holder[key]``. Holders are modules, dicts and lists."""

    holder: Any
    key: Any
    value: Any


class ModelState:
    """What a trace has of a model: its modules, dicts and lists, and the arrays in them.

    It is compared with the model before every decode step, by identity, in a few flat passes that run in C. A replaced
    array, module, layer or class is noticed; a changed plain attribute of a module (a factor, a flag) is not: see
    :func:`mlx_paged.retrace`. Arrays that the model itself assigns in a step are not compared (Gemma 3n clips some
    weights in each). It keeps the arrays alive, and no module.

    Args:
        model: a tree of modules, dicts and lists.
    """

    def __init__(self, model: nn.Module) -> None:
        members = list(_members_of(model))
        inner = [member for member in members if isinstance(member.value, dict | list)]
        holders = {id(each): each for each in [model, *(member.value for member in inner)]}
        modules = [each for each in holders.values() if isinstance(each, nn.Module)]
        # Modules are referenced weakly. Other dicts and lists cannot be: they are looked up in their holders.
        plain = {id(member.value): member for member in inner if not isinstance(member.value, nn.Module)}
        containers = [*modules, *(member.value for member in plain.values())]
        numbers = {id(each): number for number, each in enumerate(containers)}
        arrays = [member for member in members if isinstance(member.value, mx.array)]
        self.arrays = [member.value for member in arrays]
        self._modules = list(map(weakref.ref, modules))
        self._plain = [(numbers[id(member.holder)], member.key) for member in plain.values()]
        self._types = list(map(type, containers))
        self._lengths = list(map(len, containers))
        self._inner = _Places(inner, numbers)
        self._inner_then = _picker([numbers[id(member.value)] for member in inner])
        self._arrays = _Places(arrays, numbers)
        self._assigned: list[int] = []  # numbers of arrays that the model itself assigns

    def is_of(self, model: nn.Module) -> bool:
        """Return whether this is what the model is made of at present."""
        try:
            containers = self._containers()
            arrays = list(self._arrays.values(containers))
            for number in self._assigned:
                arrays[number] = self.arrays[number]
            return (
                containers[0] is model
                and list(map(type, containers)) == self._types
                and list(map(len, containers)) == self._lengths
                and all(map(is_, self._inner.values(containers), self._inner_then(containers)))
                and all(map(is_, arrays, self.arrays))
            )
        except (LookupError, TypeError):  # something is gone
            return False

    def put_back(self) -> None:
        """Put back the arrays that the model has assigned while a step was traced, and compare them no more."""
        containers = self._containers()
        for number, array in enumerate(self._arrays.values(containers)):
            if array is not self.arrays[number]:
                self._arrays.assign(containers, number, self.arrays[number])
                self._assigned.append(number)

    def _containers(self) -> list[Any]:
        """Return the present modules, dicts and lists. Raises LookupError or TypeError if one is gone."""
        containers: list[Any] = [module() for module in self._modules]
        for holder, key in self._plain:
            containers.append(containers[holder][key])
        return containers


class _Places:
    """Places of some values in a model: container and key.

    Args:
        members: the values.
        numbers: number of each container, by id.
    """

    def __init__(self, members: Sequence[Member], numbers: dict[int, int]) -> None:
        self._numbers = [numbers[id(member.holder)] for member in members]
        self._owners = _picker(self._numbers)
        self._keys = [member.key for member in members]

    def values(self, containers: list[Any]) -> Iterable[Any]:
        """Return the present values. Iterating over them raises LookupError if one is missing."""
        return map(getitem, self._owners(containers), self._keys)

    def assign(self, containers: list[Any], number: int, value: Any) -> None:
        """Put a value in one of the places."""
        holder = containers[self._numbers[number]]
        (dict if isinstance(holder, dict) else list).__setitem__(holder, self._keys[number], value)


def _picker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function from a list to its items at these indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: [values[index] for index in indices]


def _members_of(model: nn.Module) -> Iterator[Member]:
    """Yield every value in a model's modules, dicts and lists; one that is held in several places, at each of them."""
    seen = {id(model)}
    holders: list[Any] = [model]
    for holder in holders:  # grows meanwhile
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield Member(holder, key, value)
            if isinstance(value, dict | list) and id(value) not in seen:
                seen.add(id(value))
                holders.append(value)
