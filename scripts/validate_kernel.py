"""Decode 200 steps with the kernels and compare every step with attention in float32, over a sweep of shapes.

    python scripts/validate_kernel.py            # on whatever GPU MLX sees; exits 1 if a step differs, 2 without a GPU
    python scripts/validate_kernel.py --kv-bits 8,4   # over quantised pages: 8, 4, or 8 for keys and 4 for values
    python scripts/validate_kernel.py --latents           # only latents (MLA); they belong to the first form, too
    python scripts/validate_kernel.py --limits   # instead: a million tokens, and pools of more than 2^31 elements

Each case joins ragged sequences, grows them by one token a step through write_slots (new blocks in a random order,
unused slots NaN), and asks for RMS < 5e-3 at every step. Steps are evaluated one behind, as a pipelined generator does.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from support.kv_bits import bits_of
from support.latent_steps import QUICK, SHAPES, LatentRun

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import MAX_RMS, SelfCheck, _attend, self_check
from mlx_paged.kernels.latent.check import self_check_latent
from mlx_paged.kernels.latent.variants import latent_variants_of
from mlx_paged.kernels.launch_shape import HEAD_DIMS, Variant
from mlx_paged.kernels.quantized.pages import PageShape, new_blocks

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


class Run:
    """Ragged sequences over one pool, with the same rows kept densely for the reference."""

    def __init__(self, variant: Variant, batch: int, longest: int, steps: int, window: int | None, seed: int) -> None:
        rng = random.Random(seed)
        mx.random.seed(seed)
        self.variant, self.window = variant, window
        self.lengths = [rng.randint(1, longest) for _ in range(batch)]
        self.n_kv, block = 2, variant.block_size
        blocks = [-(-(n + steps) // block) for n in self.lengths]
        free = list(range(1, sum(blocks) + 1))
        rng.shuffle(free)
        self.tables = [[free.pop() for _ in range(n)] for n in blocks]
        widest = max(blocks)
        self.device_tables = mx.array([t + [0] * (widest - len(t)) for t in self.tables], mx.int32)
        dims = variant.head_dim, variant.value_dim
        self.pools = new_blocks(sum(blocks) + 1, self.n_kv, block, dims, variant.dtype, variant.pages, float("nan"))
        self.fence = kernels.new_fence()
        self.dense = []
        for b, n in enumerate(self.lengths):
            k, v = (self.rows(n, dim) for dim in dims)
            slots = mx.array([self.slot(b, t) for t in range(n)], mx.int32)
            self.fence = kernels.write_slots(*self.pools, self.fence, k[None], v[None], slots, variant.pages)
            self.dense.append(self.kept(k, v))
        self.sinks = mx.random.normal((self.n_kv * variant.gqa,)) if variant.sinks else None

    def rows(self, n: int, dim: int) -> mx.array:
        return mx.random.normal((self.n_kv, n, dim)).astype(self.variant.dtype)

    def kept(self, k: mx.array, v: mx.array) -> list[mx.array]:
        """What the pages hold of keys and values."""
        pages = self.variant.pages
        return [k, v] if pages is None else list(pages.dequantize(*pages.quantize(k, v)))

    def slot(self, b: int, t: int) -> int:
        return self.tables[b][t // self.variant.block_size] * self.variant.block_size + t % self.variant.block_size

    def step(self) -> mx.array:
        """Append one token to every sequence, attend, and return the largest RMS over the sequences (lazy)."""
        variant, batch = self.variant, len(self.lengths)
        new = [(self.rows(1, variant.head_dim), self.rows(1, variant.value_dim)) for _ in range(batch)]
        slots = mx.array([self.slot(b, n) for b, n in enumerate(self.lengths)], mx.int32)
        k, v = (mx.stack([pair[i] for pair in new]) for i in (0, 1))
        self.fence = kernels.write_slots(*self.pools, self.fence, k, v, slots, variant.pages)
        self.lengths = [n + 1 for n in self.lengths]
        starts = [max(0, n - self.window) if self.window else 0 for n in self.lengths]
        q = mx.random.normal((batch, self.n_kv * variant.gqa, 1, variant.head_dim)).astype(variant.dtype)
        options: dict[str, Any] = {"scale": variant.head_dim**-0.5, "softcap": 20.0 if variant.softcap else None}
        out, self.fence = kernels.paged_decode(
            q,
            *self.pools,
            self.fence,
            self.device_tables,
            mx.array(self.lengths, mx.int32)[:, None],
            mx.array(starts, mx.int32)[:, None],
            sinks=self.sinks,
            max_visible=self.window,
            variant=variant,
            pages=variant.pages,
            **options,
        )
        worst = []
        for b in range(batch):
            newest = self.kept(*new[b])
            self.dense[b] = [mx.concatenate([old, x], axis=1) for old, x in zip(self.dense[b], newest, strict=True)]
            kb, vb = (x[:, starts[b] :] for x in self.dense[b])
            expected = _attend(q[b], kb, vb, options["scale"], options["softcap"], self.sinks)
            worst.append(mx.square(out[b].astype(mx.float32) - expected).mean())
        return mx.sqrt(mx.stack(worst).max())


def cases(quick: bool) -> list[dict[str, Any]]:
    """The sweep: every head_dim in bf16, then dtypes, ratios, block sizes, windows and extras."""
    base: dict[str, Any] = {"dtype": "bf16", "dim": 128, "gqa": 4, "block": 32, "window": None, "extras": False}
    sweep: list[dict[str, Any]] = [{**base, "dim": dim} for dim in ((64, 128, 256) if quick else HEAD_DIMS)]
    changes: list[dict[str, Any]] = [
        {"dtype": "f32"},
        {"dtype": "f16"},
        {"window": 100},
        {"extras": True},
        {"gqa": 16},
        {"block": 8},
    ]
    if not quick:
        changes += [{"gqa": 1}, {"gqa": 7}, {"block": 16}, {"block": 64}, {"block": 128}]
        changes += [{"dim": 64, "window": 40, "extras": True, "dtype": "f16"}, {"dim": 256, "gqa": 2, "window": 512}]
    return sweep + [{**base, **change} for change in changes]


def attend_in_chunks(q: mx.array, k: mx.array, v: mx.array, scale: float, chunk: int = 1 << 14) -> mx.array:
    """Attention in float32 of q [n_q_heads, 1, D] over k, v [n_kv_heads, n, D], `chunk` tokens at a time."""
    repeat = q.shape[0] // k.shape[0]
    q = q.astype(mx.float32)
    top, total, out = mx.full((q.shape[0], 1), -float("inf")), mx.zeros((q.shape[0], 1)), mx.zeros(q.shape)
    for first in range(0, k.shape[1], chunk):
        part_k, part_v = (mx.repeat(x[:, first : first + chunk].astype(mx.float32), repeat, axis=0) for x in (k, v))
        scores = (q * part_k).sum(-1) * scale
        higher = mx.maximum(top, scores.max(1, keepdims=True))
        weights, shrink = mx.exp(scores - higher), mx.exp(top - higher)
        top, total = higher, total * shrink + weights.sum(1, keepdims=True)
        out = out * shrink[..., None] + (weights[..., None] * part_v).sum(1, keepdims=True)
        mx.eval(top, total, out)
    return out / total[..., None]


def check_limits(tokens: int = 1 << 20) -> int:
    """A context of a million tokens whose blocks all lie past the 2^31st element of both pools. Returns the failures.

    Needs about 20 GB of GPU memory.
    """
    failed = 0
    n_kv, gqa, block = 8, 4, 32
    for dim in (64, 128):
        mx.random.seed(dim)
        below = 2**31 // (n_kv * block * dim)
        used = tokens // block
        pools = [mx.full((below + used + 1, n_kv, block, dim), float("nan"), mx.bfloat16) for _ in "kv"]
        ids = mx.random.permutation(used).astype(mx.int32) + (below + 1)
        k, v = (mx.random.normal((n_kv, tokens, dim)).astype(mx.bfloat16) for _ in "kv")
        q = mx.random.normal((1, n_kv * gqa, 1, dim)).astype(mx.bfloat16)
        slots = (ids[:, None] * block + mx.arange(block, dtype=mx.int32)).reshape(-1)
        mx.eval(pools, k, v, q, slots)
        fence = kernels.new_fence()
        for first in range(0, tokens, 1 << 15):
            rows = slice(first, first + (1 << 15))
            fence = kernels.write_slots(*pools, fence, k[None, :, rows], v[None, :, rows], slots[rows])
            mx.eval(fence)
        fence = kernels.copy_blocks(*pools, fence, ids[-1:], mx.array([0], mx.int32))
        tail = mx.concatenate([ids[-3:-1], mx.array([0], mx.int32)])  # the copy in place of the last block
        got_k, got_v, fence = kernels.gather_blocks(*pools, fence, tail, 0, 3 * block)
        same = all(mx.array_equal(got[0], x[:, -3 * block :]).item() for got, x in ((got_k, k), (got_v, v)))
        failed += not same
        print(f"{'ok  ' if same else 'FAIL'} d{dim} pools of {pools[0].size:.2e} elements: writes, copies, gathers")
        scale = 3 * dim**-0.5  # a peaked softmax: with flat weights a wrong block would hardly show
        for length in (tokens, tokens - 1, tokens // 2 + 5):
            expected = attend_in_chunks(q[0], k[:, :length], v[:, :length], scale)
            size = mx.sqrt(mx.square(expected).mean()).item()
            for variant in kernels.decode_variants(*pools, n_kv * gqa):
                ends = mx.array([[length]], mx.int32)
                out, fence = kernels.paged_decode(
                    q, *pools, fence, ids[None], ends, mx.zeros_like(ends), scale=scale, variant=variant
                )
                rms = mx.sqrt(mx.square(out[0].astype(mx.float32) - expected).mean()).item()
                good = rms < MAX_RMS * size
                failed += not good
                print(
                    f"{'ok  ' if good else 'FAIL'} {variant} {length} tokens: RMS {rms:.2e} of {size:.2e}", flush=True
                )
        del pools, k, v
        mx.clear_cache()
    return failed


def is_good(check: SelfCheck, make: Callable[[], Run | LatentRun], steps: int, window: int | None) -> bool:
    """Whether a self-check and each of so many steps have a small difference. Prints a line."""
    worst = check.rms
    if check.ok:
        run, behind = make(), None
        for _ in range(steps):
            rms = run.step()
            mx.async_eval(rms)
            if behind is not None:
                worst = max(worst, behind.item())
            behind = rms
        worst = max(worst, behind.item() if behind is not None else 0.0)
    good = check.ok and worst < MAX_RMS
    seen = f" window {window}" if window else ""
    print(f"{'ok  ' if good else 'FAIL'} {check.variant}{seen}: RMS {worst:.2e} {check.reason}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--longest", type=int, default=600, help="longest prompt, tokens")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--latents", action="store_true", help="only the kernels over latents")
    parser.add_argument("--limits", action="store_true", help="only a context of 2^20 tokens past element 2^31 (20 GB)")
    parser.add_argument("--kv-bits", type=bits_of, help="quantised pages: 8, 4, or 8,4 for keys and values")
    parser.add_argument("--kv-group-size", type=int, default=32)
    args = parser.parse_args()
    dialect = kernels.backend()
    if dialect is None:
        print("validate_kernel: MLX sees no GPU here; the kernels need Metal or CUDA", file=sys.stderr)
        return 2
    mx.set_default_device(mx.gpu)
    failed = check_limits() if args.limits else 0
    for seed, case in enumerate(cases(args.quick) if not args.limits and not args.latents else []):
        shape = (DTYPES[case["dtype"]], case["dim"], case["dim"], 2 * case["gqa"], 2, case["block"])
        pages = None
        if args.kv_bits:
            if case["dim"] % args.kv_group_size:
                continue
            pages = PageShape.of(case["dim"], args.kv_bits, args.kv_group_size, shape[0])
        for variant in kernels.variants_of(*shape, case["extras"], case["extras"], pages):
            make = partial(Run, variant, args.batch, args.longest, args.steps, case["window"], seed)
            failed += not is_good(self_check(variant), make, args.steps, case["window"])
    over_latents = [] if args.limits or args.kv_bits else QUICK if args.quick else SHAPES
    for seed, latent in enumerate(over_latents):
        for variant in latent_variants_of(latent.dtype, latent.rank, LatentRun.rope, latent.heads, 1, latent.block):
            make_latent = partial(LatentRun, variant, latent, args.batch, args.steps, seed)
            failed += not is_good(self_check_latent(variant), make_latent, args.steps, latent.window)
    print(f"{failed} failed" if failed else "all good", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
