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
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from support.decode_run import LATENTS, HeadRun, LatentRun, Run, SharedRun
from support.paged_decode import decode_variants, gather_blocks, paged_decode, write_slots

from mlx_paged.config import parse_kv_bits
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import MAX_RMS, self_check
from mlx_paged.kernels.launch_shape import HEAD_DIMS, Variant
from mlx_paged.kernels.ops import latent_variants_of
from mlx_paged.kernels.quantized import PageShape

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def cases(quick: bool) -> list[dict[str, Any]]:
    """Return the sweep: every head_dim in bf16, then dtypes, ratios, block sizes, windows and extras."""
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
    """Return attention in float32 of q [n_q_heads, 1, D] over k, v [n_kv_heads, n, D], `chunk` tokens at a time."""
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
    """Check a context of a million tokens whose blocks all lie past element 2^31 of both pools. Return the failures.

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
            fence = write_slots(*pools, fence, k[None, :, rows], v[None, :, rows], slots[rows])
            mx.eval(fence)
        fence = kernels.copy_blocks(*pools, fence, ids[-1:], mx.array([0], mx.int32))
        tail = mx.concatenate([ids[-3:-1], mx.array([0], mx.int32)])  # the copy in place of the last block
        got_k, got_v, fence = gather_blocks(*pools, fence, tail, 0, 3 * block)
        same = all(mx.array_equal(got[0], x[:, -3 * block :]).item() for got, x in ((got_k, k), (got_v, v)))
        failed += not same
        print(f"{'ok  ' if same else 'FAIL'} d{dim} pools of {pools[0].size:.2e} elements: writes, copies, gathers")
        scale = 3 * dim**-0.5  # a peaked softmax: with flat weights a wrong block would hardly show
        for length in (tokens, tokens - 1, tokens // 2 + 5):
            expected = attend_in_chunks(q[0], k[:, :length], v[:, :length], scale)
            size = mx.sqrt(mx.square(expected).mean()).item()
            for variant in decode_variants(*pools, n_kv * gqa):
                ends = mx.array([[length]], mx.int32)
                out, fence = paged_decode(
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


def is_good(variant: Variant, make: Callable[[], Run], steps: int, window: int | None) -> bool:
    """Return whether the self-check passes and each of ``steps`` steps has an RMS below MAX_RMS; print a line."""
    check = self_check(variant)
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
    print(f"{'ok  ' if good else 'FAIL'} {variant}{seen}: RMS {worst:.2e} {check.reason}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--longest", type=int, default=600, help="longest prompt, tokens")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--latents", action="store_true", help="only the kernels over latents")
    parser.add_argument("--limits", action="store_true", help="only a context of 2^20 tokens past element 2^31 (20 GB)")
    parser.add_argument("--kv-bits", type=parse_kv_bits, help="quantised pages: 8, 4, or 8,4 for keys and values")
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
            make = partial(HeadRun, variant, args.batch, args.longest, args.steps, case["window"], seed)
            failed += not is_good(variant, make, args.steps, case["window"])
            shared = kernels.shared_variant_of(variant)
            if shared is not None:
                make_shared = partial(SharedRun, shared, 3 * args.batch, 5 * args.longest, args.steps, seed)
                failed += not is_good(shared, make_shared, args.steps, None)
    latents = LATENTS[:3] if args.quick else LATENTS
    for seed, latent in enumerate(latents if not args.limits and not args.kv_bits else []):
        for variant in latent_variants_of(latent.dtype, latent.rank, LatentRun.rope, latent.heads, 1, latent.block):
            make_latent = partial(LatentRun, variant, latent, args.batch, args.steps, seed)
            failed += not is_good(variant, make_latent, args.steps, latent.window)
    print(f"{failed} failed" if failed else "all good", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
