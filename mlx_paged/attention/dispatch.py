"""paged_attention(): attention of new queries over the blocks of their sequences; says which path it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..errors import GeometryError
from ..kernels.availability import prepares_plans
from ..kernels.build import KernelUnavailable
from ..kernels.launch_shape import MAX_QUERY_LENGTH
from ..kv.block_table import BlockTable
from ..kv.group import BlockGroup
from ..kv.layer import PoolLayer
from ..kv.pool import BlockPool
from ..kv.step import PackedStep, Step
from ..kv.storage.attention_params import AttentionParams, QueryHeads, Window
from ..kv.storage.choice import kernel_unsupported_reason, prefill_unsupported_reason
from . import gather
from .gather import causal_mask

# Where MLX's attention prepares a plan for each new shape (docs/adr/0010), the kernel takes up to so many new tokens of
# a sequence, and so many of them times its length: it reads the context again for each.
MOST_FEW_TOKENS = 64
MOST_READS = 1 << 18


class Dispatch(NamedTuple):
    """One choice of path.

    Attributes:
        path: "prefill" (fresh keys and values only, nothing read from the pool), "kernel" (the fused kernel), "gather"
            (gather-then-SDPA), "apart" (a pack, sequence by sequence: for each of them another path follows).
        reason: why this path.
    """

    path: str
    reason: str


_counts: Counter[Dispatch] = Counter()
_last: Dispatch | None = None


def last_dispatch() -> Dispatch | None:
    """Return the path taken by the last attention call in this process, or None."""
    return _last


def dispatch_counts() -> dict[Dispatch, int]:
    """Return how often each path was taken, with its reason, since the last :func:`reset_dispatch_counts`."""
    return dict(_counts)


def reset_dispatch_counts() -> None:
    """Forget the counts, and the last dispatch."""
    global _last
    _counts.clear()
    _last = None


_FRESH = Dispatch("prefill", "no prefix: the new keys are all there is")
_KERNEL_ONE = Dispatch("kernel", "one new token per sequence")
_KERNEL_FEW = Dispatch("kernel", "a few new tokens per sequence")
_KERNEL_PACK = Dispatch("kernel", "several sequences' new tokens")


def record(choice: Dispatch, times: int = 1) -> None:
    """Count a choice of path."""
    global _last
    _last = choice
    _counts[choice] += times


def record_compiled(num_layers: int) -> None:
    """Count a compiled decode step, in which every layer ran in the kernel."""
    record(_KERNEL_ONE, num_layers)


def prefill_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pool: BlockPool,
    layer: int,
    table: BlockTable,
    params: AttentionParams,
    step: Step | None = None,
) -> mx.array:
    """Attention of several new tokens of one sequence, whose k and v are already written to the pool.

    Args:
        q: ``[1, n_q_heads, n_new, head_dim]``.
        k: the new keys ``[1, n_kv_heads, n_new, k_head_dim]``, as written.
        v: the new values ``[1, n_kv_heads, n_new, v_head_dim]``.
        pool, layer, table: where they were written.
        params: its mask is over the visible keys (prefix and new ones).
        step: as for :func:`paged_attention`.

    Returns:
        ``[1, n_q_heads, n_new, v_head_dim]``.
    """
    group = pool.layer(layer).group
    # What quantised pages hold is what everybody else is going to see of these tokens.
    fresh = table.num_visible == q.shape[2] and not group.is_quantized
    if fresh and prepares_plans():
        fresh = _unsupported_reason(q, group, table.length, params) is not None
    if fresh:
        record(_FRESH)
        k, v = pool.layer(layer).after_writes(k, v)
        return gather.attention(q, k, v, params)
    return paged_attention(q, pool, layer, [table], params, step)


def paged_attention(
    q: mx.array,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    params: AttentionParams,
    step: Step | None = None,
) -> mx.array:
    """Attention of the newest tokens of each sequence over its visible tokens, themselves included.

    Args:
        q: ``[B, n_q_heads, q_len, head_dim]``: the last ``q_len`` tokens of each sequence.
        pool: holds the keys and values, those of the new tokens included.
        layer: model layer.
        tables: B block tables of the layer's group.
        params: its mask is over the visible tokens.
        step: of these tables and tokens, if the caller has it.

    Returns:
        ``[B, n_q_heads, q_len, v_head_dim]``.

    Raises:
        GeometryError: the queries are not one row per table.
    """
    return _attend(q, pool, layer, tables, step, None, params)


def takes_rows(q: mx.array, pool: BlockPool, layer: int, longest: int, params: AttentionParams) -> bool:
    """Return whether kernels serve several new tokens of each of B sequences together.

    Args:
        q: ``[B, n_q_heads, n_new, head_dim]``.
        pool, layer: where their keys and values are going to be.
        longest: tokens of the longest sequence, the new ones included.
        params: without a mask.
    """
    return _unsupported_reason(q, pool.layer(layer).group, longest, params) is None


def serves_latents(num_q_heads: int, pool: BlockPool, layer: int) -> bool:
    """Return whether a kernel attends over a layer's latents, from so many query heads and for one new token per
    sequence."""
    group = pool.layer(layer).group
    return group.in_place and _heads_unsupported_reason(group, QueryHeads(num_q_heads, latent=True)) is None


def ragged_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    counts: Sequence[int],
    params: AttentionParams,
) -> mx.array:
    """Write a few new tokens of each of B sequences and attend from them, by kernels, each in one launch for all.
    Only where :func:`takes_rows` says so.

    Args:
        q: ``[B, n_q_heads, n_new, head_dim]``.
        k, v: ``[B, n_kv_heads, n_new, head_dim]``, accepted by :meth:`PoolLayer.set_geometry`.
        pool, layer, tables: where to write; the positions are reserved.
        counts: real tokens of each row, at least one; the rest is padding on the right.
        params: without a mask.

    Returns:
        ``[B, n_q_heads, n_new, v_head_dim]``, zeros at padding.
    """
    kv = pool.layer(layer)
    step = kv.step(tables, q.shape[2], counts)
    kv.write_step(tables, step, k, v)
    group, window = kv.group, kv.sees
    try:
        out = kv.storage.decode(q, tables, step, params._replace(window=window))
    except KernelUnavailable as error:
        record(Dispatch("gather", _note_unsupported(group, q, params, error)))
        outputs = []
        for row, (table, count) in enumerate(zip(tables, counts, strict=True)):
            mask = causal_mask(count, table.num_visible - count, window)
            one = q[row : row + 1, :, :count]
            out = gather.gather_attention(one, pool, layer, [table], params._replace(mask=mask))
            outputs.append(mx.pad(out, [(0, 0), (0, 0), (0, q.shape[2] - count), (0, 0)]))
        return mx.concatenate(outputs)
    record(_KERNEL_FEW)
    return out


def append_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    step: Step,
    params: AttentionParams,
) -> mx.array:
    """Write one new token per sequence and attend from it; one kernel does both where there is one.

    Args:
        q: ``[B, n_q_heads, 1, head_dim]``.
        k, v: ``[B, n_kv_heads, 1, head_dim]``, accepted by :meth:`PoolLayer.set_geometry`.
        pool, layer, tables: where to write; the positions are reserved.
        step: of these tables, one token each.
        params: as for :func:`paged_attention`.

    Returns:
        ``[B, n_q_heads, 1, v_head_dim]``.
    """
    return _attend(q, pool, layer, tables, step, (k, v), params)


def packed_attention(
    q: mx.array,
    k: mx.array | None,
    v: mx.array | None,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    step: PackedStep,
    params: AttentionParams,
    *,
    as_rows: bool = False,
) -> mx.array:
    """Attention of several sequences' new tokens, T in all, which are written: in one kernel for all sequences, or for
    one after the other as :func:`prefill_attention` does it.

    Args:
        q: ``[T, n_q_heads, 1, head_dim]``.
        k, v: the new keys ``[T, n_kv_heads, 1, head_dim]`` and values, as written; None if they are not at hand.
        pool, layer, tables: where they were written.
        step: of these tables.
        params: without a mask; a window of its own may be narrower than the layer's.
        as_rows: the kernel is that of decode steps, which cuts long contexts up, and reads them for each token.

    Returns:
        ``[T, n_q_heads, 1, v_head_dim]``.
    """
    kv = pool.layer(layer)
    params = params._replace(window=_seen(kv, params))
    if as_rows and _unsupported_reason(q, kv.group, 0, params) is None:
        try:
            out = kv.storage.decode(q, tables, step, params)
            record(_KERNEL_FEW)
            return out
        except KernelUnavailable as error:  # raised before anything was launched
            _note_unsupported(kv.group, q, params, error)
    unsupported = _packed_unsupported_reason(q, kv.group, params)
    if unsupported is None:
        try:
            out = kv.storage.prefill(q, tables, step, params)
            record(_KERNEL_PACK)
            return out
        except KernelUnavailable as error:  # raised before anything was launched
            unsupported = f"the kernel is off: {error}"
            kv.group.packs_unsupported[params.heads(q.shape[1])] = unsupported
    record(Dispatch("apart", unsupported))
    queries = step.split(q)
    new = [None] * len(queries) if k is None or v is None else list(zip(step.split(k), step.split(v), strict=True))
    outputs = []
    for index, (one, table, pair) in enumerate(zip(queries, tables, new, strict=True)):
        own = params._replace(mask=_mask_of(one.shape[2], table, params.window))
        if pair is None:
            outputs.append(paged_attention(one, pool, layer, [table], own, step.part(tables, index)))
        else:
            outputs.append(prefill_attention(one, *pair, pool, layer, table, own, step.part(tables, index)))
    return step.join(outputs)


def _mask_of(num_tokens: int, table: BlockTable, window: Window | None) -> mx.array | str:
    """Return the mask of the table's last tokens over its visible ones."""
    before = table.num_visible - num_tokens
    if window is None or not window.first_seen(before + num_tokens - 1):
        return "causal"
    return causal_mask(num_tokens, before, window)


