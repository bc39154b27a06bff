"""A program: tokens per second of a small model, by stock mlx-lm and on the paged cache.

    python -m mlx_paged.cli.doctor.speed

Prints them as JSON. The model is the demo model where it is in the cache, or else a Llama with random weights. The
variables of the paged cache (``MLX_PAGED_KERNEL``, ...) hold.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import llama

from ...by_model import kept_of
from ...config import PagedConfig
from ..generate import raise_cpu_cache_limit

DEMO_FOLDER = "SmolLM2-135M-Instruct-Q4_1"
VOCAB = 320


def demo_folder() -> Path | None:
    """Return where ``scripts/demo_model.py`` puts the demo model, or None if it is not there."""
    if own := os.environ.get("MLX_PAGED_CACHE"):
        cache = Path(own)
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(xdg) / "mlx_paged"
    else:
        cache = Path("~/Library/Caches/mlx_paged" if sys.platform == "darwin" else "~/.cache/mlx_paged")
    try:
        folder = cache.expanduser() / DEMO_FOLDER
    except RuntimeError:  # no home directory
        return None
    return folder if (folder / "manifest.json").is_file() else None


def random_llama(dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """Return a Llama with random weights, the same each time; ``changes`` are fields of mlx-lm's ``ModelArgs``."""
    mx.random.seed(0)
    shape: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }
    model = llama.Model(llama.ModelArgs(**{**shape, **changes}))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


class Work(NamedTuple):
    """How much is measured: tokens of the prompt, tokens generated, and how often."""

    prompt: int
    tokens: int
    repeats: int


GPU_WORK, CPU_WORK = Work(256, 128, 2), Work(8, 6, 1)  # on a CPU to see that it works
RANDOM: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}


def load_model() -> tuple[Any, int, str]:
    """Return the model, the size of its vocabulary, and what it is, for people."""
    folder = demo_folder()
    if folder is not None:
        from mlx_lm.utils import load_model as load

        model, config = load(folder)
        return model, config["vocab_size"], "the demo model, SmolLM2-135M-Instruct"
    dtype = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16
    shape = f"{RANDOM['num_hidden_layers']} layers of {RANDOM['hidden_size']}"
    name = str(dtype).removeprefix("mlx.core.")
    return random_llama(dtype, **RANDOM), RANDOM["vocab_size"], f"a Llama with random weights, {shape}, {name}"


def tokens_per_second(model: Any, prompt: mx.array, count: int) -> tuple[float, list[int]]:
    """Return the rate of greedy decoding after a prompt, without the first token; and the tokens."""
    step = importlib.import_module("mlx_lm.generate").generate_step  # looked up now: patches replace it
    tokens: list[int] = []
    begin = 0.0
    for token, _ in step(prompt, model, max_tokens=count):
        if not tokens:
            begin = time.perf_counter()
        tokens.append(int(token))
    return (len(tokens) - 1) / (time.perf_counter() - begin), tokens


def measure() -> dict[str, Any]:
    """Both, the better of some repeats, after one that is not counted.

    Returns:
        ``model``, ``prompt`` and ``tokens`` (counts), ``stock`` and ``paged`` (tokens per second), ``path`` that the
        paged cache's attention took last, and ``same_tokens``, how many of the tokens agree before the first that
        does not (with weights in 16 bits they may part), and ``kept``, what is kept of the model.
    """
    from ... import patches
    from ...attention.dispatch import last_dispatch

    raise_cpu_cache_limit()
    model, vocab, name = load_model()
    work = CPU_WORK if mx.default_device() == mx.Device(mx.cpu) else GPU_WORK
    prompt = mx.random.randint(0, vocab, (work.prompt,), key=mx.random.key(1))
    speeds: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    for which in ("stock", "paged"):
        if which == "paged":
            patches.apply_patches(PagedConfig.from_env())
        runs = [tokens_per_second(model, prompt, work.tokens) for _ in range(1 + work.repeats)]
        speeds[which] = round(max(speed for speed, _ in runs[1:]), 1)
        tokens[which] = runs[-1][1]
    path, kept = last_dispatch(), sorted(kept_of(model))
    patches.remove_patches()
    pairs = zip(tokens["stock"], tokens["paged"], strict=True)
    return {
        "model": name,
        "prompt": work.prompt,
        "tokens": work.tokens,
        **speeds,
        "path": None if path is None else f"{path.path}: {path.reason}",
        "same_tokens": next((i for i, (a, b) in enumerate(pairs) if a != b), work.tokens),
        "kept": kept,
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
