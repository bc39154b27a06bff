"""The server, with faults: a script to run in its place, as FaultyServer does.

While the file ``FAULT`` says ``holds N``, no decode step of N rows or more begins: what runs is seen running, however
busy the machine is.

``SIGUSR1`` has the thread that computes meet the fault that the file ``FAULT`` names, once, in its next decode step,
while it has the pool's turn:

- ``raises``: an exception that is no error of a request.
- ``loops``: it goes on for ever in code of Python.
- ``blocks``: it waits for a lock that nobody gives back.
- ``loses``: as ``raises``, and a block of the pool is held by nobody.
"""

import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlx_paged.engine.decode_batch import DecodeBatch

_is_due = threading.Event()
_reserve = DecodeBatch.reserve
_fault = Path(os.environ["FAULT"])


class Fault(BaseException):
    """What no part of the engine catches."""


def num_held() -> float:
    """Return from how many rows on steps are held."""
    words = _fault.read_text().split() if _fault.exists() else []
    return int(words[1]) if words[:1] == ["holds"] else math.inf


def reserve(self: DecodeBatch) -> Any:
    while len(self.rows) >= num_held():
        time.sleep(0.01)
    if not _is_due.is_set():
        return _reserve(self)
    _is_due.clear()
    kind = _fault.read_text()
    sequence = next(iter(self.rows)).sequence
    assert sequence is not None
    with sequence.pool.turn:
        if kind == "raises":
            raise Fault("as asked")
        if kind == "loses":
            sequence.pool.groups[0].allocator.allocate(1)
            raise Fault("as asked")
        if kind == "blocks":
            held = threading.Lock()
            held.acquire()
            held.acquire()
        while True:
            time.sleep(0.01)


def main() -> None:
    DecodeBatch.reserve = reserve  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: _is_due.set())
    from mlx_paged.cli import server

    sys.argv = sys.argv[:1] + sys.argv[2:]  # the command's name
    server.main()


if __name__ == "__main__":
    main()
