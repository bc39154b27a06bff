"""Batches, stock mlx-lm against mlx_paged: throughput, latency, first tokens and memory.

    python scripts/bench.py batch --random llama-1b --cases 8x2048,16x4096,32xragged1024 --out out/batch
    python scripts/bench.py batch --random llama-1b --cases 32x1024,64xmixed200-3000 --repeats 3

A case is ``BATCHxPROMPT``, ``BATCHxraggedMOST`` (lengths from a sixteenth of MOST to MOST) or ``BATCHxmixedLEAST-MOST``
(random lengths, run once in a fresh process, so that no length was seen before). All requests come at once. Each side
and case runs in a process of its own.

A warm-up of the same shape comes first, of ``mixed`` cases a short one of other lengths: on a GPU with whole prompts,
because kernels and plans are made for each length; the paged side then starts with a new pool, so that growth counts.
Decode throughput counts the steps in which every row decodes: from the last first token to the first finish, without
the step in between that may still compute a prompt. Latencies are as the caller of ``next()`` sees them. "last" is
when the last row has its first token.

With ``--repeats`` the best decode throughput and the earliest last first token count, on both sides, and everything
else is the fastest run's. Writes batch.json, which has all runs, and batch.png.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

import mlx_paged

from .models import SEED, add_model_arguments, chosen_model, model_name, on_gpu, vocabulary_of
from .report import (
    Panel,
    add_pool_arguments,
    dispatch_counts,
    list_of,
    measure_apart,
    patch_anew,
    positive,
    table,
    write_results,
)

PANELS: tuple[Panel, ...] = (
    ("decode, tokens/s", lambda r: r["decode_tokens_per_s"] or r["tokens_per_s"]),
    ("time to first token, p50, s", lambda r: r["ttft_s"]["p50"]),
    ("last first token, s", lambda r: r["last_first_s"]),
    ("between tokens, p95, ms", lambda r: 1e3 * r["inter_token_s"].get("p95", 0.0)),
    ("peak memory, GB", lambda r: r["peak_bytes"] / 1e9),
)
CPU_WARMUP_PROMPT, CPU_WARMUP_TOKENS = 64, 4
WARM_UNSEEN = 700  # prompt tokens of the warm-up of cases whose lengths must be new
PERCENTILES = (50, 95, 99)
SIDES = ("stock", "paged")


class Request(NamedTuple):
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    num_tokens: int


class Case(NamedTuple):
    """A batch: its name and the lengths of its prompts."""

    name: str
    lengths: tuple[int, ...]

    @property
    def is_unseen(self) -> bool:
        """Whether its lengths must not have been run before in the process."""
        return "mixed" in self.name


def parse_case(text: str) -> Case:
    """Parse ``BATCHxPROMPT``, ``BATCHxraggedMOST`` or ``BATCHxmixedLEAST-MOST``."""
    batch_text, _, prompt = text.partition("x")
    try:
        batch = int(batch_text)
        if prompt.startswith("ragged"):
            most = int(prompt.removeprefix("ragged"))
            least = max(1, most // 16)
            lengths = [least + (most - least) * i // max(1, batch - 1) for i in range(batch)]
            random.Random(SEED).shuffle(lengths)
        elif prompt.startswith("mixed"):
            least, most = map(int, prompt.removeprefix("mixed").split("-"))
            rng = random.Random(SEED)
            lengths = [rng.randint(least, most) for _ in range(batch)]
        else:
            lengths = [int(prompt)] * batch
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not BATCHxPROMPT, BATCHxraggedMOST or BATCHxmixedLEAST-MOST"
        ) from None
    if batch < 1 or min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: batch and prompt must be positive")
    return Case(text, tuple(lengths))


def requests_of(case: Case, args: argparse.Namespace, vocabulary: int) -> list[Request]:
    """Return the case's requests, the same in every process."""
    rng = random.Random(SEED)
    return [Request([rng.randrange(vocabulary) for _ in range(n)], args.decode_tokens) for n in case.lengths]


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 by nearest rank, in the samples' unit."""
    ranked = sorted(samples)
    return {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in PERCENTILES} if ranked else {}


