"""How a command ends: errors in one line, quiet when interrupted or when its reader has gone. Checks of its flags."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, TextIO

from ..errors import PagedCacheError

INTERRUPTED = 130  # exit status of a program that SIGINT ended
NOBODY_READS = 141  # and of one that SIGPIPE ended


def version_text() -> str:
    """Return the versions of this package, mlx-lm and MLX, in one line."""
    from .. import __version__

    others = []
    for name in ("mlx-lm", "mlx"):
        with suppress(metadata.PackageNotFoundError):
            others.append(f"{name} {metadata.version(name)}")
    return f"mlx_paged {__version__} ({', '.join(others)})"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version`` to a command's flags."""
    parser.add_argument("--version", action="version", version=version_text())


def whole_number(least: int, most: int | None = None, *, also: int | None = None) -> Callable[[str], int]:
    """Return a type of argparse: a whole number from ``least`` to ``most``, or ``also``."""
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    if also is not None:
        allowed += f", or {also} for no limit"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}") from None
        if value != also and (value < least or (most is not None and value > most)):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {value}")
        return value

    return convert


def restrict(parser: argparse.ArgumentParser, flag: str, convert: Callable[[str], Any]) -> None:
    """Check the values of a flag that mlx-lm's parser has, if this version has it."""
    action = parser._option_string_actions.get(flag)
    if action is not None:
        action.type = convert


class LineTracker:
    """A text stream that knows whether its last line has ended, and why it could not be written.

    Args:
        stream: where everything goes.

    Attributes:
        error: what the stream raised last.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        if text:
            self._at_start = text.endswith("\n")
        with self._noting_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._noting_errors():
            self._stream.flush()

    def end_line(self) -> None:
        """Begin a new line, if the present one holds anything."""
        if not self._at_start:
            self.write("\n")
        self.flush()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def orderly_end(command: str) -> Iterator[None]:
    """Turn what ends a command into its exit: this package's errors into one line, an interrupt into status 130, a
    reader of stdout that has gone into status 141 without a word.

    Args:
        command: named before an error.

    Raises:
        SystemExit: for a PagedCacheError or a stdout that cannot be written, with a message; for a KeyboardInterrupt.
    """
    stdout = sys.stdout
    tracker = LineTracker(stdout)
    sys.stdout = tracker  # type: ignore[assignment]
    try:
        yield
        tracker.flush()
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
    except OSError as error:
        if error is not tracker.error:
            raise
        if isinstance(error, BrokenPipeError):
            sys.exit(NOBODY_READS)
        sys.exit(f"{command}: stdout cannot be written: {error}")
    finally:
        sys.stdout = stdout
        _let_go_of_unwritable(stdout)


def _end_line(tracker: LineTracker) -> None:
    with suppress(OSError):  # whoever reads it may have gone
        tracker.end_line()


def _let_go_of_unwritable(stdout: TextIO) -> None:
    """Send what a stream still holds nowhere if it cannot be written: Python would try again at its exit, and report
    an error of its own."""
    try:
        stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stdout.fileno())
            os.close(nowhere)
