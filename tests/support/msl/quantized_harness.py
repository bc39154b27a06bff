"""Cases over pages of quantised keys and values, for the emulator."""

import mlx.core as mx
import numpy as np

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.quantized.pages import PageShape
from mlx_paged.kernels.quantized.rows import QuantizedRows
from tests.support.msl.harness import Case, to_float
from tests.support.msl.prefill_harness import Pack


def page_shape(head_dim, value_dim, bits, group_size, dtype):
    """Of keys and values of so many bits, a pair or one number."""
    k_bits, v_bits = bits if isinstance(bits, tuple) else (bits, bits)
    rows = ((head_dim, k_bits), (value_dim, v_bits))
    return PageShape(*(QuantizedRows(dim, n, group_size, dtype) for dim, n in rows))


def pages_of(rows, form):
    """Rows [blocks, heads, block_size, num_words] in the two planes of their pages."""
    blocks, heads, size, _ = rows.shape
    codes, factors = (x.reshape(blocks, heads, -1) for x in np.split(rows, [form.code_words], axis=-1))
    return mx.array(np.concatenate([codes, factors], axis=-1).reshape(blocks, heads, size, form.num_words))


def rows_of(pool, form):
    """The inverse of :func:`pages_of`."""
    words = np.asarray(pool)
    blocks, heads, size, _ = words.shape
    flat = words.reshape(blocks, heads, -1)
    codes, factors = np.split(flat, [form.code_words * size], axis=-1)
    parts = (x.reshape(blocks, heads, size, -1) for x in (codes, factors))
    return np.concatenate(list(parts), axis=-1)


def quantized_pool(pool, form):
    """(pages, values that they stand for) of a pool of values in which slots that nobody wrote are NaN. Those are words of
    ones, whose scales are NaN."""
    dead = np.isnan(to_float(pool)).any(axis=-1)
    rows = np.array(form.quantize(mx.where(mx.array(dead)[..., None], 0.0, pool).astype(form.dtype)))
    rows[dead] = 0xFFFFFFFF
    return pages_of(rows, form), to_float(form.dequantize(mx.array(rows)))


class QuantizedCase(Case):
    """A :class:`Case` over quantised pages; its rows are what the pages hold."""

    def __init__(self, contexts, *, bits=8, group_size=64, head_dim=64, value_dim=None, dtype=mx.bfloat16, spread=False, **options):
        super().__init__(contexts, head_dim=head_dim, value_dim=value_dim, dtype=dtype, **options)
        self.pages = page_shape(head_dim, value_dim or head_dim, bits, group_size, dtype)
        pools = [self.k_pool, self.v_pool]
        if spread:  # values of tokens differ in size, by up to 2^20
            sizes = 2.0 ** (np.arange(self.block_size) * 7 % 21 - 10)
            pools[1] = (pools[1].astype(mx.float32) * mx.array(sizes[:, None].astype(np.float32))).astype(dtype)
        self.exact = [to_float(pool) for pool in pools]  # before they are quantised
        (self.k_pool, k), (self.v_pool, v) = (quantized_pool(pool, form) for pool, form in zip(pools, self.pages, strict=True))
        self.rows = [self._rows_of(b, k, v) for b in range(len(contexts))]

    def _rows_of(self, b, *pools):
        end, size = int(self.ends[b].max()), self.block_size
        blocks = [self.tables[b, t // size] % 10**6 for t in range(end)]
        return [np.stack([pool[block, :, t % size] for t, block in enumerate(blocks)], axis=1) for pool in pools]

    def take_out_newest(self):
        """Keys and values of each sequence's newest token before they are quantised; its slot is NaN again."""
        new, pools = [], []
        for pool, exact, form in zip((self.k_pool, self.v_pool), self.exact, self.pages, strict=True):
            rows, own = rows_of(pool, form), []
            for b, end in enumerate(self.ends[:, 0]):
                place = self.tables[b, (end - 1) // self.block_size], slice(None), (end - 1) % self.block_size
                own.append(exact[place][:, None])
                rows[place] = 0xFFFFFFFF
            new.append(mx.array(np.stack(own)).astype(self.dtype))
            pools.append(pages_of(rows, form))
        self.k_pool, self.v_pool = pools
        return tuple(new)

    def variant(self):
        """The variant for tensor cores."""
        extras = {"softcap": self.softcap is not None, "sinks": self.sinks is not None, "pages": self.pages}
        return kernels.decode_variants(self.k_pool, self.v_pool, self.n_q, **extras)[0]

    def run(self, **options):
        return super().run(pages=self.pages, **options)


class QuantizedPack(Pack):
    """A :class:`Pack` over quantised pages; its rows are what the pages hold."""

    def __init__(self, counts, prefixes, *, bits=8, group_size=64, head_dim=64, value_dim=None, dtype=mx.bfloat16, **options):
        super().__init__(counts, prefixes, head_dim=head_dim, value_dim=value_dim, dtype=dtype, **options)
        self.pages = page_shape(head_dim, value_dim or head_dim, bits, group_size, dtype)
        pools = []
        for pool, form in zip((self.k_pool, self.v_pool), self.pages, strict=True):
            pools.append(quantized_pool(pool, form))
        (self.k_pool, k), (self.v_pool, v) = pools
        for s, length in enumerate(self.lengths):
            places = [(self.tables[s, t // self.block_size] % 10**6, t % self.block_size) for t in range(length)]
            self.rows[s] = [np.stack([pool[block, :, at] for block, at in places], axis=1) for pool in (k, v)]

    def prepare(self, **options):
        return super().prepare(pages=self.pages, **options)
