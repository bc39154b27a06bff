"""What the commands show in a terminal: progress, tables, colours."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, Self, TextIO

from ..errors import PagedCacheError
from ..kv.stats import PagedCacheStats
from .prompts_file import Counts

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
        """Write text, and note an error of the stream."""
        if text:
            self._at_start = text.endswith("\n")
        with self._noting_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream, and note an error of it."""
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
    reader of stdout that has gone into status 141 without a message.

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
    with suppress(OSError):  # its reader may have gone
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


WIDTH = 30
ERASE_LINE = "\r\x1b[K"
SHOW_EVERY_SECONDS = 0.2
# Shorter prefills finish before a bar says anything.
SHOW_AFTER_SECONDS = 0.5


class Bar:
    """A bar, drawn anew as work goes on; silent where the stream is no terminal. A ``with`` block takes it away.

    Args:
        stream: where it is drawn.
        what: is being done.
    """

    def __init__(self, stream: TextIO, what: str) -> None:
        self._out = stream if stream.isatty() else None
        self._what = what
        self._begin = time.monotonic()
        self._drawn = False

    @property
    def seconds(self) -> float:
        """Return how long the work has taken."""
        return time.monotonic() - self._begin

    def draw(self, share: float, text: str) -> None:
        """Draw it: this share is done."""
        if self._out is not None:
            filled = int(WIDTH * share)
            self._out.write(f"{ERASE_LINE}{self._what}[{'#' * filled}{'.' * (WIDTH - filled)}] {text}")
            self._out.flush()
            self._drawn = True

    def clear(self) -> None:
        """Take the bar away, if there is one."""
        if self._out is not None and self._drawn:
            self._out.write(ERASE_LINE)
            self._out.flush()
        self._drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


class PrefillProgress(Bar):
    """A ``prompt_progress_callback`` that draws a bar on stderr, once prefill has taken a while."""

    def __init__(self) -> None:
        super().__init__(sys.stderr, "prefill ")

    def __call__(self, processed: int, total: int) -> None:
        """Draw the bar; clear it at the end."""
        seconds = self.seconds
        if processed >= total:
            self.clear()
        elif processed and (self._drawn or seconds > SHOW_AFTER_SECONDS):
            self.draw(processed / total, f"{processed}/{total} tokens, {processed / seconds:.0f} tokens/s")


class BatchProgress(Bar):
    """A bar for a run over many prompts."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "")
        self._shown_at = -SHOW_EVERY_SECONDS

    def show(
        self,
        counts: Counts,
        num_tokens: int,
        seconds: float,
        stats: PagedCacheStats | None,
        *,
        num_prompt_tokens: int = 0,
        underway: float = 0.0,
    ) -> None:
        """Draw the bar, if it is time to.

        Args:
            counts: prompts done, of all, failed.
            num_tokens: generated in this run.
            seconds: since it began.
            stats: of the block pool, if there is one.
            num_prompt_tokens: tokens of prompts computed in this run.
            underway: how much of the prompts that run is done, in prompts.
        """
        if self._out is None or seconds - self._shown_at < SHOW_EVERY_SECONDS:
            return
        self._shown_at = seconds
        text = f"{counts.done}/{counts.total} prompts"
        text += f", {counts.failed} failed" if counts.failed else ""
        text += f", {num_prompt_tokens:,} prompt tokens" if num_prompt_tokens else ""
        text += f", {num_tokens / max(seconds, 1e-9):.0f} tokens/s"
        if stats is not None and stats.budget_bytes:
            text += f", pool {100 * stats.bytes_in_use / stats.budget_bytes:.0f} % in use ({stats.live_blocks} blocks)"
        self.draw(min(counts.done + underway, counts.total) / max(counts.total, 1), text)
