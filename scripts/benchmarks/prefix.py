"""A shared prefix: time to first token, tokens computed and memory, for the stock server's prompt cache
(LRUPromptCache), for mlx_paged without sharing, and for mlx_paged with its prefix cache. The same prompts and model.

    python scripts/bench.py prefix --random llama-1b --prefix 4096 --sharers 32 --out out/prefix
    python scripts/bench.py prefix --random tiny --prefix 512 --sharers 8

Each prompt is the prefix and a suffix of its own. Two patterns:

- ``burst``: all requests come at once.
- ``after``: the first comes alone; when its first token is there, all others come at once.

Requests go through the batch generator as the server's do: on the stock side, the prefix is a segment of its own (a
system prompt), whose cache is kept when it is computed and looked up when a request comes. Each side and pattern runs
in a process of its own; on a GPU, after a warm-up of the same pattern with other tokens, and with a new pool and cache.
"K/V" is what keys and values take at the most, over what each token of the prefix, of the
suffixes and of the answers would take if it were stored once. Writes prefix.json and prefix.png.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

import mlx_paged

from .models import SEED, add_model_arguments, chosen_model, model_name, on_gpu, vocabulary_of
from .report import (
    Column,
    Panel,
    add_pool_arguments,
    dispatch_counts,
    patch_anew,
    positive,
    print_columns,
    run_apart,
    write_results,
)
from .timed_run import Request, Run

PANELS: tuple[Panel, ...] = (
    ("median TTFT after the first, s", lambda r: r["ttft_later_s"]["median"]),
    ("prompt tokens computed", lambda r: r["computed_prompt_tokens"]),
    ("K/V, MB", lambda r: r["kv_bytes"] / 1e6),
)
COLUMNS: tuple[Column, ...] = (
    ("TTFT first, s", lambda r: f"{r['ttft_first_s']:.3f}"),
    ("TTFT later, s", lambda r: f"{r['ttft_later_s']['median']:.3f}"),
    ("all done, s", lambda r: f"{r['seconds']:.2f}"),
    ("computed", lambda r: str(r["computed_prompt_tokens"])),
    ("of unique", lambda r: f"{r['computed_prompt_tokens'] / r['unique_prompt_tokens']:.2f}x"),
    ("K/V MB", lambda r: f"{r['kv_bytes'] / 1e6:.1f}"),
    ("of unique", lambda r: f"{r['kv_bytes'] / r['unique_kv_bytes']:.2f}x"),
)
SIDES = ("stock cache", "no sharing", "shared")
PATTERNS = ("burst", "after")
KEY = ("model", None, None)


def prompts_of(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Return the prompts, prefix and suffix, the same in every process. Suffixes begin with different tokens."""
    rng = random.Random(SEED)
    prefix = [rng.randrange(vocabulary) for _ in range(args.prefix)]
    starts = rng.sample(range(vocabulary), args.sharers)
    return [[*prefix, start, *(rng.randrange(vocabulary) for _ in range(args.suffix - 1))] for start in starts]


class Server:
    """One side's batch generator and prompt cache, used as the server uses them."""

    def __init__(self, side: str, model: Any, args: argparse.Namespace) -> None:
        self.side, self.args = side, args
        options = {
            "completion_batch_size": args.sharers,
            "prefill_batch_size": min(args.sharers, 8),
            "prefill_step_size": 2048,
        }
        self.cache: Any = None
        self.computed = self.peak_nbytes = 0
        if side == "stock cache":
            from mlx_lm.models.cache import LRUPromptCache

            self.cache = LRUPromptCache(10)
        elif side == "shared":
            from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache

            self.cache = PagedPromptCache(None)
            options["prefixes"] = self.cache.shared_prefixes(KEY, mlx_paged.pool_of(model))
        self.generator = importlib.import_module("mlx_lm.generate").BatchGenerator(model, **options)

    def insert_segments(self, prompts: list[list[list[int]]], counts: list[int]) -> list[int]:
        return [self.insert(*segments, count) for segments, count in zip(prompts, counts, strict=True)]

    def insert(self, prompt: list[int], num_tokens: int) -> int:
        segments, caches, told = [prompt], None, [[]]
        if self.side == "stock cache":
            found, rest = self.cache.fetch_nearest_cache(KEY, prompt)
            num_cached = len(prompt) - len(rest)
            self.computed += len(rest)
            parts = [prompt[num_cached : self.args.prefix], prompt[max(num_cached, self.args.prefix) :]]
            segments = [part for part in parts if part]
            caches, told = [found], [prompt[:num_cached]]
        elif self.side == "no sharing":
            self.computed += len(prompt)
        (uid,) = self.generator.insert_segments([segments], [num_tokens], caches, told)
        return uid

    def next(self) -> tuple[list[Any], list[Any]]:
        prompts, generated = self.generator.next()
        if self.side == "stock cache":
            ends = [r.uid for r in prompts if r.end_of_segment and not r.end_of_prompt]
            for cache, tokens in self.generator.extract_cache(ends).values():
                self.cache.insert_cache(KEY, tokens[:], cache, cache_type="system")
            for response in generated:
                if response.finish_reason is not None:
                    self.cache.insert_cache(KEY, response.all_tokens[:], response.prompt_cache)
            nbytes = self.cache.nbytes + self.generator.prompt_cache_nbytes
            self.peak_nbytes = max(self.peak_nbytes, nbytes)
        return prompts, generated


