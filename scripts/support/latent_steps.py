"""Decode steps over latents (MLA) with the kernels, each compared with attention in float32."""

from __future__ import annotations

import random
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import _attend
from mlx_paged.kernels.launch_shape import Variant
from mlx_paged.kernels.quantized.pages import new_blocks


class LatentShape(NamedTuple):
    """What a case is of: dtype, elements of a latent, query heads, block size, and the longest prompt in tokens."""

    dtype: mx.Dtype
    rank: int = 512
    heads: int = 128
    block: int = 32
    longest: int = 600
    window: int | None = None


SHAPES = [
    LatentShape(mx.bfloat16),
    LatentShape(mx.bfloat16, longest=5000),
    LatentShape(mx.bfloat16, heads=20),
    LatentShape(mx.bfloat16, block=8),
    LatentShape(mx.bfloat16, block=128, window=100),
    LatentShape(mx.float16, rank=256, heads=70, block=16),
    LatentShape(mx.float16, block=64),
    LatentShape(mx.float32, heads=16),
]
QUICK = SHAPES[:3]


class LatentRun:
    """Ragged sequences over one pool of latents and what is rotated of them (64 elements), with the same rows kept
    densely for the reference. A step's newest tokens come with the call, which stores them."""

    rope = 64

    def __init__(self, variant: Variant, shape: LatentShape, batch: int, steps: int, seed: int) -> None:
        rng = random.Random(seed)
        mx.random.seed(seed)
        self.variant, self.shape = variant, shape
        self.lengths = [rng.randint(1, shape.longest) for _ in range(batch)]
        blocks = [-(-(n + steps) // shape.block) for n in self.lengths]
        free = list(range(1, sum(blocks) + 1))
        rng.shuffle(free)
        tables = [[free.pop() for _ in range(n)] for n in blocks]
        self.tables = mx.array([table + [0] * (max(blocks) - len(table)) for table in tables], mx.int32)
        dims = shape.rank, self.rope
        self.pools = new_blocks(sum(blocks) + 1, 1, shape.block, dims, shape.dtype, None, float("nan"))
        self.fence = kernels.new_fence()
        self.dense = []
        for n, table in zip(self.lengths, tables, strict=True):
            rows = [self.rows(n, dim) for dim in dims]
            slots = mx.array([table[t // shape.block] * shape.block + t % shape.block for t in range(n)], mx.int32)
            self.fence = kernels.write_slots(*self.pools, self.fence, *(x[None] for x in rows), slots)
            self.dense.append(rows)

    def rows(self, n: int, dim: int) -> mx.array:
        return mx.random.normal((1, n, dim)).astype(self.shape.dtype)

    def step(self) -> mx.array:
        """Append one token to every sequence, attend, and return the largest RMS over the sequences (lazy)."""
        shape, batch = self.shape, len(self.lengths)
        new = [[self.rows(1, dim) for dim in (shape.rank, self.rope)] for _ in range(batch)]
        self.lengths = [n + 1 for n in self.lengths]
        starts = [max(0, n - shape.window) if shape.window else 0 for n in self.lengths]
        q = mx.random.normal((batch, shape.heads, 1, shape.rank + self.rope)).astype(shape.dtype)
        scale = (shape.rank + self.rope) ** -0.5
        ends, begins = (mx.array(x, mx.int32)[:, None] for x in (self.lengths, starts))
        launch = kernels.prepare_decode(
            *self.pools, (self.tables, ends, begins), n_q_heads=shape.heads, scale=scale, max_visible=shape.window,
            append=True, variant=self.variant, latent=True,
        )  # fmt: skip
        out, self.fence = launch(q, *self.pools, self.fence, None, *(mx.stack(x) for x in zip(*new, strict=True)))
        worst = []
        for b in range(batch):
            self.dense[b] = [mx.concatenate([old, x], axis=1) for old, x in zip(self.dense[b], new[b], strict=True)]
            latents, rotated = (x[:, starts[b] :] for x in self.dense[b])
            keys = mx.concatenate([latents, rotated], axis=-1)
            expected = _attend(q[b], keys, latents, scale, None, None)
            worst.append(mx.square(out[b].astype(mx.float32) - expected).mean())
        return mx.sqrt(mx.stack(worst).max())
