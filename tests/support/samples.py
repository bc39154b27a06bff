"""Sweeps over several dimensions: which of their cases always run. The others are slow."""

from __future__ import annotations

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


def _pairs(case: Case) -> set[Case]:
    return set(itertools.combinations(enumerate(case), 2))
