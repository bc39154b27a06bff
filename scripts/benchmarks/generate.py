"""One sequence, stock mlx-lm against mlx_paged: prefill, decode and memory by context, in one process on one model.

    python scripts/bench.py generate --random llama-135m --contexts 1024,4096 --out out/bench
    python scripts/bench.py generate --random llama-135m --synthetic-context --contexts 1024,4096,16384

Both sides generate with mlx-lm's own ``generate_step``; :func:`mlx_paged.apply_patches` and ``remove_patches`` switch
between them. The order of the sides is reversed with every repeat, a ratio is taken between samples of one repeat, and
every sample starts with no caches, no pool and nothing in the allocator's cache. A run in which the paged side did not
attend through the paged path fails.

Prefill is the time to the first token. Decode is the mean of ``--decode-tokens`` steps after two that are not counted
(the caches grow there, and mlx-lm empties the allocator's cache). Writes generate.json and generate.png.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.models import cache as stock_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.config import parse_block_size, parse_kernel

from .models import SEED, BenchError, add_model_arguments, chosen_model, model_name, vocabulary_of
from .report import (
    Panel,
    add_out_argument,
    dispatch_counts,
    list_of,
    positive,
    ratios,
    show,
    spread,
    table,
    write_results,
)

SKIPPED_STEPS = 2
FILL_CHUNK = 2048
PANELS: tuple[Panel, ...] = (
    ("decode, ms/token", lambda r: r["decode_ms_per_token"]["median"]),
    ("prefill, tokens/s", lambda r: r["prefill_tokens_per_s"]["median"]),
)
Side = int | None  # mlx_paged with blocks of this size, or stock mlx-lm


class Sample(NamedTuple):
    """One generation by one side."""

    prefill_s: float | None
    decode_ms: float
    peak_bytes: int
    tokens: list[int]
    dispatch: dict[str, Any] | None


class Generation:
    """Measures prefill and decode of a model, one context length at a time."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.sides: list[Side] = [None, *args.block_sizes]

    def measure(self, context: int) -> list[dict[str, Any]]:
        """Return the results of every side, stock first."""
        mx.random.seed(SEED + context)
        prompt = mx.random.randint(0, vocabulary_of(self.model), (context,), dtype=mx.int32)
        template = self._random_cache(context) if self.args.synthetic_context else None
        if template is not None:
            prompt = prompt[-1:]
        mx.eval(prompt)
        for side in self.sides:
            self._sample(side, prompt, template, 2)
        samples: dict[Side, list[Sample]] = {side: [] for side in self.sides}
        for repeat in range(self.args.repeats):
            for side in self.sides if repeat % 2 == 0 else self.sides[::-1]:
                samples[side].append(self._sample(side, prompt, template, self.args.decode_tokens))
        return [result_of(context, side, samples[side], samples[None]) for side in self.sides]

    def _random_cache(self, context: int) -> list[Any]:
        """Return mlx-lm's own caches, filled with random keys and values of the model's shapes."""
        probe = stock_cache.make_prompt_cache(self.model)
        self.model(mx.array([[0]]), cache=probe)
        cache = stock_cache.make_prompt_cache(self.model)
        for begin in range(0, context, FILL_CHUNK):
            count = min(FILL_CHUNK, context - begin)
            for shape, layer in zip(probe, cache, strict=True):
                keys, values = (
                    mx.random.normal((1, x.shape[1], count, x.shape[3])).astype(x.dtype)
                    for x in (shape.keys, shape.values)
                )
                layer.update_and_fetch(keys, values)
            mx.eval([layer.state for layer in cache])
        return cache

    def _sample(self, side: Side, prompt: mx.array, template: list[Any] | None, decode_tokens: int) -> Sample:
        gc.collect()
        mx.clear_cache()
        mlx_paged.reset_dispatch_counts()
        baseline = mx.get_active_memory()
        mx.reset_peak_memory()
        if side is not None:
            mlx_paged.apply_patches(PagedConfig(block_size=side, kernel=self.args.kernel), strict=True)
        try:
            with wired_limit(self.model, [generation_stream]):
                sample = self._generate(side, self._start(side, template), prompt, template is None, decode_tokens)
        finally:
            mx.synchronize(generation_stream)
            mlx_paged.remove_patches()
        return sample._replace(peak_bytes=sample.peak_bytes - baseline)

    def _start(self, side: Side, template: list[Any] | None) -> list[Any]:
        if template is None:
            return stock_cache.make_prompt_cache(self.model)
        cache = copy.deepcopy(template) if side is None else mlx_paged.adopt_prompt_cache(self.model, template)
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
        tokens, times, prefill_dispatch = [], [], None
        begin = time.perf_counter()
        for token, _ in steps:
            times.append(time.perf_counter())
            tokens.append(token)
            if prefill_dispatch is None:
                prefill_dispatch = dispatch_counts()
                mlx_paged.reset_dispatch_counts()
        mx.synchronize(generation_stream)
        return Sample(
            prefill_s=times[0] - begin if with_prefill else None,
            decode_ms=1e3 * (times[-1] - times[SKIPPED_STEPS - 1]) / decode_tokens,
            peak_bytes=mx.get_peak_memory(),
            tokens=tokens,
            dispatch=_check_dispatch(side, len(cache) * decode_tokens, prefill_dispatch or {}),
        )


