"""Cases of sweeps for ``parametrize``: those that always run are listed, the others are slow. Random histories."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def slow(*cases: Any, single: bool = False) -> list[Any]:
    """Mark cases as slow. ``single``: a case that is a tuple is one value."""
    values = [case if isinstance(case, tuple) and not single else (case,) for case in cases]
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


def quick(cases: Iterable[Any], *always: Any, single: bool = False) -> list[Any]:
    """Mark all cases as slow that are neither listed nor marked already."""
    given = list(cases)
    assert all(case in given for case in always), "listed cases must be among the cases"
    return [c if c in always or hasattr(c, "marks") else slow(c, single=single)[0] for c in given]


def crossed(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return every combination of one value per dimension."""
    return list(itertools.product(*dimensions))


def run_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run a state machine through the same random examples in every run."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    options: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": checks}
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps, **options))