def _seen(kv: PoolLayer, params: AttentionParams) -> Window | None:
    """Return what a query sees: the layer's window, or a narrower one."""
    if kv.sees is None or (params.window is not None and params.window.size < kv.sees.size):
        return params.window
    return kv.sees


def _attend(
    q: mx.array,
    pool: BlockPool,
    layer: int,
    tables: Sequence[BlockTable],
    step: Step | None,
    append: tuple[mx.array, mx.array] | None,
    params: AttentionParams,
) -> mx.array:
    """Attend by the kernel or over gathered arrays; ``append``: keys and values of the step that are not written
    yet."""
    shape = q.shape
    if len(shape) != 4 or shape[0] != len(tables):
        raise GeometryError(f"queries {shape} for {len(tables)} sequence(s)")
    kv = pool.layer(layer)
    group, q_len = kv.group, shape[2]
    longest = max(table.length for table in tables) if q_len > MAX_QUERY_LENGTH else 0
    unsupported = _unsupported_reason(q, group, longest, params)
    if unsupported is None:
        window = _seen(kv, params)
        seen = params if window is params.window else params._replace(window=window)
        try:
            step_now = step or kv.step(tables, q_len)
            out = kv.storage.decode(q, tables, step_now, seen, append=append)
            record(_KERNEL_ONE if q_len == 1 else _KERNEL_FEW)
            return out
        except KernelUnavailable as error:  # raised before anything of the layer was launched
            unsupported = _note_unsupported(group, q, params, error)
    if append is not None:
        assert step is not None
        kv.write_step(tables, step, *append)
    record(Dispatch("gather", unsupported))
    return gather.gather_attention(q, pool, layer, tables, params, step)


