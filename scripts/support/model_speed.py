"""First token and decode of one shape of each class of models on a GPU, stock mlx-lm against mlx_paged, in one process.

    python scripts/support/model_speed.py --out docs/models_gpu.json

Random weights in bf16, few layers. A burst of prompts, then one prompt alone; of each, the second of two runs counts.
Classes for which ``--seconds`` leave no time stay as the file has them; ``--classes`` names some.
scripts/model_matrix.py writes the file's figures into docs/models.md.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import mlx_paged  # noqa: E402
from scripts.support import model_configs  # noqa: E402

FILE = ROOT / "docs" / "models_gpu.json"
STRETCHES = 3
COLUMNS = (
    ("first_s", 2, 1.0),
    ("decode_tokens_per_s", 0, 1.0),
    ("peak_bytes", 1, 1e9),
    ("alone_first_s", 3, 1.0),
    ("alone_tokens_per_s", 0, 1.0),
)
TITLE = "\n## On a GPU\n"
COMMON: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "query_pre_attn_scalar": 128,
    "max_position_embeddings": 65536, "sliding_window": 1024, "sliding_window_size": 1024,
    "moe_intermediate_size": 1024, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip
MLA_20 = {"num_attention_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
MLA_128 = {"num_attention_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128}


class Shape(NamedTuple):
    """Of a class.

    Attributes:
        module: of mlx_lm.models.
        says: the shape of its attention, for people.
        fields: of its configuration, where they are not those of COMMON.
        prompts: their number and length.
    """

    module: str
    says: str
    fields: dict[str, Any]
    prompts: tuple[int, int] = (8, 2048)


SHAPES = {
    "latents, 20 heads": Shape("glm4_moe_lite", "512 + 64, as GLM 4.7 Flash", MLA_20, (16, 4096)),
    "latents, 128 heads": Shape(
        "deepseek_v3", "512 + 64, as DeepSeek V3", {**MLA_128, "hidden_size": 4096}, (16, 4096)
    ),
    "adapter": Shape("qwen3", "16 heads over 8, 128", {}),
    "seam": Shape("qwen2", "16 heads over 2, 128", {"num_key_value_heads": 2}),
    "windows": Shape("olmo3", "16 heads over 8, 128; windows of 1,024 in half", {}),
    "experts": Shape("qwen3_moe", "16 heads over 8, 128; 4 of 16 experts", {}),
    "states": Shape("falcon_h1", "16 heads over 8, 128, and state-space layers", {}),
    "sinks": Shape("gpt_oss", "64 heads over 8, 64; windows in half", {"num_attention_heads": 64, "head_dim": 64}),
    "soft cap": Shape(
        "gemma2", "8 heads over 4, 256", {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    ),
    # It writes to logits from 100,256 on.
    "gathered": Shape("phi3small", "16 heads over 8, 128; block-sparse in half", {"vocab_size": 100352}),
}


def build(shape: Shape) -> Any:
    """The model with random weights in bf16."""
    fields = {**COMMON, **shape.fields}
    own = {**copy.deepcopy(model_configs.OVERRIDES.get(shape.module, {}))}
    own = {key: value for key, value in own.items() if key not in fields}
    with mock.patch.dict(model_configs.COMMON, fields), mock.patch.dict(model_configs.OVERRIDES, {shape.module: own}):
        model = model_configs.build(shape.module)
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


class Burst(NamedTuple):
    """Seconds until the last row has its first token, tokens a second from then on with all rows, peak bytes."""

    first: float
    decode: float
    peak: int


def burst(model: Any, lengths: Sequence[int], num_tokens: int, seed: int) -> Burst:
    """Of prompts of these lengths, all at once. Decode is the median of stretches of so many tokens of each row."""
    upstream = importlib.import_module("mlx_lm.generate")
    keys = mx.random.split(mx.random.key(seed), len(lengths))
    prompts = [mx.random.randint(0, 30000, (n,), key=key).tolist() for n, key in zip(lengths, keys, strict=True)]
    mx.clear_cache()
    mx.reset_peak_memory()
    # The first rows decode while the last ones are computed, and must not end before them.
    most = 2 * num_tokens * (STRETCHES + 1) + 4 * len(lengths)
    generator = upstream.BatchGenerator(model, max_tokens=most, completion_batch_size=len(lengths))
    begin = time.perf_counter()
    generator.insert(prompts)
    begun: set[int] = set()
    ends: list[float] = []  # of stretches
    count = 0
    while len(ends) <= STRETCHES and (responses := generator.next_generated()):
        if len(begun) == len(lengths):
            count += len(responses)
        begun |= {response.uid for response in responses}
        if len(begun) == len(lengths) and count >= len(ends) * num_tokens * len(lengths):
            ends.append(time.perf_counter())
    generator.close()
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return Burst(ends[0] - begin, num_tokens * len(lengths) / statistics.median(seconds), mx.get_peak_memory())


def measure(shape: Shape, num_tokens: int) -> dict[str, Any]:
    """Both sides' figures, of the second of two runs alike: by then everything is compiled that they need."""
    model, (batch, length) = build(shape), shape.prompts
    gc.collect()
    figures: dict[str, Any] = {}
    for side in ("stock", "paged"):
        if side == "paged":
            mlx_paged.apply_patches(mlx_paged.PagedConfig())
        found: dict[str, Any] = dict.fromkeys(key for key, _, _ in COLUMNS)
        try:
            for keys, rows, seeds in ((COLUMNS[:3], batch, (1, 2)), (COLUMNS[3:], 1, (3, 4))):
                try:
                    best = [burst(model, [length] * rows, num_tokens, seed) for seed in seeds][-1]
                except ValueError as error:
                    if side == "paged":
                        raise
                    found["fails"] = str(error)  # a shape that mlx-lm cannot compute in batches
                    continue
                found |= {key: value for (key, _, _), value in zip(keys, best, strict=False)}
        finally:
            mlx_paged.remove_patches()
        figures[side] = found
        gc.collect()
    return figures


