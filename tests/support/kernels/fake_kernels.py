"""Stand-ins for the GPU kernels, so that in-place pools, dispatch and generation over them run on a CPU.

They do what the kernels do, on the same arrays, and check the discipline the kernels cannot check: each call on a pool
must be given the fence that the call before returned. The kernels' own text is tested in tests/msl.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import config
from mlx_paged.attention import gather
from mlx_paged.attention.gather import causal_mask
from mlx_paged.cuda import narrow_matmul
from mlx_paged.cuda.narrow_matmul import PackedWeight
from mlx_paged.engine import compiled_step
from mlx_paged.kernels import availability, nvidia
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.quantized import PageShape, QuantizedRows
from mlx_paged.kv import blocks, device_blocks, group
from mlx_paged.kv.geometry import AttentionParams, Geometry, QueryHeads, Window
from tests.support.kernels.quantized_pages import pages_of, rows_of

NO_PAGES = (None, None)


class FakeKernels:
    """Fakes of the kernels. Attributes: calls, by kernel; max_q_len of the decode calls; rewound, how often calls were
    undone."""

    def __init__(self) -> None:
        self.calls = {"write_slots": 0, "paged_decode": 0, "gather_blocks": 0, "copy_blocks": 0, "append": 0}
        self.calls["narrow_matmul"] = self.calls["paged_prefill"] = 0
        self.max_q_len = 0
        self.rewound = 0
        # Per pool: its tensor, and the fences returned so far with the kernel that returned each.
        self._chains: dict[int, tuple[mx.array, list[tuple[str, mx.array]]]] = {}

    def _pass(self, kernel: str, k_pool: mx.array, v_pool: mx.array, fence: mx.array) -> mx.array:
        """Return the next fence, ready when the blocks are; fails if ``fence`` is not the latest of the pool's
        chain."""
        self.calls[kernel] += 1
        known = self._chains.get(id(k_pool))
        if known is None or known[0] is not k_pool:
            known = self._chains[id(k_pool)] = (k_pool, [("new", fence)])
        chain = known[1]
        if chain[-1][1] is not fence:
            # The gather of update_and_fetch was not used, and maybe the write before it was not: they are undone.
            forgotten = next((i for i in range(1, 3) if len(chain) > i and chain[-1 - i][1] is fence), None)
            assert forgotten is not None, f"{kernel} was given an old fence"
            names = [name for name, _ in chain[-forgotten:]]
            assert names in (["gather_blocks"], ["write_slots", "gather_blocks"]), f"{names} were forgotten"
            del chain[-forgotten:]
            self.rewound += 1
        (fresh,) = mx.depends([fence + 1], [k_pool, v_pool])
        chain.append((kernel, fresh))
        del chain[:-4]
        return fresh

    def prepare_write(
        self,
        k_pool: mx.array,
        v_pool: mx.array,
        slots: mx.array,
        pages: PageShape | None = None,
        *,
        stored: bool = False,
    ) -> Any:
        def launch(k_pool: mx.array, v_pool: mx.array, fence: mx.array, k: mx.array, v: mx.array) -> mx.array:
            size = k_pool.shape[2]
            blocks, offsets = slots // size, slots % size
            written = mx.array([row for row, slot in enumerate(slots.tolist()) if slot >= 0])
            for pool, x, form in zip((k_pool, v_pool), (k, v), pages or NO_PAGES, strict=True):
                given = pool.dtype if form is None or stored else form.dtype
                assert x.dtype == given and x.shape[1] == pool.shape[1]
                rows = x.transpose(0, 2, 1, 3).reshape(slots.size, x.shape[1], x.shape[3])
                (put_rows if stored else put)(pool, form, blocks[written], offsets[written], rows[written])
            return self._pass("write_slots", k_pool, v_pool, fence)

        return launch

    def prepare_decode(
        self,
        k_pool: mx.array,
        v_pool: mx.array,
        visible: tuple[mx.array, mx.array, mx.array],
        *,
        n_q_heads: int,
        scale: float,
        softcap: float | None = None,
        sinks: bool = False,
        max_visible: int | None = None,
        append: bool = False,
        pages: PageShape | None = None,
        latent: bool = False,
        init_value: float | None = None,
        items: mx.array | None = None,
    ) -> Any:
        tables, ends, starts = (x.tolist() for x in visible)
        if max_visible is not None:
            assert (visible[1] - visible[2]).max().item() <= max_visible

        def launch(
            q: mx.array,
            k_pool: mx.array,
            v_pool: mx.array,
            fence: mx.array,
            sinks: mx.array | None = None,
            k_new: mx.array | None = None,
            v_new: mx.array | None = None,
            counters: Any = None,
        ) -> tuple[mx.array, mx.array]:
            assert append == (k_new is not None) == (v_new is not None)
            forms = pages or NO_PAGES
            assert q.shape[1] == n_q_heads and q.shape[2] <= 8
            assert q.dtype == (k_pool.dtype if pages is None else pages.dtype)
            self.max_q_len = max(self.max_q_len, q.shape[2])
            size = k_pool.shape[2]
            if append:
                self.calls["append"] += 1
                assert q.shape[2] == 1
                rows = [row for row, end in enumerate(ends) if end[0]]  # others are padding
                newest = [ends[row][0] - 1 for row in rows]
                blocks = mx.array([tables[row][p // size] for row, p in zip(rows, newest, strict=True)])
                for pool, x, form in zip((k_pool, v_pool), (k_new, v_new), forms, strict=True):
                    assert x is not None
                    put(pool, form, blocks, mx.array([p % size for p in newest]), x[mx.array(rows)][:, :, 0])
            keys, values = (dense(pool, form) for pool, form in zip((k_pool, v_pool), forms, strict=True))
            value_dim = keys.shape[3] if latent else values.shape[3]
            outputs = []
            for b, table in enumerate(tables):
                columns = []
                for i in range(q.shape[2]):
                    start, end = starts[b][i], ends[b][i]
                    if start >= end:  # padding
                        columns.append(mx.zeros((1, n_q_heads, 1, value_dim), q.dtype))
                        continue
                    ids = mx.array(table[start // size : -(-end // size)])
                    k, v = (positions(pool, ids, start % size, end - start) for pool in (keys, values))
                    one = q[b : b + 1, :, i : i + 1]
                    columns.append(
                        gather.attention(
                            one, k, v, AttentionParams(scale, None, softcap=softcap, sinks=sinks, latent=latent)
                        )
                    )
                outputs.append(mx.concatenate(columns, axis=2))
            return mx.concatenate(outputs), self._pass("paged_decode", k_pool, v_pool, fence)

        return launch

    def prepare_prefill(
        self,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: mx.array,
        counts: Sequence[int],
        lengths: Sequence[int],
        *,
        n_q_heads: int,
        scale: float,
        softcap: float | None = None,
        sinks: bool = False,
        window: int | None = None,
        stride: int = 1,
        pages: PageShape | None = None,
    ) -> Any:
        assert tables.dtype == mx.int32 and tables.shape[0] == len(counts) == len(lengths)
        rows, size = tables.tolist(), k_pool.shape[2]

        def launch(
            q: mx.array, k_pool: mx.array, v_pool: mx.array, fence: mx.array, sinks_of: mx.array | None = None
        ) -> tuple[mx.array, mx.array]:
            assert q.shape[:3] == (sum(counts), n_q_heads, 1)
            assert q.dtype == (k_pool.dtype if pages is None else pages.dtype)
            assert sinks == (sinks_of is not None)
            pools = [dense(*pair) for pair in zip((k_pool, v_pool), pages or NO_PAGES, strict=True)]
            outputs, first = [], 0
            for row, count, length in zip(rows, counts, lengths, strict=True):
                seen = None if window is None else Window(window, stride)
                start = 0 if seen is None else seen.first_seen(length - count)
                ids = mx.array(row[start // size : -(-length // size)])
                k, v = (positions(pool, ids, start % size, length - start) for pool in pools)
                mask = causal_mask(count, length - start - count, seen)
                one = q[first : first + count].swapaxes(0, 2)
                out = gather.attention(one, k, v, AttentionParams(scale, mask, softcap=softcap, sinks=sinks_of))
                outputs.append(out.swapaxes(0, 2))
                first += count
            return mx.concatenate(outputs), self._pass("paged_prefill", k_pool, v_pool, fence)

        return launch

    def prepare_gather(
        self,
        k_pool: mx.array,
        v_pool: mx.array,
        block_ids: Any,
        start: int,
        length: int,
        pages: PageShape | None = None,
        *,
        stored: bool = False,
    ) -> Any:
        def held(pool: mx.array, form: Any) -> mx.array:
            return mx.array(rows_of(np.array(pool), form)) if stored else dense(pool, form)

        ids = block_ids if isinstance(block_ids, mx.array) else mx.array(list(block_ids), mx.int32)
        assert start >= 0 and length >= 1 and start + length <= ids.size * k_pool.shape[2]

        def launch(k_pool: mx.array, v_pool: mx.array, fence: mx.array) -> tuple[mx.array, mx.array, mx.array]:
            k, v = (
                positions(held(*x), ids, start, length) for x in zip((k_pool, v_pool), pages or NO_PAGES, strict=True)
            )
            return k, v, self._pass("gather_blocks", k_pool, v_pool, fence)

        return launch

    def copy_blocks(
        self, k_pool: mx.array, v_pool: mx.array, fence: mx.array, source: Any, target: Any, pages: Any = None
    ) -> mx.array:
        assert not set(source) & set(target) and len(set(target)) == len(target) == len(source)
        for pool in (k_pool, v_pool):
            pool[mx.array(target)] = pool[mx.array(source)]
        return self._pass("copy_blocks", k_pool, v_pool, fence)

    def multiply(
        self,
        body: str,
        x: mx.array,
        weights: Sequence[narrow_matmul.Matrix],
        bias: mx.array | None,
        tile: int,
        shapes: Sequence[tuple[int, ...]],
    ) -> list[mx.array]:
        x = x.reshape(-1, weights[0].shape[1])
        is_packed = isinstance(weights[0], PackedWeight)
        assert x.shape[0] <= (narrow_matmul.MAX_PACKED_ROWS if is_packed else tile)
        assert all(w.dtype == x.dtype for w in weights)
        assert body in (narrow_matmul.GROUPED, narrow_matmul.GATED) or len(weights) == 1
        assert (bias is not None) == (body == narrow_matmul.BIASED)
        self.calls["narrow_matmul"] += 1
        weights = [dequantized(w) for w in weights]
        products = [x @ w.T for w in weights]
        if body == narrow_matmul.BIASED:
            products = [mx.addmm(bias, x, weights[0].T)]
        if body == narrow_matmul.GATED:
            gate, up = products
            products = [nn.silu(gate) * up]
        return [y.reshape(shape) for y, shape in zip(products, shapes, strict=True)]


def dense(pool: mx.array, form: QuantizedRows | None) -> mx.array:
    """Return the values of a pool's blocks, [num_blocks, n_kv_heads, block_size, dim]."""
    return pool if form is None else form.dequantize(mx.array(rows_of(np.array(pool), form)))


