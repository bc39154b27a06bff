"""A script that runs the server with faults; FaultyServer starts it.

While the file ``FAULT`` says ``holds N``, no decode step of N rows or more begins, so tests can observe running
requests on a machine of any speed.

``SIGUSR1`` triggers the fault that the file ``FAULT`` names, once, in the computing thread's next decode step, while it
holds the pool's turn:

- ``raises``: raises an exception that no request causes.
- ``loops``: loops for ever in Python code.
- ``blocks``: waits for a lock that is never released.

``device PLACE`` in it, from the signal on, makes each call of one kind fail as MLX does when the device has failed:
``eval``, ``async_eval``, ``item`` (reading tokens) or ``write`` (before a prefix goes to disk).
"""

import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.engine import decode_batch
from mlx_paged.engine.decode_batch import DecodeBatch

_is_due = threading.Event()
_step = DecodeBatch.step
_fault = Path(os.environ["FAULT"])
# What MLX says once macOS ignores the process's work.
IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)


class Fault(BaseException):
    """An exception that no part of the engine catches."""


def failing(place: str, function: Any) -> Any:
    """Return the function, which fails once the device has failed at this place."""

    def call(*args: Any) -> Any:
        if _is_due.is_set() and _fault.read_text() == f"device {place}":
            raise RuntimeError(IGNORED)
        return function(*args)

    return call


def num_held() -> float:
    """Return the number of rows from which on steps are held."""
    words = _fault.read_text().split() if _fault.exists() else []
    return int(words[1]) if words[:1] == ["holds"] else math.inf


def step(self: DecodeBatch) -> Any:
    while len(self.rows) >= num_held():
        time.sleep(0.01)
    kind = _fault.read_text() if _is_due.is_set() else ""
    if not kind or kind.startswith("device"):
        return _step(self)
    _is_due.clear()
    sequence = next(iter(self.rows)).sequence
    assert sequence is not None
    with sequence.pool.lock:
        if kind == "raises":
            raise Fault("as asked")
        if kind == "blocks":
            held = threading.Lock()
            held.acquire()
            held.acquire()
        while True:
            time.sleep(0.01)


def main() -> None:
    DecodeBatch.step = step  # type: ignore[method-assign]
    mx.eval, mx.async_eval = failing("eval", mx.eval), failing("async_eval", mx.async_eval)
    mx.synchronize = failing("write", mx.synchronize)
    decode_batch._as_ints = failing("item", decode_batch._as_ints)
    signal.signal(signal.SIGUSR1, lambda *_: _is_due.set())
    from mlx_paged.cli import server

    sys.argv = sys.argv[:1] + sys.argv[2:]  # the command's name
    server.main()


if __name__ == "__main__":
    main()
