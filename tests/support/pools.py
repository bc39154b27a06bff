"""Small pools, random keys and values for them, and checks of their contents."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.attention.dispatch import attend
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.geometry import AttentionParams
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
TOKEN_BYTES = 2 * (8 + 8) * 4  # of the arrays of kv() in one layer
BLOCK_BYTES = 4 * TOKEN_BYTES


def bits(x: mx.array) -> np.ndarray:
    """Return the bytes, so that NaNs and signed zeros can be compared."""
    return np.array(mx.contiguous(x).view({2: mx.uint16, 4: mx.uint32}[x.dtype.size]))


def noise(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def kv(
    seed: int, n: int, *, batch: int = 1, heads: int = 2, kd: int = 8, vd: int = 8, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    return noise(2 * seed, batch, heads, n, kd, dtype=dtype), noise(2 * seed + 1, batch, heads, n, vd, dtype=dtype)


def pool_of(*, layers: int = 1, window: int | None = None, block_size: int = 4, **options: Any) -> BlockPool:
    return BlockPool([LayerGroup(tuple(range(layers)), window)], block_size=block_size, **options)


def put(pool: BlockPool, table: BlockTable, seed: int, n: int, **shape: Any) -> tuple[mx.array, mx.array]:
    """Append n tokens and write them to layer 0."""
    k, v = kv(seed, n, **shape)
    pool.append_tokens(table, n)
    if n == 1:
        pool.write(0, [table], k, v)
    else:
        pool.write_prefill(table, 0, k, v)
    return k, v


def assert_holds(pool: BlockPool, table: BlockTable, k: mx.array, v: mx.array, layer: int = 0) -> None:
    got_k, got_v = pool.gather_visible(table, layer)
    assert (got_k.dtype, got_v.dtype) == (k.dtype, v.dtype)
    np.testing.assert_array_equal(bits(got_k), bits(k))
    np.testing.assert_array_equal(bits(got_v), bits(v))


def joined(*parts: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    return mx.concatenate([k for k, _ in parts], axis=2), mx.concatenate([v for _, v in parts], axis=2)


class Watched:
    """A pool with a sequence in it, to check that an error changes nothing and that the pool remains usable."""

    def __init__(self, **options: Any) -> None:
        self.pool = pool_of(layers=2, **options)
        self.table = self.pool.new_table()
        self.pool.append_tokens(self.table, 6)
        self.parts = [kv(layer, 6) for layer in range(2)]
        for layer in range(2):
            self.pool.write_prefill(self.table, layer, *self.parts[layer])

    def picture(self) -> tuple[Any, ...]:
        table = self.table
        return self.pool.stats(), list(table.block_ids[0]), table.length, table.starts[0]

    def assert_unchanged(self, picture: tuple[Any, ...]) -> None:
        assert self.picture() == picture
        for layer in range(2):
            assert_holds(self.pool, self.table, *self.parts[layer], layer)
        self.pool.check_integrity()

    def go_on(self) -> None:
        self.pool.append_tokens(self.table, 2)
        for layer in range(2):
            more = kv(50 + layer, 2)
            self.pool.write_prefill(self.table, layer, *more)
            assert_holds(self.pool, self.table, *joined(self.parts[layer], more), layer)
        self.pool.check_integrity()


def paged_attention(
    q: mx.array, pool: BlockPool, layer: int, tables: Sequence[BlockTable], params: AttentionParams
) -> mx.array:
    """Return attention from the last ``q_len`` tokens of each table, which are written, for q
    ``[B, n_q_heads, q_len, head_dim]``."""
    tokens = pool.tokens_of(layer, tables, q.shape[2])
    return attend(q, None, pool.group_of(layer), pool.places[layer][1], tokens, params, is_written=True)