def positions(pool: mx.array, ids: mx.array, start: int, length: int) -> mx.array:
    """Return some positions of blocks, ``[1, n_kv_heads, length, dim]``."""
    x = pool[ids].transpose(1, 0, 2, 3).reshape(1, pool.shape[1], -1, pool.shape[3])
    return x[:, :, start : start + length]


def put(pool: mx.array, form: QuantizedRows | None, blocks: mx.array, offsets: mx.array, x: mx.array) -> None:
    """Store values [n, n_kv_heads, dim]."""
    if form is None:
        pool[blocks, :, offsets] = x
    else:
        put_rows(pool, form, blocks, offsets, form.quantize(x))


def put_rows(pool: mx.array, form: QuantizedRows, blocks: mx.array, offsets: mx.array, x: mx.array) -> None:
    """Store rows [n, n_kv_heads, num_words]."""
    rows = rows_of(np.array(pool), form)
    rows[np.array(blocks), :, np.array(offsets)] = np.array(x)
    pool[:] = mx.array(pages_of(rows, form))


def dequantized(weight: narrow_matmul.Matrix) -> mx.array:
    if not isinstance(weight, PackedWeight):
        return weight
    return mx.dequantize(*weight[:3], weight.shape[1] // weight.scales.shape[1], weight.bits)


def decline(geometry: Geometry, block_size: int, heads: QueryHeads) -> str | None:
    return None if heads.num_q_heads % geometry.num_kv_heads == 0 else "heads do not divide"


@contextmanager
def fake_kernels() -> Iterator[FakeKernels]:
    """Replace the kernels by fakes. Pools made in this context by :func:`mlx_paged.kv.blocks.blocks_choice`
    are in place."""
    fake = FakeKernels()
    names = ("prepare_write", "prepare_decode", "prepare_gather", "copy_blocks")
    with (
        mock.patch.multiple(kernels, **{name: getattr(fake, name) for name in names}),
        mock.patch.object(availability, "device_unsupported_reason", lambda: None),
        # In a compiled step, a fake would run only once, while it is traced.
        mock.patch.object(compiled_step, "compile_function", lambda function: function),
        mock.patch.object(config, "device_unsupported_reason", lambda: None),
        mock.patch.object(blocks, "kernel_unsupported_reason", decline),
        mock.patch.object(group, "kernel_unsupported_reason", decline),
        mock.patch.object(group, "prefill_unsupported_reason", decline),
        mock.patch.object(device_blocks, "prepare_prefill", fake.prepare_prefill),
        mock.patch.object(device_blocks, "shared_cut_of", lambda *_: None),
        mock.patch.object(narrow_matmul, "passes_check", lambda body, dtype, *choice: dtype in narrow_matmul.DTYPES),
        mock.patch.object(nvidia, "backend", lambda: "cuda"),
        mock.patch.object(narrow_matmul, "is_available", lambda: True),
        mock.patch.object(narrow_matmul, "launch", fake.multiply),
    ):
        yield fake
