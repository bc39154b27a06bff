"""What the self-check compares of the kernels over latents."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from .. import ops
from ..cases import Blocks, attention, squared_errors, worst_rms
from ..launch_shape import LATENT_BODIES, MAX_QUERY_LENGTH, Variant
from ..quantized import new_blocks
from ..trial import MANY
from .prompts import ROPE, prepare_prompts, prompt_shape_for

_TABLE_WIDTH = 16  # block tables are as wide as a multiple of it


def latent_difference(variant: Variant) -> float:
    """RMS between a decode variant and float32 attention, of the worst row of two seeded cases (2 rows and 9), with the
    newest tokens in the pool, then with them given to the call, and then with rows of padding.

    Contexts of 1, block - 1, block, block + 1 and several blocks in permuted blocks, every unused slot NaN, on Metal
    every output NaN before, and query heads that do not fill the last thread group's; also with 2 to 8 queries.
    Raises RuntimeError if bytes went astray.
    """
    block = variant.block_size
    many = [1, block - 1, block, block + 1, 3 * block + 5, 300, 2100, 7, 2 * block]
    return max(_difference(variant, each) for each in ([300, 5], many))


def _difference(variant: Variant, contexts: list[int]) -> float:
    """Return the RMS for one case."""
    block, dtype, rank = variant.block_size, variant.dtype, variant.value_dim
    rope, batch = variant.head_dim - rank, len(contexts)
    heads = 2 * variant.gqa - (variant.gqa // 3 if variant.body == LATENT_BODIES[1] else 0)
    keys = [mx.random.key(7 * batch + i) for i in range(3)]
    blocks = Blocks.of(contexts, block, batch)
    tables, slots = blocks.tables(_TABLE_WIDTH), blocks.slots
    k, v = (
        mx.random.normal((len(slots), 1, 1, n), key=key).astype(dtype)
        for n, key in zip((rank, rope), keys, strict=False)
    )
    q = mx.random.normal((batch, heads, 1, rank + rope), key=keys[2]).astype(dtype)
    scale = (rank + rope) ** -0.5
    k_pool, v_pool = new_blocks(blocks.num_blocks + 1, 1, block, (rank, rope), dtype, None, float("nan"))
    fence = ops.write_slots(k_pool, v_pool, ops.new_fence(), k, v, mx.array(slots, mx.int32))
    visible = mx.array(tables, mx.int32), mx.array(contexts, mx.int32)[:, None], mx.zeros((batch, 1), mx.int32)
    # Memory that a kernel should have written, and did not, often holds numbers that do no harm.
    init_value = float("nan") if variant.backend == "metal" else None
    given: dict[str, Any] = {
        "n_q_heads": heads,
        "scale": scale,
        "variant": variant,
        "latent": True,
        "init_value": init_value,
    }
    prepare: Any = partial(ops.prepare_decode, k_pool, v_pool, **given)
    out, fence = prepare(visible)(q, k_pool, v_pool, fence)
    newest = [sum(contexts[: b + 1]) - 1 for b in range(batch)]
    no_k, no_v = (mx.full((batch, *x.shape[1:]), float("nan"), dtype) for x in (k, v))
    fence = ops.write_slots(k_pool, v_pool, fence, no_k, no_v, mx.array([slots[i] for i in newest], mx.int32))
    new = [mx.concatenate([x[i : i + 1] for i in newest]) for x in (k, v)]
    again, fence = prepare(visible, append=True)(q, k_pool, v_pool, fence, None, *new)
    if not mx.array_equal(out.astype(mx.float32), again.astype(mx.float32)).item():
        raise RuntimeError("the result differs when the newest tokens come with the call")
    tables_padded, ends_padded, starts_padded = (_extended(x, 0) for x in visible)
    padded, fence = prepare((tables_padded, ends_padded, starts_padded), append=True)(
        _extended(q, float("nan")), k_pool, v_pool, fence, None, *(_extended(x, float("nan")) for x in new)
    )
    if not _alike(padded[:batch], again, variant):
        raise RuntimeError("the result differs with rows of padding")
    if padded[batch:].any().item():
        raise RuntimeError("rows of padding have a result")
    first, errors, kept = 0, [], []
    for b, n in enumerate(contexts):
        own_k, own_v = (x[first : first + n].reshape(n, -1) for x in (k, v))
        first += n
        got_k, got_v, fence = ops.gather_blocks(k_pool, v_pool, fence, blocks.ids[b], 0, n)
        if not (mx.array_equal(got_k[0, 0], own_k).item() and mx.array_equal(got_v[0, 0], own_v).item()):
            raise RuntimeError("slots read back differ from what was written")
        kept.append((own_k, own_v))
        expected = _attend(q[b, :, 0], own_k, own_v, scale)
        errors.append(mx.square(out[b, :, 0].astype(mx.float32) - expected).mean())
    for q_len in (2, 3, 4, 5, 6, 7) if 2 * batch < MANY else (MAX_QUERY_LENGTH,):
        q = mx.random.normal((batch, heads, q_len, rank + rope), key=keys[2]).astype(dtype)
        ends = [[max(n - q_len + 1 + i, 0) for i in range(q_len)] for n in contexts]
        seen = visible[0], mx.array(ends, mx.int32), mx.zeros((batch, q_len), mx.int32)
        out, fence = prepare(seen)(q, k_pool, v_pool, fence)
        for b, (own_k, own_v) in enumerate(kept):
            for i, end in enumerate(ends[b]):
                got = out[b, :, i].astype(mx.float32)
                if end > 0:
                    got = got - _attend(q[b, :, i], own_k[:end], own_v[:end], scale)
                errors.append(mx.square(got).mean())
    return worst_rms(errors)


def _alike(x: mx.array, y: mx.array, variant: Variant) -> bool:
    """Bit for bit, where a row's partitions do not depend on the other rows; else nearly."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    if variant.body != LATENT_BODIES[1]:
        return bool(mx.array_equal(x, y).item())
    return bool(mx.allclose(x, y, rtol=2e-2, atol=2e-2).item())


