"""The self-check: a kernel variant is compared with plain attention before it may serve a model on this machine."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..device import confirm
from . import ops as kernels
from . import quantized
from .build import Constants, compile_ahead, warn_when_compiling
from .decode_spec import pool_constants_of, spec_of
from .launch_shape import (
    LATENT_BODIES,
    MAX_QUERY_LENGTH,
    SHARED_BODIES,
    SINGLE_ROW_BODY_OF,
    LaunchShape,
    Variant,
    shape_for,
)
from .prefill import BODIES as PREFILL_BODIES
from .prefill import prefill_constants_of, prepare_prefill
from .prefill import shape_of as prefill_shape_of
from .quantized import PageShape, new_blocks
from .shared_runs import Partitions, shared_items, shared_rows

MAX_RMS = 5e-3
_QUERY_HEADS = 8  # at least, as in real models
# Block tables are as wide as those of real steps (kv/step.py): the launch then has several partitions, and a merge.
_TABLE_WIDTH = 16  # a table's width is a multiple of it
_FREE_BLOCKS = 5  # targets of copies
_WINDOW = 100  # tokens; so few that one token too many shows in the result
_SHARED_WINDOW = 1500  # tokens: begins inside a partition
_PROMPT_WINDOW = 45
_MOST = 1 << 25  # elements of the largest temporary of `attention`
_MORE = 44  # tokens by which a longer window exceeds what one partition may hold on Metal

Bounds = list[list[int]]  # [row][query]


class CheckResult(NamedTuple):
    """Result of a self-check. rms is NaN if there was no result; seconds include compiling; reason is empty if the
    kernel passed."""

    ok: bool
    rms: float
    seconds: float
    reason: str


_results: dict[Variant, CheckResult] = {}


def self_check(variant: Variant) -> CheckResult:
    """Compare one variant of an attention kernel, decode or prefill, over plain, quantised or latent pages, with
    attention in float32: :func:`decode_difference`, :func:`prefill_difference`; for common blocks
    :func:`shared_difference`.

    Fails on a compile error, a non-finite value or an RMS difference of at least 5e-3. Never raises for a failing
    kernel. Switches nothing off.
    """
    if variant.body in SHARED_BODIES:
        difference = shared_difference
    else:
        difference = prefill_difference if variant.body in PREFILL_BODIES else decode_difference
    return outcome_of(lambda: difference(variant))


def decode_difference(variant: Variant) -> float:
    """Return the RMS difference of a decode variant from float32 attention: the worst query of two ragged cases. Also
    runs all texts of slot writes, gathers and block copies, which every pool needs.

    Contexts have 1, block - 1, block, block + 1 tokens and several blocks, in permuted blocks; every unused slot is
    NaN, and on Metal every output before the launch. The newest tokens are in the pool, then passed to the call, then
    passed with rows of padding. Several queries see windows in one partition and in several; one launch has a single
    partition. The length of partitions is the one for this GPU's number of cores.

    The results of every text that a step of this variant may launch are compared. On Metal, MLX puts inputs of fewer
    than 8 elements in another address space, which makes another text, so the cases have 2 and 9 rows.
    """
    block = variant.block_size
    # Windows of the long row begin in the second half of 64 tokens, where a smallest partition of 32 would see nothing.
    many = [1, block - 1, block, block + 1, 3 * block + 5, 300, 2140, 7, 2 * block]
    worst = ragged_difference(variant, [300, 5], 2)
    return max(worst, ragged_difference(variant, many, MAX_QUERY_LENGTH)) if worst < MAX_RMS else worst


def ragged_difference(variant: Variant, contexts: list[int], q_len: int) -> float:
    """Return the RMS of :func:`decode_difference` for rows of these lengths in tokens, and 1, then ``q_len`` queries.
    Raises RuntimeError if the pool holds other bytes than were written."""
    rows, own = _Rows(variant, contexts, q_len), shape_for(variant, kernels.gpu_cores())
    q, ends, starts = rows.queries(1), [[n] for n in contexts], [[0]] * len(contexts)
    out = rows.decode(q, ends, starts)
    rows.compare_appends(q, ends, starts, out)
    rows.read_back()
    errors = rows.errors_of(out, q, ends, starts)
    # As many tokens as one partition holds, with the launch for windows that always fit one.
    most = max(own.partition, own.first)
    starts = [[-(-max(n - most, 0) // own.alignment) * own.alignment] for n in contexts]
    out = rows.decode(q, ends, starts, max_visible=most - own.alignment + 1)
    errors += rows.errors_of(out, q, ends, starts)
    # Windows that begin inside a partition.
    q, ends = rows.queries(q_len), [[max(n - q_len + 1 + i, 0) for i in range(q_len)] for n in contexts]
    for window in _windows_of(own):
        starts = [[max(end - window, 0) for end in row] for row in ends]
        errors += rows.errors_of(rows.decode(q, ends, starts, max_visible=window), q, ends, starts)
    rows.copy_blocks()
    return worst_rms(errors)


def _windows_of(own: LaunchShape) -> list[int]:
    """Return the windows to check: on CUDA one; on Metal a short one, in one partition, and a longer one."""
    if not own.first:
        return [_WINDOW]
    return [min(_WINDOW, own.first - own.alignment + 1), own.first + _MORE]


def shared_difference(variant: Variant) -> float:
    """Compare the decode variant for common blocks with the one that reads each row by itself: the bits must be equal.
    Nine rows have up to 2,080 tokens in common, in a tree. Their newest tokens are passed to the call; they see all
    tokens, then those of a window.

    Returns:
        0. Raises RuntimeError if the bits differ.
    """
    block = variant.block_size
    contexts = [2100, 2100, 2090, 300, 2400, 1, 700, 2200, 310]
    rows = _Rows(variant._replace(body=SINGLE_ROW_BODY_OF[variant.body]), contexts, 4)
    for table, tokens in zip(rows.tables, [0, 2080, 2048, 256, 2080, 0, 640, 1280, 256], strict=True):
        table[: tokens // block] = rows.tables[0][: tokens // block]
    q, ends = rows.queries(1), [[n] for n in contexts]
    shape = shape_for(variant)
    shared = shared_rows(np.array(rows.tables), [-(-n // block) for n in contexts], block)
    assert shared is not None
    newest: tuple[mx.array, mx.array] | None = None
    for window in (None, _SHARED_WINDOW):
        starts = [[0 if window is None else max(n - window, 0)] for n in contexts]
        expected = rows.decode(q, ends, starts, max_visible=window)
        newest = newest or rows.take_newest()
        seen = Partitions.of(np.array(contexts), shape, np.array(starts)[:, 0])
        items = mx.array(shared_items(shared, seen, shape))
        out = rows.decode(q, ends, starts, append=newest, variant=variant, items=items, max_visible=window)
        if not mx.array_equal(out.astype(mx.float32), expected.astype(mx.float32)).item():
            raise RuntimeError("results of rows with common blocks differ from those of single rows")
    return 0.0


def prefill_difference(variant: Variant) -> float:
    """Return the RMS difference of a prefill variant from float32 attention: the worst sequence of a seeded pack,
    without a window and then with one, in two launches of one text.

    New tokens fill tiles or do not, with and without prefixes, in permuted blocks. Every slot that no token sees is
    NaN.
    """
    tile = prefill_shape_of(variant).rows // variant.gqa  # tokens
    counts, prefixes = [1, tile + 3, 2, tile], [variant.block_size + 5, 0, 90, 64]
    lengths = [count + prefix for count, prefix in zip(counts, prefixes, strict=True)]
    rows = _Rows(variant, lengths, 3)
    rows.read_back()
    q = mx.concatenate([rows.queries(n)[:1].swapaxes(0, 2) for n in counts])
    errors: list[mx.array] = []
    for window in (None, _PROMPT_WINDOW):
        if window is not None:  # slots behind the window are NaN from here on
            ends = [prefix - window + 1 for prefix in prefixes]
            rows.forget([[t < end for t in range(n)] for n, end in zip(lengths, ends, strict=True)])
        out, row = rows.prefill(q, counts, window), 0
        for count, length, (k, v) in zip(counts, lengths, rows.kept, strict=True):
            got, asked = (x[row : row + count].squeeze(2) for x in (out, q))
            assert k.shape[1] == length
            expected = rows.attend(asked, k, v, window)
            errors.append(mx.square(got.astype(mx.float32) - expected).mean())
            row += count
    return worst_rms(errors)


def outcome_of(difference: Callable[[], float]) -> CheckResult:
    """Run a check that returns the RMS difference between a kernel and its reference; it fails if that is 5e-3 or more,
    or if the check raises a RuntimeError or ValueError."""
    confirm()  # what fails from here on is the kernel's fault
    begin = time.perf_counter()
    rms = float("nan")
    try:
        rms = difference()
        reason = "" if rms < MAX_RMS else f"RMS {rms:.2e} is not below {MAX_RMS}"
    except (RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:500]}"
    return CheckResult(not reason, rms, time.perf_counter() - begin, reason)


def check_and_warn(kernel: str, check: Callable[[], CheckResult]) -> bool:
    """Check a kernel that is not attention. Warn if it fails or does not compile; return whether it passes."""
    with warn_when_compiling():
        reason = check().reason
    if reason:
        warnings.warn(f"mlx_paged: {kernel} is off, using MLX's operations: {reason}", stacklevel=3)
    return not reason


def checked(variant: Variant) -> CheckResult:
    """Return the result of :func:`self_check`, which runs once per variant and process. A failure warns and switches
    the variant off."""
    if variant not in _results:
        compile_ahead(texts_of(variant))
        with warn_when_compiling():
            result = _results[variant] = self_check(variant)
        if not result.ok:
            kernels.switched_off[variant] = result.reason
            warnings.warn(f"mlx_paged: {variant} failed its self-check and is off: {result.reason}", stacklevel=2)
    return _results[variant]


def summary() -> str:
    """Return how many kernels have been checked in this process, in how many seconds, and which are off and why."""
    off = [f"{variant} is off: {result.reason}" for variant, result in _results.items() if not result.ok]
    seconds = sum(result.seconds for result in _results.values())
    return "; ".join([f"{len(_results)} attention kernels checked in {seconds:.1f} s", *(off or ["all right"])])


def texts_of(variant: Variant) -> list[tuple[str, Constants]]:
    """Return (body, constants) of the texts that a variant's check, pool and steps launch on CUDA."""
    texts = _pool_texts_of(variant)
    if variant.body in PREFILL_BODIES:
        return [texts[0], (variant.body, prefill_constants_of(variant, prefill_shape_of(variant)))]
    for partitions in (2, 1):
        texts += spec_of(variant, shape_for(variant), 1, variant.gqa, 1, partitions).texts(variant)
    shared = kernels.shared_variant_of(variant)
    if shared is not None:
        texts += spec_of(shared, shape_for(shared), 1, variant.gqa, 1, 1).texts(shared)
    return list(dict.fromkeys(texts))


