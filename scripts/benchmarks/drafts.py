"""Several tokens a step in batches, with and without drafts: tokens per second, host time and what was accepted.

    python scripts/bench.py drafts --model path/to/model --batches 1,8 --lookup 8 --draft-layers 2
    python scripts/bench.py drafts --random llama-1b --batches 1,8,32 --made .5,.8

Sides:
- *look-up N*: up to N tokens that stood before.
- *made A*: the model's own next tokens, each wrong with a chance of 1 - A.
- *first N layers*: a draft model of the model's first layers.

How many are drafted follows from what they cost and how often they are right. With *always* it is all that are looked
up, or ``--num-draft-tokens`` in every step: tokens a step of a row are then to be 1 + A + ... + A^k.

With a model that chats, *copy* asks for a text of the prompt to be repeated (greedy) and *prose* for a story (sampled).
With random weights the model's next token depends on its last one: *copy* has prompts that hold the answer, *prose*
chooses between a few words, so that what stood before is found again and again and rarely goes on as before.

All sides run in turns in one process, each case after a warm-up. A rate is the tokens behind every row's first, by the
seconds they took; the ratio is that of the medians. Host time is that of the thread that calls the generator. CPU time
is the process's, from the first prompt to the last token: on a CPU that is what the answer takes. Writes drafts.json
and drafts.png.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm import sample_utils

import mlx_paged
from mlx_paged.drafts.depth import Acceptance, Candidate, Depth, new_depth
from mlx_paged.engine.proposer import NextTokens, Proposal, most_drafts, num_known
from mlx_paged.engine.request import Request, RequestOptions

from .models import (
    PRESETS,
    SEED,
    BenchError,
    add_model_arguments,
    changed_preset,
    chosen_model,
    random_model,
    vocabulary_of,
)
from .report import Panel, add_pool_arguments, list_of, patch_anew, positive, table, write_results

PANELS: tuple[Panel, ...] = (
    ("tokens/s", lambda r: r["tokens_per_s"]),
    ("drafts accepted, of those proposed", lambda r: r["accepted"] / max(1, r["drafted"])),
)
SHOWN = (("tokens_per_s", 1), ("ratio", 2), ("cpu_ratio", 3), ("per_step", 2), ("host_ms", 3))
WORDS = 200  # tokens that a model of random weights generates
LIKELY = 4  # tokens that may follow each of them in prose
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
        always: whether it drafts in every step.
    """

    name: str
    lookup: int = 0
    made: float | None = None
    draft_model: Any = None
    always: bool = False


class EveryStep(Depth):
    """Drafts the most tokens possible, in every step."""

    def choose(self, rows: Sequence[Candidate], num_rows: int) -> list[int]:
        return [len(row.chances) for row in rows]

    def may_choose(self, num_rows: int) -> bool:
        return True


class Made:
    """Proposes the rows' own next tokens, some of them wrong. A :class:`mlx_paged.engine.proposer.Proposer`.

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

    def add(self, rows: Sequence[Request], choice: Any) -> None:
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
                self.rows[row].note(tried, right)
        self._depth.note(len(rows), drafted, accepted, is_new=is_new)


def successor_model(preset: str, dtype: str | None) -> Any:
    """Return a model of random weights whose next token is one of WORDS and depends almost only on the last one. Its
    steps cost as much as those of other weights."""
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


def text_work(tokenizer: Any) -> list[Work]:
    """Return tasks for a chat model."""

    def chats(wish: str) -> Callable[[int], list[list[int]]]:
        def prompts(batch: int) -> list[list[int]]:
            wishes = [
                wish.format(text=TEXT.format(name=n), name=n) for n in (NAMES[i % len(NAMES)] for i in range(batch))
            ]
            chat = [[{"role": "user", "content": each}] for each in wishes]
            return [list(tokenizer.apply_chat_template(each, add_generation_prompt=True)) for each in chat]

        return prompts

    return [Work("copy", chats(COPY)), Work("prose", chats(PROSE), 0.8)]


def first_layers(model: Any, num_layers: int) -> Any:
    """Return a draft model: the model's first layers, with its embedding, norm and output layer."""
    cut = copy.copy(model)
    cut.model = copy.copy(model.model)
    cut.model.layers = model.model.layers[:num_layers]
    return cut


class Run(NamedTuple):
    """Figures of a batch from when every row decodes.

    Attributes:
        rate: tokens per second.
        host: CPU milliseconds of the calling thread per token.
        cpu: CPU seconds of the process for the whole batch.
        answers: answers by prompt.
        steps: steps of the engine.
        tokens: tokens of these steps.
    """

    rate: float
    host: float
    cpu: float
    answers: dict[tuple[int, ...], list[int]]
    steps: int
    tokens: int


