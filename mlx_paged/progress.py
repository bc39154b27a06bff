"""Progress bars for long prefills and for runs over many prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from .kv.stats import PagedCacheStats
from .prompts_file import Counts

WIDTH = 30
SHOW_EVERY_SECONDS = 0.2
# Shorter prefills finish before a bar says anything.
SHOW_AFTER_SECONDS = 0.5


def prefill_progress(stream: TextIO | None = None) -> Callable[[int, int], None] | None:
    """A ``prompt_progress_callback`` that draws a bar on stderr, or None where stderr is no terminal."""
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        return None
    started = time.monotonic()
    drawn = False

    def callback(processed: int, total: int) -> None:
        nonlocal drawn
        seconds = time.monotonic() - started
        if processed >= total:
            if drawn:
                out.write("\r\x1b[K")
                out.flush()
            drawn = False
        elif processed and (drawn or seconds > SHOW_AFTER_SECONDS):
            filled = WIDTH * processed // total
            out.write(
                f"\rprefill [{'#' * filled}{'.' * (WIDTH - filled)}] {processed}/{total} tokens, "
                f"{processed / seconds:.0f} tokens/s"
            )
            out.flush()
            drawn = True

    return callback


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