def section_of(known: dict[str, Any]) -> str:
    """The file's figures, in Markdown."""
    lines = [
        f"{TITLE}\nOne shape of each class on one {known['device']}, mlx {known['mlx']}: random weights in bf16, "
        f"{COMMON['num_hidden_layers']} layers,\nsome prompts at once and then one of the same length. Stock / here: "
        "seconds until the last row has its first token,\ntokens a second from then on, peak memory with weights. "
        "Hosts differ: compare within a line. "
        "Written by `scripts/support/model_speed.py`.\n",
        "| Class | Module | Attention | Prompts | First token, s | Decode, tokens/s | Peak, GB "
        "| Alone: first token, s | Alone: tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in known["classes"].items():
        cells = [name, found["module"], found["shape"], found["prompts"]]
        for key, digits, unit in COLUMNS:
            both = (found[side][key] for side in ("stock", "paged"))
            cells.append(" / ".join("fails" if x is None else f"{x / unit:,.{digits}f}" for x in both))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def short(name: str) -> str:
    """Of a class, on the command line."""
    return name.replace(", ", "-").replace(" ", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--classes", type=lambda text: text.split(","), default=list(map(short, SHAPES)))
    parser.add_argument("--tokens", type=int, default=64, help="of each row in a stretch")
    parser.add_argument("--seconds", type=float, default=85, help="begin no class after so many")
    options = parser.parse_args(arguments)
    if unknown := set(options.classes) - set(map(short, SHAPES)):
        parser.error(f"no class {', '.join(sorted(unknown))}; there are {', '.join(map(short, SHAPES))}")
    begin = time.perf_counter()
    measured = {
        "device": mx.device_info().get("device_name", str(mx.default_device())),
        **{"mlx": mx.__version__, "tokens": options.tokens},
    }
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if any(known.get(key) != value for key, value in measured.items()):
        known = {**measured, "classes": {}}  # figures of one machine are not put beside those of another
    for name, shape in SHAPES.items():
        if short(name) not in options.classes:
            continue
        if time.perf_counter() - begin > options.seconds:
            print(f"no time left for {name}", file=sys.stderr)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            figures = measure(shape, options.tokens)
        prompts = f"{shape.prompts[0]} x {shape.prompts[1]:,}"
        known["classes"][name] = {"module": shape.module, "shape": shape.says, "prompts": prompts, **figures}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(known, indent=1) + "\n")
        told = (
            f"{key} {(figures['stock'][key] or 0) / unit:.4g} / {figures['paged'][key] / unit:.4g}"
            for key, _, unit in COLUMNS
        )
        print(f"[{time.perf_counter() - begin:.0f}] {name}: {', '.join(told)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