def _extended(x: mx.array, value: float) -> mx.array:
    """With two more rows of a value."""
    return mx.concatenate([x, mx.full((2, *x.shape[1:]), value, x.dtype)])


def _attend(q: mx.array, latents: mx.array, rotated: mx.array, scale: float) -> mx.array:
    """Attention of q [n_q_heads, rank + rope] over latents [n, rank] and rotated [n, rope]."""
    keys = mx.concatenate([latents, rotated], axis=1)
    return attention(q[None], keys[:, None], latents[:, None], scale)[0]


_HEADS = 2


def prompts_difference(variant: Variant) -> float:
    """RMS between a variant for prompts and float32 attention, of the worst sequence of a seeded pack: new tokens that
    fill tiles and do not, after prefixes and without, in permuted blocks; every slot that no token sees is NaN."""
    block, dtype = variant.block_size, variant.dtype
    tile = prompt_shape_for(variant.head_dim, variant.value_dim).rows
    counts, prefixes = [1, tile + 3, 2, tile], [block + 5, 0, 90, 64]
    lengths = [count + prefix for count, prefix in zip(counts, prefixes, strict=True)]
    scale = variant.head_dim**-0.5
    blocks = Blocks.of(lengths, block, 5, 0)
    tables = mx.array(blocks.tables(), mx.int32)
    heads = (_HEADS, _HEADS, 1)
    dims = (variant.head_dim - ROPE, variant.value_dim, ROPE)
    rows = [
        mx.random.normal((sum(lengths), n, dim), key=mx.random.key(5 + i)).astype(dtype)
        for i, (n, dim) in enumerate(zip(heads, dims, strict=True))
    ]
    spans = [(0, 0)] * blocks.num_blocks  # rows of the tokens in each block
    begin = 0
    for table, length in zip(blocks.ids, lengths, strict=True):
        for i, block_id in enumerate(table):
            spans[block_id] = begin + i * block, begin + min(length, i * block + block)
        begin += length
    arrays = [mx.concatenate([_block(x, span, block) for span in spans])[None].swapaxes(1, 2) for x in rows]
    keys, values, rotated = (mx.contiguous(x) for x in arrays)
    q = mx.random.normal((sum(counts), _HEADS, 1, variant.head_dim), key=mx.random.key(8)).astype(dtype)
    out = prepare_prompts(tables, counts, lengths, variant=variant, scale=scale)(q, keys, values, rotated)
    own_keys = mx.concatenate([rows[0], mx.broadcast_to(rows[2], (*rows[0].shape[:2], ROPE))], axis=-1)
    return worst_rms(squared_errors(out, q, own_keys, rows[1], counts, lengths, scale))


def _block(x: mx.array, span: tuple[int, int], block: int) -> mx.array:
    """Rows of x in a block, the rest of which is NaN."""
    first, last = span
    missing = mx.full((block - (last - first), *x.shape[1:]), float("nan"), x.dtype)
    return mx.concatenate([x[first:last], missing])
