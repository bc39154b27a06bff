"""Several tokens a step in batches, with and without drafts: tokens per second and what was accepted.

    python scripts/bench.py drafts --random llama-1b --batches 1,8,32 --lookup 8 --made .5,.8 --draft-layers 2

Sides:
- *look-up N*: up to N tokens that stood before.
- *made A*: the model's own next tokens, each wrong with a chance of 1 - A.
- *first N layers*: a draft model of the model's first layers.

How many are drafted follows from what they cost and how often they are right. The model's next token depends on its
last one: *copy* has prompts that hold the answer (greedy), *prose* chooses between a few words (sampled), so that what
stood before is found again and again and rarely goes on as before.

All sides run in turns in one process, each case after a warm-up. A rate is of the steps in which every row decodes; the
ratio is that of the medians. Writes drafts.json and drafts.png.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm import sample_utils

import mlx_paged
from mlx_paged.drafts.depth import Acceptance, Candidate, Depth, new_depth
from mlx_paged.engine.interfaces import NextTokens, Proposal, most_drafts, num_known
from mlx_paged.engine.request import Request, RequestOptions

from . import timed_run
from .models import DTYPES, PRESETS, SEED, BenchError, random_model, vocabulary_of
from .report import (
    Column,
    Panel,
    add_pool_arguments,
    list_of,
    patch_anew,
    positive,
    print_columns,
    write_results,
)

PANELS: tuple[Panel, ...] = (
    ("tokens/s", lambda r: r["tokens_per_s"]),
    ("drafts accepted, of those proposed", lambda r: r["accepted"] / max(1, r["drafted"])),
)
COLUMNS: tuple[Column, ...] = (
    ("tokens/s", lambda r: f"{r['tokens_per_s']:.1f}"),
    ("ratio", lambda r: f"{r['ratio']:.2f}"),
    ("proposed", lambda r: str(r["drafted"])),
    ("accepted", lambda r: str(r["accepted"])),
)
WORDS = 200  # tokens that the model generates
LIKELY = 4  # tokens that may follow each of them in prose


class Work(NamedTuple):
    """A task for a batch.

    Attributes:
        name: ``copy`` or ``prose``.
        prompts: returns the prompts of a batch of this size.
        temperature, top_k: of the sampler of all rows.
    """

    name: str
    prompts: Callable[[int], list[list[int]]]
    temperature: float = 0.0
    top_k: int = 0


class Side(NamedTuple):
    """A source of drafts.

    Attributes:
        name: its name in the table.
        lookup: most tokens looked up per step.
        made: chance that a made draft is right, or None.
        draft_model: a draft model, or None.
    """

    name: str
    lookup: int = 0
    made: float | None = None
    draft_model: Any = None


class Made:
    """Proposes the rows' own next tokens, some of them wrong. A :class:`mlx_paged.engine.interfaces.Proposer`.

    Args:
        answers: answers by prompt, longer than those to generate.
        chance: chance that a draft is right.
        num_drafts: most drafts of a row per step.
        vocab: size of the vocabulary.
        depth: decides how many to draft.
    """

    def __init__(
        self, answers: dict[tuple[int, ...], list[int]], chance: float, num_drafts: int, vocab: int, depth: Depth
    ) -> None:
        self.rows: dict[Request, Acceptance] = {}
        self._answers, self._chance, self._num, self._vocab = answers, chance, num_drafts, vocab
        self._depth = depth
        self._rng = np.random.default_rng(SEED)
        self._last: list[Request] = []

    @property
    def seconds_saved(self) -> float:
        return self._depth.seconds_saved

    def add(self, rows: Sequence[Request]) -> None:
        self.rows.update((row, Acceptance()) for row in rows)

    def remove(self, rows: Collection[Request]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def propose(
        self, rows: Sequence[Request], inputs: NextTokens, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        self._depth.begin(len(rows), is_like_last=list(rows) == self._last)
        self._last = list(rows) if is_alone else []
        if not self._depth.may_choose(len(rows)):
            return None
        candidates = [
            Candidate(self.rows[row].chances(min(self._num, left)), left) for row in rows for left in [most_drafts(row)]
        ]
        tokens: list[int] = []
        counts = []
        for row, count in zip(rows, self._depth.choose(candidates, len(rows)), strict=True):
            coming: list[int] = []
            if count:
                answer, prompt = self._answers[tuple(row.source[: row.prompt_length])], row.prompt_length
                place = num_known(row) - prompt + 1
                coming = answer[place : place + count]
            wrong = self._rng.random(len(coming)) >= self._chance
            tokens += [(token + bad) % self._vocab for token, bad in zip(coming, wrong.tolist(), strict=True)]
            counts.append(len(coming))
        if not tokens:
            return None
        self._depth.note_proposed(len(tokens))
        return Proposal(counts, tokens)

    def note(
        self, rows: Sequence[Request], drafted: Sequence[int], accepted: Sequence[int], following: Any, *, is_new: bool
    ) -> None:
        for row, tried, right in zip(rows, drafted, accepted, strict=True):
            if tried:
                self.rows[row].note([tried], [right])
        self._depth.note(len(rows), drafted, accepted, is_new=is_new)


def successor_model(preset: str, dtype: str | None) -> Any:
    """Return a model of random weights whose next token is one of WORDS and depends almost only on the last one. Its
    steps cost as much as those of other weights."""
    if PRESETS[preset].module.__name__.rsplit(".", 1)[-1] != "llama":
        raise BenchError(f"--random {preset}: an answer's words can be foretold of Llama shapes only")
    model = random_model(preset, dtype, tie_word_embeddings=False)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * 1e-3
    head = model.lm_head.weight
    model.lm_head.weight = mx.where(mx.arange(head.shape[0])[:, None] < WORDS, head, 0)
    mx.eval(model.parameters())
    return model


def successors(model: Any) -> list[int]:
    """Return the most likely token after each of the WORDS tokens."""
    return mx.argmax(model(mx.arange(WORDS, dtype=mx.uint32)[:, None])[:, -1], axis=-1).tolist()  # type: ignore


def random_work(model: Any, prompt: int) -> list[Work]:
    """Return tasks for a :func:`successor_model`: prompts that hold the greedy answer, and samples of few tokens."""
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

    return [Work("copy", copies), Work("prose", prose, 1.0, LIKELY)]


def first_layers(model: Any, num_layers: int) -> Any:
    """Return a draft model: the model's first layers, with its embedding, norm and output layer."""
    cut = copy.copy(model)
    cut.model = copy.copy(model.model)
    cut.model.layers = model.model.layers[:num_layers]
    return cut