def serve(server: Server, prompts: Sequence[list[int]], pattern: str) -> Run:
    """Return the run of these requests."""
    requests = [Request(prompt, server.args.decode_tokens) for prompt in prompts]
    run = Run(server, requests, leads=pattern == "after")
    run.go()
    return run


def measure(args: argparse.Namespace, side: str, pattern: str) -> dict[str, Any]:
    """Measure one side of one pattern in this process."""
    model = chosen_model(args)
    per_token = bytes_per_token(model)
    paged = side != "stock cache"
    if paged:
        patch_anew(args)
    vocabulary = vocabulary_of(model)
    prompts = prompts_of(args, vocabulary)
    if on_gpu():
        warm, pattern_of_warm = [[(t + 1) % vocabulary for t in prompt] for prompt in prompts], pattern
    else:
        warm, pattern_of_warm = [prompt[-64:] for prompt in prompts[:2]], "burst"
    serve(Server(side, model, args), warm, pattern_of_warm)
    if paged:
        patch_anew(args)
    mx.clear_cache()
    weights = mx.get_active_memory()
    mx.reset_peak_memory()
    server = Server(side, model, args)
    pool = mlx_paged.pool_of(model) if paged else None
    run = serve(server, prompts, pattern)
    if side == "shared":
        server.computed = server.generator.computed_prompt_tokens
    kv_bytes = server.peak_nbytes
    if pool is not None:  # groups may reach their peaks at different times
        kv_bytes = sum(group.bytes_per_block * group.allocator.peak_live for group in pool.groups)
    unique = args.prefix + args.sharers * (args.suffix + args.decode_tokens)
    later = run.first[1:] or run.first
    return {
        "side": side,
        "pattern": pattern,
        "ttft_first_s": run.first[0],
        "ttft_later_s": {"median": statistics.median(later), "min": min(later), "max": max(later)},
        "ttft_s": run.first,
        "seconds": run.seconds,
        "prompt_tokens": sum(map(len, prompts)),
        "computed_prompt_tokens": server.computed,
        "unique_prompt_tokens": args.prefix + args.sharers * args.suffix,
        "kv_bytes": kv_bytes,
        "unique_kv_bytes": int(unique * per_token),
        "peak_bytes": mx.get_peak_memory() - weights,
        "pool": None if pool is None else pool.stats().as_dict(),
        "dispatch": dispatch_counts(),
        "tokens": [run.tokens[uid] for uid in sorted(run.tokens)],
    }


def bytes_per_token(model: Any) -> float:
    """Return the bytes of a token's keys and values in mlx-lm's own caches."""
    caches = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 8), mx.uint32), cache=caches))
    return sum(x.nbytes / x.shape[2] for cache in caches for x in (cache.keys, cache.values))


def print_results(results: Sequence[dict[str, Any]]) -> None:
    print("\nTTFT later: median over all requests but the first, from when each came.\n")
    print_columns(results, ("pattern", "side"), COLUMNS)
    done = [r for r in results if "error" not in r]
    for pattern in dict.fromkeys(r["pattern"] for r in done):
        mine = {r["side"]: r for r in done if r["pattern"] == pattern}
        answers = list(zip(*(r["tokens"] for r in mine.values()), strict=True))
        same = sum(len(set(map(tuple, answer))) == 1 for answer in answers)
        line = f"{pattern}: {same}/{len(answers)} answers the same on all sides"
        if len(mine) == len(SIDES):
            stock, alone, shared = (mine[side]["ttft_later_s"]["median"] for side in SIDES)
            line += (
                f"; TTFT {alone / shared:.1f}x lower than no sharing; TTFT {stock / shared:.1f}x lower than stock cache"
            )
        print(line)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--prefix", type=positive, default=1024, help="tokens that all prompts begin with")
    add("--suffix", type=positive, default=32, help="tokens of each prompt's own")
    add("--sharers", type=positive, default=8, help="requests")
    add("--decode-tokens", type=positive, default=16, help="tokens of each answer")
    add("--pattern", choices=PATTERNS, default=None, help="only this one")
    add_pool_arguments(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measure each side of each pattern in a process of its own."""
    patterns = (args.pattern,) if args.pattern else PATTERNS
    cases = [{"side": side, "pattern": pattern} for pattern in patterns for side in SIDES]
    results = run_apart("prefix", args, argv, measure, cases)
    if results is None:
        return 0
    print_results(results)
    title = f"{args.sharers} requests, a prefix of {args.prefix} tokens: {model_name(args)}"
    write_results(args.out, "prefix", argv, results, PANELS, "pattern", title)
    return int(any("error" in result for result in results))
