"""Time to the first token of a burst, stock mlx-lm against mlx_paged: many prompts at once, and prompts alone.

    python scripts/bench_first_token.py --random llama-1b --cases 32x1024,64xmixed200-3000 --out out/first
    python scripts/bench_first_token.py --random llama-1b --cases 16x4096,8x2048,1x512,1x8192,1x32768

A case is ``BATCHxPROMPT``, ``BATCHxraggedMOST`` as in bench_batch.py, or ``BATCHxmixedLEAST-MOST``: random lengths, run
once and before all other cases, so that no length has been seen in the process. All other cases run once to warm up
and then ``--repeats`` times; the fastest run counts, on both sides. Each side runs in a process of its own. "last" is
when the last row has its first token; "dense" is the rate of a forward pass over ``[8, 1024]`` tokens (``[1, 64]`` on a
CPU) without cache and head in the same process, and "of dense" the prompt tokens per second until the last first token
against it (not with ``--bits``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from bench_batch import SIDES, Case, Request, Run, parse_case, percentiles
from support.bench_apart import (
    Panel,
    add_model_arguments,
    add_pool_arguments,
    chosen_model,
    measure_apart,
    on_gpu,
    patch_anew,
    write_results,
)
from support.bench_common import SEED, BenchError, table

import mlx_paged

DENSE_SHAPE, CPU_DENSE_SHAPE = (8, 1024), (1, 64)
WARM_UP = Case("warm-up", 4, (700,) * 4)
PANELS: tuple[Panel, ...] = (
    ("last first token, s", lambda r: r["last_first_s"]),
    ("median first token, s", lambda r: r["first_s"]["p50"]),
    ("peak memory, GB", lambda r: r["peak_bytes"] / 1e9),
)


def parse_any_case(text: str) -> Case:
    """As :func:`.bench_batch.parse_case`, and ``BATCHxmixedLEAST-MOST``."""
    batch_text, _, lengths = text.partition("xmixed")
    if not lengths:
        return parse_case(text)
    try:
        batch, least, most = int(batch_text), *map(int, lengths.split("-"))
        rng = random.Random(SEED)
        return Case(text, batch, tuple(rng.randint(least, most) for _ in range(batch)))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxmixedLEAST-MOST") from None


def requests_of(case: Case, num_tokens: int, vocabulary: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [Request(0.0, [rng.randrange(vocabulary) for _ in range(length)], num_tokens) for length in case.lengths]


def dense_rate(model: Any, vocabulary: int) -> float:
    """Tokens per second of a forward pass without cache and head; the best of five."""
    body = getattr(model, "model", model)
    tokens = mx.random.randint(0, vocabulary, DENSE_SHAPE if on_gpu() else CPU_DENSE_SHAPE)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        mx.eval(body(tokens))
        best = min(best, time.perf_counter() - begin)
    mx.clear_cache()
    return tokens.size / best


def measure(args: argparse.Namespace, side: str) -> list[dict[str, Any]]:
    """One side's figures of all cases, in this process."""
    model = chosen_model(args)
    vocabulary = model.args.vocab_size if hasattr(model, "args") else 1000
    dense = dense_rate(model, vocabulary) if args.bits is None else None
    if side == "paged":
        patch_anew(args)
    upstream = importlib.import_module("mlx_lm.generate")

    def run(case: Case, seed: int, num_tokens: int = args.decode_tokens) -> tuple[Run, int]:
        generator = upstream.BatchGenerator(
            model, completion_batch_size=case.batch, prefill_step_size=args.prefill_step_size
        )
        requests = requests_of(case, num_tokens, vocabulary, seed)
        mx.clear_cache()
        mx.reset_peak_memory()
        done = Run(generator, requests)
        done.go()
        generator.close()
        done.generator = None  # and the pool: the next case has one of its own
        return done, mx.get_peak_memory()

    run(WARM_UP, SEED)
    results = []
    for case in sorted(args.cases, key=lambda case: "mixed" not in case.name):
        seen = "mixed" not in case.name
        if side == "paged":
            patch_anew(args)  # the pool is as large as the case before has made it
        runs = [run(case, SEED + 1 + n) for n in range(args.repeats + 1 if seen else 1)][1 if seen else 0 :]
        best, peak = min(runs, key=lambda item: item[0].last_first)
        num_tokens = sum(case.lengths)
        results.append(
            {
                "side": side,
                "case": case.name,
                "prompt_tokens": num_tokens,
                "last_first_s": best.last_first,
                "last_first_s_of_repeats": [each.last_first for each, _ in runs],
                "first_s": percentiles(best.first),
                "decode_tokens_per_s": max((rate for each, _ in runs if (rate := each.decode_rate())), default=None),
                "prompt_tokens_per_s": num_tokens / best.last_first,
                "dense_tokens_per_s": dense,
                "peak_bytes": peak,
                "dispatch": {f"{c.path}: {c.reason}": n for c, n in mlx_paged.dispatch_counts().items()},
            }
        )
    return results


