"""trim_heap(): gives back to the system what the C library keeps of freed memory."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


@cache
def _trim() -> Any:
    """glibc's ``malloc_trim``; None: this C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def trim_heap() -> None:
    """MLX's buffers on a CPU come from there, and a freed one stays resident between others that are in use. For times
    without work, or with too little memory: it looks through the whole heap, and what comes next faults pages in."""
    trim = _trim()
    if trim is not None:
        trim(0)
