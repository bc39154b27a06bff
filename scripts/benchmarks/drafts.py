"""Several tokens a step in batches, with and without drafts: tokens per second and what was accepted.

    python scripts/bench.py drafts --random llama-1b --batches 1,8,32 --lookup 8 --right .5,.8

Sides:
- *look-up N*: up to N tokens that stood before.
- *draft A*: a draft model of the model's first layer, whose token is right with a chance of A.

How many are drafted follows from what they cost and how often they are right. The model's next token depends on its
last one: *copy* has prompts that hold the answer (greedy), *prose* chooses between a few words (sampled), so that what
stood before is found again and again and rarely goes on as before.

All sides run in turns in one process, after a turn that warms up. A rate is of the steps in which every row decodes.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import sample_utils

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.request import RequestOptions

from .models import DTYPES, PRESETS, SEED, patch_anew, random_model
from .report import BenchError, Metric, list_of, positive
from .timed_run import Request, Run

METRICS = (
    Metric("tokens/s", "tokens_per_s", "more"),
    Metric("accepted share", "accepted_share"),
    Metric("proposed", "drafted", is_plotted=False),
    Metric("rows same", "same_rows", is_plotted=False),
)
WORDS = 200  # tokens that the model generates, each followed by the next one
LIKELY = 4  # tokens that may follow each of them in prose


class Side(NamedTuple):
    """A source of drafts: the most tokens looked up per step, or a draft model."""

    name: str
    lookup: int = 0
    draft_model: Any = None


def counting_model(preset: str, dtype: str | None) -> Any:
    """Return a model of random weights after whose token n the most likely one is n + 1, of WORDS. It depends almost
    only on the last token. Its steps cost as much as those of other weights."""
    if PRESETS[preset].module.__name__.rsplit(".", 1)[-1] != "llama":
        raise BenchError(f"--random {preset}: an answer's words can be foretold of Llama shapes only")
    model = random_model(preset, dtype, tie_word_embeddings=False)
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * 1e-3
    words = model.model.embed_tokens.weight[:WORDS]
    likely = words / mx.linalg.norm(words, axis=1, keepdims=True) / words.shape[1] ** 0.5  # a logit of 1
    head = model.lm_head.weight
    model.lm_head.weight = mx.concatenate([mx.roll(likely, 1, axis=0), mx.zeros_like(head[WORDS:])]).astype(head.dtype)
    mx.eval(model.parameters())
    return model


def draft_of(model: Any, right: float) -> Any:
    """Return a draft model: the first layer of a :func:`counting_model`, which takes some words for others."""
    draft = copy.copy(model)
    draft.model = copy.copy(model.model)
    draft.model.layers = model.model.layers[:1]
    weight = model.model.embed_tokens.weight
    is_right = mx.arange(len(weight))[:, None] % 10 < round(10 * right)
    draft.model.embed_tokens = nn.Embedding(1, 1)
    draft.model.embed_tokens.weight = mx.where(is_right, weight, mx.roll(weight, 2, axis=0))
    mx.eval(draft.parameters())
    return draft


def prompts_of(task: str, batch: int, length: int) -> list[list[int]]:
    """Return the prompts of a batch."""
    rng = np.random.default_rng(SEED)
    if task == "copy":
        return [[(start + n) % WORDS for n in range(length)] for start in rng.permutation(WORDS)[:batch].tolist()]
    return rng.integers(0, WORDS, (batch, length)).tolist()  # type: ignore[no-any-return]


def answered(model: Any, task: str, batch: int, side: Side, args: argparse.Namespace) -> Run:
    """Run a batch to its end."""
    draft = {} if side.draft_model is None else {"draft_model": side.draft_model}
    generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
        model, completion_batch_size=batch, prefill_batch_size=min(8, batch), **draft
    )
    sampler = sample_utils.make_sampler() if task == "copy" else sample_utils.make_sampler(1.0, top_k=LIKELY)
    run = Run(
        generator,
        [Request(prompt, args.num_tokens) for prompt in prompts_of(task, batch, args.prompt)],
        samplers=[sampler] * batch,
        options=[RequestOptions(prompt_lookup=side.lookup, seed=n) for n in range(batch)],
    )
    run.go()
    run.close()
    return run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--random", choices=sorted(PRESETS), default="tiny", help="a model of random weights, of a Llama shape")
    add("--dtype", choices=sorted(DTYPES), default=None, help="of weights (default: the model's)")
    add("--batches", type=list_of(positive), default=[1, 8], help="rows, separated by commas")
    add("--lookup", type=list_of(positive), default=[8], help="most looked-up tokens a step, separated by commas")
    add("--right", type=list_of(float), default=[0.8], help="chances of a draft of being right, in tenths")
    add("--prompt", type=positive, default=256, help="tokens of a prompt, at least 200 to hold the answer")
    add("--num-tokens", type=positive, default=128, help="of each answer")
    add("--repeats", type=positive, default=3)
    PagedConfig.add_arguments(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of each task, batch size, side and repeat."""
    model = counting_model(args.random, args.dtype)
    sides = [
        Side("without"),
        *(Side(f"look-up {most}", lookup=most) for most in args.lookup),
        *(Side(f"draft {right:g}", draft_model=draft_of(model, right)) for right in args.right),
    ]
    patch_anew(args)
    pool, results = mlx_paged.pool_of(model), []
    for task, batch in [(task, batch) for task in ("copy", "prose") for batch in args.batches]:
        expected = answered(model, task, batch, sides[0], args).tokens
        for side in sides[1:]:
            answered(model, task, batch, side, args)
        for side in sides * args.repeats:
            before = pool.stats()
            run = answered(model, task, batch, side, args)
            after = pool.stats()
            drafted = after.drafted_tokens - before.drafted_tokens
            accepted = after.accepted_tokens - before.accepted_tokens
            pairs = zip(run.tokens.values(), expected.values(), strict=True)
            figures = {"tokens_per_s": run.decode_rate(), "drafted": drafted, "accepted": accepted}
            figures |= {"accepted_share": accepted / drafted if drafted else None}
            figures |= {"same_rows": sum(mine == other for mine, other in pairs)}
            results.append({"case": f"{task}, {batch}", "side": side.name, "rows": batch, **figures})
        print(f"{task}, {batch} row(s) done", file=sys.stderr, flush=True)
    return results
