"""Time the paged decode kernel against dense attention and against gather-then-attend, on the GPU that MLX sees.

    python scripts/bench_kernel.py --out out/kernel        # writes kernel.json and, with matplotlib, kernel.png
    python scripts/bench_kernel.py --kv-bits 8 4 8,4       # and the decode kernel over quantised pages, in the same run
    python scripts/bench_kernel.py --latents               # over latents (MLA, 512 + 64) against gather-then-attend
    python scripts/bench_kernel.py --prefill               # TFLOP/s of the prefill kernel, warm; writes kernel.json

Every side gets bf16 queries of one position per sequence. Launches are chained (a launch's output is the next one's
query), many to an eval, and inputs rotate among sets that together exceed the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from support.kv_bits import bits_of

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.prefill import prepare_prefill
from mlx_paged.kernels.quantized.pages import PageShape
from mlx_paged.kernels.quantized.rows import QuantizedRows

SHAPES = {"32/8x128": (32, 8, 128), "32/8x64": (32, 8, 64), "8/4x256": (8, 4, 256), "64/8x128": (64, 8, 128)}
BATCHES = (1, 4, 8, 32)
CONTEXTS = (1024, 4096, 16384, 65536)
BLOCK_SIZE = 32
KV_GROUP_SIZE = 64
ROTATE_BYTES = 256 << 20
DTYPE = mx.bfloat16


def seconds_per_launch(chain: Callable[[int], mx.array], launches: int, repeats: int = 5) -> float:
    """Median seconds of one launch; chain(n) builds n dependent launches, outside the clock."""
    mx.eval(chain(launches))
    times = []
    for _ in range(repeats):
        last = chain(launches)
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval(last)
        times.append((time.perf_counter() - begin) / launches)
    return statistics.median(times)


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes per second of a device copy, read plus written."""
    source = mx.random.normal((int(gigabytes * 2**30) // 4,))
    mx.eval(source)

    def chain(n: int) -> mx.array:
        x = source
        for _ in range(n):
            x = x + 1.0
        return x

    return 2 * source.nbytes / seconds_per_launch(chain, 10)


def sets_for(read: int) -> int:
    """Of inputs, so many that together they exceed the L2 cache, if a launch reads so many bytes."""
    return max(1, min(64, -(-ROTATE_BYTES // read)))


def launches_for(read: int) -> int:
    """Enough that starting up is not what is measured."""
    return int(max(16, min(400, 0.03 / (read / 3e12 + 10e-6))))


class Cell:
    """One (batch, context, head shape) with its pools, tables and dense arrays."""

    def __init__(self, batch: int, context: int, heads: tuple[int, int, int], block_size: int = BLOCK_SIZE) -> None:
        self.batch, self.context = batch, context
        self.n_q, self.n_kv, self.head_dim = heads
        self.block_size = block_size
        self.kv_bytes = 2 * batch * context * self.n_kv * self.head_dim * DTYPE.size
        self.sets = sets_for(self.kv_bytes)
        self.scale = self.head_dim**-0.5
        self.q = mx.random.normal((batch, self.n_q, 1, self.head_dim)).astype(DTYPE)
        self.launches = launches_for(self.kv_bytes)

    def paged(self, pages: PageShape | None = None) -> Callable[..., Callable[[int], mx.array]]:
        """A function (**options of paged_decode) -> chain."""
        blocks_each = -(-self.context // self.block_size)
        shape = (self.batch * blocks_each + 1, self.n_kv, self.block_size)
        bits = 16 if pages is None else 8 * pages.itemsize
        sets = max(1, min(64, int(self.sets * 16 / bits)))
        pools = [
            tuple(
                mx.random.normal((*shape, self.head_dim)).astype(DTYPE) if form is None else noise_pages(shape, form)
                for form in pages or (None, None)
            )
            for _ in range(sets)
        ]
        order = mx.random.permutation(self.batch * blocks_each).astype(mx.int32) + 1
        tables = order.reshape(self.batch, blocks_each)
        ends = mx.full((self.batch, 1), self.context, mx.int32)
        starts = mx.zeros((self.batch, 1), mx.int32)
        first = kernels.new_fence()
        mx.eval(pools, tables, ends, starts, first)

        def make(**options: Any) -> Callable[[int], mx.array]:
            def chain(n: int) -> mx.array:
                q, fence = self.q, first
                for i in range(n):
                    k, v = pools[i % sets]
                    q, fence = kernels.paged_decode(
                        q, k, v, fence, tables, ends, starts, scale=self.scale, pages=pages, **options
                    )
                return q

            return chain

        return make

    def dense(self) -> Callable[[int], mx.array]:
        """mx.fast.scaled_dot_product_attention over contiguous keys and values."""
        shape = (self.batch, self.n_kv, self.context, self.head_dim)
        arrays = [tuple(mx.random.normal(shape).astype(DTYPE) for _ in "kv") for _ in range(self.sets)]
        mx.eval(arrays)

        def chain(n: int) -> mx.array:
            q = self.q
            for i in range(n):
                k, v = arrays[i % self.sets]
                q = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale)
            return q

        return chain

    def gathered(self) -> Callable[[int], mx.array]:
        """Gather the blocks with stock MLX, then attend."""
        blocks_each = -(-self.context // self.block_size)
        shape = (self.batch * blocks_each + 1, self.n_kv, self.block_size, self.head_dim)
        pools = [mx.random.normal(shape).astype(DTYPE) for _ in "kv"]
        tables = (mx.random.permutation(self.batch * blocks_each) + 1).reshape(self.batch, blocks_each)
        mx.eval(pools, tables)

        def chain(n: int) -> mx.array:
            q = self.q
            for _ in range(n):
                k, v = (
                    p[tables].swapaxes(1, 2).reshape(self.batch, self.n_kv, -1, self.head_dim)[:, :, : self.context]
                    for p in pools
                )
                q = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale)
            return q

        return chain


def noise_pages(shape: tuple[int, int, int], form: QuantizedRows) -> mx.array:
    """Pages of noise: [blocks, heads, tokens, words]."""
    blocks, heads, size = shape
    codes = mx.random.bits((blocks, heads, size * form.code_words))
    factors = (0.01 * mx.random.normal((blocks, heads, size * 2 * form.num_groups))).astype(form.dtype)
    return mx.concatenate([codes, factors.view(mx.uint32)], axis=-1).reshape(*shape, form.num_words)


def measure(
    batch: int, context: int, name: str, copy: float, with_gather: bool, kv_bits: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """One row of the table: seconds of each side, bytes/s and shares."""
    cell = Cell(batch, context, SHAPES[name])
    row: dict[str, Any] = {"batch": batch, "context": context, "heads": name, "kv_bytes": cell.kv_bytes}
    row["paged_s"] = seconds_per_launch(cell.paged()(), cell.launches)
    mx.clear_cache()
    for bits in kv_bits:
        pages = PageShape.of(cell.head_dim, bits, KV_GROUP_SIZE, DTYPE)
        row[f"paged_{bits[0]}_{bits[1]}_s"] = seconds_per_launch(cell.paged(pages)(), cell.launches)
        mx.clear_cache()
    row["dense_s"] = seconds_per_launch(cell.dense(), cell.launches)
    mx.clear_cache()
    if with_gather:
        row["gather_s"] = seconds_per_launch(cell.gathered(), 2, repeats=3)
        mx.clear_cache()
    row["paged_bytes_per_s"] = cell.kv_bytes / row["paged_s"]
    row["share_of_copy"] = row["paged_bytes_per_s"] / copy
    row["dense_over_paged"] = row["dense_s"] / row["paged_s"]
    return row


# Rows x context, and query heads, of decode steps over latents.
LATENTS = [(32, 16384, heads) for heads in (128, 64, 20)] + [(n, 4096, heads) for n in (16, 1) for heads in (128, 20)]
RANK, ROPE = 512, 64


def measure_latents(batch: int, context: int, heads: int, copy: float) -> dict[str, Any]:
    """One row: seconds of a decode step's attention by the kernel and over gathered latents, and its share of copy."""
    blocks, read = batch * -(-context // BLOCK_SIZE), batch * context * (RANK + ROPE) * DTYPE.size
    shape, sets = (blocks + 1, 1, BLOCK_SIZE), sets_for(read)
    pools = [tuple(mx.random.normal((*shape, dim)).astype(DTYPE) for dim in (RANK, ROPE)) for _ in range(sets)]
    tables = (mx.random.permutation(blocks).astype(mx.int32) + 1).reshape(batch, -1)
    q, scale = mx.random.normal((batch, heads, 1, RANK + ROPE)).astype(DTYPE), (RANK + ROPE) ** -0.5
    ends, starts, first = mx.full((batch, 1), context, mx.int32), mx.zeros((batch, 1), mx.int32), kernels.new_fence()
    mx.eval(pools, tables, q, ends, starts, first)
    launch = kernels.prepare_decode(*pools[0], (tables, ends, starts), n_q_heads=heads, scale=scale, latent=True)

    def paged(n: int) -> mx.array:
        x, out, fence = q, q, first
        for i in range(n):
            out, fence = launch(x, *pools[i % sets], fence)
            x = mx.depends(q, out)
        return out

    def gathered(n: int) -> mx.array:
        x = q
        for i in range(n):
            latents, rotated = (p[tables].reshape(batch, 1, -1, p.shape[-1])[:, :, :context] for p in pools[i % sets])
            keys = mx.concatenate([latents, rotated], axis=-1)
            out = mx.fast.scaled_dot_product_attention(x, keys, latents, scale=scale)
            x = mx.depends(q, out)
        return out

    row: dict[str, Any] = {"batch": batch, "context": context, "heads": heads, "kv_bytes": read}
    row["paged_s"] = seconds_per_launch(paged, launches_for(read))
    row["gather_s"] = seconds_per_launch(gathered, 2, repeats=3)
    mx.clear_cache()
    row["paged_bytes_per_s"] = read / row["paged_s"]
    row["share_of_copy"] = row["paged_bytes_per_s"] / copy
    row["flops_per_s"] = 2 * batch * context * heads * (2 * RANK + ROPE) / row["paged_s"]
    return row


def run_latents(path: Path) -> int:
    """Print the table for latents and write it."""
    copy = copy_bandwidth()
    print(f"{mx.device_info().get('device_name', '?')}, mlx {mx.__version__}, copy {copy / 1e9:.0f} GB/s")
    print("batch context heads  paged us gather us     GB/s  of copy  TFLOP/s")
    rows = [measure_latents(*shape, copy) for shape in LATENTS]
    for row in rows:
        times = f"{row['paged_s'] * 1e6:9.1f} {row['gather_s'] * 1e6:9.1f} {row['paged_bytes_per_s'] / 1e9:8.0f}"
        rates = f"{row['share_of_copy']:8.2f} {row['flops_per_s'] / 1e12:8.0f}"
        print(f"{row['batch']:5} {row['context']:7} {row['heads']:5} {times} {rates}")
    write(path, copy_bytes_per_s=copy, latents=rows)
    return 0


# Sequences x new tokens + prefix of each.
PREFILLS = ((32, 1024, 0), (16, 2048, 2048), (8, 2048, 0), (1, 8192, 0), (64, 256, 0), (1, 512, 16384))


def measure_prefill(batch: int, count: int, prefix: int, name: str) -> dict[str, Any]:
    """One row: seconds of a launch for a pack, and of MLX's attention over dense arrays of the same shapes."""
    n_q, _, head_dim = SHAPES[name]
    flops = 4 * n_q * head_dim * batch * (count * prefix + count * (count + 1) // 2)
    launches = max(2, min(50, int(0.03 * 250e12 / flops)))
    row: dict[str, Any] = {"batch": batch, "count": count, "prefix": prefix, "heads": name, "flops": flops}
    row["paged_s"] = seconds_per_launch(paged_prefill(batch, count, prefix, SHAPES[name]), launches)
    mx.clear_cache()
    row["dense_s"] = seconds_per_launch(dense_prefill(batch, count, prefix, SHAPES[name]), launches)
    mx.clear_cache()
    return row


def paged_prefill(batch: int, count: int, prefix: int, heads: tuple[int, int, int]) -> Callable[[int], mx.array]:
    """A chain of launches of the prefill kernel."""
    n_q, n_kv, head_dim = heads
    length = count + prefix
    blocks_each = -(-length // BLOCK_SIZE)
    pools = [mx.random.normal((batch * blocks_each + 1, n_kv, BLOCK_SIZE, head_dim)).astype(DTYPE) for _ in range(2)]
    tables = (mx.random.permutation(batch * blocks_each).astype(mx.int32) + 1).reshape(batch, blocks_each)
    q = mx.random.normal((batch * count, n_q, 1, head_dim)).astype(DTYPE)
    first = kernels.new_fence()
    mx.eval(pools, tables, q, first)
    launch = prepare_prefill(*pools, tables, [count] * batch, [length] * batch, n_q_heads=n_q, scale=head_dim**-0.5)

    def paged(n: int) -> mx.array:
        x, fence = q, first
        for _ in range(n):
            x, fence = launch(x, *pools, fence)
        return x

    return paged


def dense_prefill(batch: int, count: int, prefix: int, heads: tuple[int, int, int]) -> Callable[[int], mx.array]:
    """A chain of MLX's own attention over contiguous keys and values."""
    n_q, n_kv, head_dim = heads
    length = count + prefix
    x = mx.random.normal((batch, n_q, count, head_dim)).astype(DTYPE)
    k, v = (mx.random.normal((batch, n_kv, length, head_dim)).astype(DTYPE) for _ in "kv")
    mx.eval(x, k, v)

    def dense(n: int) -> mx.array:
        y = x
        for _ in range(n):
            y = mx.fast.scaled_dot_product_attention(y, k, v, scale=head_dim**-0.5, mask="causal")
        return y

    return dense


def run_prefill(path: Path) -> int:
    """Print the table for the prefill kernel and write it."""
    if kernels.backend() != "cuda":
        print("bench_kernel: the prefill kernel needs CUDA", file=sys.stderr)
        return 2
    print("heads      batch  tokens  prefix  paged us  dense us  paged TFLOP/s  dense TFLOP/s  dense/paged")
    rows = []
    for name in SHAPES:
        for batch, count, prefix in PREFILLS:
            row = measure_prefill(batch, count, prefix, name)
            rows.append(row)
            rates = [row["flops"] / row[f"{side}_s"] / 1e12 for side in ("paged", "dense")]
            print(
                f"{name:10} {batch:5} {count:7} {prefix:7} {row['paged_s'] * 1e6:9.1f} {row['dense_s'] * 1e6:9.1f}"
                f" {rates[0]:14.0f} {rates[1]:14.0f} {row['dense_s'] / row['paged_s']:12.2f}",
                flush=True,
            )
    write(path, prefill=rows)
    return 0


def write(path: Path, **measured: Any) -> None:
    """A JSON file of what was measured, beside the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = {"mlx": mx.__version__, "device": str(mx.device_info()), **measured}
    path.with_suffix(".json").write_text(json.dumps(info, indent=1))


def plot(rows: list[dict[str, Any]], path: Path) -> bool:
    """Ratio to dense by context, one panel per head shape. False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, axes = plt.subplots(1, len(SHAPES), figsize=(4 * len(SHAPES), 3.4), sharey=True)
    for axis, name in zip(axes, SHAPES, strict=True):
        for batch in BATCHES:
            points = [(r["context"], r["dense_over_paged"]) for r in rows if (r["heads"], r["batch"]) == (name, batch)]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=f"batch {batch}")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(title=name, xlabel="context (tokens)", xscale="log")
    axes[0].set_ylabel("dense time / paged time")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/kernel", help="prefix of the .json and .png")
    parser.add_argument("--no-gather", action="store_true", help="leave the gather side out")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--kv-bits", type=bits_of, nargs="*", default=[], help="quantised pages: 8, 4 or 8,4")
    parser.add_argument("--prefill", action="store_true", help="time the prefill kernel, not the decode kernel")
    parser.add_argument("--latents", action="store_true", help="time the kernels over latents")
    args = parser.parse_args()
    if kernels.backend() is None:
        print("bench_kernel: MLX sees no GPU here; nothing to measure", file=sys.stderr)
        return 2
    mx.set_default_device(mx.gpu)
    if args.prefill:
        return run_prefill(Path(args.out))
    if args.latents:
        return run_latents(Path(args.out))
    copy = copy_bandwidth()
    print(f"{mx.device_info().get('device_name', '?')}, mlx {mx.__version__}, copy {copy / 1e9:.0f} GB/s")
    print("heads      batch context  paged us  dense us gather us     GB/s  of copy  dense/paged")
    rows = []
    for name in SHAPES:
        for batch in args.batches:
            for context in args.contexts:
                with_gather = not args.no_gather and batch * context <= 32 * 16384
                row = measure(batch, context, name, copy, with_gather, args.kv_bits)
                quantized = ""
                for k, v in args.kv_bits:
                    seconds = row[f"paged_{k}_{v}_s"]
                    quantized += f"  {k}/{v} bits {seconds * 1e6:.1f} us ({row['paged_s'] / seconds:.2f}x)"
                rows.append(row)
                print(
                    f"{name:10} {batch:5} {context:7} {row['paged_s'] * 1e6:9.1f} {row['dense_s'] * 1e6:9.1f}"
                    f" {row.get('gather_s', float('nan')) * 1e6:9.1f} {row['paged_bytes_per_s'] / 1e9:8.0f}"
                    f" {row['share_of_copy']:8.2f} {row['dense_over_paged']:8.2f}{quantized}",
                    flush=True,
                )
    path = Path(args.out)
    write(path, copy_bytes_per_s=copy, rows=rows)
    if not plot(rows, path.with_suffix(".png")):
        print("no plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
