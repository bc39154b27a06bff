"""Progress bars for long prefills and for runs over many prompts."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ..kv.stats import PagedCacheStats
from .prompts_file import Counts

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
    """The bar of a long prefill on stderr, or None where stderr is no terminal."""
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