def rate_of(
    model: Any, work: Work, prompts: list[list[int]], side: Side, num_tokens: int, drafts: int, known: Any
) -> Run:
    """Run a batch to its end."""
    size = len(prompts)
    options: dict[str, Any] = {}
    if side.draft_model is not None:
        options = {"draft_model": side.draft_model, "num_draft_tokens": drafts}
    generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
        model, completion_batch_size=size, prefill_batch_size=min(8, size), **options
    )
    steps = generator._engine.drafts
    if side.always and side.made is None:
        steps.proposer.depth = EveryStep()
    if side.made is not None:
        depth = EveryStep() if side.always else new_depth()
        steps.proposer = Made(known, side.made, drafts, vocabulary_of(model), depth)
        generator._engine.batch.proposer = steps.proposer
    mx.random.seed(SEED)
    cpu = time.process_time()
    uids = generator.insert_segments(
        [[prompt] for prompt in prompts],
        [num_tokens] * size,
        samplers=[sample_utils.make_sampler(work.temperature, top_k=work.top_k)] * size,
        options=[RequestOptions(prompt_lookup=side.lookup, seed=n) for n in range(size)],
    )
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    begin = host = 0.0
    timed = first = 0
    while True:
        reports, generated = generator.next()
        if not reports and not generated:
            break
        is_timed = all(answers.values())
        for response in generated:
            answers[response.uid].append(response.token)
        timed += len(generated) if is_timed else 0
        if not is_timed:
            begin, host, first = time.perf_counter(), time.thread_time(), generator.num_steps
    seconds, host, cpu = time.perf_counter() - begin, time.thread_time() - host, time.process_time() - cpu
    ran = generator.num_steps - first
    generator.close()
    told = {tuple(prompt): answers[uid] for prompt, uid in zip(prompts, uids, strict=True)}
    return Run(timed / seconds, 1000 * host / max(1, timed), cpu, told, ran, timed)


def measure(
    model: Any, work: Work, batch: int, sides: Sequence[Side], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the figures of one task and batch size, for each side."""
    prompts = work.prompts(batch)
    pool = mlx_paged.pool_of(model)
    longer = args.num_tokens + args.num_draft_tokens + 1
    known = rate_of(model, work, prompts, Side("without"), longer, 0, None).answers
    results: list[dict[str, Any]] = []
    for side in sides:
        rate_of(model, work, prompts, side, args.num_tokens, args.num_draft_tokens, known)
        results.append(
            {"side": side.name, "case": f"{work.name}, {batch}", "batch": batch, "rates": [], "host": [], "cpu": []}
        )
        results[-1] |= {"made": side.made, "drafted": 0, "accepted": 0, "steps": 0, "tokens": 0, "same_tokens": True}
    for _ in range(args.repeats):
        for side, result in zip(sides, results, strict=True):
            before = pool.stats()
            ran = rate_of(model, work, prompts, side, args.num_tokens, args.num_draft_tokens, known)
            after = pool.stats()
            result["rates"].append(ran.rate)
            result["host"].append(ran.host)
            result["cpu"].append(ran.cpu)
            result["drafted"] += after.drafted_tokens - before.drafted_tokens
            result["accepted"] += after.accepted_tokens - before.accepted_tokens
            result["steps"] += ran.steps
            result["tokens"] += ran.tokens
            same = all(known[prompt][: len(answer)] == answer for prompt, answer in ran.answers.items())
            result["same_tokens"] = result["same_tokens"] and same
    for result in results:
        result["tokens_per_s"] = statistics.median(result["rates"])
        result["host_ms"] = statistics.median(result["host"])
        result["cpu_ratio"] = statistics.median(results[0]["cpu"]) / statistics.median(result["cpu"])
        result["ratio"] = result["tokens_per_s"] / results[0]["tokens_per_s"]
        result["per_step"] = result["tokens"] / max(1, result["steps"]) / batch
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--batches", type=list_of(positive), default=[1, 8], help="rows, separated by commas")
    add("--lookup", type=list_of(positive), default=[8], help="most looked-up tokens a step, separated by commas")
    add("--made", type=list_of(float), default=[0.8], help="chances of a draft of being right, separated by commas")
    add("--draft-layers", type=list_of(positive), default=[], help="layers of draft models, separated by commas")
    add("--num-draft-tokens", type=positive, default=3, help="of draft models, and made")
    add("--only", choices=("copy", "prose"), default=None)
    add("--prompt", type=positive, default=256, help="tokens of a prompt, with random weights")
    add("--num-tokens", type=positive, default=128, help="of each answer")
    add("--repeats", type=positive, default=3)
    add_pool_arguments(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure each task and batch size, print the table and write the files."""
    if args.model is None:
        model = successor_model(args.random or "tiny", args.dtype)
        works = random_work(model, args.prompt)
    else:
        from mlx_lm.utils import load_tokenizer

        model = chosen_model(args)
        works = text_work(load_tokenizer(Path(args.model)))
    sides = [Side("without")]
    for most in args.lookup:
        sides += [Side(f"look-up {most}", lookup=most), Side(f"look-up {most}, always", lookup=most, always=True)]
    for chance in args.made:
        sides += [Side(f"made {chance:g}", made=chance), Side(f"made {chance:g}, always", made=chance, always=True)]
    for number in args.draft_layers:
        cut = first_layers(model, number)
        sides += [Side(f"first {number} layers", draft_model=cut)]
        sides += [Side(f"first {number} layers, always", draft_model=cut, always=True)]
    patch_anew(args)
    results = []
    for work in works:
        for batch in args.batches if args.only in (None, work.name) else ():
            results += measure(model, work, batch, sides, args)
            print(f"{work.name}, {batch} row(s) done", file=sys.stderr, flush=True)
    rows = [
        [r["case"], r["side"], *(f"{r[name]:.{n}f}" for name, n in SHOWN), str(r["drafted"]), str(r["accepted"])]
        for r in results
    ]
    header = ("case", "drafts", "tokens/s", "ratio", "CPU ratio", "a step", "host ms/token", "proposed", "accepted")
    print(table(header, rows))
    write_results(args.out, "drafts", argv, results, PANELS, "case", args.model or args.random or "tiny")
