"""The self-check: a kernel variant is compared with plain attention before it may serve a model on this machine."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from . import ops as kernels
from .build import Constants, compile_ahead, told_when_compiling
from .decode_spec import pool_constants_of, spec_of
from .launch_shape import Variant, shape_for
from .quantized import moves
from .quantized.pages import PageShape, new_blocks

MAX_RMS = 5e-3
_QUERY_HEADS = 8  # at least, as models have
# Block tables are as wide as those of real steps (kv/step.py): the launch then has several partitions, and a merge.
_TABLE_WIDTH = 16
_FREE_BLOCKS = 5  # to copy blocks to


class SelfCheck(NamedTuple):
    """Outcome for one variant. rms is NaN if it never produced a result; seconds include compiling."""

    variant: Variant
    ok: bool
    rms: float
    seconds: float
    reason: str


_results: dict[Variant, SelfCheck] = {}


def self_check(variant: Variant) -> SelfCheck:
    """Run one variant on two seeded cases (batch 2 and batch 9), and the slot writes, gathers and copies of blocks it
    depends on: a pool cannot do without these, so all their texts run here.

    Each with the newest tokens in the pool, then with them given to the call, and then with rows of padding. Two cases,
    because MLX gives Metal kernels inputs of less than 8 elements in another address space: that is another text, built
    by itself. Both are those of real steps.

    Contexts of 1, block - 1, block, block + 1 and several blocks in permuted blocks, every unused slot NaN. Fails on a
    compile error, a non-finite value or an RMS difference of 5e-3 and more from attention in float32. Never raises for
    a failing kernel. Does not switch anything off.
    """
    block = variant.block_size
    several = [3 * block + 5, 300, 2100, 7, 2 * block]
    contexts = [1, block - 1, block, block + 1, *several]
    return SelfCheck(
        variant,
        *outcome_of(lambda: max(_difference(variant, [300, 5], seed=1), _difference(variant, contexts, seed=2))),
    )


def outcome_of(difference: Callable[[], float]) -> tuple[bool, float, float, str]:
    """Run what compares a kernel with a reference and gives the RMS of their difference.

    Returns:
        Whether it is below 5e-3; the RMS, NaN if it raised a RuntimeError or ValueError; seconds; why it failed.
    """
    begin = time.perf_counter()
    rms = float("nan")
    try:
        rms = difference()
        reason = "" if rms < MAX_RMS else f"RMS {rms:.2e} is not below {MAX_RMS}"
    except (RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:500]}"
    return not reason, rms, time.perf_counter() - begin, reason


def checked(
    variant: Variant,
    check: Callable[[Variant], SelfCheck] | None = None,
    texts: Sequence[tuple[str, Constants]] | None = None,
) -> SelfCheck:
    """The remembered result of a check, self_check if none is given. The first failure warns and switches the variant
    off for this process.

    Args:
        texts: body and constants of what the check and the variant's steps launch, where that is not self_check's.

    A variant that has passed fails from then on once it is off: a text that only a later step needed does not compile.
    """
    if variant not in _results:
        compile_ahead(_texts_of(variant) if texts is None else texts)
        with told_when_compiling():
            result = _results[variant] = (check or self_check)(variant)
        if not result.ok:
            kernels.switch_off(variant, result.reason)
            warnings.warn(f"mlx_paged: {variant} failed its self-check and is off: {result.reason}", stacklevel=2)
    result, off = _results[variant], kernels.why_off(variant)
    return result if off is None or not result.ok else result._replace(ok=False, reason=off)


def _texts_of(variant: Variant) -> list[tuple[str, Constants]]:
    """Body and constants of the texts that a pool of this variant and its decode steps need, on CUDA."""
    texts = pool_texts_of(variant)
    for partitions in (2, 1):
        spec = spec_of(variant, shape_for(variant), 1, variant.gqa, 1, partitions)
        texts += [(text.body, text.constants) for text in spec.texts]
    return list(dict.fromkeys(texts))


def pool_texts_of(variant: Variant) -> list[tuple[str, Constants]]:
    """Body and constants of the texts that a pool of this variant cannot do without."""
    block, pages = variant.block_size, variant.pages
    if pages is not None:
        words = mx.uint32, pages.k.num_words, pages.v.num_words
        return [*moves.texts_of(pages, block), ("copy_blocks", pool_constants_of(*words, block))]
    pool = pool_constants_of(variant.dtype, variant.head_dim, variant.value_dim, block)
    return [("write_slots", (*pool, ("S", mx.int32))), ("gather_blocks", pool), ("copy_blocks", pool)]


def _difference(variant: Variant, contexts: list[int], seed: int) -> float:
    """RMS between the variant and float32 attention. Raises RuntimeError if bytes went astray."""
    block, dtype, pages = variant.block_size, variant.dtype, variant.pages
    n_kv_heads = max(2, _QUERY_HEADS // variant.gqa)
    batch, n_q_heads = len(contexts), n_kv_heads * variant.gqa
    used = [-(-n // block) for n in contexts]
    width = -(-max(used) // _TABLE_WIDTH) * _TABLE_WIDTH
    # By Python and by slices, here and below: MLX would have to compile what it needs to index on CUDA.
    keys = [mx.random.key(5 * seed + i) for i in range(5)]
    order = random.Random(seed).sample(range(1, sum(used) + 1), sum(used))
    tables, slots = [], []
    for n, blocks in zip(contexts, used, strict=True):
        ids, order = order[:blocks], order[blocks:]
        tables.append(ids + [0] * (width - blocks))
        slots += [ids[t // block] * block + t % block for t in range(n)]

    def rows(i: int, dim: int) -> mx.array:
        return mx.random.normal((len(slots), n_kv_heads, dim), key=keys[i]).astype(dtype)

    k, v = rows(1, variant.head_dim), rows(2, variant.value_dim)
    q = mx.random.normal((batch, n_q_heads, 1, variant.head_dim), key=keys[3]).astype(dtype)
    sinks = mx.random.normal((n_q_heads,), key=keys[4]) if variant.sinks else None
    softcap = 10.0 if variant.softcap else None
    scale = variant.head_dim**-0.5
    dims = variant.head_dim, variant.value_dim
    k_pool, v_pool = new_blocks(sum(used) + 1 + _FREE_BLOCKS, n_kv_heads, block, dims, dtype, pages, float("nan"))
    fence = kernels.new_fence()
    fence = kernels.write_slots(k_pool, v_pool, fence, k, v, mx.array(slots, mx.int32), pages)
    visible = (mx.array(tables, mx.int32), mx.array(contexts, mx.int32)[:, None], mx.zeros((batch, 1), mx.int32))
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "variant": variant, "pages": pages}
    out, fence = kernels.paged_decode(q, k_pool, v_pool, fence, *visible, **options)
    newest = [sum(contexts[: b + 1]) - 1 for b in range(batch)]
    no_k, no_v = (mx.full((batch, *x.shape[1:]), float("nan"), dtype) for x in (k, v))
    fence = kernels.write_slots(
        k_pool, v_pool, fence, no_k, no_v, mx.array([slots[i] for i in newest], mx.int32), pages
    )
    new_k, new_v = (mx.concatenate([x[i : i + 1] for i in newest])[:, :, None] for x in (k, v))
    fence = _compare_appends(q, (k_pool, v_pool), fence, visible, (new_k, new_v), out, options)
    first = 0
    errors = []
    for b, n in enumerate(contexts):
        kb, vb = (x[first : first + n].swapaxes(0, 1) for x in (k, v))
        if pages is not None:
            own = mx.array(tables[b][: used[b]], mx.int32), mx.array(slots[first : first + n], mx.int32)
            kb, vb, fence = _kept(k_pool, v_pool, fence, kb, vb, *own, pages)
        first += n
        got_k, got_v, fence = kernels.gather_blocks(k_pool, v_pool, fence, tables[b][: used[b]], 0, n, pages)
        if not (mx.array_equal(got_k.squeeze(0), kb).item() and mx.array_equal(got_v.squeeze(0), vb).item()):
            raise RuntimeError("slots read back differ from what was written")
        expected = _attend(q[b : b + 1].squeeze(0), kb, vb, scale, softcap, sinks)
        errors.append(mx.square(out[b : b + 1].squeeze(0).astype(mx.float32) - expected).mean())
    # One block and then four onto free ones: that is two texts, too.
    free = sum(used) + 1
    for sources, targets in (([1], [free]), ([1, 2, 3, 4], [free + i for i in range(1, 5)])):
        length = len(sources) * block
        *before, fence = kernels.gather_blocks(k_pool, v_pool, fence, sources, 0, length, pages)
        fence = kernels.copy_blocks(k_pool, v_pool, fence, sources, targets)
        *after, fence = kernels.gather_blocks(k_pool, v_pool, fence, targets, 0, length, pages)
        if not all(mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(before, after, strict=True)):
            raise RuntimeError("copies of blocks differ")
    return worst_rms(errors)


def _compare_appends(
    q: mx.array,
    pools: tuple[mx.array, mx.array],
    fence: mx.array,
    visible: tuple[mx.array, mx.array, mx.array],
    append: tuple[mx.array, mx.array],
    expected: mx.array,
    options: dict[str, Any],
) -> mx.array:
    """Compare ``expected`` with calls that bring the newest tokens, whose slots hold NaN; also with rows of padding,
    which end at position 0, as compiled steps have them. Returns the fence; raises RuntimeError for another result."""
    batch = q.shape[0]
    again, fence = kernels.paged_decode(q, *pools, fence, *visible, append=append, **options)
    if not mx.array_equal(expected.astype(mx.float32), again.astype(mx.float32)).item():
        raise RuntimeError("the result differs when the newest tokens come with the call")
    tables, ends, starts = (_extended(x, 0) for x in visible)
    q_padded, k, v = (_extended(x, float("nan")) for x in (q, *append))
    padded, fence = kernels.paged_decode(q_padded, *pools, fence, tables, ends, starts, append=(k, v), **options)
    if not mx.array_equal(padded[:batch].astype(mx.float32), again.astype(mx.float32)).item():
        raise RuntimeError("the result differs with rows of padding")
    if padded[batch:].any().item():
        raise RuntimeError("rows of padding have a result")
    return fence


def worst_rms(errors: list[mx.array]) -> float:
    """The largest root of mean squared differences. Raises RuntimeError if one is not finite."""
    rms: Any = mx.sqrt(mx.stack(errors).max()).item()
    if not rms < float("inf"):
        raise RuntimeError("the result is not finite")
    return float(rms)


def _kept(
    k_pool: mx.array,
    v_pool: mx.array,
    fence: mx.array,
    k: mx.array,
    v: mx.array,
    ids: mx.array,
    slots: mx.array,
    pages: PageShape,
) -> tuple[mx.array, mx.array, mx.array]:
    """What quantised pages hold of k, v ``[n_kv_heads, n, dim]``, dequantised, and the next fence. Raises RuntimeError
    if their rows are not MLX's; they are written once more, as they are."""
    rows = pages.quantize(k[None], v[None])
    *got, fence = moves.gather_rows(k_pool, v_pool, fence, ids, 0, k.shape[1], pages)
    if not all(mx.array_equal(a, b).item() for a, b in zip(got, rows, strict=True)):
        raise RuntimeError("rows differ from what MLX quantises")
    fence = moves.write_rows(k_pool, v_pool, fence, *rows, slots, pages)
    kept_k, kept_v = pages.dequantize(*rows)
    return kept_k.squeeze(0), kept_v.squeeze(0), fence


def _extended(x: mx.array, value: float) -> mx.array:
    """With two more rows of a value."""
    return mx.concatenate([x, mx.full((2, *x.shape[1:]), value, x.dtype)])


def _attend(
    q: mx.array, k: mx.array, v: mx.array, scale: float, softcap: float | None, sinks: mx.array | None
) -> mx.array:
    """Attention of q [n_q_heads, 1, D] over k, v [n_kv_heads, n, D] in float32, without matrix units."""
    repeat = q.shape[0] // k.shape[0]
    k, v = (mx.repeat(x.astype(mx.float32), repeat, axis=0) for x in (k, v))
    scores = (q.astype(mx.float32) * k).sum(-1) * scale
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if sinks is not None:
        scores = mx.concatenate([sinks[:, None], scores], axis=1)
    weights = mx.softmax(scores, axis=1, precise=True)
    if sinks is not None:
        weights = weights[:, 1:]
    return (weights[..., None] * v).sum(1, keepdims=True)