def print_results(results: Sequence[dict[str, Any]]) -> None:
    header = (
        "case",
        "side",
        "last s",
        "median s",
        "prompt tok/s",
        "of dense",
        "decode tok/s",
        "peak GB",
        "last/stock",
        "median/stock",
        "decode/stock",
    )
    stock = {r["case"]: r for r in results if r["side"] == "stock"}
    rows = []
    for r in results:
        base = stock.get(r["case"])
        decode = r["decode_tokens_per_s"]
        row = [
            r["case"],
            r["side"],
            f"{r['last_first_s']:.3f}",
            f"{r['first_s']['p50']:.3f}",
            f"{r['prompt_tokens_per_s']:.0f}",
            f"{r['prompt_tokens_per_s'] / r['dense_tokens_per_s']:.2f}" if r["dense_tokens_per_s"] else "-",
            "-" if decode is None else f"{decode:.0f}",
            f"{r['peak_bytes'] / 1e9:.2f}",
        ]
        if base is None or r["side"] == "stock":
            row += ["", "", ""]
        else:
            row.append(f"{r['last_first_s'] / base['last_first_s']:.2f}")
            row.append(f"{r['first_s']['p50'] / base['first_s']['p50']:.2f}")
            row.append(f"{decode / base['decode_tokens_per_s']:.2f}" if decode and base["decode_tokens_per_s"] else "-")
        rows.append(row)
    print(table(header, rows))
    dense = {f"{r['dense_tokens_per_s']:.0f}" for r in results if r["dense_tokens_per_s"]}
    print("dense forward:", ", ".join(sorted(dense)) or "-", "tokens/s")
    paths = sorted({path for r in results for path in r["dispatch"]})
    print("Paged attention ran through:", "; ".join(paths) or "-")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument(
        "--cases", type=lambda text: [parse_any_case(part) for part in text.split(",")], default="4x64,8xmixed10-90"
    )
    parser.add_argument("--decode-tokens", type=int, default=64, help="tokens of each request")
    parser.add_argument("--only", choices=SIDES, default=None, help="skip the other side")
    parser.add_argument("--repeats", type=int, default=2, help="runs of a case after the first")
    parser.add_argument("--prefill-step-size", type=int, default=2048)
    add_pool_arguments(parser, "first")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    if args.random is None and args.model is None:
        args.random = "tiny"
    if args.child is not None:
        print(json.dumps({"cases": measure(args, json.loads(args.child)[0])}))
        return 0
    results: list[dict[str, Any]] = []
    for side in SIDES if args.only is None else (args.only,):
        measured = measure_apart(__file__, given, [side], side=side)
        if "error" in measured:
            print(f"bench_first_token: {side}: {measured['error']}", file=sys.stderr)
            return 1
        results += measured["cases"]
    print_results(results)
    if args.out is not None:
        title = str(args.random or args.model)
        problem = write_results(args.out, "first", given, results, PANELS, "case", SIDES, title, rotation=30)
        if problem:
            print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        print(f"bench_first_token: {error}", file=sys.stderr)
        sys.exit(1)
