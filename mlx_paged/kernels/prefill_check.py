"""The self-check of the prefill kernel: compared with plain attention before it may serve a model on this machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import mlx.core as mx

from . import ops
from .check import SelfCheck, checked, outcome_of, pool_texts_of, worst_rms
from .launch_shape import Variant
from .prefill import prefill_constants_of, prefill_shape_for, prepare_prefill
from .quantized.pages import new_blocks
from .timing import LAUNCHES, seconds_of

_KV_HEADS = 2
_WINDOW = 45
_FREE_BLOCKS = 1


def checked_prefill(variant: Variant) -> SelfCheck:
    """The remembered result of :func:`self_check_prefill`, as :func:`.check.checked` has it for decoding: the first
    call compiles and runs the variant, and a failure warns and switches it off for this process."""
    shape = prefill_shape_for(variant.head_dim, variant.value_dim, variant.pages)
    texts = [pool_texts_of(variant)[0], (variant.body, prefill_constants_of(variant, shape))]
    return checked(variant, self_check_prefill, texts)


def self_check_prefill(variant: Variant) -> SelfCheck:
    """Run one variant on a seeded pack, without a window and then with one: two launches of one text.

    New tokens that fill tiles and do not, after prefixes and without, in permuted blocks; every slot that no token sees
    is NaN. Fails on a compile error, a non-finite value or an RMS difference of 5e-3 and more from attention in
    float32. Never raises for a failing kernel. Does not switch anything off.
    """
    return SelfCheck(variant, *outcome_of(partial(_difference, variant)))


def _difference(variant: Variant) -> float:
    """RMS between the variant and float32 attention, of the worst sequence."""
    block, dtype, pages = variant.block_size, variant.dtype, variant.pages
    launch_shape = prefill_shape_for(variant.head_dim, variant.value_dim, variant.pages)
    tile = launch_shape.rows // variant.gqa  # tokens
    counts, prefixes = [1, tile + 3, 2, tile], [block + 5, 0, 90, 64]
    lengths = [count + prefix for count, prefix in zip(counts, prefixes, strict=True)]
    n_q_heads = _KV_HEADS * variant.gqa
    keys = [mx.random.key(3 + i) for i in range(4)]
    # By Python here, above and below: what MLX's indexing by arrays needs, it would have to compile on CUDA.
    used = [-(-n // block) for n in lengths]
    order = random.Random(3).sample(range(_FREE_BLOCKS, _FREE_BLOCKS + sum(used)), sum(used))
    ids = [[order.pop() for _ in range(n)] for n in used]
    tables = mx.array([[*row, *[0] * (max(used) - len(row))] for row in ids], mx.int32)
    slots = [ids[s][t // block] * block + t % block for s, n in enumerate(lengths) for t in range(n)]
    k, v = (
        mx.random.normal((len(slots), _KV_HEADS, dim), key=key).astype(dtype)
        for dim, key in zip((variant.head_dim, variant.value_dim), keys, strict=False)
    )
    q = mx.random.normal((sum(counts), n_q_heads, 1, variant.head_dim), key=keys[2]).astype(dtype)
    sinks = mx.random.normal((n_q_heads,), key=keys[3]) if variant.sinks else None
    scale, softcap = variant.head_dim**-0.5, 10.0 if variant.softcap else None
    dims = variant.head_dim, variant.value_dim
    k_pool, v_pool = new_blocks(sum(used) + _FREE_BLOCKS, _KV_HEADS, block, dims, dtype, pages, float("nan"))
    fence = ops.write_slots(k_pool, v_pool, ops.new_fence(), k, v, mx.array(slots, mx.int32), pages)
    if pages is not None:  # what they hold of keys and values
        k, v = pages.dequantize(*pages.quantize(k, v))
    errors = []
    for window in (None, _WINDOW):
        if window is not None:
            # What the window leaves behind is NaN from here on.
            dead: list[int] = []
            for length, prefix in zip(lengths, prefixes, strict=True):
                own = slots[len(dead) : len(dead) + length]
                dead += [slot if t < prefix - window + 1 else -1 for t, slot in enumerate(own)]
            no_k, no_v = (mx.full(x.shape, float("nan"), dtype) for x in (k, v))
            fence = ops.write_slots(k_pool, v_pool, fence, no_k, no_v, mx.array(dead, mx.int32), pages)
        launch = prepare_prefill(
            k_pool,
            v_pool,
            tables,
            counts,
            lengths,
            n_q_heads=n_q_heads,
            scale=scale,
            softcap=softcap,
            sinks=variant.sinks,
            window=window,
            variant=variant,
            launch_shape=launch_shape,
            pages=pages,
        )
        out, fence = launch(q, k_pool, v_pool, fence, sinks)
        errors += squared_errors(out, q, k, v, counts, lengths, scale, softcap, sinks, window)
    return worst_rms(errors)


def squared_errors(
    out: mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    counts: Sequence[int],
    lengths: Sequence[int],
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
) -> list[mx.array]:
    """Of each sequence of a pack, the mean squared difference from attention in float32.

    Args:
        out: what a kernel has made of q, ``[T, n_q_heads, 1, value_dim]``.
        q: of the new tokens, ``[T, n_q_heads, 1, D]``.
        k, v: of all tokens, one sequence's after the other's, ``[sum(lengths), n_kv_heads, D]``.
        counts: new tokens of each sequence.
        lengths: of the sequences, the new tokens included.
    """
    errors = []
    row = first = 0
    for count, length in zip(counts, lengths, strict=True):
        own_k, own_v = (x[first : first + length] for x in (k, v))
        expected = _attend(q[row : row + count], own_k, own_v, scale, softcap, sinks, window)
        errors.append(mx.square(out[row : row + count].astype(mx.float32) - expected).mean())
        row, first = row + count, first + length
    return errors


def _attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    softcap: float | None,
    sinks: mx.array | None,
    window: int | None,
) -> mx.array:
    """Causal attention of q ``[n, n_q_heads, 1, D]``, the last of the tokens of k, v ``[length, n_kv_heads, D]``, in
    float32 and without matrix units."""
    count, length = q.shape[0], k.shape[0]
    positions = mx.arange(length)
    own = (length - count + mx.arange(count))[:, None]
    seen = positions <= own
    if window is not None:
        seen = mx.logical_and(seen, positions > own - window)
    group, heads = q.shape[1] // k.shape[1], []
    for h in range(q.shape[1]):
        keys, values = (x[:, h // group].astype(mx.float32) for x in (k, v))
        scores = (q[:, h].astype(mx.float32) * keys).sum(-1) * scale  # [count, length]
        if softcap is not None:
            scores = softcap * mx.tanh(scores / softcap)
        scores = mx.where(seen, scores, -float("inf"))
        if sinks is not None:
            scores = mx.concatenate([mx.broadcast_to(sinks[h : h + 1], (count, 1)), scores], axis=1)
        weights = mx.softmax(scores, axis=1, precise=True)[:, int(sinks is not None) :]
        heads.append((weights[:, :, None] * values).sum(1))
    return mx.stack(heads, axis=1)[:, :, None]


def prefill_seconds(variant: Variant) -> float:
    """Seconds of one launch for 4 sequences of 512 new tokens and 2 KV heads, the kernel being compiled."""
    batch, length, block, dtype = 4, 512, variant.block_size, variant.dtype
    per_row = length // block
    dims = variant.head_dim, variant.value_dim
    k_pool, v_pool = new_blocks(batch * per_row + 1, _KV_HEADS, block, dims, dtype, variant.pages)
    q = mx.zeros((batch * length, _KV_HEADS * variant.gqa, 1, variant.head_dim), dtype)
    sinks = mx.zeros((q.shape[1],)) if variant.sinks else None
    tables = mx.arange(1, 1 + batch * per_row, dtype=mx.int32).reshape(batch, per_row)
    mx.eval(k_pool, v_pool, q, tables)
    launch = prepare_prefill(
        k_pool,
        v_pool,
        tables,
        [length] * batch,
        [length] * batch,
        n_q_heads=q.shape[1],
        scale=variant.head_dim**-0.5,
        softcap=10.0 if variant.softcap else None,
        sinks=variant.sinks,
        variant=variant,
        pages=variant.pages,
    )

    def launches() -> list[mx.array]:
        fence, results = ops.new_fence(), []
        for _ in range(LAUNCHES):
            out, fence = launch(q, k_pool, v_pool, fence, sinks)
            results.append(out)
        return [*results, fence]

    return seconds_of(launches) / LAUNCHES
