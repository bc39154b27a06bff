"""Stock mlx-lm against mlx_paged: prefill, decode and memory, in one process on one model.

    python scripts/bench.py --random llama-135m --contexts 1024,4096 --out out/bench
    python scripts/bench.py --random llama-135m --synthetic-context --contexts 1024,4096,16384
    python scripts/bench.py --append                       # cost of an append against the size of the pool

Both sides generate with mlx-lm's own ``generate_step``; :func:`mlx_paged.apply_patches` and ``remove_patches`` switch
between them. The order of the sides is reversed with every repeat, a ratio is taken between samples of one repeat,
and every sample starts with no caches, no pool and nothing in the allocator's cache. A run in which the paged side did
not attend through the paged path fails.

Prefill is the time to the first token. Decode is the mean of ``--decode-tokens`` steps after two that are not counted
(the caches grow there, and mlx-lm empties the allocator's cache). Writes bench.json and, with matplotlib, bench.png.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.models import cache as stock_cache
from support.bench_common import (
    DTYPES,
    PRESETS,
    SEED,
    BenchError,
    add_quantization,
    load_model,
    machine,
    measure_append,
    plot,
    print_append,
    print_generation,
    random_model,
    ratios,
    spread,
)

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache
from mlx_paged.config import parse_block_size, parse_kernel, parse_memory

# MLX's CPU build keeps 32 MB of freed buffers; larger temporaries of either side would be paged in anew each time.
CPU_CACHE_LIMIT = 1 << 30
SKIPPED_STEPS = 2
COMPARED_LOGPROBS = 4
FILL_CHUNK = 2048


@dataclass(frozen=True)
class Side:
    """Stock mlx-lm (no block size) or mlx_paged with a block size."""

    block_size: int | None

    @property
    def name(self) -> str:
        return "stock" if self.block_size is None else f"paged-{self.block_size}"


@dataclass
class Sample:
    """One generation by one side."""

    prefill_s: float | None
    decode_ms: float
    peak_bytes: int
    tokens: list[int]
    logprobs: list[mx.array]
    dispatch: dict[str, Any] | None


class Generation:
    """Measures prefill and decode of a model, one context length at a time."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.sides = [Side(None), *(Side(size) for size in args.block_sizes)]
        self.vocab = int(model.args.vocab_size)

    def measure(self, context: int) -> list[dict[str, Any]]:
        """Results of every side, stock first."""
        mx.random.seed(SEED + context)
        prompt = mx.random.randint(0, self.vocab, (context,), dtype=mx.int32)
        template = None
        if self.args.synthetic_context:
            template = self._random_cache(context)
        elif self.args.no_prefill:
            template = self._computed_cache(prompt)
        if template is not None:
            prompt = prompt[-1:]
        mx.eval(prompt)
        for side in self.sides:
            self._sample(side, prompt, template, 2)
        samples: dict[Side, list[Sample]] = {side: [] for side in self.sides}
        for repeat in range(self.args.repeats):
            for side in self.sides if repeat % 2 == 0 else self.sides[::-1]:
                samples[side].append(self._sample(side, prompt, template, self.args.decode_tokens))
        stock = samples[self.sides[0]]
        return [self._result(context, side, samples[side], stock) for side in self.sides]

    # Starting points ------------------------------------------------------------------------------------------

    def _random_cache(self, context: int) -> list[Any]:
        """mlx-lm's own caches, filled with random keys and values of the shapes the model makes."""
        probe = stock_cache.make_prompt_cache(self.model)
        self.model(mx.array([[0]]), cache=probe)
        cache = stock_cache.make_prompt_cache(self.model)
        for begin in range(0, context, FILL_CHUNK):
            count = min(FILL_CHUNK, context - begin)
            for shape, layer in zip(probe, cache, strict=True):
                pair = [
                    mx.random.normal((1, x.shape[1], count, x.shape[3])).astype(x.dtype)
                    for x in (shape.keys, shape.values)
                ]
                layer.update_and_fetch(*pair)
            mx.eval([layer.state for layer in cache])
        return cache

    def _computed_cache(self, prompt: mx.array) -> list[Any]:
        """mlx-lm's own caches after the prompt."""
        cache = stock_cache.make_prompt_cache(self.model)
        step = self.args.prefill_step_size
        for begin in range(0, prompt.size, step):
            self.model(prompt[None, begin : begin + step], cache=cache)
            mx.eval([layer.state for layer in cache])
        return cache

    # One sample -----------------------------------------------------------------------------------------------

    def _sample(self, side: Side, prompt: mx.array, template: list[Any] | None, decode_tokens: int) -> Sample:
        gc.collect()
        mx.clear_cache()
        mlx_paged.reset_dispatch_counts()
        baseline = mx.get_active_memory()
        mx.reset_peak_memory()
        if side.block_size is not None:
            mlx_paged.apply_patches(PagedConfig(block_size=side.block_size, kernel=self.args.kernel), strict=True)
        try:
            with wired_limit(self.model, [generation_stream]):
                sample = self._generate(side, self._start(side, template), prompt, template is None, decode_tokens)
        finally:
            mx.synchronize(generation_stream)
            mlx_paged.remove_patches()
        sample.peak_bytes -= baseline
        return sample

    def _start(self, side: Side, template: list[Any] | None) -> list[Any]:
        if template is None:
            cache = stock_cache.make_prompt_cache(self.model)
        elif side.block_size is None:
            cache = copy.deepcopy(template)
        else:
            cache = mlx_paged.adopt_prompt_cache(self.model, template)
        paged = [isinstance(layer, PagedKVCache) for layer in cache]
        if side.block_size is not None and not all(paged):
            raise BenchError(f"the paged path did not run: mlx_paged does not page this model's caches ({cache[0]!r})")
        if side.block_size is None and any(paged):
            raise BenchError("the stock side was given paged caches")
        if template is not None:
            mx.eval([layer.state for layer in cache])
        return cache

    def _generate(
        self, side: Side, cache: list[Any], prompt: mx.array, with_prefill: bool, decode_tokens: int
    ) -> Sample:
        steps = generate_step(
            prompt,
            self.model,
            max_tokens=decode_tokens + SKIPPED_STEPS,
            prompt_cache=cache,
            prefill_step_size=self.args.prefill_step_size,
        )
        tokens, times, logprobs, prefill_dispatch = [], [], [], None
        begin = time.perf_counter()
        for token, step_logprobs in steps:
            times.append(time.perf_counter())
            tokens.append(token)
            if len(logprobs) < COMPARED_LOGPROBS:
                logprobs.append(step_logprobs)
            if prefill_dispatch is None:
                prefill_dispatch = _dispatch_counts()
                mlx_paged.reset_dispatch_counts()
        mx.synchronize(generation_stream)
        first, last = times[SKIPPED_STEPS - 1], times[-1]
        return Sample(
            prefill_s=times[0] - begin if with_prefill else None,
            decode_ms=1e3 * (last - first) / decode_tokens,
            peak_bytes=mx.get_peak_memory(),
            tokens=tokens,
            logprobs=logprobs,
            dispatch=_check_dispatch(side, len(cache) * decode_tokens, prefill_dispatch or {}),
        )

    # Results --------------------------------------------------------------------------------------------------

    def _result(self, context: int, side: Side, samples: list[Sample], stock: list[Sample]) -> dict[str, Any]:
        decode, stock_decode = [s.decode_ms for s in samples], [s.decode_ms for s in stock]
        prefill = [s.prefill_s for s in samples if s.prefill_s is not None]
        stock_prefill = [s.prefill_s for s in stock if s.prefill_s is not None]
        paged = side.block_size is not None
        different, logprob = _compare(samples, stock[0])
        return {
            "context": context,
            "side": side.name,
            "block_size": side.block_size,
            "prefill_s": spread(prefill) if prefill else None,
            "prefill_tokens_per_s": spread([context / s for s in prefill]) if prefill else None,
            "prefill_ratio": ratios(prefill, stock_prefill) if paged and prefill else None,
            "decode_ms_per_token": spread(decode),
            "decode_ratio": ratios(decode, stock_decode) if paged else None,
            "peak_bytes": max(s.peak_bytes for s in samples),
            "same_tokens": different is None,
            "first_different_token": different,
            "max_logprob_difference": logprob,
            "distinct_tokens": len(set(samples[0].tokens)),
            "dispatch": samples[-1].dispatch,
        }


