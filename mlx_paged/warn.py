"""One warning per reason: what falls through to stock mlx-lm says why, once. What is slow says so on a terminal."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SLOW_SECONDS = 1.0

_given: set[str] = set()
_told: set[str] = set()


class NotPagedWarning(UserWarning):
    """Something runs on stock mlx-lm instead of the paged cache; results are the same."""


def warn_once(reason: str, category: type[Warning] = NotPagedWarning) -> None:
    """Warn, of a fall-through unless another category is given, if the same was not said before in this process."""
    if reason not in _given:
        _given.add(reason)
        warnings.warn(f"mlx_paged: {reason}", category, stacklevel=3)


def forget_warnings() -> None:
    """Give every reason again from now on."""
    _given.clear()


@contextmanager
def warn_when_slow(what: str) -> Iterator[None]:
    """Print a line on stderr, if that is a terminal, when what runs inside takes more than a second; once for each
    ``what`` in a process."""
    if what in _told or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, _tell, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(what: str) -> None:
    if what not in _told:
        _told.add(what)
        with suppress(OSError, ValueError):  # its reader may have gone
            print(f"mlx_paged: {what}", file=sys.stderr, flush=True)
