"""Bits of quantised pages, as a command line gives them."""

from __future__ import annotations


def bits_of(text: str) -> tuple[int, int]:
    """(keys, values) of "8", "4" or "8,4"; raises ValueError for others."""
    keys, _, values = text.partition(",")
    pair = int(keys), int(values or keys)
    if not set(pair) <= {8, 4}:
        raise ValueError(f"bits are 8 or 4, not {text}")
    return pair
