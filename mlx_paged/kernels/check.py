"""The self-check: a kernel variant is compared with plain attention before it may serve a model on this machine."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..device import confirm
from . import ops as kernels
from .build import KernelText, compile_ahead, warn_when_compiling
from .decode_spec import spec_of
from .launch_shape import (
    FUSED_BODIES,
    LATENT_BODIES,
    MAX_QUERY_LENGTH,
    PREFILL_BODIES,
    SHARED_BODIES,
    Variant,
    constants_of,
    shape_for,
)
from .prefill import prepare_prefill
from .quantized import new_blocks
from .shared_runs import Partitions, shared_items, shared_rows

MAX_RMS = 5e-3
_QUERY_HEADS = 8  # at least, as in real models
# Block tables are as wide as those of real steps (kv/new_tokens.py), so a launch has several partitions, and a merge.
_TABLE_WIDTH = 16  # a table's width is a multiple of it
_WINDOWS = 20, 300  # tokens: one too many shows in the result; in one partition, and in several
_SHARED_WINDOW = 1500  # tokens: begins inside a partition
_PROMPT_WINDOW = 45

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


def decode_difference(variant: Variant, contexts: Sequence[int] = (), q_len: int = MAX_QUERY_LENGTH) -> float:
    """Return the RMS difference of a decode variant from float32 attention: the worst query of a ragged batch. Also
    runs all texts of slot writes and gathers, which every pool needs.

    Unless ``contexts`` are given, rows have 1, block - 1, block, block + 1 tokens and several blocks. Blocks are
    permuted; every unused slot is NaN, and on Metal every output before the launch. One step is given the newest tokens
    and has rows of padding. ``q_len`` queries then see windows that begin inside a partition, in one partition and in
    several. The length of partitions is the one for this GPU's number of cores.

    Raises:
        RuntimeError: the pool holds other bytes than were written, or the result is not finite.
    """
    block, own = variant.block_size, shape_for(variant, kernels.gpu_cores())
    contexts = contexts or [1, block - 1, block, block + 1, 3 * block + 5, 300, 2140, 7, 2 * block]
    rows = _Rows(variant, contexts)
    rows.write(num_newest=1)
    q, ends, starts = rows.queries(1), [[n] for n in contexts], [[0] for _ in contexts]
    out = rows.decode(q, ends, starts, append=rows.newest(), num_padding=2)
    rows.read_back()
    errors = [*rows.errors_of(out, q, ends, starts), mx.square(out[len(contexts) :].astype(mx.float32)).mean()]
    q, ends = rows.queries(q_len), [[max(n - q_len + 1 + i, 0) for i in range(q_len)] for n in contexts]
    for most, window in zip((max(own.partition, own.first) - own.alignment + 1, _WINDOWS[1]), _WINDOWS, strict=True):
        window = min(window, most)
        starts = [[max(end - window, 0) for end in row] for row in ends]
        errors += rows.errors_of(rows.decode(q, ends, starts, max_visible=window), q, ends, starts)
    return worst_rms(errors)


@lru_cache(maxsize=64)
def check_pool(variant: Variant) -> None:
    """Write blocks of a variant's pool and read them back, once per process, for attention without the variant.

    Raises:
        RuntimeError: the kernels that do so fail. That is not kept: the device may have lacked memory.
    """

    def difference() -> float:
        rows = _Rows(variant, [variant.block_size + 1, 2 * variant.block_size])
        rows.write()
        rows.read_back()
        return 0.0

    result = outcome_of(difference)
    if not result.ok:
        raise RuntimeError(result.reason)


def shared_difference(variant: Variant) -> float:
    """Compare the decode variant for common blocks with the one that reads each row by itself: the bits must be equal.
    Nine rows have up to 2,080 tokens in common, in a tree. Their newest tokens are passed to the call; they see all
    tokens, then those of a window.

    Returns:
        0. Raises RuntimeError if the bits differ.
    """
    block, shape = variant.block_size, shape_for(variant)
    contexts = [2100, 2100, 2090, 300, 2400, 1, 700, 2200, 310]
    rows = _Rows(variant._replace(body=FUSED_BODIES[variant.pages is not None]), contexts)
    rows.write(num_newest=1)
    for table, tokens in zip(rows.tables, [0, 2080, 2048, 256, 2080, 0, 640, 1280, 256], strict=True):
        table[: tokens // block] = rows.tables[0][: tokens // block]
    q, ends = rows.queries(1), [[n] for n in contexts]
    shared = shared_rows(np.array(rows.tables), [-(-n // block) for n in contexts], block)
    assert shared is not None
    for window in (None, _SHARED_WINDOW):
        starts = [[0 if window is None else max(n - window, 0)] for n in contexts]
        items = mx.array(shared_items(shared, Partitions.of(np.array(contexts), shape, np.array(starts)[:, 0]), shape))
        out = rows.decode(q, ends, starts, append=rows.newest(), variant=variant, items=items, max_visible=window)
        expected = rows.decode(q, ends, starts, max_visible=window)
        if not mx.array_equal(out.astype(mx.float32), expected.astype(mx.float32)).item():
            raise RuntimeError("results of rows with common blocks differ from those of single rows")
    return 0.0


def prefill_difference(variant: Variant) -> float:
    """Return the RMS difference of a prefill variant from float32 attention: the worst sequence of a pack with a
    window. New tokens fill tiles or do not, with and without prefixes, in permuted blocks; every slot that no token
    sees is NaN."""
    tile = shape_for(variant).rows // variant.gqa  # tokens
    counts, prefixes = [1, tile + 3, 2, tile], [variant.block_size + 5, 0, 90, 64]
    rows = _Rows(variant, [count + prefix for count, prefix in zip(counts, prefixes, strict=True)])
    rows.write(hidden=[max(prefix - _PROMPT_WINDOW + 1, 0) for prefix in prefixes])
    q = mx.concatenate([rows.queries(n)[:1].swapaxes(0, 2) for n in counts])
    out, row, errors = rows.prefill(q, counts, _PROMPT_WINDOW), 0, []
    for count, (k, v) in zip(counts, rows.kept, strict=True):
        got, asked = (x[row : row + count].squeeze(2) for x in (out, q))
        errors.append(mx.square(got.astype(mx.float32) - rows.attend(asked, k, v, _PROMPT_WINDOW)).mean())
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


def texts_of(variant: Variant) -> list[KernelText]:
    """Return the texts that a variant's check, pool and steps launch on CUDA."""
    dims = variant.head_dim, variant.value_dim
    if variant.body in LATENT_BODIES:  # the pools hold latents, which are the values, and rotated parts
        dims = variant.value_dim, variant.head_dim - variant.value_dim
    texts = list(kernels.pool_texts(variant.dtype, *dims, variant.block_size, variant.pages).values())
    if variant.body in PREFILL_BODIES:
        return [*texts, (variant.body, constants_of(variant, shape_for(variant)))]
    for partitions in (2, 1):
        texts += spec_of(variant, shape_for(variant), 1, variant.gqa, 1, partitions).texts
    shared = kernels.shared_variant_of(variant)
    if shared is not None:
        texts += spec_of(shared, shape_for(shared), 1, variant.gqa, 1, 1).texts
    return list(dict.fromkeys(texts))


