"""Sequences whose keys show which tokens they were computed from: every position holds a hash of its prefix.

Prefix caches of such sequences.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.geometry import Window
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import UNLIMITED, BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache

BYTES_PER_TOKEN = 3 * 4


def make_pool(
    windows: Sequence[int | Window | None] = (None,), *, block_size: int = 4, num_blocks: int | None = None
) -> BlockPool:
    """Return a pool with one layer per group, where a number is a sliding window; ``num_blocks`` is its budget, null
    blocks included."""
    own = [Window(window) if isinstance(window, int) else window for window in windows]
    return BlockPool(
        [
            LayerGroup((layer,), window and window.size, f"group {layer}", stride=window.stride if window else 1)
            for layer, window in enumerate(own)
        ],
        block_size=block_size,
        memory_budget=UNLIMITED if num_blocks is None else num_blocks * block_size * BYTES_PER_TOKEN,
    )


def fingerprints(tokens: Sequence[int], start: int, salt: object = None) -> np.ndarray:
    """Return one number per position from ``start`` on, different for different prefixes."""
    return np.array([hash((salt, *tokens[: i + 1])) % (1 << 23) for i in range(start, len(tokens))], np.float32)


def compute(pool: BlockPool, table: BlockTable, tokens: Sequence[int], salt: object = None) -> None:
    """Write what a forward pass over ``tokens`` would write, given that the table already holds the first ones."""
    start = table.length
    if start < len(tokens):
        pool.append_tokens(table, len(tokens) - start)
        for layer in range(len(pool.groups)):
            x = mx.array(fingerprints(tokens, start, salt))[None, None, :, None] + layer
            pool.write_prefill(table, layer, mx.concatenate([x, x + 1], axis=-1), -x)


def check_contents(pool: BlockPool, table: BlockTable, tokens: Sequence[int], salt: object = None) -> None:
    """Assert that every visible position of the table holds what was computed from its own prefix of ``tokens``."""
    for layer, start in enumerate(table.starts):
        if table.length == start:
            continue
        k, v = pool.gather_visible(table, layer)
        expected = fingerprints(tokens[: table.length], start, salt) + layer
        np.testing.assert_array_equal(np.array(k)[0, 0], np.stack([expected, expected + 1], axis=-1))
        np.testing.assert_array_equal(np.array(v)[0, 0, :, 0], -expected)


def add(tree: PrefixCache, tokens: Sequence[int], salt: Any = None, chunks: Sequence[int] = (), **options: Any) -> Any:
    """Serve a request for ``tokens`` and leave its whole blocks in the cache, nothing else."""
    _, table = tree.adopt([*tokens, -1], salt)
    for end in (*chunks, len(tokens)):
        compute(tree.pool, table, tokens[:end], salt)
    result = tree.insert(tokens, table, salt, **options)
    tree.pool.release_table(table)
    tree.check_integrity()
    tree.pool.check_integrity()
    return result


def found(tree: PrefixCache, tokens: Sequence[int], salt: Any = None) -> int:
    """Return how many tokens the cache serves of ``tokens`` and one more, and check their contents."""
    match, table = tree.adopt([*tokens, -1], salt)
    check_contents(tree.pool, table, tokens, salt)
    tree.pool.release_table(table)
    return match.length


def hold(pool: BlockPool, tokens: Sequence[int]) -> BlockTable:
    table = pool.new_table()
    compute(pool, table, tokens)
    return table


def make_tree(windows: Sequence[int | Window | None], **options: Any) -> tuple[PrefixCache, BlockPool]:
    """Return a prefix cache and its pool, which the cache does not keep alive."""
    pool = make_pool(windows)
    return PrefixCache(pool, **options), pool


def adopt_longest(tree: PrefixCache, tokens: Sequence[int], salt: Hashable = None) -> SequenceTables | None:
    """Return a new sequence on the longest prefix that the cache can serve, or None if it has none."""
    match, table = tree.adopt(tokens, salt)
    return SequenceTables(tree.pool, table) if match.length else None