def _packed_unsupported_reason(q: mx.array, group: BlockGroup, params: AttentionParams) -> str | None:
    """Why the kernel for several sequences' new tokens cannot serve this call, or None."""
    if not group.in_place:
        return group.storage_reason
    why = _dtype_unsupported_reason(q, group, params)
    if why is not None:
        return why
    geometry, heads = group.geometry, params.heads(q.shape[1])
    assert geometry is not None
    if heads not in group.packs_unsupported:
        group.packs_unsupported[heads] = prefill_unsupported_reason(geometry, group.block_size, heads)
    return group.packs_unsupported[heads]


def _dtype_unsupported_reason(q: mx.array, group: BlockGroup, params: AttentionParams) -> str | None:
    assert group.geometry is not None
    _, k_dim, v_dim, dtype, _ = group.geometry
    if q.dtype != dtype or q.shape[3] != k_dim + params.latent * v_dim:
        return f"queries of {q.dtype} x {q.shape[3]} over keys of {dtype} x {k_dim}"
    return None


def _unsupported_reason(q: mx.array, group: BlockGroup, longest: int, params: AttentionParams) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    _, num_q_heads, q_len, _ = q.shape
    if q_len > MAX_QUERY_LENGTH and not (
        q_len <= MOST_FEW_TOKENS and q_len * longest <= MOST_READS and prepares_plans()
    ):
        return "several new tokens after a prefix"
    if not group.in_place:
        return group.storage_reason
    if params.window is None and isinstance(params.mask, mx.array):
        return "a mask that is not causality and a window"
    return _dtype_unsupported_reason(q, group, params) or _heads_unsupported_reason(group, params.heads(num_q_heads))


def _heads_unsupported_reason(group: BlockGroup, heads: QueryHeads) -> str | None:
    """Why the kernel cannot serve such queries over the group's blocks, or None."""
    try:
        return group.unsupported[heads]
    except KeyError:
        assert group.geometry is not None
        why = group.unsupported[heads] = kernel_unsupported_reason(group.geometry, group.block_size, heads)
        return why


def _note_unsupported(group: BlockGroup, q: mx.array, params: AttentionParams, error: KernelUnavailable) -> str:
    """Why the kernel serves these queries no more: a text that this call needed first does not work."""
    reason = f"the kernel is off: {error}"
    group.unsupported[params.heads(q.shape[1])] = reason
    return reason