class Run:
    """One side's run of one case, with the times that its caller sees.

    Attributes:
        first: per request, seconds to its first token.
        gaps: seconds between tokens of one request.
        steps: (time, rows with a token) of each call that returned tokens.
    """

    def __init__(self, generator: Any, requests: Sequence[Request]) -> None:
        self.generator = generator
        self.requests = requests
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.steps: list[tuple[float, int]] = []
        self.tokens: dict[int, list[int]] = {}
        self._last: dict[int, float] = {}
        self.first_finish: float | None = None
        self.last_first = 0.0

    def go(self) -> float:
        """Run to the end. Return the seconds it took."""
        begin = time.perf_counter()
        uids = self.generator.insert(
            [each.prompt for each in self.requests], [each.num_tokens for each in self.requests]
        )
        self.tokens = {uid: [] for uid in uids}
        finished = 0
        while finished < len(self.requests):
            _, generated = self.generator.next()
            finished += self._take(generated, time.perf_counter() - begin)
        return time.perf_counter() - begin

    def _take(self, generated: Sequence[Any], now: float) -> int:
        finished = 0
        for response in generated:
            uid = response.uid
            self.tokens[uid].append(response.token)
            if uid in self._last:
                self.gaps.append(now - self._last[uid])
            else:
                self.first.append(now)
                self.last_first = now
            self._last[uid] = now
            if response.finish_reason is not None:
                finished += 1
                self.first_finish = self.first_finish or now
        if generated:
            self.steps.append((now, len(generated)))
        return finished

    def decode_rate(self) -> float | None:
        """Return the tokens per second of the steps in which every row decodes; None if there are too few."""
        full = [(at, rows) for at, rows in self.steps if rows == len(self.requests)]
        # The first full step came in a call that also computed a prompt.
        timed = full[2:]
        if len(timed) < 3:
            return None
        return sum(rows for _, rows in timed[1:]) / (timed[-1][0] - timed[0][0])


def measure(args: argparse.Namespace, case: Case, side: str) -> dict[str, Any]:
    """Measure one side of one case in this process."""
    model = chosen_model(args)
    if side == "paged":
        patch_anew(args)
    upstream = importlib.import_module("mlx_lm.generate")

    def generator() -> Any:
        batch = len(case.lengths)
        options = {"completion_batch_size": batch, "prefill_batch_size": min(batch, args.prefill_batch_size)}
        return upstream.BatchGenerator(model, sampler=None, prefill_step_size=args.prefill_step_size, **options)

    vocabulary = vocabulary_of(model)
    requests = requests_of(case, args, vocabulary)
    if case.is_unseen:
        warm = [Request(request.prompt[:1] * WARM_UNSEEN, 8) for request in requests[:4]]
    else:
        longest = max(case.lengths) if on_gpu() else CPU_WARMUP_PROMPT
        # On a GPU the warm-up generates as many tokens as the run: steps are compiled only after some of the same
        # shape, and those with all rows come last. The first compilation on a machine takes seconds.
        num_tokens = None if on_gpu() else CPU_WARMUP_TOKENS
        warm = [Request(r.prompt[:longest], num_tokens or r.num_tokens) for r in requests]
    Run(generator(), warm).go()
    if side == "paged":
        patch_anew(args)
    mx.clear_cache()
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    runs = []
    for _ in range(1 if case.is_unseen else args.repeats):
        gen = generator()
        run = Run(gen, requests)
        with gen.stats() as stats:
            seconds = run.go()
        runs.append((seconds, run, stats))
        gen.close()
        del gen
    seconds, run, stats = min(runs, key=lambda item: item[0])
    rates = [rate for _, each, _ in runs if (rate := each.decode_rate()) is not None]
    num_tokens = sum(len(tokens) for tokens in run.tokens.values())
    pool = mlx_paged.pool_of(model) if side == "paged" else None
    return {
        "side": side,
        "case": case.name,
        "batch": len(requests),
        "prompt_tokens": sum(case.lengths),
        "generated_tokens": num_tokens,
        "seconds": seconds,
        "seconds_of_repeats": [item[0] for item in runs],
        "tokens_per_s": num_tokens / seconds,
        "decode_tokens_per_s": max(rates, default=None),
        "decode_tokens_per_s_of_repeats": rates,
        "prompt_time": stats.prompt_time,
        "ttft_s": percentiles(run.first),
        "last_first_s": min(each.last_first for _, each, _ in runs),
        "inter_token_s": percentiles(run.gaps),
        "peak_bytes": mx.get_peak_memory(),
        "weight_bytes": weights,
        "tokens": [run.tokens[uid] for uid in sorted(run.tokens)],
        "dispatch": dispatch_counts(),
        "pool": pool.stats().as_dict() if pool is not None else None,
    }


