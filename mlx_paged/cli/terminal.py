"""What the commands show in a terminal: progress, tables, colours."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, TextIO

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
ERASE_LINE = "\x1b[K"
SHOW_EVERY_SECONDS = 0.2
# Shorter prefills finish before a bar says anything.
SHOW_AFTER_SECONDS = 0.5


class PrefillProgress:
    """A ``prompt_progress_callback`` that draws a bar.

    Args:
        out: the terminal.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._started = time.monotonic()
        self._drawn = False

    def __call__(self, processed: int, total: int) -> None:
        """Draw the bar, once prefill has taken a while; clear it at the end."""
        seconds = time.monotonic() - self._started
        if processed >= total:
            self.clear()
        elif processed and (self._drawn or seconds > SHOW_AFTER_SECONDS):
            filled = WIDTH * processed // total
            self._out.write(
                f"\r{ERASE_LINE}prefill [{'#' * filled}{'.' * (WIDTH - filled)}] {processed}/{total} tokens, "
                f"{processed / seconds:.0f} tokens/s"
            )
            self._out.flush()
            self._drawn = True

    def clear(self) -> None:
        """Take the bar away, if there is one."""
        if self._drawn:
            self._out.write(f"\r{ERASE_LINE}")
            self._out.flush()
        self._drawn = False


def prefill_progress(stream: TextIO | None = None) -> PrefillProgress | None:
    """Return the bar of a long prefill on stderr, or None where stderr is no terminal."""
    out = sys.stderr if stream is None else stream
    return PrefillProgress(out) if out.isatty() else None


class BatchProgress:
    """A bar on stderr for a run over many prompts; silent where stderr is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._out = stream if stream.isatty() else None
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
        filled = int(WIDTH * min(counts.done + underway, counts.total) / max(counts.total, 1))
        text = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {counts.done}/{counts.total} prompts"
        text += f", {counts.failed} failed" if counts.failed else ""
        text += f", {num_prompt_tokens:,} prompt tokens" if num_prompt_tokens else ""
        text += f", {num_tokens / max(seconds, 1e-9):.0f} tokens/s"
        if stats is not None and stats.budget_bytes:
            text += f", pool {100 * stats.bytes_in_use / stats.budget_bytes:.0f} % in use ({stats.live_blocks} blocks)"
        self._out.write(f"\r\x1b[K{text}")
        self._out.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()


class Bar:
    """A bar for things that are done elsewhere; silent where the stream is no terminal. To be used in a ``with`` block,
    which takes it away.

    Args:
        stream: where it is drawn.
        what: is being done.
        total: how many things.
    """

    SECONDS = SHOW_EVERY_SECONDS

    def __init__(self, stream: TextIO, what: str, total: int) -> None:
        self._out = stream if stream.isatty() else None
        self._what = what
        self._total = total
        self._begin = time.monotonic()

    def show(self, done: int) -> None:
        """Draw it: so many are done."""
        if self._out is not None:
            filled = WIDTH * done // self._total
            text = f"{self._what} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{self._total}"
            self._out.write(f"\r{ERASE_LINE}{text}, {time.monotonic() - self._begin:.0f} s")
            self._out.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not None:
            self._out.write(f"\r{ERASE_LINE}")
            self._out.flush()
