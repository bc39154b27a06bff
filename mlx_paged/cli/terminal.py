"""How a command ends: errors on a line of their own, and quietly when the user interrupts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from ..errors import PagedCacheError

INTERRUPTED = 130  # exit status of a program that SIGINT ended


class LineTracker:
    """A text stream that knows whether its last line has ended.

    Args:
        stream: where everything goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True

    def write(self, text: str) -> int:
        if text:
            self._at_start = text.endswith("\n")
        return self._stream.write(text)

    def end_line(self) -> None:
        """Begin a new line, if the present one holds anything."""
        if not self._at_start:
            self.write("\n")
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def orderly_end(command: str) -> Iterator[None]:
    """Turn what ends a command into its exit: this package's errors into one line, an interrupt into status 130.

    Args:
        command: named before an error.

    Raises:
        SystemExit: for a PagedCacheError, with its message, or for a KeyboardInterrupt.
    """
    stdout = sys.stdout
    tracker = LineTracker(stdout)
    sys.stdout = tracker  # type: ignore[assignment]
    try:
        yield
    except PagedCacheError as error:
        _end_line(tracker)
        sys.exit(f"{command}: {error}")
    except KeyboardInterrupt as interrupt:
        _end_line(tracker)
        if sys.stderr.isatty():
            print(file=sys.stderr)  # behind the ^C of the terminal
        if interrupt.args:
            print(f"{command}: {interrupt}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        sys.stdout = stdout


def _end_line(tracker: LineTracker) -> None:
    with suppress(OSError):  # whoever reads it may have gone
        tracker.end_line()
