"""Decode steps of ragged sequences with the kernels, each compared with attention in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.build import gpu_cores
from mlx_paged.kernels.cases import attention
from mlx_paged.kernels.launch_shape import SINGLE_ROW_BODY_OF, Variant, shape_for
from mlx_paged.kernels.quantized import new_blocks
from mlx_paged.kernels.shared_runs import Partitions, shared_items, shared_rows

from .paged_decode import paged_decode, write_slots


def _attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    """Return attention of q ``[n_q_heads, 1, D]`` over k, v ``[n_kv_heads, n, D]`` in float32."""
    out = attention(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1), **options)
    return out.swapaxes(0, 1)


class Run:
    """Ragged sequences over one pool, with a dense copy of their rows for the reference. ``dims``: elements of a
    token's row in each of the two pools, for each of ``n_kv`` heads."""

    def __init__(
        self, variant: Variant, n_kv: int, dims: tuple[int, int], batch: int, longest: int, steps: int,
        window: int | None, seed: int,
    ) -> None:  # fmt: skip
        rng = random.Random(seed)
        mx.random.seed(seed)
        self.variant, self.n_kv, self.dims, self.window = variant, n_kv, dims, window
        self.lengths = [rng.randint(1, longest) for _ in range(batch)]
        block = variant.block_size
        blocks = [-(-(n + steps) // block) for n in self.lengths]
        free = list(range(1, sum(blocks) + 1))
        rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(n)] for n in blocks]
        widest = max(blocks)
        self.device_tables = mx.array([t + [0] * (widest - len(t)) for t in self.tables], mx.int32)
        self.pools = new_blocks(sum(blocks) + 1, n_kv, block, dims, variant.dtype, variant.pages, float("nan"))
        self.fence = kernels.new_fence()
        self.dense = []
        for b, n in enumerate(self.lengths):
            k, v = (self.rows(n, dim) for dim in dims)
            slots = mx.array([self.slot(b, t) for t in range(n)], mx.int32)
            self.fence = write_slots(*self.pools, self.fence, k[None], v[None], slots, variant.pages)
            self.dense.append(self.kept(k, v))

    def rows(self, n: int, dim: int) -> mx.array:
        return mx.random.normal((self.n_kv, n, dim)).astype(self.variant.dtype)

    def kept(self, k: mx.array, v: mx.array) -> list[mx.array]:
        """Return keys and values as the pages hold them."""
        pages = self.variant.pages
        return [k, v] if pages is None else list(pages.dequantize(*pages.quantize(k, v)))

    def slot(self, b: int, t: int) -> int:
        return self.tables[b][t // self.variant.block_size] * self.variant.block_size + t % self.variant.block_size

    def step(self) -> mx.array:
        """Append one token to every sequence, attend, and return the largest RMS over the sequences (lazy)."""
        raise NotImplementedError

    def grow(self) -> tuple[tuple[mx.array, mx.array], tuple[mx.array, mx.array]]:
        """Add a token to every sequence. Return the rows of these tokens ``[B, n_kv, 1, dim]``, and (ends, starts)
        ``[B, 1]`` of the tokens that they see."""
        new = [(self.rows(1, self.dims[0]), self.rows(1, self.dims[1])) for _ in self.lengths]
        for b, rows in enumerate(new):
            self.dense[b] = [mx.concatenate(list(x), axis=1) for x in zip(self.dense[b], self.kept(*rows), strict=True)]
        self.lengths = [n + 1 for n in self.lengths]
        ends, starts = (mx.array(x, mx.int32)[:, None] for x in (self.lengths, self.starts))
        return (mx.stack([k for k, _ in new]), mx.stack([v for _, v in new])), (ends, starts)

    @property
    def starts(self) -> list[int]:
        """Return the first token that each sequence's newest token sees."""
        return [max(0, n - self.window) if self.window else 0 for n in self.lengths]

    def queries(self, heads: int) -> mx.array:
        return mx.random.normal((len(self.lengths), heads, 1, self.variant.head_dim)).astype(self.variant.dtype)

    def worst(self, out: mx.array, expected: Callable[[int, mx.array, mx.array], mx.array]) -> mx.array:
        """Return the largest RMS over the sequences (lazy). ``expected(b, k, v)`` is the reference of sequence b over
        the rows that it sees."""
        errors = []
        for b, start in enumerate(self.starts):
            reference = expected(b, *(x[:, start:] for x in self.dense[b]))
            errors.append(mx.square(out[b].astype(mx.float32) - reference).mean())
        return mx.sqrt(mx.stack(errors).max())


class HeadRun(Run):
    """A run over keys and values of two KV heads. A step writes its new tokens before it attends."""

    def __init__(self, variant: Variant, batch: int, longest: int, steps: int, window: int | None, seed: int) -> None:
        super().__init__(variant, 2, (variant.head_dim, variant.value_dim), batch, longest, steps, window, seed)
        self.sinks = mx.random.normal((self.n_kv * variant.gqa,)) if variant.sinks else None

    def step(self) -> mx.array:
        variant = self.variant
        slots = mx.array([self.slot(b, n) for b, n in enumerate(self.lengths)], mx.int32)
        new, (ends, starts) = self.grow()
        self.fence = write_slots(*self.pools, self.fence, *new, slots, variant.pages)
        q = self.queries(self.n_kv * variant.gqa)
        options: dict[str, Any] = {"scale": variant.head_dim**-0.5, "softcap": 20.0 if variant.softcap else None}
        out = self.attend(q, ends, starts, **options)
        return self.worst(out, lambda b, k, v: _attend(q[b], k, v, **options, sinks=self.sinks))

    def attend(self, q: mx.array, ends: mx.array, starts: mx.array, **options: Any) -> mx.array:
        """Return the kernel's output."""
        out, self.fence = paged_decode(
            q, *self.pools, self.fence, self.device_tables, ends, starts, sinks=self.sinks, max_visible=self.window,
            variant=self.variant, pages=self.variant.pages, **options,
        )  # fmt: skip
        return out


class SharedRun(HeadRun):
    """Like :class:`HeadRun`, for rows that share leading blocks of the longest one, which are read together. Each step
    must have the same bits as the kernel for single rows."""

    def __init__(self, variant: Variant, batch: int, longest: int, steps: int, seed: int) -> None:
        super().__init__(variant._replace(body=SINGLE_ROW_BODY_OF[variant.body]), batch, longest, steps, None, seed)
        block, first = variant.block_size, self.lengths.index(max(self.lengths))
        for b, length in enumerate(self.lengths):
            count = length // block // (1 + b % 2)  # a tree: every second row shares half as many
            self.tables[b][:count] = self.tables[first][:count]
            for which, own in enumerate(self.dense[b]):
                theirs = self.dense[first][which][:, : count * block]
                self.dense[b][which] = mx.concatenate([theirs, own[:, count * block :]], axis=1)
        widest = max(map(len, self.tables))
        host = np.array([table + [0] * (widest - len(table)) for table in self.tables], np.int32)
        self.device_tables = mx.array(host)
        shared = shared_rows(host, [n // block for n in self.lengths], block)
        assert shared is not None
        self.shared, self.own = shared, variant

    def attend(self, q: mx.array, ends: mx.array, starts: mx.array, **options: Any) -> mx.array:
        alone = super().attend(q, ends, starts, **options)
        shape = shape_for(self.own, gpu_cores())
        items = shared_items(self.shared, Partitions.of(np.array(self.lengths), shape), shape)
        out, self.fence = paged_decode(
            q, *self.pools, self.fence, self.device_tables, ends, starts, sinks=self.sinks, variant=self.own,
            items=mx.array(items), pages=self.variant.pages, **options,
        )  # fmt: skip
        same = mx.array_equal(out.view(mx.uint16), alone.view(mx.uint16))
        return mx.where(same, out, float("inf"))


class LatentShape(NamedTuple):
    """A case: dtype, elements of a latent, query heads, block size, longest prompt and window in tokens."""

    dtype: mx.Dtype
    rank: int = 512
    heads: int = 128
    block: int = 32
    longest: int = 600
    window: int | None = None


LATENTS = [
    LatentShape(mx.bfloat16),
    LatentShape(mx.bfloat16, longest=5000),
    LatentShape(mx.bfloat16, heads=20),
    LatentShape(mx.bfloat16, block=8),
    LatentShape(mx.bfloat16, block=128, window=100),
    LatentShape(mx.float16, rank=256, heads=70, block=16),
    LatentShape(mx.float16, block=64),
    LatentShape(mx.float32, heads=16),
]


class LatentRun(Run):
    """A run over latents and rotary parts of 64 elements. The decode launch itself stores a step's new tokens."""

    rope = 64

    def __init__(self, variant: Variant, shape: LatentShape, batch: int, steps: int, seed: int) -> None:
        super().__init__(variant, 1, (shape.rank, self.rope), batch, shape.longest, steps, shape.window, seed)
        self.heads = shape.heads

    def step(self) -> mx.array:
        new, (ends, starts) = self.grow()
        q, scale = self.queries(self.heads), self.variant.head_dim**-0.5
        launch = kernels.prepare_decode(
            *self.pools, (self.device_tables, ends, starts), n_q_heads=self.heads, scale=scale,
            max_visible=self.window, append=True, variant=self.variant, latent=True,
        )  # fmt: skip
        out, self.fence = launch(q, *self.pools, self.fence, None, *new)

        def expected(b: int, latents: mx.array, rotated: mx.array) -> mx.array:
            return _attend(q[b], mx.concatenate([latents, rotated], axis=-1), latents, scale=scale)

        return self.worst(out, expected)
