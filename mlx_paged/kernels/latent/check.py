"""The self-check of the kernels over latents: compared with plain attention before they may serve a model here."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import mlx.core as mx

from .. import ops
from ..build import Constants
from ..check import SelfCheck, checked, outcome_of, worst_rms
from ..decode_spec import pool_constants_of, spec_of
from ..launch_shape import LATENT_BODIES, MAX_QUERY_LENGTH, Variant, shape_for
from ..prefill import squared_errors
from ..quantized import new_blocks
from ..trial import MANY
from .prompts import ROPE, prepare_prompts, prompt_constants_of, prompt_shape_for

_TABLE_WIDTH = 16  # block tables are as wide as a multiple of it


def checked_latent(variant: Variant) -> SelfCheck:
    """Return the remembered result of :func:`self_check_latent`, as :func:`..check.checked` has it for other pages: the
    first call compiles and runs the variant, and a failure warns and switches it off for this process."""
    return checked(variant, self_check_latent, latent_texts_of(variant))


def latent_texts_of(variant: Variant) -> list[tuple[str, Constants]]:
    """Body and constants of the texts that a pool of latents and its decode steps need, on CUDA."""
    rank, rope = variant.value_dim, variant.head_dim - variant.value_dim
    pool = pool_constants_of(variant.dtype, rank, rope, variant.block_size)
    texts = [("write_slots", (*pool, ("S", mx.int32))), ("gather_blocks", pool), ("copy_blocks", pool)]
    for partitions in (2, 1):
        spec = spec_of(variant, shape_for(variant), 1, variant.gqa, 1, partitions)
        texts += [(text.body, text.constants) for text in spec.texts]
    return list(dict.fromkeys(texts))


def self_check_latent(variant: Variant) -> SelfCheck:
    """Run one variant on two seeded cases (2 rows and 9), with the newest tokens in the pool, then with them given to
    the call, and then with rows of padding. Contexts of 1, block - 1, block, block + 1 and several blocks in permuted
    blocks, every unused slot NaN, on Metal every output NaN before, and query heads that do not fill the last thread
    group's; also with 2 to 8 queries.

    Fails on a compile error, a non-finite value or an RMS difference of 5e-3 and more from attention in float32. Never
    raises for a failing kernel. Does not switch anything off.
    """
    block = variant.block_size
    many = [1, block - 1, block, block + 1, 3 * block + 5, 300, 2100, 7, 2 * block]
    return SelfCheck(variant, *outcome_of(lambda: max(_difference(variant, each) for each in ([300, 5], many))))


def _difference(variant: Variant, contexts: list[int]) -> float:
    """RMS between the variant and float32 attention, of the worst row. Raises RuntimeError if bytes went astray."""
    block, dtype, rank = variant.block_size, variant.dtype, variant.value_dim
    rope, batch = variant.head_dim - rank, len(contexts)
    heads = 2 * variant.gqa - (variant.gqa // 3 if variant.body == LATENT_BODIES[1] else 0)
    keys = [mx.random.key(7 * batch + i) for i in range(3)]
    used = [-(-n // block) for n in contexts]
    width = -(-max(used) // _TABLE_WIDTH) * _TABLE_WIDTH
    order = random.Random(batch).sample(range(1, sum(used) + 1), sum(used))
    # By Python and by slices: MLX would have to compile what it needs to index on CUDA.
    tables, slots = [], []
    for n, blocks in zip(contexts, used, strict=True):
        ids, order = order[:blocks], order[blocks:]
        tables.append(ids + [0] * (width - blocks))
        slots += [ids[t // block] * block + t % block for t in range(n)]
    k, v = (
        mx.random.normal((len(slots), 1, 1, n), key=key).astype(dtype)
        for n, key in zip((rank, rope), keys, strict=False)
    )
    q = mx.random.normal((batch, heads, 1, rank + rope), key=keys[2]).astype(dtype)
    scale = (rank + rope) ** -0.5
    k_pool, v_pool = new_blocks(sum(used) + 1, 1, block, (rank, rope), dtype, None, float("nan"))
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
        got_k, got_v, fence = ops.gather_blocks(k_pool, v_pool, fence, tables[b][: used[b]], 0, n)
        if not (mx.array_equal(got_k[0, 0], own_k).item() and mx.array_equal(got_v[0, 0], own_v).item()):
            raise RuntimeError("slots read back differ from what was written")
        kept.append((own_k, own_v))
        expected = _attend(q[b].squeeze(1), own_k, own_v, scale)
        errors.append(mx.square(out[b].squeeze(1).astype(mx.float32) - expected).mean())
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
    """Attention of q [n_q_heads, rank + rope] over latents [n, rank] and rotated [n, rope] in float32, without matrix
    units."""
    heads = []
    latents, keys = latents.astype(mx.float32), mx.concatenate([latents, rotated], axis=1).astype(mx.float32)
    for h in range(q.shape[0]):
        weights = mx.softmax((keys * q[h].astype(mx.float32)).sum(1) * scale, precise=True)
        heads.append((weights[:, None] * latents).sum(0))
    return mx.stack(heads)


_HEADS = 2


def checked_prompts(variant: Variant) -> SelfCheck:
    """Return the remembered result of :func:`self_check_prompts`, as :func:`..check.checked` has it for decoding: the
    first call compiles and runs the variant, and a failure warns and switches it off for this process."""
    constants = prompt_constants_of(variant, prompt_shape_for(variant.head_dim, variant.value_dim))
    return checked(variant, self_check_prompts, [(variant.body, constants)])


def self_check_prompts(variant: Variant) -> SelfCheck:
    """Run one variant on a seeded pack: new tokens that fill tiles and do not, after prefixes and without, in permuted
    blocks; every slot that no token sees is NaN.

    Fails on a compile error, a non-finite value or an RMS difference of 5e-3 and more from attention in float32. Never
    raises for a failing kernel. Does not switch anything off.
    """
    return SelfCheck(variant, *outcome_of(partial(_prompts_difference, variant)))


def _prompts_difference(variant: Variant) -> float:
    """RMS between the variant and float32 attention, of the worst sequence."""
    block, dtype = variant.block_size, variant.dtype
    tile = prompt_shape_for(variant.head_dim, variant.value_dim).rows
    counts, prefixes = [1, tile + 3, 2, tile], [block + 5, 0, 90, 64]
    lengths = [count + prefix for count, prefix in zip(counts, prefixes, strict=True)]
    scale = variant.head_dim**-0.5
    # By Python and by slices here and below: what MLX's indexing by arrays needs, it would have to compile on CUDA.
    used = [-(-n // block) for n in lengths]
    order = random.Random(5).sample(range(sum(used)), sum(used))
    ids = [[order.pop() for _ in range(n)] for n in used]
    tables = mx.array([[*row, *[0] * (max(used) - len(row))] for row in ids], mx.int32)
    heads = (_HEADS, _HEADS, 1)
    dims = (variant.head_dim - ROPE, variant.value_dim, ROPE)
    rows = [
        mx.random.normal((sum(lengths), n, dim), key=mx.random.key(5 + i)).astype(dtype)
        for i, (n, dim) in enumerate(zip(heads, dims, strict=True))
    ]
    spans = [(0, 0)] * sum(used)  # rows of the tokens in each block
    begin = 0
    for table, length in zip(ids, lengths, strict=True):
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
