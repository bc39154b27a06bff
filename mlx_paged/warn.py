"""Warnings that are given once per reason, mostly of fallbacks to stock mlx-lm; and notices of slow work."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SLOW_SECONDS = 1.0

_given: set[str] = set()
_printed: set[str] = set()


class NotPagedWarning(UserWarning):
    """Something runs on stock mlx-lm instead of the paged cache; results are the same."""


def warn_once(reason: str, category: type[Warning] = NotPagedWarning) -> None:
    """Warn, if this reason was not given before in this process; by default of a fallback to stock mlx-lm."""
    if reason not in _given:
        _given.add(reason)
        warnings.warn(f"mlx_paged: {reason}", category, stacklevel=3)


def forget_warnings() -> None:
    """Forget which reasons were given, so that all are given again."""
    _given.clear()


@contextmanager
def warn_when_slow(what: str) -> Iterator[None]:
    """Print ``what`` on stderr, if that is a terminal, when the block takes more than a second; once per ``what`` and
    process."""
    if what in _printed or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(SLOW_SECONDS, _print_notice, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_notice(what: str) -> None:
    if what not in _printed:
        _printed.add(what)
        with suppress(OSError, ValueError):  # its reader may have gone
            print(f"mlx_paged: {what}", file=sys.stderr, flush=True)
