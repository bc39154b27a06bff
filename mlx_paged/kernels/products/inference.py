"""Inference: a section in which kernels of this package may stand in for layers of a model, and layers share angles."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx

# Of dequantised weights that are needed before the host waits for those before them. MLX frees nothing that a launch
# of its graph uses before that graph has run, and a GPU's host is a whole prompt ahead of it.
BYTES_AHEAD = 256 << 20


class Pace:
    """What bounds the dequantised weights of a model call.

    Attributes:
        num_bytes: of those since the last mark.
        mark: what is being computed, and waited for at the next mark.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.mark: mx.array | None = None

    def make_way(self, x: mx.array, num_bytes: int) -> bool:
        """Make way for a weight of so many bytes that x is multiplied with. False where nothing can be computed yet,
        as in a function that is being traced."""
        if self.num_bytes and self.num_bytes + num_bytes > BYTES_AHEAD:
            try:
                mx.async_eval(x)
            except ValueError:
                return False
            if self.mark is not None:
                mx.eval(self.mark)
            self.mark, self.num_bytes = x, 0
        self.num_bytes += num_bytes
        return True


class _ThreadState(threading.local):
    inference: Inference | None = None  # that the thread is in


_thread = _ThreadState()


class Inference:
    """A section in which, in this thread, kernels of this package may multiply, and weights may be dequantised: a call
    of a model whose results are computed in the order they are asked for, and are not differentiated (kernels have no
    gradient, and one would keep all dequantised weights).

    Args:
        allowed: False for a section in which neither is done.
        dequantizes: False for one in which no weight is.
        shares_angles: rotary positions are computed once for all layers.
    """

    def __init__(self, *, allowed: bool = True, dequantizes: bool = True, shares_angles: bool = False) -> None:
        self.allowed = allowed
        self.angles: dict[Any, tuple[Any, mx.array, mx.array]] | None = {} if shares_angles else None
        self.pace = Pace() if allowed and dequantizes else None

    def __enter__(self) -> None:
        self._outer, _thread.inference = _thread.inference, self

    def __exit__(self, *_: object) -> None:
        _thread.inference = self._outer


def is_inference() -> bool:
    """Return whether kernels may stand in for layers here."""
    return _thread.inference is not None and _thread.inference.allowed


def pace() -> Pace | None:
    """Return what bounds dequantised weights here; None where none may be dequantised."""
    return None if _thread.inference is None else _thread.inference.pace


def angles() -> dict[Any, tuple[Any, mx.array, mx.array]] | None:
    """Return what layers of this section have computed of rotary positions; None where they share nothing."""
    return None if _thread.inference is None else _thread.inference.angles
