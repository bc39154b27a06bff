"""Inference: a section in which kernels of this package may replace layers of a model."""

from __future__ import annotations

import threading

import mlx.core as mx

# Bytes of dequantised weights after which the host waits for earlier ones. MLX frees nothing that a graph uses before
# that graph has run, and the host is a whole prompt ahead of the GPU.
BYTES_AHEAD = 256 << 20


class Pace:
    """A limit on the memory that a model call's dequantised weights take at a time.

    Attributes:
        num_bytes: bytes of weights since the last mark.
        mark: an array that is being computed; the next mark waits for it.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.mark: mx.array | None = None

    def make_way(self, x: mx.array, num_bytes: int) -> bool:
        """Wait for earlier weights if a weight of ``num_bytes``, to be multiplied with x, exceeds the limit. Return
        False if nothing can be computed yet, as in a function that is being traced."""
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
    pace: Pace | None = None  # that of the section that the thread is in


_thread = _ThreadState()


class Inference:
    """A section in which, in this thread, kernels of this package may multiply and weights may be dequantised: a model
    call whose results are computed in the order in which they are requested, and are not differentiated. Kernels have
    no gradient, and a gradient would keep all dequantised weights.

    Args:
        allowed: False forbids both.
    """

    def __init__(self, *, allowed: bool = True) -> None:
        self._pace = Pace() if allowed else None

    def __enter__(self) -> None:
        self._outer, _thread.pace = _thread.pace, self._pace

    def __exit__(self, *_: object) -> None:
        _thread.pace = self._outer


def pace() -> Pace | None:
    """Return the section's limit on dequantised weights; None if no weight may be dequantised."""
    return _thread.pace
