"""Time what a step takes to choose its tokens: mlx-lm's way against ours, in one run.

    python scripts/bench_sampling.py --out out/sampling    # sampling alone; sampling.json and, with matplotlib, .png
    python scripts/bench_sampling.py --random llama-1b --dtype bfloat16 --batch 32    # and whole decode steps

Sampling alone takes random logits, on the CPU or GPU that MLX sees. Every row has its own parameters (and so mlx-lm
calls a sampler for each), histories have 200 tokens.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from support.bench_common import DTYPES, PRESETS, BenchError, machine, random_model, table
from support.changed_preset import changed_preset

import mlx_paged
from mlx_paged.engine.sampling.batch_sampler import BatchSampler, SampledRow
from mlx_paged.engine.sampling.params import SamplingParams

HISTORY = 200
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
# Of a row, by its index.
SETTINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda row: {},
    "temperature": lambda row: {"temperature": 0.5 + 0.05 * row},
    "min-p": lambda row: {"temperature": 0.5 + 0.05 * row, "min_p": 0.02},
    "top-k": lambda row: {"temperature": 0.5 + 0.05 * row, "top_k": 20 + row},
    "top-p": lambda row: {"temperature": 0.5 + 0.05 * row, "top_p": 0.9 - 0.01 * row},
    "penalties": lambda row: PENALTIES,
    "top-p, penalties": lambda row: {**SETTINGS["top-p"](row), **PENALTIES},
    "all": lambda row: {**SETTINGS["top-p"](row), "min_p": 0.001 + 0.001 * row, "top_k": 40 + row, **PENALTIES},
}
MAKES_SAMPLER = ("temperature", "top_p", "min_p", "top_k")


def made(fields: dict[str, Any]) -> tuple[Any, list[Any]]:
    """mlx-lm's sampler and processors of a row."""
    chosen = {name: value for name, value in fields.items() if name in MAKES_SAMPLER}
    sampler = make_sampler(chosen.pop("temperature", 0.0), **chosen)
    return sampler, make_logits_processors(**{name: v for name, v in fields.items() if name not in MAKES_SAMPLER})


def stock_step(rows: Sequence[dict[str, Any]], histories: Sequence[list[int]]) -> Callable[..., list[mx.array]]:
    """What mlx-lm's GenerationBatch does behind the forward pass, from its source."""
    chosen = [made(row) for row in rows]
    same = make_sampler(0.0) if not any("temperature" in row for row in rows) else None
    buffers = [TokenBuffer(history) for history in histories]

    def step(logits: mx.array, inputs: mx.array) -> list[mx.array]:
        contexts = []
        if any(processors for _, processors in chosen):
            parts = []
            for index, (_, processors) in enumerate(chosen):
                part = logits[index : index + 1]
                context = buffers[index].update_and_fetch(inputs[index : index + 1])
                contexts.append(context)
                for processor in processors:
                    part = processor(context, part)
                parts.append(part)
            logits = mx.concatenate(parts)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if same is not None:
            sampled = same(logprobs)
        else:
            sampled = mx.concatenate([sampler(logprobs[i : i + 1]) for i, (sampler, _) in enumerate(chosen)])
        return [sampled, logprobs, *contexts]

    return step


def our_step(rows: Sequence[dict[str, Any]], histories: Sequence[list[int]]) -> Callable[..., list[mx.array]]:
    sampler = BatchSampler()
    sampler.add([SampledRow(SamplingParams(**row), h, 0) for row, h in zip(rows, histories, strict=True)])

    def step(logits: mx.array, inputs: mx.array) -> list[mx.array]:
        return [sampler.sample(sampler.penalised(logits, inputs))]

    return step


def seconds_per_step(step: Callable[..., list[mx.array]], logits: mx.array, steps: int) -> float:
    """Median seconds of a step; each one's tokens are the next one's input."""
    inputs = mx.zeros((logits.shape[0],), mx.uint32)
    times = []
    for index in range(steps + 2):
        begin = time.perf_counter()
        found = step(logits, inputs)
        mx.eval(found)
        if index >= 2:
            times.append(time.perf_counter() - begin)
        inputs = found[0]
    return statistics.median(times)


def measure_alone(batch: int, vocab: int, dtype: str, steps: int, settings: Sequence[str]) -> list[dict[str, Any]]:
    logits = (mx.random.normal((batch, vocab), key=mx.random.key(0)) * 2.5).astype(DTYPES[dtype])
    histories = mx.random.randint(0, vocab, (batch, HISTORY), key=mx.random.key(1)).tolist()
    mx.eval(logits)
    results = []
    for name in settings:
        rows = [SETTINGS[name](index) for index in range(batch)]
        seconds = {
            side: seconds_per_step(make(rows, histories), logits, steps)
            for side, make in (("stock", stock_step), ("ours", our_step))
        }
        results.append({"part": "sampling", "setting": name, **seconds, "ratio": seconds["ours"] / seconds["stock"]})
        print(f"{name}: stock {1e3 * seconds['stock']:.2f} ms, ours {1e3 * seconds['ours']:.2f} ms", flush=True)
    return results


