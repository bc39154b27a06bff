"""A progress bar for long prefills."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 30
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
