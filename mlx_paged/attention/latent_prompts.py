"""Attention of prompts' new tokens over keys and values expanded from latents (MLA), for a whole pack at a time.

A layer's latents are gathered once for all sequences of the pack; keys and values are expanded from them for as many
heads at a time as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..kernels.latent_prompts import prepare_prompts, prompt_variant_of
from ..kv.attention_params import LatentHeads
from ..kv.choice import latent_prefill_unsupported_reason
from ..kv.group import Group
from ..kv.new_tokens import NewTokens
from ..kv.pool import BlockPool
from . import dispatch
from .dispatch import Dispatch

# Most bytes of expanded keys and values at a time: DeepSeek V3's 128 heads for 8,192 tokens.
MOST_BYTES = 512 << 20
KERNEL = Dispatch("kernel", "prompts over expanded latents")

# Expands latents [1, 1, slots, rank] for a slice of heads to keys, without their rotated part, and values, each
# [1, n_heads, slots, dim].
Expand = Callable[[mx.array, slice], tuple[mx.array, mx.array]]


def is_supported(heads: LatentHeads, dtype: mx.Dtype, pool: BlockPool, layer: int) -> bool:
    """Return whether a kernel attends over keys and values expanded from a layer's latents, for several new tokens per
    sequence and queries of this dtype."""
    group = pool.group_of(layer)
    if group.choice is None or not group.choice.has_kernel or group.geometry is None or group.geometry.dtype != dtype:
        return False
    return _unsupported_reason(group, heads) is None


def _unsupported_reason(group: Group, heads: LatentHeads) -> str | None:
    if heads not in group.prompts_unsupported:
        assert group.geometry is not None
        why = "a sliding window over latents is not supported" if group.spec.window is not None else None
        group.prompts_unsupported[heads] = why or latent_prefill_unsupported_reason(
            group.geometry, group.block_size, heads
        )
    return group.prompts_unsupported[heads]


def attend(
    nope: mx.array,
    rope: mx.array,
    group: Group,
    position: int,
    tokens: NewTokens,
    heads: LatentHeads,
    scale: float,
    expand: Expand,
) -> mx.array:
    """Compute causal attention of new tokens, whose latents are written. Call it only if :func:`is_supported`.

    Args:
        nope: the queries without their rotated part, ``[T, n_heads, 1, head_dim - rope]``.
        rope: their rotated part, ``[T, n_heads, 1, rope]``.
        group, position: the layer's group, and its index there.
        tokens: the new tokens.
        heads: number and sizes of the heads.
        scale: factor on the scores.
        expand: makes keys and values from latents.

    Returns:
        ``[T, n_heads, 1, value_dim]``.
    """
    key = "prompts", heads, scale
    launch = tokens.made.get(key)
    latents, rotated = group.device(position).read_packed(tokens)
    if launch is None:
        variant = prompt_variant_of(rotated.dtype, heads.head_dim, heads.value_dim, rotated.shape[3], group.block_size)
        assert variant is not None
        lengths = [table.length for table in tokens.tables]
        launch = prepare_prompts(tokens.gathered_tables(), tokens.counts, lengths, variant=variant, scale=scale)
        tokens.made[key] = launch
    dispatch.record(KERNEL)
    slots = latents.shape[2]
    bytes_of_head = slots * (heads.head_dim - rotated.shape[3] + heads.value_dim) * latents.dtype.size
    pieces = -(-heads.num_heads * bytes_of_head // MOST_BYTES)
    together = -(-heads.num_heads // min(pieces, heads.num_heads))
    outputs: list[mx.array] = []
    for first in range(0, heads.num_heads, together):
        part = slice(first, min(first + together, heads.num_heads))
        keys, values = expand(latents, part)
        queries = mx.concatenate([nope[:, part], rope[:, part]], axis=-1)
        outputs.append(launch(queries, keys, values, rotated))
        if together < heads.num_heads:  # keeps the keys and values of at most two pieces alive
            mx.async_eval(outputs[-1])
            mx.eval(outputs[-2:-1])
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
