"""What grammars cost: decode throughput of a batch, none of whose rows, one, or all have a grammar.

    python scripts/grammar/bench_grammar.py --dequantize --out out/grammar     # the demo model, 8 rows
    python scripts/grammar/bench_grammar.py --model path/to/model --rows 32 --tokens 256

The sides run in turn, in one process, ``--repeats`` times; the median and the best decode throughput of each are shown.
Every row generates ``--tokens`` tokens: the grammar is JSON whose end is out of reach, and rows without one have no
stop token. Only steps in which all rows decode count. Writes bench_grammar.json and, with matplotlib, a plot.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
from demo_model import ensure_demo_model
from mlx_lm.utils import dequantize_model
from support.bench_common import machine, table

import mlx_paged
from mlx_paged.engine.grammar.compiler import GrammarSource
from mlx_paged.engine.grammar.grammar import CompiledGrammar
from mlx_paged.engine.request_options import RequestOptions
from mlx_paged.patches.grammar.tokenizer_grammars import TokenizerGrammars
from mlx_paged.serve.constraints.constraint import Constraint

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; the demo model without it")
    parser.add_argument("--dequantize", action="store_true", help="weights in float32, which a CPU is faster with")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("out/grammar"))
    args = parser.parse_args()
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
    best = {name: max(values) for name, values in rates.items()}
    median = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "machine": machine(),
        "device": str(mx.default_device()),
        "rows": args.rows,
        "tokens": args.tokens,
        "decode_tokens_per_s": rates,
        "ratio_of_medians": {name: median[name] / median["none"] for name in sides},
        "ratio_of_best": {name: best[name] / best["none"] for name in sides},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bench_grammar.json").write_text(json.dumps(result, indent=2))
    plot(rates, args.out / "bench_grammar.png")
    rows = [
        (name, f"{median[name]:.1f}", f"{best[name]:.1f}", f"{median[name] / median['none']:.2f}") for name in sides
    ]
    print(table(("rows with a grammar", "median tok/s", "best tok/s", "of none"), rows))


def plot(rates: dict[str, list[float]], path: Path) -> None:
    """Bars of the medians, and each run; nothing without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axis = pyplot.subplots(figsize=(5, 3.5))
    axis.bar(list(rates), [statistics.median(values) for values in rates.values()], color="lightgray")
    for index, values in enumerate(rates.values()):
        axis.plot([index] * len(values), values, "k.")
    axis.set_ylabel("decode, tokens/s")
    axis.set_xlabel("rows with a grammar")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
