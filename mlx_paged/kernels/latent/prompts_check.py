"""The self-check of the kernel for prompts over latents' keys and values: compared with plain attention before it may
serve a model on this machine."""

from __future__ import annotations

import random
from functools import partial

import mlx.core as mx

from ..check import SelfCheck, checked, outcome_of, worst_rms
from ..launch_shape import Variant
from ..prefill_check import squared_errors
from .prompts import ROPE, prepare_prompts, prompt_constants_of, prompt_shape_for

_HEADS = 2


def checked_prompts(variant: Variant) -> SelfCheck:
    """The remembered result of :func:`self_check_prompts`, as :func:`..check.checked` has it for decoding: the first
    call compiles and runs the variant, and a failure warns and switches it off for this process."""
    constants = prompt_constants_of(variant, prompt_shape_for(variant.head_dim, variant.value_dim))
    return checked(variant, self_check_prompts, [(variant.body, constants)])


def self_check_prompts(variant: Variant) -> SelfCheck:
    """Run one variant on a seeded pack: new tokens that fill tiles and do not, after prefixes and without, in permuted
    blocks; every slot that no token sees is NaN.

    Fails on a compile error, a non-finite value or an RMS difference of 5e-3 and more from attention in float32. Never
    raises for a failing kernel. Does not switch anything off.
    """
    return SelfCheck(variant, *outcome_of(partial(_difference, variant)))


def _difference(variant: Variant) -> float:
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