def tokens_seconds(model: Any, chosen: Sequence[tuple[Any, list[Any]]], steps: int) -> float:
    """Median seconds of a decode step of mlx-lm's batch generator, patched or not."""
    generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
        model, completion_batch_size=len(chosen), prefill_batch_size=len(chosen)
    )
    prompts = [[1 + (7 * index + place) % 1000 for place in range(64)] for index in range(len(chosen))]
    generator.insert(
        prompts,
        [steps + 16] * len(chosen),
        samplers=[sampler for sampler, _ in chosen],
        logits_processors=[processors for _, processors in chosen],
    )
    times: list[float] = []
    while len(times) < steps + 8:
        begin = time.perf_counter()
        responses = generator.next_generated()
        if len(responses) == len(chosen):
            times.append(time.perf_counter() - begin)
        elif not responses:
            raise BenchError("the generator ended early")
    generator.close()
    return statistics.median(times[8:])


def measure_model(args: argparse.Namespace, settings: Sequence[str]) -> list[dict[str, Any]]:
    with changed_preset(args.random, vocab_size=args.vocab):
        model = random_model(args.random, args.dtype)
    seconds: dict[tuple[str, str], float] = {}
    for side in ("ours",) if args.ours_only else ("stock", "ours"):
        if side == "ours":
            mlx_paged.apply_patches()
        times: dict[str, list[float]] = {name: [] for name in settings}
        chosen = {name: [made(SETTINGS[name](index)) for index in range(args.batch)] for name in settings}
        # In rounds, the first of which does not count: what comes first is the slowest, whatever it is.
        for number in range(args.rounds + 1):
            for name in settings:
                taken = tokens_seconds(model, chosen[name], args.steps if number else 2)
                times[name] += [taken] if number else []
        for name in settings:
            seconds[side, name] = statistics.median(times[name])
            each = ", ".join(f"{1e3 * taken:.2f}" for taken in times[name])
            print(f"whole step, {side}, {name}: {1e3 * seconds[side, name]:.2f} ms ({each})", flush=True)
    mlx_paged.remove_patches()
    return [
        {
            "part": "model",
            "setting": name,
            "stock": (stock := seconds.get(("stock", name), math.nan)),
            "ours": seconds["ours", name],
            "ratio": seconds["ours", name] / stock,
            "to_greedy": seconds["ours", name] / seconds["ours", "greedy"],
        }
        for name in settings
    ]


def plot(results: Sequence[dict[str, Any]], path: Path, title: str) -> str | None:
    """Draw the figure. Returns why not, if not."""
    try:
        from matplotlib import pyplot
    except ImportError:
        return "no matplotlib: no figure"
    parts = list(dict.fromkeys(result["part"] for result in results))
    figure, axes = pyplot.subplots(1, len(parts), figsize=(7 * len(parts), 4), squeeze=False, layout="constrained")
    for axis, part in zip(axes[0], parts, strict=True):
        rows = [result for result in results if result["part"] == part]
        for offset, side in ((-0.2, "stock"), (0.2, "ours")):
            axis.bar([i + offset for i in range(len(rows))], [1e3 * row[side] for row in rows], 0.4, label=side)
        axis.set_xticks(range(len(rows)), [row["setting"] for row in rows], rotation=30, ha="right")
        axis.set(yscale="log", ylabel="ms a step", title={"sampling": "Sampling", "model": "Whole step"}[part])
        axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--steps", type=int, default=9, help="steps whose median counts")
    parser.add_argument("--rounds", type=int, default=3, help="of whole steps; their median counts")
    parser.add_argument("--setting", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--random", choices=sorted(PRESETS), help="measure whole steps of such a model, too")
    parser.add_argument("--model-only", action="store_true", help="with --random: nothing but whole steps")
    parser.add_argument("--ours-only", action="store_true", help="no whole steps of stock, which compiles for minutes")
    parser.add_argument("--out", type=Path, help="folder for sampling.json and sampling.png")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(given)
    if args.model_only and args.random is None:
        parser.error("--model-only needs --random")
    try:
        results = []
        if not args.model_only:
            results += measure_alone(args.batch, args.vocab, args.dtype, args.steps, args.setting)
        if args.random is not None:
            results += measure_model(args, list(dict.fromkeys(["greedy", *args.setting])))
    except BenchError as error:
        print(f"bench_sampling: {error}", file=sys.stderr)
        return 1
    rows = []
    for r in results:
        times = [f"{1e3 * r[side]:.2f}" for side in ("stock", "ours")]
        to_greedy = f"{r['to_greedy']:.3f}" if "to_greedy" in r else "-"
        rows.append([r["part"], r["setting"], *times, f"{r['ratio']:.2f}", to_greedy])
    print(table(["part", "setting", "stock, ms", "ours, ms", "ours / stock", "ours / greedy"], rows))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        found = {"arguments": given, "machine": machine(), "results": results}
        (args.out / "sampling.json").write_text(json.dumps(found, indent=1))
        title = f"{args.batch} rows, {args.vocab:,} words, {args.dtype}"
        if problem := plot(results, args.out / "sampling.png", title):
            print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