def _dispatch_counts() -> dict[str, int]:
    return {f"{d.path}: {d.reason}": count for d, count in mlx_paged.dispatch_counts().items()}


def _check_dispatch(side: Side, least: int, prefill: dict[str, int]) -> dict[str, Any] | None:
    """What the paged side ran, or None for stock. Raises BenchError if a side ran what it should not."""
    counts, last = _dispatch_counts(), mlx_paged.last_dispatch()
    if side.block_size is None:
        if counts or prefill:
            raise BenchError(f"the stock side ran through mlx_paged: {counts or prefill}")
        return None
    if last is None or sum(counts.values()) < least:
        raise BenchError(f"the paged path did not run: {counts} in {least} or more decode attention calls")
    return {"last": {"path": last.path, "reason": last.reason}, "first_token": prefill, "decode": counts}


def _compare(samples: Sequence[Sample], reference: Sample) -> tuple[int | None, float]:
    """Index of the first token that differs (None: none does), and how far log-probabilities differ up to there."""
    first, largest = None, 0.0
    for sample in samples:
        pairs = enumerate(zip(sample.tokens, reference.tokens, strict=True))
        different = next((i for i, (a, b) in pairs if a != b), None)
        if different is not None:
            first = different if first is None else min(first, different)
        comparable = COMPARED_LOGPROBS if different is None else different + 1
        for a, b in list(zip(sample.logprobs, reference.logprobs, strict=True))[:comparable]:
            largest = max(largest, float(mx.max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32))).item()))
    return first, largest


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def convert(text: str) -> list[Any]:
        try:
            return [parse(item) for item in text.split(",")]
        except (ValueError, mlx_paged.ConfigError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _pool_size(text: str) -> int:
    size = parse_memory(text)
    if size is None:
        raise argparse.ArgumentTypeError("a pool needs a size, such as 64MB")
    return size


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="PATH", help="folder of a model that mlx-lm loads")
    model.add_argument("--random", metavar="PRESET", choices=PRESETS, help=f"random weights: {', '.join(PRESETS)}")
    add("--dtype", choices=DTYPES, help="of weights and caches (default: the model's)")
    add_quantization(parser)
    add("--contexts", type=_list_of(_positive), default=[1024, 4096, 16384], help="tokens, default 1024,4096,16384")
    add("--block-sizes", type=_list_of(parse_block_size), default=[16, 32, 128], help="default 16,32,128")
    add("--kernel", type=parse_kernel, default=None, help="fused kernel: auto (default), on or off")
    add("--decode-tokens", type=_positive, default=32, help="counted steps of a sample (default 32)")
    add("--repeats", type=_positive, default=5, help="samples per side (default 5)")
    add("--prefill-step-size", type=_positive, default=2048, help="as in mlx-lm (default 2048)")
    add("--no-prefill", action="store_true", help="decode only: compute each prompt once, with mlx-lm, for all samples")
    add("--synthetic-context", action="store_true", help="decode only: fill the caches with random keys and values")
    add("--append", action="store_true", help="cost of an append against the size of the pool (needs no model)")
    add("--append-pools", type=_list_of(_pool_size), default=[64_000_000, 4_000_000_000], help="default 64MB,4GB")
    add("--out", type=Path, default=Path("out/bench"), help="folder for bench.json and bench.png (default out/bench)")
    add("--no-plot", action="store_true", help="write no bench.png")
    args = parser.parse_args(argv)
    if not (args.model or args.random or args.append):
        parser.error("nothing to measure: give --model, --random or --append")
    return args


