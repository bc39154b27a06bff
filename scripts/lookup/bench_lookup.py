"""Speculation by look-up in batches: tokens per second with and without, where answers repeat their prompt and where
they do not.

    python scripts/lookup/bench_lookup.py --model path/to/model --batches 1,8 --lookup 8
    python scripts/lookup/bench_lookup.py --random llama-1b --batches 1,8,32 --lookup 3,8

With a model that chats, *copy* asks for a text of the prompt to be repeated (greedy) and *prose* for a story (sampled).
With random weights the model's next token depends on its last one: *copy* has prompts that hold the answer, *prose*
chooses between a few words, so that what stood before is found again and again and rarely goes on as before.

Both sides run in turns in one process, each case after a warm-up. A rate is the tokens behind every row's first, by the
seconds they took; the ratio is that of the medians. lookup.json has all rates, and with matplotlib there is a
lookup.png.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
from lookup_work import Work, random_work, successor_model, text_work
from support.bench_apart import Panel, add_model_arguments, add_pool_arguments, patch_anew, write_results
from support.bench_common import SEED, BenchError, load_model, table

import mlx_paged
from mlx_paged.engine.request_options import RequestOptions

PANELS: tuple[Panel, ...] = (
    ("tokens/s", lambda r: r["tokens_per_s"]),
    ("drafts accepted, of those proposed", lambda r: r["accepted"] / max(1, r["drafted"])),
)


def run(model: Any, work: Work, prompts: list[list[int]], num_tokens: int, lookup: int) -> tuple[float, int]:
    """Tokens per second once every row decodes, and all tokens that were generated."""
    generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
        model, completion_batch_size=len(prompts), prefill_batch_size=min(8, len(prompts))
    )
    mx.random.seed(SEED)
    size = len(prompts)
    generator.insert_segments(
        [[prompt] for prompt in prompts],
        [num_tokens] * size,
        samplers=[work.sampler] * size,
        options=[RequestOptions(prompt_lookup=lookup)] * size,
    )
    started: set[int] = set()
    begin, total, timed = 0.0, 0, 0
    while True:
        reports, generated = generator.next()
        if not reports and not generated:
            break
        total += len(generated)
        if len(started) == size:
            timed += len(generated)
            continue
        started.update(response.uid for response in generated)
        begin = time.perf_counter()
    seconds = time.perf_counter() - begin
    generator.close()
    return timed / seconds, total


def measure(
    model: Any, work: Work, batch: int, lookups: Sequence[int], num_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Figures of one work and batch: without look-up, and with each number of drafts."""
    prompts = work.prompts(batch)
    pool = mlx_paged.pool_of(model)
    results: list[dict[str, Any]] = []
    for lookup in (0, *lookups):
        run(model, work, prompts, num_tokens, lookup)
        side = "without" if lookup == 0 else f"up to {lookup}"
        facts = {"side": side, "case": f"{work.name}, {batch}", "lookup": lookup, "batch": batch, "rates": []}
        results.append({**facts, "drafted": 0, "accepted": 0, "generated_tokens": 0})
    for _ in range(repeats):
        for result in results:
            before = pool.stats()
            rate, total = run(model, work, prompts, num_tokens, result["lookup"])
            after = pool.stats()
            result["rates"].append(rate)
            result["generated_tokens"] += total
            result["drafted"] += after.drafted_tokens - before.drafted_tokens
            result["accepted"] += after.accepted_tokens - before.accepted_tokens
    for result in results:
        result["tokens_per_s"] = statistics.median(result["rates"])
        result["ratio"] = result["tokens_per_s"] / results[0]["tokens_per_s"]
    return results


def numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    return [int(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--batches", type=numbers, default=[1, 8], help="rows, separated by commas")
    parser.add_argument("--lookup", type=numbers, default=[8], help="most drafts a step, separated by commas")
    parser.add_argument("--only", choices=("copy", "prose"), default=None)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt, with random weights")
    parser.add_argument("--num-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    add_pool_arguments(parser, "lookup")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    try:
        if args.model is None:
            model = successor_model(args.random or "tiny", args.dtype)
            works = random_work(model, args.prompt)
        else:
            from mlx_lm.utils import load_tokenizer

            model = load_model(args.model, args.dtype, args.bits, args.group_size)
            works = text_work(load_tokenizer(Path(args.model)))
    except BenchError as error:
        print(f"bench_lookup: {error}", file=sys.stderr)
        return 1
    patch_anew(args)
    results = []
    for work in works:
        for batch in args.batches if args.only in (None, work.name) else ():
            results += measure(model, work, batch, args.lookup, args.num_tokens, args.repeats)
            print(f"{work.name}, {batch} row(s) done", file=sys.stderr, flush=True)
    rows = [
        (r["case"], r["side"], f"{r['tokens_per_s']:.1f}", f"{r['ratio']:.2f}x", str(r["drafted"]), str(r["accepted"]))
        for r in results
    ]
    print(table(("case", "drafts", "tokens/s", "ratio", "proposed", "accepted"), rows))
    if args.out is not None:
        sides = list(dict.fromkeys(result["side"] for result in results))
        name = args.model or args.random or "tiny"
        problem = write_results(args.out, "lookup", given, results, PANELS, "case", sides, name, rotation=30)
        if problem:
            print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
