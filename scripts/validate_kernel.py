"""Compare the decode kernels with attention in float32, over a sweep of shapes.

    python scripts/validate_kernel.py            # on whatever GPU MLX sees; exits 1 if one differs, 2 without a GPU
    python scripts/validate_kernel.py --kv-bits 8,4   # over quantised pages: 8, 4, or 8 for keys and 4 for values
    python scripts/validate_kernel.py --limits   # instead: a million tokens, and pools of more than 2^31 elements

Each variant passes its self-check, and then has an RMS below 5e-3 over batches of sequences of random lengths, with 1
to 8 queries each (:func:`mlx_paged.kernels.check.decode_difference`).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_paged.cli.doctor_kernels import Shape, popular_shapes
from mlx_paged.config import parse_kv_bits
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import MAX_RMS, attention, decode_difference, outcome_of, self_check
from mlx_paged.kernels.launch_shape import HEAD_DIMS, MAX_QUERY_LENGTH, SHARED_BODIES, Variant
from scripts.support.paged_decode import decode_variants, gather_blocks, page_shape, paged_decode, write_slots

ROPE = 64  # elements of a rotary part beside a latent
# dtype, elements of a latent, query heads, block size
LATENTS = (
    (mx.bfloat16, 512, 128, 32),
    (mx.bfloat16, 512, 20, 32),
    (mx.bfloat16, 512, 128, 8),
    (mx.bfloat16, 512, 128, 128),
    (mx.float16, 256, 70, 16),
    (mx.float16, 512, 128, 64),
    (mx.float32, 512, 16, 32),
)


def shapes() -> list[Shape]:
    """Return the doctor's shapes, and one for each other head_dim, ratio and block size, and for softcap with sinks."""
    base = Shape(mx.bfloat16, 128, 4, 32)
    others = [base._replace(head_dim=dim) for dim in HEAD_DIMS]
    others += [base._replace(block_size=block) for block in (8, 16, 64, 128)]
    others += [base._replace(gqa=16), base._replace(softcap=True, sinks=True), Shape(mx.float16, 64, 4, 32, True, True)]
    return list(dict.fromkeys([*popular_shapes(32), *others]))


def variants(bits: Any, group_size: int) -> Iterator[Variant]:
    """Yield the variants to check: over quantised pages of ``bits``, or else over plain pages and latents."""
    for shape in shapes():
        dim = shape.head_dim
        if bits and dim % group_size:
            continue
        pages = page_shape(dim, bits, group_size, shape.dtype) if bits else None
        heads = shape.dtype, dim, dim, 2 * shape.gqa, 2, shape.block_size
        for variant in kernels.variants_of(*heads, shape.softcap, shape.sinks, pages):
            yield variant
            shared = kernels.shared_variant_of(variant)
            if shared is not None:
                yield shared
    for dtype, rank, num_heads, block in LATENTS if not bits else ():
        yield from kernels.variants_of(dtype, rank, ROPE, num_heads, 1, block, use="latents")


def check_limits(tokens: int = 1 << 20) -> int:
    """Check a context of a million tokens whose blocks all lie past element 2^31 of both pools. Return the failures.

    Needs about 30 GB of GPU memory.
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
        *tail, last = (int(id) for id in np.array(ids[-3:]))
        fence = kernels.copy_blocks(*pools, fence, [last], [0])
        tail.append(0)  # the copy in place of the last block
        got_k, got_v, fence = gather_blocks(*pools, fence, tail, 0, 3 * block)
        same = all(mx.array_equal(got[0], x[:, -3 * block :]).item() for got, x in ((got_k, k), (got_v, v)))
        failed += not same
        print(f"{'ok  ' if same else 'FAIL'} d{dim} pools of {pools[0].size:.2e} elements: writes, copies, gathers")
        scale = 3 * dim**-0.5  # a peaked softmax: with flat weights a wrong block would hardly show
        for length in (tokens, tokens - 1, tokens // 2 + 5):
            heads = (  # one by one: the products of all would take gigabytes
                attention(own[None], *(x[head : head + 1, :length].swapaxes(0, 1) for x in (k, v)), scale)
                for head, own in enumerate(q.reshape(n_kv, gqa, dim))
            )
            expected = mx.concatenate(list(heads), axis=1).swapaxes(0, 1)
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


def is_good(variant: Variant, batches: Sequence[Sequence[int]]) -> bool:
    """Return whether the self-check passes, and the RMS over each batch of contexts in tokens is below 5e-3; print a
    line. Variants for common blocks have the self-check only."""
    checks = [self_check(variant)]
    for number, contexts in enumerate(batches if variant.body not in SHARED_BODIES else ()):
        if checks[-1].ok:
            q_len = 1 + number % MAX_QUERY_LENGTH
            checks.append(outcome_of(lambda n=q_len, given=list(contexts): decode_difference(variant, given, n)))
    good, worst = checks[-1].ok, max(check.rms for check in checks)
    print(f"{'ok  ' if good else 'FAIL'} {variant}: RMS {worst:.2e} {checks[-1].reason}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="of random lengths (default: 8)")
    parser.add_argument("--longest", type=int, default=600, help="longest context, tokens (default: 600)")
    parser.add_argument("--limits", action="store_true", help="only a context of 2^20 tokens past element 2^31 (30 GB)")
    parser.add_argument("--kv-bits", type=parse_kv_bits, help="quantised pages: 8, 4, or 8,4 for keys and values")
    parser.add_argument("--kv-group-size", type=int, default=32)
    args = parser.parse_args()
    if kernels.backend() is None:
        print("validate_kernel: MLX sees no GPU here; the kernels need Metal or CUDA", file=sys.stderr)
        return 2
    mx.set_default_device(mx.gpu)
    if args.limits:
        failed = check_limits()
    else:
        rng = random.Random(0)
        batches = [[rng.randint(1, args.longest) for _ in range(3 + n)] for n in range(args.batches)]
        failed = sum(not is_good(variant, batches) for variant in variants(args.kv_bits, args.kv_group_size))
    print(f"{failed} failed" if failed else "all good", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
