"""Patch: a symbol of mlx-lm and its replacement, and their registration; replaced(): a temporary replacement."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

_MODELS = "mlx_lm.models"
_SHARED = (f"{_MODELS}.base", f"{_MODELS}.cache")  # modules that all models use

Adapter = TypeVar("Adapter", bound=Callable[..., Any])


class Patch(NamedTuple):
    """One upstream symbol and its replacement.

    Attributes:
        module: upstream module.
        name: a function of the module, or ``Class.method``.
        fingerprint: fingerprint of the upstream source the replacement was written for (see :func:`fingerprint`).
        adapt: takes the original and returns its replacement.
        only_cuda: the symbol is replaced only on CUDA; elsewhere the replacement has no advantage.
    """

    module: str
    name: str
    fingerprint: str
    adapt: Callable[..., Any]
    only_cuda: bool = False

    @property
    def target(self) -> str:
        """Full name of the symbol."""
        return f"{self.module}.{self.name}"

    @property
    def can_wait(self) -> bool:
        """Return whether the symbol belongs to a model's module that has not been imported yet."""
        is_of_model = self.module.startswith(f"{_MODELS}.") and self.module not in _SHARED
        return is_of_model and self.module not in sys.modules


PATCHES: list[Patch] = []


def replaces(target: str, fingerprint: str, *, only_cuda: bool = False) -> Callable[[Adapter], Adapter]:
    """Return a decorator that registers a function from an upstream symbol to its replacement.

    Args:
        target: ``module:function`` or ``module:Class.method``.
        fingerprint, only_cuda: see :class:`Patch`.
    """
    module, _, name = target.partition(":")

    def register(adapt: Adapter) -> Adapter:
        PATCHES.append(Patch(module, name, fingerprint, adapt, only_cuda))
        return adapt

    return register


def fingerprint(symbol: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of a function's source, dedented and without blank lines."""
    lines = inspect.cleandoc("\n" + inspect.getsource(symbol)).splitlines()
    return hashlib.sha256("\n".join(line.rstrip() for line in lines if line.strip()).encode()).hexdigest()[:16]


@contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Set attributes of a module within a ``with`` block."""
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
