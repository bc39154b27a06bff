"""Whether answers keep to their JSON schemas: random schemas, some prompts, one batch; every finished answer is parsed
and validated by jsonschema.

    python scripts/grammar/eval_grammar.py --dequantize                     # 300 schemas x 3 prompts, the demo model
    python scripts/grammar/eval_grammar.py --model path/to/model --schemas 50 --temperature 1.0

Schemas are drawn from what is supported: objects with required and optional properties, closed or not, arrays with
bounds, tuples, strings with lengths, patterns and formats, numbers with bounds, enumerations, alternatives, references,
up to four levels deep. With --schemas-file they are others, of which some may be refused.
An answer that ends because ``--max-tokens`` are used up is counted and not judged. Writes
eval_grammar.json to ``--out``, with all that was wrong, and exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jsonschema
import mlx.core as mx
from benchmarks.report import machine
from demo_model import ensure_demo_model
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import dequantize_model

import mlx_paged
from mlx_paged import RequestFailedError
from mlx_paged.engine.request import RequestOptions
from mlx_paged.patches.grammar.tokenizer_grammars import TokenizerGrammars
from mlx_paged.server.constraint import constraint_of
from mlx_paged.server.errors import RequestRefused

PROMPTS = (
    "Describe a city as JSON.",
    "Tell me a story about a fox, in two lines.",
    "Give me the record of a customer.",
)
NAMES = ("name", "id", "tags", "size", "city", "note", "été", "a b", 'quo"te')
WORDS = ("red", "green", "blue", "", "ünïcode", 'a "quote"', "line\nbreak")
PATTERNS = ("^[a-z]{2,6}$", "^(yes|no)$", "^[A-Z][a-z]*[0-9]{2}$", "^\\d{3}-\\d{4}$")
FORMATS = ("date", "time", "uuid", "ipv4")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of an object, or within it of anything."""
    if depth == 0:
        schema = _object(rng, depth)
        if rng.random() < 0.3:
            schema["$defs"] = {"part": _leaf(rng)}
            schema["properties"]["ref"] = {"$ref": "#/$defs/part"}
        return schema
    kind = rng.random()
    if depth < 3 and kind < 0.2:
        return _object(rng, depth)
    if depth < 3 and kind < 0.4:
        return _array(rng, depth)
    if depth < 3 and kind < 0.5:
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    return _leaf(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.85:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_leaf(rng), _leaf(rng)], "items": False, "minItems": 2}
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(rng, depth + 1),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(0, 2),
    }


def _leaf(rng: random.Random) -> dict[str, Any]:
    fewest = rng.randint(0, 4)
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "minLength": fewest, "maxLength": fewest + rng.randint(0, 12)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + 7.5},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"enum": rng.sample([*WORDS, 1, -2.5, None, True, {"a": [1]}], 3)},
            {"const": rng.choice(WORDS)},
        ]
    )


def judge(text: str, schema: dict[str, Any]) -> str:
    """What is wrong with an answer, or nothing."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker(("date", "ipv4", "uuid")))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    mx.random.seed(args.seed)
    rng = random.Random(args.seed)
    if args.schemas_file is None:
        schemas = [random_schema(rng) for _ in range(args.schemas)]
    else:
        schemas = json.loads(args.schemas_file.read_text())
    model, tokenizer = importlib.import_module("mlx_lm").load(str(args.model or ensure_demo_model()))
    if args.dequantize:
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
    mlx_paged.apply_patches()
    grammars = TokenizerGrammars(tokenizer)
    generator = importlib.import_module("mlx_lm.generate").BatchGenerator(
        model,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        sampler=make_sampler(args.temperature),
        completion_batch_size=args.batch_size,
    )
    asked: dict[int, tuple[dict[str, Any], str]] = {}
    refused = []
    begin = time.perf_counter()
    for schema in schemas:
        described = {"type": "json_schema", "json_schema": {"schema": schema}}
        constraint = constraint_of({"response_format": described}, chat=True)
        assert constraint is not None
        try:
            compiled = grammars.compile(constraint)
        except RequestRefused as error:
            refused.append({"schema": schema, "reason": str(error)})
            continue
        for prompt in PROMPTS[: args.prompts]:
            message = [{"role": "user", "content": prompt}]
            tokens = tokenizer.apply_chat_template(message, add_generation_prompt=True)
            options = [RequestOptions(grammar=compiled)]
            (uid,) = generator.insert([tokens], [args.max_tokens], options=options)
            asked[uid] = schema, prompt
    compiling = time.perf_counter() - begin
    answers: dict[int, list[int]] = {uid: [] for uid in asked}
    wrong, reasons = [], {"stop": 0, "length": 0, "error": 0}
    while len(asked) > sum(reasons.values()):
        try:
            generated = generator.next_generated()
        except RequestFailedError as error:
            schema, prompt = asked[error.uid]
            wrong.append({"schema": schema, "prompt": prompt, "text": "", "fault": str(error)})
            reasons["error"] += 1
            continue
        for response in generated:
            if response.finish_reason != "stop":
                answers[response.uid].append(response.token)
            if response.finish_reason is None:
                continue
            reasons[response.finish_reason] += 1
            schema, prompt = asked[response.uid]
            text = tokenizer.decode(answers[response.uid])
            if response.finish_reason == "stop" and (fault := judge(text, schema)):
                wrong.append({"schema": schema, "prompt": prompt, "text": text, "fault": fault})
            if args.verbose and sum(reasons.values()) % 50 == 0:
                print(f"{sum(reasons.values())} of {len(asked)} answers, {len(wrong)} wrong", file=sys.stderr)
    return {
        "machine": machine(),
        "schemas": len(schemas),
        "refused": refused,
        "answers": len(asked),
        "finished": reasons["stop"],
        "cut_off": reasons["length"],
        "failed": reasons["error"],
        "valid": reasons["stop"] - (len(wrong) - reasons["error"]),
        "tokens": sum(map(len, answers.values())),
        "seconds_of_compiling": compiling,
        "seconds": time.perf_counter() - begin,
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; the demo model without it")
    parser.add_argument("--dequantize", action="store_true", help="weights in float32, which a CPU is faster with")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--schemas-file", type=Path, help="a list of them, as JSON")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    result = evaluate(args)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "eval_grammar.json").write_text(json.dumps(result, indent=2))
    print(
        f"{result['schemas']} schemas, {len(result['refused'])} of them refused, {result['answers']} answers: "
        f"{result['finished']} finished, {result['valid']} of these valid, {result['cut_off']} cut off at "
        f"{args.max_tokens} tokens; {result['tokens']} tokens in {result['seconds']:.0f} s, "
        f"{result['seconds_of_compiling']:.1f} s of them compiling"
    )
    for each in result["wrong"][:5]:
        print(json.dumps(each, ensure_ascii=False))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