def compare(results: list[dict[str, Any]]) -> None:
    """Add to each paged result its ratios to stock's of the same case, and whether the tokens are the same."""
    stock = {r["case"]: r for r in results if r["side"] == "stock" and "error" not in r}
    for result in results:
        base = stock.get(result["case"])
        if result["side"] != "paged" or base is None or "error" in result:
            continue
        pairs = {
            "total": (result["tokens_per_s"], base["tokens_per_s"]),
            "decode": (result["decode_tokens_per_s"], base["decode_tokens_per_s"]),
            "ttft_p50": (base["ttft_s"]["p50"], result["ttft_s"]["p50"]),
            "last_first": (base["last_first_s"], result["last_first_s"]),
            "peak": (base["peak_bytes"], result["peak_bytes"]),
        }
        result["ratios"] = {name: a / b if a and b else None for name, (a, b) in pairs.items()}
        rows = list(zip(result["tokens"], base["tokens"], strict=True))
        result["rows_with_same_tokens"] = sum(mine == theirs for mine, theirs in rows)


def print_results(results: Sequence[dict[str, Any]]) -> None:
    """Print a line for each side of each case, and the ratios."""
    header = (
        "case",
        "side",
        "decode tok/s",
        "total tok/s",
        "TTFT p50/p95/p99 ms",
        "last ms",
        "inter-token ms",
        "peak GB",
    )
    rows = []
    for r in results:
        if "error" in r:
            rows.append((r["case"], r["side"], r["error"][:60], *[""] * 5))
            continue
        decode = r["decode_tokens_per_s"]
        rates = "-" if decode is None else f"{decode:.0f}", f"{r['tokens_per_s']:.0f}"
        waits = _milliseconds(r["ttft_s"]), f"{1e3 * r['last_first_s']:.1f}", _milliseconds(r["inter_token_s"])
        rows.append((r["case"], r["side"], *rates, *waits, f"{r['peak_bytes'] / 1e9:.3f}"))
    print(table(header, rows))
    for r in results:
        if "ratios" in r:
            shown = ", ".join(
                f"{name} {'-' if value is None else f'{value:.2f}x'}" for name, value in r["ratios"].items()
            )
            print(f"{r['case']}: paged against stock: {shown}; {r['rows_with_same_tokens']}/{r['batch']} rows same")
    paths = sorted({path for r in results for path in r.get("dispatch", {})})
    print("Paged attention ran through:", "; ".join(paths) or "-")


def _milliseconds(values: dict[str, float]) -> str:
    return "/".join(f"{1e3 * value:.1f}" for value in values.values()) or "-"


def summary(result: dict[str, Any]) -> str:
    """Return a one-line summary of a result."""
    if "error" in result:
        return "failed"
    decode, first, peak = result["decode_tokens_per_s"], result["ttft_s"]["p50"], result["peak_bytes"] / 1e9
    rate = "" if decode is None else f"{decode:.0f} tokens/s decoding, "
    return f"{rate}{1e3 * first:.0f} ms to the median first token, peak {peak:.2f} GB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--cases", type=list_of(parse_case), default="4x64,8xragged256")
    add("--decode-tokens", type=positive, default=64, help="tokens of each request")
    add("--only", choices=SIDES, default=None, help="skip the other side")
    add("--repeats", type=positive, default=1, help="runs of a case in its process")
    add("--prefill-step-size", type=positive, default=2048)
    add("--prefill-batch-size", type=positive, default=8)
    add_pool_arguments(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure each side of each case in a child process; as such a process, measure one of them."""
    if args.child is not None:
        side, name, lengths = json.loads(args.child)
        print(json.dumps(measure(args, Case(name, tuple(lengths)), side)))
        return 0
    results = []
    for case in args.cases:
        for side in SIDES if args.only is None else (args.only,):
            results.append(measure_apart("batch", argv, [side, *case], side=side, case=case.name))
            print(f"{case.name}, {side}: {summary(results[-1])}", file=sys.stderr, flush=True)
    compare(results)
    print_results(results)
    write_results(args.out, "batch", argv, results, PANELS, "case", model_name(args))
    return int(any("error" in result for result in results))
