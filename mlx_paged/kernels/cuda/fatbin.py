"""Fat binaries: machine code in the container that NVIDIA's compilers put it in, compressed.

MLX hashes a precompiled kernel's bytes at each launch, so they had better be few (docs/adr/0025). The container is what
``fatbinary --compress-mode=speed`` writes: a header, and one image as an LZ4 block.
"""

from __future__ import annotations

import re
import struct

_MAGIC, _VERSION = 0xBA55ED50, 1
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHIIIQQQ")
_KIND_ELF, _ENTRY_VERSION = 2, 0x0101
_FLAGS = 0x1 | 0x10 | 0x2000  # for 64 bits, Linux; LZ4
_OF_ONE = 0x100000  # for an architecture with all it has and no other can do, like "sm_90a"
_ELF_VERSION = (8, 1)  # minor, major
# LZ4's rules for the end of a block.
_LAST_LITERALS, _LAST_MATCH, _LEAST_MATCH, _FURTHEST = 5, 12, 4, 65535
_CANDIDATES = 32  # earlier places that are tried


def fat_binary(cubin: bytes, architecture: str) -> bytes:
    """The container with one compressed image, for an architecture like "sm_90" or "sm_90a".

    Raises:
        ValueError: the architecture has no number.
    """
    number = re.match(r"sm_(\d+)(a?)", architecture)
    if number is None:
        raise ValueError(f"{architecture} has no number")
    packed = lz4_block(cubin)
    padded = packed + bytes(-len(packed) % 8)
    entry = _ENTRY.pack(
        _KIND_ELF,
        _ENTRY_VERSION,
        _ENTRY.size,
        len(padded),
        len(packed),
        0,
        *_ELF_VERSION,
        int(number.group(1)),
        0,
        0,
        _FLAGS | (_OF_ONE if number.group(2) else 0),
        0,
        len(cubin),
    )
    return _HEADER.pack(_MAGIC, _VERSION, _HEADER.size, len(entry) + len(padded)) + entry + padded


def lz4_block(data: bytes) -> bytes:
    """Compress bytes to one LZ4 block; machine code of a kernel in a tenth of a second."""
    out, places = bytearray(), _Places(data)
    start = at = 0  # of what is not written yet; of what is looked at
    while at < places.end:
        length, distance = places.longest(at)
        if not length:
            at += 1
            continue
        while (later := places.longest(at + 1))[0] > length:  # a longer one begins a byte further
            at += 1
            length, distance = later
        _sequence(out, data[start:at], distance, length)
        start = at = at + length
    _sequence(out, data[start:], 0, 0)
    return bytes(out)


class _Places:
    """Where four bytes have been before. Places are asked for in order; those between are noted by themselves."""

    def __init__(self, data: bytes) -> None:
        self.end = len(data) - _LAST_MATCH
        self._data = data
        self._places: dict[bytes, list[int]] = {}
        self._noted = 0  # all places before

    def longest(self, at: int) -> tuple[int, int]:
        """Length and distance of the longest earlier bytes that are alike, or zeros."""
        data, most = self._data, len(self._data) - _LAST_LITERALS - at
        for place in range(self._noted, min(at, self.end)):
            known = self._places.setdefault(data[place : place + _LEAST_MATCH], [])
            known.append(place)
            if len(known) > _CANDIDATES:
                del known[0]
        self._noted = max(self._noted, min(at, self.end))
        best, where = 0, 0
        if at >= self.end:
            return best, where
        for place in reversed(self._places.get(data[at : at + _LEAST_MATCH], ())):
            if at - place > _FURTHEST:
                break
            if best and data[place + best] != data[at + best]:
                continue
            length = _LEAST_MATCH
            while length < most and data[place + length] == data[at + length]:
                length += 1
            if length > best:
                best, where = length, place
            if best == most:
                break
        return best, at - where


def _sequence(out: bytearray, literals: bytes, distance: int, length: int) -> None:
    """Literals, and then a match, if it has a length."""
    more = length - _LEAST_MATCH if length else 0
    out.append(min(len(literals), 15) << 4 | min(more, 15))
    _count(out, len(literals))
    out += literals
    if length:
        out += struct.pack("<H", distance)
        _count(out, more)


def _count(out: bytearray, count: int) -> None:
    """What of a count is beyond the 15 of its four bits."""
    if count >= 15:
        count -= 15
        out += b"\xff" * (count // 255)
        out.append(count % 255)
