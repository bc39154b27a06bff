"""Pools of latents for the real launch code of the latent kernels on the emulator."""

import mlx.core as mx
import numpy as np

from mlx_paged.kernels.ops import variants_of
from tests.support.msl.harness import Case


class LatentCase(Case):
    """:class:`Case` of latents (the pool of keys) and their rotated parts (the pool of values)."""

    def __init__(self, contexts, *, heads=4, rank=64, rope=64, q_len=1, dtype=mx.float32, seed=0, **options):
        super().__init__(
            contexts, heads=(heads, 1), head_dim=rank, value_dim=rope, q_len=q_len, dtype=dtype, seed=seed, **options
        )
        self.scale = (rank + rope) ** -0.5
        q = np.random.default_rng(seed + 1).standard_normal((len(contexts), heads, q_len, rank + rope))
        self.q = mx.array(q.astype(np.float32)).astype(dtype)

    def variant(self, body=-1):
        """Return the variant of the portable body, or with 0 the fastest."""
        _, _, block_size, rank = self.k_pool.shape
        return variants_of(self.dtype, rank, self.v_pool.shape[3], self.n_q, 1, block_size, use="latents")[body]

    def keys_and_values(self, b, head):
        latents, rotated = (x[0] for x in self.rows[b])
        return np.concatenate([latents, rotated], axis=1), latents

    def run(self, **options):
        return super().run(latent=True, **options)