def _pool_texts_of(variant: Variant) -> list[tuple[str, Constants]]:
    """Return (body, constants) of the texts that every pool of this variant needs."""
    block, pages, value_dim = variant.block_size, variant.pages, variant.value_dim
    if pages is not None:
        words = mx.uint32, pages.k.num_words, pages.v.num_words
        return [*quantized.texts_of(pages, block), ("copy_blocks", pool_constants_of(*words, block))]
    is_latent = variant.body in LATENT_BODIES  # the pools hold latents, which are the values, and rotated parts
    dims = (value_dim, variant.head_dim - value_dim) if is_latent else (variant.head_dim, value_dim)
    pool = pool_constants_of(variant.dtype, *dims, block)
    return [("write_slots", (*pool, ("S", mx.int32))), ("gather_blocks", pool), ("copy_blocks", pool)]


class _Rows:
    """Rows of random tokens in permuted blocks of a pool whose other slots are NaN. Over latents, the pool of keys
    holds latents and that of values the rotated parts.

    Attributes:
        tables: block ids of each row, as wide as those of real steps.
        kept: what the pool holds of each row, ``[n_kv_heads, n, dim]`` each, after :meth:`read_back`.
    """

    def __init__(self, variant: Variant, contexts: list[int], seed: int) -> None:
        block, dtype = variant.block_size, variant.dtype
        self._variant, self._contexts = variant, contexts
        self._is_latent = variant.body in LATENT_BODIES
        self._on_tensor_cores = variant.body == LATENT_BODIES[1]
        self._dims = variant.head_dim, variant.value_dim
        if self._is_latent:
            self._dims = variant.value_dim, variant.head_dim - variant.value_dim
            # On tensor cores, query heads do not fill the last thread group.
            self._n_kv_heads, self._n_q_heads = 1, 2 * variant.gqa - self._on_tensor_cores * (variant.gqa // 3)
        else:
            self._n_kv_heads = max(2, _QUERY_HEADS // variant.gqa)
            self._n_q_heads = self._n_kv_heads * variant.gqa
        self._blocks = blocks = Blocks.of(contexts, block, seed)
        self.tables, self._slots = blocks.tables(_TABLE_WIDTH), blocks.slots
        self._keys = [mx.random.key(5 * seed + i) for i in range(5)]
        k, v = (
            mx.random.normal((len(self._slots), self._n_kv_heads, dim), key=key).astype(dtype)
            for dim, key in zip(self._dims, self._keys[1:3], strict=True)
        )
        self._given = k, v
        self.kept: list[tuple[mx.array, mx.array]] = []
        count = blocks.num_blocks + 1 + _FREE_BLOCKS
        self._pools = new_blocks(count, self._n_kv_heads, block, self._dims, dtype, variant.pages, float("nan"))
        self._fence = kernels.new_fence()
        # The newest tokens are written separately: few rows are another text.
        self._newest = [sum(contexts[: b + 1]) - 1 for b in range(len(contexts))]
        newest = set(self._newest)
        self._write(k, v, [-1 if i in newest else slot for i, slot in enumerate(self._slots)])
        self._write_newest(*(mx.concatenate([x[i : i + 1] for i in self._newest]) for x in self._given))
        self._sinks = mx.random.normal((self._n_q_heads,), key=self._keys[4]) if variant.sinks else None
        self._softcap = 10.0 if variant.softcap else None
        self._scale = variant.head_dim**-0.5

    def _write(self, k: mx.array, v: mx.array, slots: list[int]) -> None:
        launch = kernels.prepare_write(*self._pools, mx.array(slots, mx.int32), self._variant.pages)
        self._fence = launch(*self._pools, self._fence, k[:, :, None], v[:, :, None])

    def _gather(self, ids: list[int], length: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of the first ``length`` positions of blocks."""
        launch = kernels.prepare_gather(*self._pools, ids, 0, length, self._variant.pages)
        k, v, self._fence = launch(*self._pools, self._fence)
        return k, v

    def _write_newest(self, k: mx.array, v: mx.array) -> None:
        self._write(k, v, [self._slots[i] for i in self._newest])

    def forget(self, dead: list[list[bool]]) -> None:
        """Write NaN to the slots of the tokens that are marked, by row."""
        marks = [mark for row in dead for mark in row]
        slots = [slot if mark else -1 for slot, mark in zip(self._slots, marks, strict=True)]
        k, v = (mx.full(x.shape, float("nan"), x.dtype) for x in self._given)
        self._write(k, v, slots)

    def queries(self, q_len: int) -> mx.array:
        """Return queries of every row, ``[B, n_q_heads, q_len, head_dim]``."""
        shape = len(self._contexts), self._n_q_heads, q_len, self._variant.head_dim
        return mx.random.normal(shape, key=self._keys[3]).astype(self._variant.dtype)

    def decode(
        self,
        q: mx.array,
        ends: Bounds,
        starts: Bounds,
        tables: Bounds | None = None,
        append: tuple[mx.array, mx.array] | None = None,
        **options: Any,
    ) -> mx.array:
        """Return the variant's result for queries that see positions from starts to ends - 1."""
        variant = self._variant
        tables_array, ends_array, starts_array = (
            mx.array(x, mx.int32) for x in (self.tables if tables is None else tables, ends, starts)
        )
        launch = kernels.prepare_decode(
            *self._pools,
            (tables_array, ends_array, starts_array),
            n_q_heads=self._n_q_heads,
            scale=self._scale,
            softcap=self._softcap,
            sinks=variant.sinks,
            append=append is not None,
            pages=variant.pages,
            latent=self._is_latent,
            # Memory that a kernel fails to write often holds harmless numbers, which would hide the failure.
            init_value=float("nan") if variant.backend == "metal" else None,
            **{"variant": variant, "max_visible": None, **options},
        )
        out, self._fence = launch(q, *self._pools, self._fence, self._sinks, *(append or ()))
        return out

    def prefill(self, q: mx.array, counts: list[int], window: int | None) -> mx.array:
        """Return the prefill variant's result ``[T, n_q_heads, 1, dim]`` for the last ``counts`` tokens of each row."""
        launch = prepare_prefill(
            *self._pools,
            mx.array(self.tables, mx.int32),
            counts,
            self._contexts,
            n_q_heads=self._n_q_heads,
            scale=self._scale,
            softcap=self._softcap,
            sinks=self._variant.sinks,
            window=window,
            variant=self._variant,
            pages=self._variant.pages,
        )
        out, self._fence = launch(q, *self._pools, self._fence, self._sinks)
        return out

    def take_newest(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of the newest tokens, as a call's ``append``; their slots are NaN from now on."""
        batch = len(self._contexts)
        self._write_newest(*(mx.full((batch, *x.shape[1:]), float("nan"), x.dtype) for x in self._given))
        k, v = (mx.concatenate([x[i : i + 1] for i in self._newest])[:, :, None] for x in self._given)
        return k, v

    def compare_appends(self, q: mx.array, ends: Bounds, starts: Bounds, expected: mx.array) -> None:
        """Compare ``expected`` with calls that are passed the newest tokens, whose slots hold NaN; also with rows of
        padding, which end at position 0 as in compiled steps. Raises RuntimeError if a result differs."""
        k, v = self.take_newest()
        batch, again = len(expected), self.decode(q, ends, starts, append=(k, v))
        q, k, v = (_extended(x, float("nan")) for x in (q, k, v))
        tables, ends, starts = ([*x, *[[0] * len(x[0])] * 2] for x in (self.tables, ends, starts))
        padded = self.decode(q, ends, starts, tables, append=(k, v))
        # On tensor cores a row's partitions over latents depend on the other rows.
        is_exact = not self._on_tensor_cores
        if not _alike(expected, again, is_exact):
            raise RuntimeError("the result differs when the newest tokens come with the call")
        if not _alike(padded[:batch], again, is_exact):
            raise RuntimeError("the result differs with rows of padding")
        if padded[batch:].any().item():
            raise RuntimeError("rows of padding are not zero")

    def read_back(self) -> None:
        """Compare the pool with what was written. Raises RuntimeError if it differs."""
        pages = self._variant.pages
        first = 0
        for blocks, n in zip(self._blocks.ids, self._contexts, strict=True):
            k, v = (x[first : first + n].swapaxes(0, 1) for x in self._given)
            if pages is not None:
                k, v = self._quantized(k, v, blocks, self._slots[first : first + n], pages)
            first += n
            got_k, got_v = self._gather(blocks, n)
            if not (mx.array_equal(got_k.squeeze(0), k).item() and mx.array_equal(got_v.squeeze(0), v).item()):
                raise RuntimeError("slots read back differ from what was written")
            self.kept.append((k, v))

    def _quantized(
        self, k: mx.array, v: mx.array, blocks: list[int], slots: list[int], pages: PageShape
    ) -> tuple[mx.array, mx.array]:
        """Return k, v ``[n_kv_heads, n, dim]`` as quantised pages hold them, dequantised. Raises RuntimeError if the
        rows differ from MLX's. Writes the same rows once more, to run the kernel that writes rows unchanged."""
        rows = pages.quantize(k[None], v[None])
        launch = kernels.prepare_gather(*self._pools, blocks, 0, k.shape[1], pages, stored=True)
        *got, self._fence = launch(*self._pools, self._fence)
        if not all(mx.array_equal(a, b).item() for a, b in zip(got, rows, strict=True)):
            raise RuntimeError("quantised rows differ from MLX's")
        self._fence = kernels.write_rows(*self._pools, self._fence, *rows, mx.array(slots, mx.int32), pages)
        kept_k, kept_v = pages.dequantize(*rows)
        return kept_k.squeeze(0), kept_v.squeeze(0)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, window: int | None = None) -> mx.array:
        """Return float32 attention of queries ``[n, n_q_heads, D]`` of the last tokens over ``k``, ``v`` as in
        :attr:`kept`."""
        k, v = (mx.concatenate([k, v], axis=-1), k) if self._is_latent else (k, v)
        return attention(q, k.swapaxes(0, 1), v.swapaxes(0, 1), self._scale, self._softcap, self._sinks, window)

    def errors_of(self, out: mx.array, q: mx.array, ends: Bounds, starts: Bounds) -> list[mx.array]:
        """Return the mean squared difference of each query's result from attention in float32."""
        errors = []
        for b, (k, v) in enumerate(self.kept):
            for i, (start, end) in enumerate(zip(starts[b], ends[b], strict=True)):
                got = out[b, :, i][None].astype(mx.float32)
                if start < end:
                    got = got - self.attend(q[b, :, i][None], k[:, start:end], v[:, start:end])
                errors.append(mx.square(got).mean())
        return errors

    def copy_blocks(self) -> None:
        """Copy one block, then four, onto free ones: on Metal, two texts. Raises RuntimeError if a copy differs."""
        free = self._blocks.num_blocks + 1
        for sources, targets in (([1], [free]), ([1, 2, 3, 4], [free + i for i in range(1, 5)])):
            length = len(sources) * self._variant.block_size
            before = self._gather(sources, length)
            self._fence = kernels.copy_blocks(*self._pools, self._fence, sources, targets)
            after = self._gather(targets, length)
            if not all(mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(before, after, strict=True)):
                raise RuntimeError("copies of blocks differ from their sources")


def _alike(x: mx.array, y: mx.array, is_exact: bool) -> bool:
    """Return whether results are equal, or nearly equal unless ``is_exact``."""
    x, y = x.astype(mx.float32), y.astype(mx.float32)
    return bool((mx.array_equal(x, y) if is_exact else mx.allclose(x, y, rtol=2e-2, atol=2e-2)).item())


def _extended(x: mx.array, value: float) -> mx.array:
    """Return x with two more rows of a value."""
    return mx.concatenate([x, mx.full((2, *x.shape[1:]), value, x.dtype)])


class Blocks(NamedTuple):
    """Blocks of some sequences, in random order.

    Attributes:
        ids: block ids of each sequence.
        slots: the slot of each token, sequence after sequence.
    """

    ids: list[list[int]]
    slots: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], block: int, seed: int, first: int = 1) -> Blocks:
        """Return blocks for sequences of these lengths; their ids begin at ``first``."""
        used = [-(-n // block) for n in lengths]
        # In Python, here and below: on CUDA, MLX would have to compile kernels to index an array.
        order = random.Random(seed).sample(range(first, first + sum(used)), sum(used))
        ids, slots = [], []
        for n, count in zip(lengths, used, strict=True):
            own, order = order[:count], order[count:]
            ids.append(own)
            slots += [own[t // block] * block + t % block for t in range(n)]
        return cls(ids, slots)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all sequences."""
        return sum(map(len, self.ids))

    def tables(self, multiple: int = 1) -> list[list[int]]:
        """Return block tables whose width is a multiple of ``multiple``, with 0 where a sequence has no block."""
        width = -(-max(map(len, self.ids)) // multiple) * multiple
        return [[*own, *[0] * (width - len(own))] for own in self.ids]


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
) -> mx.array:
    """Compute causal attention in float32, without matrix units.

    Args:
        q: queries of the last tokens, ``[n, n_q_heads, D]``.
        k, v: keys and values of all tokens, ``[length, n_kv_heads, D]``.
        scale, softcap, sinks, window: as passed to a kernel.

    Returns:
        ``[n, n_q_heads, Dv]``.
    """
    count, n_q, dim = q.shape
    length, n_kv, _ = k.shape
    group = n_q // n_kv
    positions, own = mx.arange(length), (length - count + mx.arange(count))[:, None]
    seen = positions <= own
    if window is not None:
        seen = mx.logical_and(seen, positions > own - window)
    q = q.astype(mx.float32).reshape(count, n_kv, group, 1, dim)
    keys, values = (x.astype(mx.float32).swapaxes(0, 1)[:, None] for x in (k, v))
    logits = None if sinks is None else mx.broadcast_to(sinks.reshape(n_kv, group, 1), (count, n_kv, group, 1))
    step, heads = max(1, _MOST // (count * n_kv * length * dim)), []
    for first in range(0, group, step):
        scores = (q[:, :, first : first + step] * keys).sum(-1) * scale  # [count, n_kv, step, length]
        if softcap is not None:
            scores = softcap * mx.tanh(scores / softcap)
        scores = mx.where(seen[:, None, None], scores, -float("inf"))
        if logits is not None:
            scores = mx.concatenate([logits[:, :, first : first + step], scores], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)[..., int(sinks is not None) :]
        heads.append((weights[..., None] * values).sum(-2))
    return mx.concatenate(heads, axis=2).reshape(count, n_q, -1)


def worst_rms(errors: list[mx.array]) -> float:
    """Return the largest root of mean squared differences. Raises RuntimeError if one is not finite."""
    rms: Any = mx.sqrt(mx.stack(errors).max()).item()
    if not rms < float("inf"):
        raise RuntimeError("the result is not finite")
    return float(rms)
