"""The kernels by themselves, on the GPU that MLX sees.

    python scripts/bench.py kernel                         # decode against dense attention
    python scripts/bench.py kernel --kv-bits 8 4 8,4       # also over quantised pages, in the same run
    python scripts/bench.py kernel --what latents          # decode over latents (MLA, 512 + 64) against a gather
    python scripts/bench.py kernel --what shared           # rows with a prefix in common: read once, or by each
    python scripts/bench.py kernel --what shared --kv-bits 8 4   # the same over quantised pages
    python scripts/bench.py kernel --what prefill          # TFLOP/s of the prefill kernel, warm (CUDA)

Queries are in bf16, of one position per sequence in decode. Launches are chained (a launch's output is the next one's
query), many to an eval, and inputs rotate among sets that together exceed the L2 cache. They are queued while the
device is busy with something else, so a host that needs longer for a launch than the device does not count.

GB/s are of the keys and values, in bf16 and common ones counted once, over the time; compare with the device copy.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.config import parse_kv_bits
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.build import DeviceRows
from mlx_paged.kernels.prefill import prepare_prefill
from mlx_paged.kernels.quantized import PageShape, QuantizedRows
from mlx_paged.kernels.shared_runs import Partitions, cut_of, interleaved, items_for, shared_items, shared_rows
from scripts.support.paged_decode import decode_variants, page_shape

from .report import BenchError, Metric

METRICS = (
    Metric("us", "seconds", "less", 1e6, is_plotted=False),
    Metric("GB/s", "bytes_per_s", scale=1e-9),
    Metric("TFLOP/s", "flops_per_s", scale=1e-12),
)
Chain = Callable[[int], mx.array]  # builds n dependent launches
SHAPES = {"32/8x128": (32, 8, 128), "32/8x64": (32, 8, 64), "8/4x256": (8, 4, 256), "64/8x128": (64, 8, 128)}
LATENTS = [(32, 16384, heads) for heads in (128, 64, 20)] + [(n, 4096, heads) for n in (16, 1) for heads in (128, 20)]
RANK, ROPE = 512, 64
# Sequences, new tokens and prefix of each.
PREFILLS = ((32, 1024, 0), (16, 2048, 2048), (8, 2048, 0), (1, 8192, 0), (64, 256, 0), (1, 512, 16384))
# Rows, common tokens, and own tokens of each row.
SHARED = tuple(
    (batch, common, own) for batch in (2, 8, 32, 64) for common in (128, 1024, 8192, 32768) for own in (32, 256, 4096)
)
BLOCK_SIZE = 32
KV_GROUP_SIZE = 64
ROTATE_BYTES = 256 << 20
HEAD_START = 0.02  # seconds
DTYPE = mx.bfloat16


def seconds_of(*work: mx.array) -> float:
    """Return the seconds that the device needs for the head start and then lazy work."""
    first = head_start()
    mx.synchronize()
    begin = time.perf_counter()
    mx.async_eval(first)
    mx.eval(first, *work)
    return time.perf_counter() - begin


@lru_cache(maxsize=1)
def _ballast() -> tuple[mx.array, int]:
    """Return an array of 256 MB, and how many times the device copies it during the head start."""
    x = mx.zeros((1 << 26,))
    mx.eval(x)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        mx.eval(x + 1.0)
        times.append(time.perf_counter() - begin)
    return x, math.ceil(HEAD_START / min(times))


def head_start() -> mx.array:
    """Return work that keeps the device busy while the host queues what is measured."""
    x, copies = _ballast()
    for _ in range(copies):
        x = x + 1.0
    return x


def seconds_per_launch(chain: Chain, launches: int, repeats: int = 5) -> float:
    """Return the median seconds of one launch on the device, even if the host needs longer to queue one. Chains are
    built before the clock starts."""
    mx.eval(chain(launches))
    before = statistics.median(seconds_of() for _ in range(repeats))
    both = statistics.median(seconds_of(chain(launches)) for _ in range(repeats))
    mx.clear_cache()
    return (both - before) / launches


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Return the bytes per second of a device copy, read plus written."""
    source = mx.random.normal((int(gigabytes * 2**30) // 4,))
    mx.eval(source)

    def chain(n: int) -> mx.array:
        x = source
        for _ in range(n):
            x = x + 1.0
        return x

    return 2 * source.nbytes / seconds_per_launch(chain, 10)


def sets_for(read: int) -> int:
    """Return how many input sets together exceed the L2 cache, if a launch reads ``read`` bytes."""
    return max(1, min(64, -(-ROTATE_BYTES // read)))


def launches_for(read: int) -> int:
    """Return enough launches that the cost of starting them does not matter."""
    return int(max(16, min(400, 0.03 / (read / 3e12 + 10e-6))))


def noise(*shape: int) -> mx.array:
    return mx.random.normal(shape).astype(DTYPE)


def noise_pages(shape: tuple[int, int, int], form: QuantizedRows) -> mx.array:
    """Return quantised pages of noise: [blocks, heads, tokens, words]."""
    blocks, heads, size = shape
    codes = mx.random.randint(0, (1 << 32) - 1, (blocks, heads, size * form.code_words), mx.uint32)
    factors = (0.01 * mx.random.normal((blocks, heads, size * 2 * form.num_groups))).astype(form.dtype)
    return mx.concatenate([codes, factors.view(mx.uint32)], axis=-1).reshape(*shape, form.num_words)


def shuffled_tables(batch: int, length: int) -> mx.array:
    """Return block tables of sequences whose blocks lie in a random order."""
    blocks = -(-length // BLOCK_SIZE)
    return (mx.random.permutation(batch * blocks).astype(mx.int32) + 1).reshape(batch, blocks)


def steps_of(tables: mx.array, length: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return tables, ends and starts of rows of ``length`` tokens, in the form that a step uses."""
    ends, starts = (DeviceRows().of(np.full((len(tables), 1), n, np.int32)) for n in (length, 0))
    return tables, ends, starts


def pages_of(head_dim: int, bits: Any) -> PageShape | None:
    """Return the form of pages of ``bits``, or of a pair of bits for keys and values; None: plain."""
    return None if bits is None else page_shape(head_dim, bits, KV_GROUP_SIZE, DTYPE)


def pools_of(tables: mx.array, n_kv: int, head_dim: int, sets: int, pages: PageShape | None) -> list[list[mx.array]]:
    """Return ``sets`` pairs of pools of keys and values, filled with noise."""
    shape = (tables.size + 1, n_kv, BLOCK_SIZE)
    forms = pages or (None, None)
    return [
        [noise(*shape, head_dim) if form is None else noise_pages(shape, form) for form in forms] for _ in range(sets)
    ]


def chain_of(launch: Callable[..., tuple[mx.array, mx.array]], q: mx.array, pools: Sequence[Any]) -> Chain:
    """Return the chain of a kernel's launches, each over the next pools."""
    first = kernels.new_fence()
    mx.eval(pools, q, first)

    def chain(n: int) -> mx.array:
        x, fence = q, first
        for i in range(n):
            x, fence = launch(x, *pools[i % len(pools)], fence)
        return x

    return chain


def dense_chain(q: mx.array, shape: tuple[int, ...], sets: int, mask: str | None = None) -> Chain:
    """Return the chain of MLX's attention over contiguous keys and values of this shape."""
    arrays = [(noise(*shape), noise(*shape)) for _ in range(sets)]
    mx.eval(q, arrays)

    def chain(n: int) -> mx.array:
        x = q
        for i in range(n):
            x = mx.fast.scaled_dot_product_attention(x, *arrays[i % sets], scale=shape[-1] ** -0.5, mask=mask)
        return x

    return chain


def measure_decode(batch: int, context: int, name: str, kv_bits: Sequence[Any]) -> dict[str, Any]:
    """Return the work and the seconds of decode: dense attention, and the kernel over plain and quantised pages."""
    n_q, n_kv, head_dim = SHAPES[name]
    read, tables = 2 * batch * context * n_kv * head_dim * DTYPE.size, shuffled_tables(batch, context)
    q, rows, sets = noise(batch, n_q, 1, head_dim), steps_of(tables, context), sets_for(read)
    dense = dense_chain(q, (batch, n_kv, context, head_dim), sets)
    seconds = {"dense": seconds_per_launch(dense, launches_for(read))}
    del dense
    for bits in (None, *kv_bits):
        pages = pages_of(head_dim, bits)
        side, itemsize = (
            ("paged", 2)
            if pages is None
            else (f"paged {pages.k.bits}/{pages.v.bits}", (pages.k.bits + pages.v.bits) / 16)
        )
        pools = pools_of(tables, n_kv, head_dim, max(1, min(64, int(sets * 2 / itemsize))), pages)
        launch = kernels.prepare_decode(*pools[0], rows, n_q_heads=n_q, scale=head_dim**-0.5, pages=pages)
        seconds[side] = seconds_per_launch(chain_of(launch, q, pools), launches_for(read))
        del pools
    return {"case": f"{name}, {batch} x {context}", "bytes": read, "seconds": seconds}


def measure_latents(batch: int, context: int, heads: int) -> dict[str, Any]:
    """Return the work and the seconds of decode attention over latents, by the kernel and over gathered latents."""
    read, tables = batch * context * (RANK + ROPE) * DTYPE.size, shuffled_tables(batch, context)
    pools = [tuple(noise(tables.size + 1, 1, BLOCK_SIZE, dim) for dim in (RANK, ROPE)) for _ in range(sets_for(read))]
    q, scale = noise(batch, heads, 1, RANK + ROPE), (RANK + ROPE) ** -0.5
    launch = kernels.prepare_decode(*pools[0], steps_of(tables, context), n_q_heads=heads, scale=scale, latent=True)

    def attend(x: mx.array, *given: mx.array) -> tuple[mx.array, mx.array]:
        out, fence = launch(x, *given)
        return mx.depends(q, out), fence

    def gathered(n: int) -> mx.array:
        x = q
        for i in range(n):
            latents, rotated = (
                p[tables].reshape(batch, 1, -1, p.shape[-1])[:, :, :context] for p in pools[i % len(pools)]
            )
            keys = mx.concatenate([latents, rotated], axis=-1)
            out = mx.fast.scaled_dot_product_attention(x, keys, latents, scale=scale)
            x = mx.depends(q, out)
        return out

    chain = chain_of(attend, q, pools)
    seconds = {
        "gather": seconds_per_launch(gathered, 2, repeats=3),
        "paged": seconds_per_launch(chain, launches_for(read)),
    }
    flops = 2 * batch * context * heads * (2 * RANK + ROPE)
    return {"case": f"{heads} heads, {batch} x {context}", "bytes": read, "flops": flops, "seconds": seconds}


def measure_shared(batch: int, common: int, own: int, name: str, bits: Any = None) -> dict[str, Any]:
    """Return the work and the seconds of decode attention of rows whose first ``common`` tokens are in the same blocks:
    each row by itself, and common blocks read once for several rows. ``bits``: of quantised pages; None: plain."""
    n_q, n_kv, head_dim = SHAPES[name]
    length, leading = common + own, common // BLOCK_SIZE
    host = np.array(shuffled_tables(batch, length))
    host[:, :leading] = host[0, :leading]
    pages = pages_of(head_dim, bits)
    itemsize = DTYPE.size if pages is None else (pages.k.bits + pages.v.bits) / 16
    read = 2 * (common + batch * own) * n_kv * head_dim * DTYPE.size
    tables = mx.array(host)
    most = max(1, int((8 << 30) // (2 * tables.size * BLOCK_SIZE * n_kv * head_dim * itemsize)))
    pools = pools_of(tables, n_kv, head_dim, min(sets_for(read), most), pages)
    q, rows = noise(batch, n_q, 1, head_dim), steps_of(tables, length)
    given: dict[str, Any] = {"n_q_heads": n_q, "scale": head_dim**-0.5, "pages": pages}
    (plain, *_) = decode_variants(*pools[0], n_q, pages=pages)
    variant, shared = kernels.shared_variant_of(plain), shared_rows(host, [host.shape[1]] * batch, BLOCK_SIZE)
    launches = {"each row": kernels.prepare_decode(*pools[0], rows, **given)}
    if variant is not None and shared is not None:
        cut = cut_of(variant, n_kv)
        seen = Partitions.of(np.full(batch, length), cut.shape)
        chosen = items_for(shared, seen, cut)
        items = mx.array(interleaved(shared_items(shared, seen, cut.shape), cut.at_once) if chosen is None else chosen)
        launches["together" if chosen is not None else "together, not chosen"] = kernels.prepare_decode(
            *pools[0], rows, **given, variant=variant, launch_shape=cut.shape, items=items
        )
    seconds = {
        side: seconds_per_launch(chain_of(launch, q, pools), launches_for(read)) for side, launch in launches.items()
    }
    format_ = "" if bits is None else f", {bits} bits"
    return {"case": f"{name}, {batch} x ({common} + {own}){format_}", "bytes": read, "seconds": seconds}


def measure_prefill(batch: int, count: int, prefix: int, name: str) -> dict[str, Any]:
    """Return the work and the seconds of a launch for a pack, and of MLX's attention over dense arrays of the same
    shapes."""
    n_q, n_kv, head_dim = SHAPES[name]
    length = count + prefix
    flops = 4 * n_q * head_dim * batch * (count * prefix + count * (count + 1) // 2)
    launches = max(2, min(50, int(0.03 * 250e12 / flops)))
    tables = shuffled_tables(batch, length)
    pools = pools_of(tables, n_kv, head_dim, 1, None)
    launch = prepare_prefill(*pools[0], tables, [count] * batch, [length] * batch, n_q_heads=n_q, scale=head_dim**-0.5)
    dense = dense_chain(noise(batch, n_q, count, head_dim), (batch, n_kv, length, head_dim), 1, "causal")
    paged = chain_of(launch, noise(batch * count, n_q, 1, head_dim), pools)
    seconds = {"dense": seconds_per_launch(dense, launches), "paged": seconds_per_launch(paged, launches)}
    return {"case": f"{name}, {batch} x {count} after {prefix}", "flops": flops, "seconds": seconds}


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the work and the seconds of each case."""
    if args.what == "latents":
        yield from (measure_latents(*shape) for shape in LATENTS)
    elif args.what == "shared":
        for bits in args.kv_bits or [None]:
            yield from (measure_shared(*case, name, bits) for name in SHAPES for case in SHARED)
    elif args.what == "prefill":
        yield from (measure_prefill(*shape, name) for name in SHAPES for shape in PREFILLS)
    else:
        for name in SHAPES:
            for batch in args.batches:
                yield from (measure_decode(batch, context, name, args.kv_bits) for context in args.contexts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--what", choices=("decode", "latents", "prefill", "shared"), default="decode")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--kv-bits", type=parse_kv_bits, nargs="*", default=[], help="quantised pages: 8, 4 or 8,4")


def run(args: argparse.Namespace, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of each side of each case. Raises BenchError where the kernel cannot run."""
    needed = ("cuda",) if args.what == "prefill" else ("cuda", "metal")
    if kernels.backend() not in needed:
        raise BenchError(f"MLX sees no GPU here of the kind that {args.what} needs: {' or '.join(needed)}")
    mx.set_default_device(mx.gpu)
    results = []
    for found in measured(args):
        for side, seconds in found.pop("seconds").items():
            rates = {f"{kind}_per_s": work / seconds for kind, work in found.items() if kind != "case"}
            results.append({"case": found["case"], "side": side, "seconds": seconds, **rates})
            print(f"{found['case']}, {side}: {1e6 * seconds:.1f} us", file=sys.stderr, flush=True)
    results.append({"case": "device copy", "side": results[0]["side"], "bytes_per_s": copy_bandwidth()})
    return results