def result_of(context: int, side: Side, samples: list[Sample], stock: list[Sample]) -> dict[str, Any]:
    decode, stock_decode = ([s.decode_ms for s in each] for each in (samples, stock))
    prefill, stock_prefill = ([s.prefill_s for s in each if s.prefill_s is not None] for each in (samples, stock))
    return {
        "context": context,
        "side": "stock" if side is None else f"paged-{side}",
        "block_size": side,
        "prefill_tokens_per_s": spread([context / s for s in prefill]) if prefill else None,
        "prefill_ratio": ratios(prefill, stock_prefill) if side is not None and prefill else None,
        "decode_ms_per_token": spread(decode),
        "decode_ratio": None if side is None else ratios(decode, stock_decode),
        "peak_bytes": max(s.peak_bytes for s in samples),
        "same_tokens": all(sample.tokens == stock[0].tokens for sample in samples),
        "dispatch": samples[-1].dispatch,
    }


def _check_dispatch(side: Side, least: int, prefill: dict[str, int]) -> dict[str, Any] | None:
    """Return the paths that the paged side took, or None for stock. Raises BenchError if a side took another's."""
    counts, last = dispatch_counts(), mlx_paged.last_dispatch()
    if side is None:
        if counts or prefill:
            raise BenchError(f"the stock side ran through mlx_paged: {counts or prefill}")
        return None
    if last is None or sum(counts.values()) < least:
        raise BenchError(f"the paged path did not run: {counts} in {least} or more decode attention calls")
    return {"last": {"path": last.path, "reason": last.reason}, "first_token": prefill, "decode": counts}


def print_results(results: Sequence[dict[str, Any]]) -> None:
    """Print the table, which paths ran, and whether both sides generated the same tokens."""
    header = ("context", "side", "prefill tok/s", "ratio", "decode ms/token", "ratio", "peak MB", "tokens", "path")
    rows = [
        (
            str(r["context"]),
            r["side"],
            show(r["prefill_tokens_per_s"], 1),
            show(r["prefill_ratio"]),
            show(r["decode_ms_per_token"]),
            show(r["decode_ratio"]),
            f"{r['peak_bytes'] / 1e6:.0f}",
            "-" if r["block_size"] is None else "same" if r["same_tokens"] else "differ",
            "mlx-lm" if r["dispatch"] is None else r["dispatch"]["last"]["path"],
        )
        for r in results
    ]
    print("\nMedian (min..max) of the repeats. Ratios are times, paged / stock, of paired repeats: below 1 is faster.")
    print("Peak MB: beyond the model (and the caches all samples start from, where the prompt is not computed).\n")
    print(table(header, rows))
    paths = {reason for r in results if r["dispatch"] for reason in r["dispatch"]["decode"]}
    print(f"\nPaged decode ran through: {'; '.join(sorted(paths))}")
    paged = [r for r in results if r["block_size"] is not None]
    differing = [f"{r['side']} at {r['context']}" for r in paged if not r["same_tokens"]]
    verdict = "the same on both sides" if not differing else "DIFFERENT: " + ", ".join(differing)
    print(f"Greedy tokens: {verdict}.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--contexts", type=list_of(positive), default=[1024, 4096, 16384], help="tokens, default 1024,4096,16384")
    add("--block-sizes", type=list_of(parse_block_size), default=[16, 32, 128], help="default 16,32,128")
    add("--kernel", type=parse_kernel, default=None, help="fused kernel: auto (default), on or off")
    add("--decode-tokens", type=positive, default=32, help="counted steps of a sample (default 32)")
    add("--repeats", type=positive, default=5, help="samples per side (default 5)")
    add("--prefill-step-size", type=positive, default=2048, help="as in mlx-lm (default 2048)")
    add("--synthetic-context", action="store_true", help="decode only: fill the caches with random keys and values")
    add_out_argument(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure each context, print the table and write the files."""
    name, generation = model_name(args), Generation(chosen_model(args), args)
    results: list[dict[str, Any]] = []
    for context in args.contexts:
        print(f"measuring {name} at {context} tokens ...", file=sys.stderr, flush=True)
        results += generation.measure(context)
    print_results(results)
    panels = PANELS[:1] if args.synthetic_context else PANELS
    write_results(args.out, "generate", argv, results, panels, "context", name)
