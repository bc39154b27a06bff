"""trim_heap returns freed memory between pieces in use to the system."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from mlx_paged.server import memory as heap

STATUS = Path("/proc/self/status")
PIECES, SIZE = 2000, 64 << 10  # below glibc's threshold for separate mappings


def resident() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim") or not STATUS.exists(), reason="the C library is not glibc"
)
def test_trim_heap_returns_memory_between_used_pieces() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    pieces = [libc.malloc(SIZE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, SIZE)
    for number, piece in enumerate(pieces):
        if number % 10:
            libc.free(piece)
    before = resident()
    heap.trim_heap()
    assert resident() < before - PIECES * SIZE // 2
    for piece in pieces[::10]:
        libc.free(piece)
