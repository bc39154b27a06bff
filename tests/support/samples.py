"""Sweeps over several dimensions: which of their cases always run. The others are slow."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

Case = tuple[Any, ...]


def each_value(first: Sequence[Any], *others: Sequence[Any], times: int = 1) -> list[Any]:
    """Every combination; always run some in which each value of each dimension occurs, those of the other dimensions
    with so many neighbours of the first."""
    count = max(map(len, (first, *others)))
    sample = [
        (first[(i + shift) % len(first)], *(values[i % len(values)] for values in others))
        for shift in range(times)
        for i in range(count)
    ]
    return sampled((first, *others), sample)


def each_pair(*dimensions: Sequence[Any]) -> list[Any]:
    """Every combination; always run some in which each pair of values of two dimensions occurs."""
    cases = list(itertools.product(*(range(len(values)) for values in dimensions)))
    missing = {pair for case in cases for pair in _pairs(case)}
    sample: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        sample.append(tuple(values[i] for values, i in zip(dimensions, best, strict=True)))
    return sampled(dimensions, sample)


def sampled(dimensions: Iterable[Sequence[Any]], sample: Sequence[Case]) -> list[Any]:
    """Every combination, for ``parametrize``: those of the sample, and as slow tests the others."""
    cases = list(itertools.product(*dimensions))
    assert all(case in cases for case in sample)
    return [case if case in sample else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def mark_surplus(items: Iterable[pytest.Item]) -> None:
    """Of tests with the mark ``sample`` always run some cases in which each value of each dimension occurs, or, with
    ``every=n``, each n-th case and those with ``keep`` in their name; the others are made slow."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("sample") is None:
            continue
        if item.get_closest_marker("slow") is None and item.get_closest_marker("gpu") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        mark = group[0].get_closest_marker("sample")
        assert mark is not None
        kept = _covering(group)
        if mark.kwargs:
            keep = mark.kwargs.get("keep")
            kept = group[:: mark.kwargs["every"]] + [item for item in group if keep is not None and keep in item.name]
        for item in group:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _covering(cases: list[pytest.Function]) -> list[pytest.Function]:
    values = [_values(case) for case in cases]
    missing, kept = set().union(*values), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(missing & values[i]))
        missing -= values[best]
        kept.append(cases[best])
    return kept


def _values(case: pytest.Function) -> set[Case]:
    """The value of each dimension: of the names of one ``parametrize`` together, and of a fixture's parameters."""
    params = case.callspec.params
    marks = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [
        tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names for names in marks
    ]
    named = {name for names in together for name in names}
    dimensions = [*together, *((name,) for name in params if name not in named)]
    return {(names, tuple(repr(params[name]) for name in names)) for names in map(tuple, dimensions)}


def _pairs(case: Case) -> set[Case]:
    return set(itertools.combinations(enumerate(case), 2))
