"""Faults of one rank while all compute."""

import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.ranks.scenarios import World, prompt


def play(name: str, folder: Path) -> None:
    """Step without end; the fault ``name`` of :data:`FAULTS` happens on rank 1 on the way."""
    world = World()
    gen = world.generator(completion_batch_size=4)
    gen.insert([prompt(9, 1), prompt(5, 2)], [10**6] * 2)
    is_one = world.group.rank() == 1
    for index in itertools.count():
        if index == 30 and is_one and name in FAULTS:
            FAULTS[name](world, gen)
        world.step(gen)
        if len(world.tokens) and index % 200 == 0:  # so that no row outgrows the pool
            gen.remove(list(gen._engine.requests))
            gen.insert([prompt(9, 1), prompt(5, 2)], [10**6] * 2)


def _diverge(world: World, gen: Any) -> None:
    """Remove a request on this rank only."""
    gen.remove([min(gen._engine.requests)])


def _fail_call(world: World, gen: Any) -> None:
    def failing(self: Any, *args: Any, **options: Any) -> mx.array:
        raise ValueError("injected: the model")

    type(world.model).__call__ = failing


def _raise(world: World, gen: Any) -> None:
    """Raise outside of the engine, as a script may."""
    raise ValueError("injected: the script")


def _leave(world: World, gen: Any) -> None:
    """End the process as if all were done."""
    raise SystemExit(0)


def _raise_late(world: World, gen: Any) -> None:
    """Raise while the step is computed, not while it is built."""
    original = mx.async_eval

    def raising(*arrays: Any) -> None:
        mx.async_eval = original
        raise RuntimeError("injected: out of memory")

    mx.async_eval = raising


FAULTS = {
    "diverge": _diverge,
    "fail_call": _fail_call,
    "raise": _raise,
    "raise_late": _raise_late,
    "leave": _leave,
}