class _Rows:
    """Rows of random tokens in permuted blocks of a pool full of NaN. Over latents, the pool of keys holds latents and
    that of values the rotated parts.

    Attributes:
        tables: block ids of each row, as wide as those of real steps.
        kept: each row's keys and values as the pool is to hold them, ``[1, n_kv_heads, n, dim]``.
    """

    def __init__(self, variant: Variant, contexts: Sequence[int]) -> None:
        block, dtype, self._pages = variant.block_size, variant.dtype, variant.pages
        self._contexts, self._is_latent = contexts, variant.body in LATENT_BODIES
        dims = variant.head_dim, variant.value_dim
        if self._is_latent:
            dims = variant.value_dim, variant.head_dim - variant.value_dim
            # On tensor cores, query heads do not fill the last thread group.
            n_kv_heads, n_q_heads = 1, 2 * variant.gqa - (variant.gqa // 3 if variant.body == LATENT_BODIES[1] else 0)
        else:
            n_kv_heads = max(2, _QUERY_HEADS // variant.gqa)
            n_q_heads = n_kv_heads * variant.gqa
        used = [-(-n // block) for n in contexts]
        num_blocks, width = sum(used) + 1, -(-max(used) // _TABLE_WIDTH) * _TABLE_WIDTH
        # In Python, here and below: on CUDA, MLX would have to compile kernels to index an array.
        ids = random.Random(0).sample(range(1, num_blocks), sum(used))
        self._blocks = [ids[sum(used[:row]) :][:count] for row, count in enumerate(used)]
        self.tables = [[*own, *[0] * (width - len(own))] for own in self._blocks]
        ends = [sum(contexts[: row + 1]) for row in range(len(contexts))]
        self._tokens = [slice(end - n, end) for end, n in zip(ends, contexts, strict=True)]  # of each row
        keys = [mx.random.key(i) for i in range(4)]
        self._query_shape, self._query_key = (len(contexts), n_q_heads, variant.head_dim), keys[0]
        self._given = [
            mx.random.normal((1, n_kv_heads, ends[-1], dim), key=key).astype(dtype)
            for dim, key in zip(dims, keys[1:], strict=False)
        ]
        kept = self._given if self._pages is None else self._pages.dequantize(*self._pages.quantize(*self._given))
        self.kept = [tuple(x[:, :, own] for x in kept) for own in self._tokens]
        self._pools = new_blocks(num_blocks, n_kv_heads, block, dims, dtype, self._pages, float("nan"))
        self._fence = kernels.new_fence()
        self._sinks = mx.random.normal((n_q_heads,), key=keys[3]) if variant.sinks else None
        self._options: dict[str, Any] = {
            **{"variant": variant, "n_q_heads": n_q_heads, "scale": variant.head_dim**-0.5, "pages": self._pages},
            **{"softcap": 10.0 if variant.softcap else None, "sinks": variant.sinks},
        }

    def _slots(self, hidden: Sequence[int] = (), num_newest: int = 0) -> mx.array:
        """Return the slot of each token; -1 for the first ``hidden`` tokens and the newest ones of each row."""
        block, slots = self._pools[0].shape[2], []
        for row, (own, n) in enumerate(zip(self._blocks, self._contexts, strict=True)):
            live = range(hidden[row] if hidden else 0, n - num_newest)
            slots += [own[t // block] * block + t % block if t in live else -1 for t in range(n)]
        return mx.array(slots, mx.int32)

    def write(self, hidden: Sequence[int] = (), num_newest: int = 0) -> None:
        """Write the tokens but for the first ``hidden`` ones and the newest ones of each row."""
        launch = kernels.prepare_write(*self._pools, self._slots(hidden, num_newest), self._pages)
        self._fence = launch(*self._pools, self._fence, *self._given)

    def newest(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of the newest tokens, ``[B, n_kv_heads, 1, dim]``."""
        k, v = (mx.concatenate([x[:, :, own.stop - 1 : own.stop] for own in self._tokens]) for x in self._given)
        return k, v

    def queries(self, q_len: int) -> mx.array:
        """Return queries of every row, ``[B, n_q_heads, q_len, head_dim]``."""
        batch, n_q_heads, dim = self._query_shape
        x = mx.random.normal((batch, n_q_heads, q_len, dim), key=self._query_key)
        return x.astype(self._options["variant"].dtype)

    def decode(
        self,
        q: mx.array,
        ends: Bounds,
        starts: Bounds,
        *,
        append: tuple[mx.array, mx.array] | None = None,
        num_padding: int = 0,
        **options: Any,
    ) -> mx.array:
        """Return the variant's result for queries that see positions from starts to ends - 1, and for rows of padding,
        which end at position 0 as in compiled steps."""
        given: list[Any] = [
            mx.concatenate([x, mx.full((num_padding, *x.shape[1:]), float("nan"), x.dtype)]) if num_padding else x
            for x in (q, *(append or ()))
        ]
        tables, ends, starts = ([*x, *[[0] * len(x[0])] * num_padding] for x in (self.tables, ends, starts))
        launch = kernels.prepare_decode(
            *self._pools,
            (mx.array(tables, mx.int32), mx.array(ends, mx.int32), mx.array(starts, mx.int32)),
            append=append is not None,
            latent=self._is_latent,
            # Memory that a kernel fails to write often holds harmless numbers, which would hide the failure.
            init_value=float("nan") if self._options["variant"].backend == "metal" else None,
            **{**self._options, "max_visible": None, **options},
        )
        out, self._fence = launch(given[0], *self._pools, self._fence, self._sinks, *given[1:])
        return out

    def prefill(self, q: mx.array, counts: list[int], window: int) -> mx.array:
        """Return the prefill variant's result ``[T, n_q_heads, 1, dim]`` for the last ``counts`` tokens of each row."""
        tables = mx.array(self.tables, mx.int32)
        launch = prepare_prefill(*self._pools, tables, counts, self._contexts, window=window, **self._options)
        out, self._fence = launch(q, *self._pools, self._fence, self._sinks)
        return out

    def _gather(self, ids: list[int], length: int, *, stored: bool = False) -> tuple[mx.array, mx.array]:
        """Return keys and values of the first ``length`` positions of blocks."""
        launch = kernels.prepare_gather(*self._pools, ids, 0, length, self._pages, stored=stored)
        k, v, self._fence = launch(*self._pools, self._fence)
        return k, v

    def read_back(self) -> None:
        """Compare the pool with what was written. Raises RuntimeError if it differs. Then write the rows of quantised
        pages once more, to run the kernel that writes rows unchanged."""
        rows = None if self._pages is None else self._pages.quantize(*self._given)
        for own, blocks, kept in zip(self._tokens, self._blocks, self.kept, strict=True):
            n = own.stop - own.start
            if rows is not None and not _are_equal(self._gather(blocks, n, stored=True), [x[:, :, own] for x in rows]):
                raise RuntimeError("quantised rows differ from MLX's")
            if not _are_equal(self._gather(blocks, n), kept):
                raise RuntimeError("slots read back differ from what was written")
        if rows is not None:
            launch = kernels.prepare_write(*self._pools, self._slots(), self._pages, stored=True)
            self._fence = launch(*self._pools, self._fence, *rows)

    def errors_of(self, out: mx.array, q: mx.array, ends: Bounds, starts: Bounds) -> list[mx.array]:
        """Return the mean squared difference of each query's result from attention in float32."""
        errors = []
        for b, (k, v) in enumerate(self.kept):
            for i, (start, end) in enumerate(zip(starts[b], ends[b], strict=True)):
                got = out[b, :, i][None].astype(mx.float32)
                if start < end:
                    got = got - self.attend(q[b, :, i][None], k[:, :, start:end], v[:, :, start:end])
                errors.append(mx.square(got).mean())
        return errors

    def attend(self, q: mx.array, k: mx.array, v: mx.array, window: int | None = None) -> mx.array:
        """Return float32 attention of queries ``[n, n_q_heads, D]`` of the last tokens over ``k``, ``v`` as in
        :attr:`kept`."""
        k, v = (x[0].swapaxes(0, 1) for x in ((mx.concatenate([k, v], axis=-1), k) if self._is_latent else (k, v)))
        return attention(q, k, v, self._options["scale"], self._options["softcap"], self._sinks, window)


def _are_equal(given: Sequence[mx.array], wanted: Sequence[mx.array]) -> bool:
    return all(mx.array_equal(a, b, equal_nan=True).item() for a, b in zip(given, wanted, strict=True))


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
    (count, n_q, dim), (length, n_kv, _) = q.shape, k.shape
    positions, own = mx.arange(length), (length - count + mx.arange(count))[:, None]
    seen = positions <= own
    if window is not None:
        seen = mx.logical_and(seen, positions > own - window)
    q = q.astype(mx.float32).reshape(count, n_kv, -1, 1, dim)
    keys, values = (x.astype(mx.float32).swapaxes(0, 1)[:, None] for x in (k, v))
    scores = (q * keys).sum(-1) * scale  # [count, n_kv, group, length]
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    scores = mx.where(seen[:, None, None], scores, -float("inf"))
    if sinks is not None:
        logits = mx.broadcast_to(sinks.reshape(n_kv, -1, 1), (*scores.shape[:3], 1))
        scores = mx.concatenate([logits, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., int(sinks is not None) :]
    return (weights[..., None] * values).sum(-2).reshape(count, n_q, -1)


def worst_rms(errors: list[mx.array]) -> float:
    """Return the largest root of mean squared differences. Raises RuntimeError if one is not finite."""
    rms: Any = mx.sqrt(mx.stack(errors).max()).item()
    if not rms < float("inf"):
        raise RuntimeError("the result is not finite")
    return float(rms)
