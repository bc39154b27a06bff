"""Speculation by look-up in batches: tokens per second with and without, where answers repeat their prompt and where
they do not.

    python scripts/bench.py lookup --model path/to/model --batches 1,8 --lookup 8
    python scripts/bench.py lookup --random llama-1b --batches 1,8,32 --lookup 3,8

With a model that chats, *copy* asks for a text of the prompt to be repeated (greedy) and *prose* for a story (sampled).
With random weights the model's next token depends on its last one: *copy* has prompts that hold the answer, *prose*
chooses between a few words, so that what stood before is found again and again and rarely goes on as before.

Both sides run in turns in one process, each case after a warm-up. A rate is the tokens behind every row's first, by the
seconds they took; the ratio is that of the medians. Writes lookup.json and lookup.png.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler, make_sampler

import mlx_paged
from mlx_paged.engine.request import RequestOptions

from .models import PRESETS, SEED, BenchError, add_model_arguments, changed_preset, chosen_model, random_model
from .report import Panel, add_pool_arguments, list_of, patch_anew, positive, table, write_results

PANELS: tuple[Panel, ...] = (
    ("tokens/s", lambda r: r["tokens_per_s"]),
    ("drafts accepted, of those proposed", lambda r: r["accepted"] / max(1, r["drafted"])),
)
WORDS = 200  # that a model of random weights says
LIKELY = 4  # that may follow each of them in prose
NAMES = ("Anna", "Bela", "Carl", "Dora", "Emil", "Fina", "Gert", "Hana")
TEXT = (
    "{name} opened the old workshop at seven in the morning, lit the stove, and put the kettle on. The clocks on the "
    "wall had stopped at different hours, and {name} liked to guess which of them had gone on longest. A customer "
    "came in with a watch wrapped in a handkerchief. It had been his grandfather's, he said, and it had lost four "
    "minutes a day since the spring. {name} opened the case, found a grain of sand between two wheels, and laughed. "
    "The man paid with two coins and a jar of honey, and the watch has kept time ever since."
)
COPY = "Repeat the following text word for word, and say nothing else.\n\n{text}"
PROSE = "Write a long story about a person called {name}, who finds something strange on a journey."


class Work(NamedTuple):
    """What a batch does.

    Attributes:
        name: ``copy`` or ``prose``.
        prompts: tokens, of as many requests as are wanted.
        sampler: of all of them.
    """

    name: str
    prompts: Callable[[int], list[list[int]]]
    sampler: Callable[[mx.array], mx.array]


def successor_model(preset: str, dtype: str | None) -> Any:
    """A model of random weights whose next token depends nearly on the last one alone, one of WORDS, and whose steps
    cost what any other's do."""
    if PRESETS[preset].module.__name__.rsplit(".", 1)[-1] != "llama":
        raise BenchError(f"--random {preset}: an answer's words can be foretold of Llama shapes only")
    with changed_preset(preset, tie_word_embeddings=False):
        model = random_model(preset, dtype)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * 1e-3
    head = model.lm_head.weight
    model.lm_head.weight = mx.where(mx.arange(head.shape[0])[:, None] < WORDS, head, 0)
    mx.eval(model.parameters())
    return model


def successors(model: Any) -> list[int]:
    """The most likely word after each of the words."""
    return mx.argmax(model(mx.arange(WORDS, dtype=mx.uint32)[:, None])[:, -1], axis=-1).tolist()  # type: ignore


def random_work(model: Any, prompt: int) -> list[Work]:
    """For a :func:`successor_model`: prompts that hold the greedy answer, and samples of a few words each."""
    following = successors(model)
    rng = np.random.default_rng(SEED)

    def copies(batch: int) -> list[list[int]]:
        starts = rng.permutation(WORDS)[:batch].tolist()
        prompts = []
        for start in starts:
            words = [start]
            while len(words) < prompt:
                words.append(following[words[-1]])
            prompts.append([*words, start])
        return prompts

    def prose(batch: int) -> list[list[int]]:
        return rng.integers(0, WORDS, (batch, prompt)).tolist()  # type: ignore[no-any-return]

    return [Work("copy", copies, greedy_sampler), Work("prose", prose, make_sampler(temp=1.0, top_k=LIKELY))]


def text_work(tokenizer: Any) -> list[Work]:
    """For a model that was trained to chat."""

    def chats(wish: str) -> Callable[[int], list[list[int]]]:
        def prompts(batch: int) -> list[list[int]]:
            wishes = [
                wish.format(text=TEXT.format(name=n), name=n) for n in (NAMES[i % len(NAMES)] for i in range(batch))
            ]
            chat = [[{"role": "user", "content": each}] for each in wishes]
            return [list(tokenizer.apply_chat_template(each, add_generation_prompt=True)) for each in chat]

        return prompts

    return [Work("copy", chats(COPY), greedy_sampler), Work("prose", chats(PROSE), make_sampler(temp=0.8))]


def rate_of(model: Any, work: Work, prompts: list[list[int]], num_tokens: int, lookup: int) -> tuple[float, int]:
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
        rate_of(model, work, prompts, num_tokens, lookup)
        side = "without" if lookup == 0 else f"up to {lookup}"
        facts = {"side": side, "case": f"{work.name}, {batch}", "lookup": lookup, "batch": batch, "rates": []}
        results.append({**facts, "drafted": 0, "accepted": 0, "generated_tokens": 0})
    for _ in range(repeats):
        for result in results:
            before = pool.stats()
            rate, total = rate_of(model, work, prompts, num_tokens, result["lookup"])
            after = pool.stats()
            result["rates"].append(rate)
            result["generated_tokens"] += total
            result["drafted"] += after.drafted_tokens - before.drafted_tokens
            result["accepted"] += after.accepted_tokens - before.accepted_tokens
    for result in results:
        result["tokens_per_s"] = statistics.median(result["rates"])
        result["ratio"] = result["tokens_per_s"] / results[0]["tokens_per_s"]
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--batches", type=list_of(positive), default=[1, 8], help="rows, separated by commas")
    add("--lookup", type=list_of(positive), default=[8], help="most drafts a step, separated by commas")
    add("--only", choices=("copy", "prose"), default=None)
    add("--prompt", type=positive, default=256, help="tokens of a prompt, with random weights")
    add("--num-tokens", type=positive, default=128, help="of each answer")
    add("--repeats", type=positive, default=3)
    add_pool_arguments(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure each work and batch, print the table and write the files."""
    if args.model is None:
        model = successor_model(args.random or "tiny", args.dtype)
        works = random_work(model, args.prompt)
    else:
        from mlx_lm.utils import load_tokenizer

        model = chosen_model(args)
        works = text_work(load_tokenizer(Path(args.model)))
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
    sides = list(dict.fromkeys(result["side"] for result in results))
    write_results(args.out, "lookup", argv, results, PANELS, "case", sides, args.model or args.random or "tiny")
