"""Which kernels attend over latents, and how they are cut. Plain arithmetic, no arrays.

A token's page holds a latent of ``rank`` elements (in the pool of keys) and ``rope`` more that are rotated by its
position (in the pool of values), of one head. Its key is both, one after the other, and its value is the latent.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..build import backend
from ..cuda.device import cuda_limits
from ..launch_shape import LATENT_BODIES, LATENT_TENSOR_HEADS, Variant, shape_for, unsupported
from ..quantized import PageShape

MAX_HEADS = 256
_MOST_TOGETHER = 16  # query heads that a thread group of the portable body takes
_TENSOR_RANKS = (256, 512)
_TENSOR_ROPE = 64


def unsupported_latent(dtype: mx.Dtype, rank: int, rope: int, n_q_heads: int, block_size: int) -> str | None:
    """Why the kernels cannot attend over latents of this geometry, or None if they can."""
    if not 1 <= n_q_heads <= MAX_HEADS:
        return f"{n_q_heads} query heads over one latent are not in 1..{MAX_HEADS}"
    return unsupported(dtype, rank, rope, 1, block_size)


@lru_cache(maxsize=256)
def latent_variants_of(
    dtype: mx.Dtype,
    rank: int,
    rope: int,
    n_q_heads: int,
    n_kv_heads: int,
    block_size: int,
    softcap: bool = False,
    sinks: bool = False,
    pages: PageShape | None = None,
) -> tuple[Variant, ...]:
    """Return the kernel instances for a geometry, fastest first; empty where MLX has no GPU. A variant's head_dim is
    rank + rope, its value_dim is rank, and its gqa the query heads that a thread group takes.

    Raises:
        ValueError: no kernel covers it.
    """
    why = unsupported_latent(dtype, rank, rope, n_q_heads, block_size)
    if n_kv_heads != 1 or softcap or sinks or pages is not None:
        why = "latents are of one head, as they are, and attended to without soft cap and sinks"
    if why:
        raise ValueError(why)
    dialect = backend()
    if dialect is None:
        return ()
    portable, tensor = LATENT_BODIES
    together = next(n for n in range(_MOST_TOGETHER, 0, -1) if n_q_heads % n == 0)
    variants = [Variant(portable, dialect, dtype, rank + rope, rank, together, block_size)]
    if dialect == "cuda" and dtype.size == 2 and rank in _TENSOR_RANKS and rope == _TENSOR_ROPE:
        wide = variants[0]._replace(body=tensor, gqa=LATENT_TENSOR_HEADS)
        # Checked here: MLX finds out only when it instantiates the graph, and then keeps a broken one.
        if cuda_limits().groups_together(shape_for(wide).latent_bytes(wide.head_dim)):
            variants.insert(0, wide)
    return tuple(variants)