def run(args: argparse.Namespace) -> None:
    """Measure what the arguments ask for, print it and write the files."""
    name = Path(args.model).resolve().name if args.model else args.random
    report: dict[str, Any] = {"machine": machine(), "generation": [], "append": []}
    report["settings"] = {
        **{key: value for key, value in vars(args).items() if key not in ("out", "model", "random")},
        "model": name,
        "skipped_steps": SKIPPED_STEPS,
        "cpu_cache_limit_bytes": None,
    }
    about = report["machine"]
    print(f"{about['gpu'] or about['cpu']}, {about['cores']} cores, {about['os']}; {about['versions']}")
    if about["device"] == "cpu":
        mx.set_cache_limit(CPU_CACHE_LIMIT)
        report["settings"]["cpu_cache_limit_bytes"] = CPU_CACHE_LIMIT
        print(f"CPU: MLX may keep {CPU_CACHE_LIMIT >> 20} MiB of freed buffers, for both sides (its default is 32 MB).")
    if name:
        how = (args.dtype, args.bits, args.group_size)
        model = load_model(args.model, *how) if args.model else random_model(args.random, *how)
        generation = Generation(model, args)
        for context in args.contexts:
            print(f"measuring {name} at {context} tokens ...", file=sys.stderr, flush=True)
            report["generation"] += generation.measure(context)
        print_generation(report["generation"])
    if args.append:
        dtype = DTYPES[args.dtype or "bfloat16"]
        for block_size in args.block_sizes:
            print(f"measuring appends to blocks of {block_size} ...", file=sys.stderr, flush=True)
            report["append"] += measure_append(args.append_pools, block_size, dtype, args.repeats)
        print_append(report["append"])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwrote {args.out / 'bench.json'}")
    if report["generation"] and not args.no_plot:
        bits = "" if args.bits is None else f", {args.bits} bits"
        title = f"{name}{bits}, {about['gpu'] or about['cpu']}, mlx {about['versions']['mlx']}"
        reason = plot(report["generation"], args.out / "bench.png", title)
        print(reason or f"wrote {args.out / 'bench.png'}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        run(args)
    except (BenchError, mlx_paged.PagedCacheError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
