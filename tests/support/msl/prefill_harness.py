"""A pack of prompts' new tokens over a pool, and the prefill kernel's real launch code on the emulator."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import check, ops, prefill
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.kernels.quantized_pages import dequantized, quantized, unset_pages
from tests.support.msl.harness import attention64, tensor_kernel, to_float


@contextmanager
def emulated(
    edit: Sequence[tuple[str, str]] = (),
    orders: tuple[int, ...] = (0, 2),
    checked: bool = True,
):
    """Run the prefill kernel on the emulator, without trials. ``edit``: mutations."""

    def build(body, constants):
        kernel, _ = tensor_kernel(body, constants, edit)
        # The text declares what the launch asks for, plus an array for codes of quantised pages.
        limit = dict(constants)["SHARED"] + (16 * 1024 if "KBITS" in dict(constants) else 0)
        return partial(kernel, checked=checked, orders=orders, tg_limit=limit)

    ops.variants_of.cache_clear()
    try:
        with (
            mock.patch.object(kernel_build, "build_kernel", build),
            mock.patch.object(ops, "backend", lambda: "cuda"),
        ):
            yield
    finally:
        ops.variants_of.cache_clear()


@contextmanager
def emulated_self_check() -> Iterator[Callable[[tuple[str, str]], None]]:
    """Run the self-check's kernel on the emulator, with faked writes; yield a function that plants a mutation."""
    edits: list[tuple[str, str]] = []
    with fake_kernels() as fake, emulated(edits, orders=(0,), checked=False):
        build, prepare = kernel_build.build_kernel, check.prepare_prefill
        fake.calls["paged_prefill"] = 0

        def follow(*args: Any, **options: Any) -> prefill.PrefillLaunch:
            # The fakes check that each use of a pool gets the fence of the previous one.
            launch = prepare(*args, **options)

            def attend(q: mx.array, *pools_and_fence: mx.array) -> tuple[mx.array, mx.array]:
                out, _ = launch(q, *pools_and_fence)
                return out, fake._pass("paged_prefill", *pools_and_fence[:3])

            return attend

        def build_arrays(body: str, constants: Any) -> Callable[..., list[mx.array]]:
            kernel = build(body, constants)

            def launch(**options: Any) -> list[mx.array]:
                outs = zip(kernel(**options), options["output_dtypes"], strict=True)
                return [mx.array(np.asarray(out)).view(dtype) for out, dtype in outs]

            return launch

        with (
            mock.patch.object(kernel_build, "build_kernel", build_arrays),
            mock.patch.object(check, "prepare_prefill", follow),
            mock.patch.dict(check._results, clear=True),
            mock.patch.dict(ops.switched_off, clear=True),
        ):
            yield edits.append


class Pack:
    """New tokens of several sequences. Slots that no token sees are NaN, blocks are permuted, and table entries that no
    token sees point outside of the pool."""

    def __init__(
        self,
        counts,
        prefixes,
        *,
        heads=(4, 2),
        head_dim=64,
        value_dim=None,
        block_size=16,
        dtype=mx.bfloat16,
        window=None,
        stride=1,
        softcap=None,
        sinks=False,
        seed=0,
        pages=None,
    ):
        rng = np.random.default_rng(seed)
        value_dim = value_dim or head_dim
        self.counts, self.lengths = list(counts), [n + p for n, p in zip(counts, prefixes, strict=True)]
        self.n_q, self.n_kv = heads
        self.dtype, self.block_size, self.window, self.softcap = dtype, block_size, window, softcap
        self.stride = stride
        self.pages = pages
        self.scale = head_dim**-0.5
        used = [-(-n // block_size) for n in self.lengths]
        order = list(rng.permutation(np.arange(1, sum(used) + 1)))
        self.tables = np.full((len(counts), max(used)), 10**6, np.int32)
        shape = (sum(used) + 2, self.n_kv, block_size)
        pools = [np.full((*shape, dim), np.nan, np.float32) for dim in (head_dim, value_dim)]

        def rows(*shape):
            return to_float(mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype))

        self.q = mx.array(rows(sum(counts), self.n_q, 1, head_dim)).astype(dtype)
        self.sinks = mx.array(rng.standard_normal(self.n_q).astype(np.float32)) if sinks else None
        self.rows = []
        for s, (length, prefix) in enumerate(zip(self.lengths, prefixes, strict=True)):
            self.rows.append([rows(self.n_kv, length, dim) for dim in (head_dim, value_dim)])
            first = self._first_seen(prefix)
            for t in range(first, length):
                if t == first or t % block_size == 0:
                    self.tables[s, t // block_size] = order.pop()
                for pool, row in zip(pools, self.rows[-1], strict=True):
                    pool[self.tables[s, t // block_size], :, t % block_size] = row[:, t]
        self.k_pool, self.v_pool = (mx.array(pool).astype(dtype) for pool in pools)
        if pages is not None:
            self._quantize(pools)

    def _first_seen(self, position):
        """Return the first position that a token sees: with a stride of the window's size, the start of its chunk."""
        if not self.window:
            return 0 * position
        return -(-np.maximum(position - self.window + 1, 0) // self.stride) * self.stride

    def _quantize(self, pools):
        """Make quantised pages of the pools; from here on, rows are their dequantised values."""
        self.k_pool, self.v_pool = map(unset_pages, pools, self.pages)
        self.rows = [
            [dequantized(quantized(x, form), form) for x, form in zip(pair, self.pages, strict=True)]
            for pair in self.rows
        ]

    def alone(self, s):
        """Return the pack of one of its sequences."""
        pack = object.__new__(type(self))
        pack.__dict__.update(self.__dict__)
        first = sum(self.counts[:s])
        pack.counts, pack.lengths = [self.counts[s]], [self.lengths[s]]
        pack.tables, pack.rows = self.tables[s : s + 1], [self.rows[s]]
        pack.q = self.q[first : first + self.counts[s]]
        return pack

    def reference(self):
        """Return float64 attention over the dense rows."""
        q, first, parts = to_float(self.q), 0, []
        for count, length, rows in zip(self.counts, self.lengths, self.rows, strict=True):
            own, position = np.arange(length - count, length)[:, None], np.arange(length)
            seen = (position <= own) & (position >= self._first_seen(own))
            heads = []
            for head in range(self.n_q):
                keys, values = (x[head // (self.n_q // self.n_kv)] for x in rows)
                sink = -np.inf if self.sinks is None else float(self.sinks[head])
                of_head = q[first : first + count, head, 0]
                heads.append(attention64(of_head, keys, values, seen, self.scale, self.softcap, sink))
            parts.append(np.stack(heads, axis=1)[:, :, None])
            first += count
        return np.concatenate(parts)

    def prepare(self, **options):
        """Return the launch for this pack."""
        return prefill.prepare_prefill(
            self.k_pool,
            self.v_pool,
            mx.array(self.tables),
            self.counts,
            self.lengths,
            n_q_heads=self.n_q,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks is not None,
            window=self.window,
            stride=self.stride,
            pages=self.pages,
            **options,
        )

    def run(self, **options):
        """Return (out as float32 NumPy, fence)."""
        fence = mx.array([7], mx.uint32)
        out, fence = self.prepare(**options)(self.q, self.k_pool, self.v_pool, fence, self.sinks)
        return to_float(out), int(np.asarray(fence)[0])