Answers = dict[tuple[int, ...], list[int]]  # by prompt


def rate_of(
    model: Any, work: Work, prompts: list[list[int]], side: Side, num_tokens: int, drafts: int, known: Answers
) -> tuple[float, Answers]:
    """Run a batch to its end. Return the tokens per second, and the answers."""
    size = len(prompts)
    options: dict[str, Any] = {}
    if side.draft_model is not None:
        options = {"draft_model": side.draft_model, "num_draft_tokens": drafts}
    generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
        model, completion_batch_size=size, prefill_batch_size=min(8, size), **options
    )
    if side.made is not None:
        made = Made(known, side.made, drafts, vocabulary_of(model), new_depth())
        generator._engine.drafts.proposer = generator._engine.batch.proposer = made
    mx.random.seed(SEED)
    run = timed_run.Run(
        generator,
        [timed_run.Request(prompt, num_tokens) for prompt in prompts],
        samplers=[sample_utils.make_sampler(work.temperature, top_k=work.top_k)] * size,
        options=[RequestOptions(prompt_lookup=side.lookup, seed=n) for n in range(size)],
    )
    run.go()
    generator.close()
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, run.tokens.values(), strict=True)}
    return run.decode_rate() or float("nan"), answers


def measure(
    model: Any, work: Work, batch: int, sides: Sequence[Side], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the figures of one task and batch size, for each side."""
    prompts, pool = work.prompts(batch), mlx_paged.pool_of(model)
    longer = args.num_tokens + args.num_draft_tokens + 1
    _, known = rate_of(model, work, prompts, Side("without"), longer, 0, {})
    results: list[dict[str, Any]] = [
        {"side": side.name, "case": f"{work.name}, {batch}", "batch": batch, "made": side.made, "rates": []}
        | {"drafted": 0, "accepted": 0, "same_tokens": True}
        for side in sides
    ]
    for repeat in range(args.repeats + 1):
        for side, result in zip(sides, results, strict=True):
            before = pool.stats()
            rate, answers = rate_of(model, work, prompts, side, args.num_tokens, args.num_draft_tokens, known)
            after = pool.stats()
            result["same_tokens"] &= all(known[prompt][: len(got)] == got for prompt, got in answers.items())
            if repeat:  # the first is the warm-up
                result["rates"].append(rate)
                result["drafted"] += after.drafted_tokens - before.drafted_tokens
                result["accepted"] += after.accepted_tokens - before.accepted_tokens
    for result in results:
        result["tokens_per_s"] = statistics.median(result["rates"])
        result["ratio"] = result["tokens_per_s"] / results[0]["tokens_per_s"]
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--random", choices=sorted(PRESETS), default="tiny", help="a model of random weights, of a Llama shape")
    add("--dtype", choices=sorted(DTYPES), default=None, help="of weights (default: the model's)")
    add("--batches", type=list_of(positive), default=[1, 8], help="rows, separated by commas")
    add("--lookup", type=list_of(positive), default=[8], help="most looked-up tokens a step, separated by commas")
    add("--made", type=list_of(float), default=[0.8], help="chances of a draft of being right, separated by commas")
    add("--draft-layers", type=list_of(positive), default=[], help="layers of draft models, separated by commas")
    add("--num-draft-tokens", type=positive, default=3, help="of draft models, and made")
    add("--only", choices=("copy", "prose"), default=None)
    add("--prompt", type=positive, default=256, help="tokens of a prompt")
    add("--num-tokens", type=positive, default=128, help="of each answer")
    add("--repeats", type=positive, default=3)
    add_pool_arguments(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure each task and batch size, print the table and write the files."""
    model = successor_model(args.random, args.dtype)
    sides = [
        Side("without"),
        *(Side(f"look-up {most}", lookup=most) for most in args.lookup),
        *(Side(f"made {chance:g}", made=chance) for chance in args.made),
        *(Side(f"first {n} layers", draft_model=first_layers(model, n)) for n in args.draft_layers),
    ]
    patch_anew(args)
    results = []
    for work in random_work(model, args.prompt):
        for batch in args.batches if args.only in (None, work.name) else ():
            results += measure(model, work, batch, sides, args)
            print(f"{work.name}, {batch} row(s) done", file=sys.stderr, flush=True)
    print_columns(results, ("case", "side"), COLUMNS)
    write_results(args.out, "drafts", argv, results, PANELS, "case", args.random)
