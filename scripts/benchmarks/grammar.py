"""What grammars cost: decode throughput of a batch, none of whose rows, one, or all have a grammar.

    python scripts/bench.py grammar --dequantize --out out/grammar     # the demo model, 8 rows
    python scripts/bench.py grammar --model path/to/model --rows 32 --tokens 256

The sides run in turn, in one process, ``--repeats`` times; the median and the best decode throughput of each are shown.
Every row generates ``--tokens`` tokens: the grammar is JSON whose end is out of reach, and rows without one have no
stop token. Only steps in which all rows decode count. Writes grammar.json and grammar.png.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from demo_model import ensure_demo_model
from mlx_lm.utils import dequantize_model

import mlx_paged
from mlx_paged.engine.grammar.compiler import GrammarSource
from mlx_paged.engine.grammar.grammar import CompiledGrammar
from mlx_paged.engine.request import RequestOptions
from mlx_paged.patches.grammar.tokenizer_grammars import TokenizerGrammars
from mlx_paged.server.constraint import Constraint

from .report import Panel, add_out_argument, positive, table, write_results

PANELS: tuple[Panel, ...] = (("decode, tokens/s", lambda r: r["tokens_per_s"]),)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Berlin", "Oslo", "Rome"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


def decode_rate(
    model: Any, prompt: list[int], grammars: list[CompiledGrammar | None], num_tokens: int
) -> tuple[float, list[list[int]]]:
    """Tokens per second of the steps in which all rows decode, and the rows' tokens."""
    generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
        model, completion_batch_size=len(grammars), prefill_batch_size=len(grammars)
    )
    prompts = [[*prompt, *prompt[: index + 1]] for index in range(len(grammars))]
    options = [RequestOptions(grammar=grammar) for grammar in grammars]
    uids = generator.insert(prompts, [num_tokens] * len(prompts), options=options)
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    full: list[float] = []
    while True:
        prompt_responses, generated = generator.next()
        if not prompt_responses and not generated:
            break
        for response in generated:
            answers[response.uid].append(response.token)
        if len(generated) == len(uids):
            full.append(time.perf_counter())
    generator.close()
    timed = full[2:]  # the first full step came in a call that also computed a prompt
    return len(uids) * (len(timed) - 1) / (timed[-1] - timed[0]), [answers[uid] for uid in uids]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder; the demo model without it")
    parser.add_argument("--dequantize", action="store_true", help="weights in float32, which a CPU is faster with")
    parser.add_argument("--rows", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=96)
    parser.add_argument("--repeats", type=positive, default=4)
    add_out_argument(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure the sides in turns, print the table and write the files."""
    model, tokenizer = importlib.import_module("mlx_lm").load(str(args.model or ensure_demo_model()))
    if args.dequantize:
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
    mlx_paged.apply_patches()
    grammar = TokenizerGrammars(tokenizer).compile(Constraint(GrammarSource.json(SCHEMA), "schema"))
    prompt = tokenizer.encode("Some people, their ages, cities and what they like, as JSON: ")
    sides = {
        "none": [None] * args.rows,
        "one row": [grammar, *[None] * (args.rows - 1)],
        "all rows": [grammar] * args.rows,
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    decode_rate(model, prompt, sides["all rows"], 8)  # warm-up
    for repeat in range(args.repeats):
        for name in list(sides) if repeat % 2 == 0 else list(sides)[::-1]:
            rate, answers = decode_rate(model, prompt, sides[name], args.tokens)
            rates[name].append(rate)
            assert name != "all rows" or all(tokenizer.decode(answer).startswith("[") for answer in answers)
            print(f"{name}: {rate:.1f} tokens/s", file=sys.stderr)
    results: list[dict[str, Any]] = []
    for name, values in rates.items():
        facts = {"side": name, "case": f"{args.rows} rows", "rates": values, "best": max(values)}
        results.append({**facts, "tokens_per_s": statistics.median(values)})
        results[-1]["ratio"] = results[-1]["tokens_per_s"] / results[0]["tokens_per_s"]
    rows = [(r["side"], f"{r['tokens_per_s']:.1f}", f"{r['best']:.1f}", f"{r['ratio']:.2f}") for r in results]
    print(table(("rows with a grammar", "median tok/s", "best tok/s", "of none"), rows))
    write_results(args.out, "grammar", argv, results, PANELS, "case", list(sides), "grammars")
