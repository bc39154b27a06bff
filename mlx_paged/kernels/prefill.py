"""Prefill attention over block tables: one launch for all chunks of a pack.

Sequences may have any lengths: a launch takes a list of tiles, each some tokens of one sequence, and nothing is
prepared or compiled per length. Keys and values of prefixes and new tokens are read in place. The kernels use CUDA's
tensor cores; on Metal, prompts take MLX's attention (docs/adr/0063).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from . import ops
from .build import prepare
from .decode_spec import FENCE, params_of
from .launch_shape import Variant, constants_of, shape_for
from .quantized import PageShape

# No window: more than any position.
_NO_WINDOW = 1 << 30


def tiles_of(counts: Sequence[int], lengths: Sequence[int], tokens: int, window: int | None) -> list[list[int]]:
    """Return [sequence, first row in the pack, its position, number of tokens (up to ``tokens``)] of each tile of a
    pack. Tiles that see the most come first, so that no long tile runs last, alone."""
    tiles, row = [], 0
    for sequence, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for first in range(0, count, tokens):
            tiles.append([sequence, row + first, length - count + first, min(tokens, count - first)])
        row += count
    reach = window or max(lengths)
    tiles.sort(key=lambda tile: -min(tile[2] + tile[3], reach + tile[3]))
    return tiles


# Takes queries ``[T, n_q_heads, 1, head_dim]``, sequence after sequence, pools of keys and of values, their fence, and
# sinks ``[n_q_heads]`` or None. Returns ``[T, n_q_heads, 1, value_dim]`` and the next fence.
PrefillLaunch = Callable[..., tuple[mx.array, mx.array]]


def prepare_prefill(
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
    variant: Variant | None = None,
    pages: PageShape | None = None,
) -> PrefillLaunch:
    """Prepare the launch for the new tokens of B sequences, which pools of this geometry hold already.

    Token i of sequence s has position ``p = lengths[s] - counts[s] + i``. It sees the positions from ``p - window + 1``
    to ``p``, starting with the first multiple of ``stride`` among them. Table entries that no token sees are not
    followed, and a token's bits depend on no other sequence.

    Args:
        tables: block ids by absolute position, int32 ``[B, max_blocks]``.
        counts: new tokens of each sequence, 1 or more.
        lengths: tokens of each sequence, the new ones included.
        variant: overrides the choice, for checks and timings.
        pages: form of pools of quantised pages.

    Raises:
        ValueError: the geometry is not supported.
        NoKernelError: no GPU, or the variant is off.
    """
    dtype, n_kv_heads, block_size, head_dim, value_dim = ops.geometry_of(k_pool, v_pool, pages)
    if variant is None:
        shape = dtype, head_dim, value_dim, n_q_heads, n_kv_heads, block_size
        variant = ops.first_working(ops.variants_of(*shape, softcap is not None, sinks, pages, "prefill"))
    own = shape_for(variant)
    tiles = tiles_of(counts, lengths, own.rows // variant.gqa, window)
    seen = _NO_WINDOW if window is None or window >= max(lengths) else window
    threads = 32 * own.simdgroups
    outputs = [((sum(counts), n_q_heads, 1, value_dim), dtype), FENCE]
    text = variant.body, constants_of(variant, own)
    launch = prepare(text, (len(tiles) * n_kv_heads * threads, 1, 1), threads, outputs)
    cut = mx.array(tiles, mx.int32)
    params = params_of(scale, softcap or 1.0, seen, stride if seen == window else 1)

    def attend(
        q: mx.array, k_pool: mx.array, v_pool: mx.array, fence: mx.array, sinks: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        logits = params if sinks is None else sinks.astype(mx.float32)
        out, fence = launch([q, k_pool, v_pool, fence, tables, cut, params, logits])
        return out, fence

    return attend
