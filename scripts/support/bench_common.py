"""What bench.py needs: models, the machine, statistics, the cost of appends, tables and the figure."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, llama, qwen3, qwen3_moe

from mlx_paged import BlockPool, LayerGroup
from mlx_paged.config import free_memory

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
SEED = 7
APPEND_HEADS, APPEND_HEAD_DIM = 8, 64
APPEND_STEPS = 64
APPEND_BATCHES = (1, 8)


class BenchError(Exception):
    """The benchmark cannot be run, or did not measure what it says it measures."""


class Preset(NamedTuple):
    """A model of random weights.

    Attributes:
        module: mlx-lm's module of the architecture.
        dtype: unless ``--dtype`` says otherwise.
        args: of the module's ModelArgs.
        tied: Gemma 3's arguments do not say that the embedding is the output layer too; mlx-lm sees it from the
            weights.
    """

    module: Any
    dtype: str
    args: dict[str, Any]
    tied: bool = False


def _shape(hidden: int, layers: int, heads: str, head_dim: int, intermediate: int, vocab: int) -> dict[str, Any]:
    q_heads, kv_heads = heads.split("/")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": int(q_heads),
        "num_key_value_heads": int(kv_heads),
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    }


# hidden, layers, query/KV heads, head dimension, MLP, vocabulary.
PRESETS = {
    "tiny": Preset(llama, "float32", {"model_type": "llama"} | _shape(128, 2, "4/2", 64, 256, 512)),
    # Next to nothing to compute: what a step takes is the host's time.
    "deep": Preset(
        llama, "float32", {"model_type": "llama", "tie_word_embeddings": False} | _shape(64, 32, "4/2", 16, 64, 512)
    ),
    "llama-135m": Preset(llama, "float32", {"model_type": "llama"} | _shape(576, 30, "9/3", 64, 1536, 49152)),
    "llama-1b": Preset(llama, "bfloat16", {"model_type": "llama"} | _shape(2048, 16, "32/8", 64, 8192, 128256)),
    "qwen3-small": Preset(
        qwen3,
        "bfloat16",
        {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1e6}
        | _shape(1024, 28, "16/8", 128, 3072, 151936),
    ),
    "llama-8b": Preset(
        llama,
        "bfloat16",
        {"model_type": "llama", "tie_word_embeddings": False, "rope_theta": 5e5}
        | _shape(4096, 32, "32/8", 128, 14336, 128256),
    ),
    "qwen3-4b": Preset(
        qwen3,
        "bfloat16",
        {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1e6}
        | _shape(2560, 36, "32/8", 128, 9728, 151936),
    ),
    # The layers of Qwen3 30B-A3B, a third of them and half of its experts.
    "qwen3-moe": Preset(
        qwen3_moe,
        "bfloat16",
        {"model_type": "qwen3_moe", "tie_word_embeddings": False, "rope_theta": 1e6, "norm_topk_prob": True}
        | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []}
        | _shape(2048, 16, "32/4", 128, 6144, 151936),
    ),
    "gemma3-4b": Preset(
        gemma3_text,
        "bfloat16",
        {"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 6}
        | _shape(2560, 34, "8/4", 256, 10240, 262208),
        tied=True,
    ),
    "gemma3-small": Preset(
        gemma3_text,
        "bfloat16",
        {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}
        | _shape(640, 18, "4/1", 256, 2048, 262144),
    ),
}


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """How the model's weights are quantised; see :func:`quantized`."""
    parser.add_argument(
        "--bits", type=int, choices=(2, 3, 4, 5, 6, 8), help="quantise the weights (default: as they are)"
    )
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64, help="of --bits (default 64)")


def quantized(model: Any, bits: int | None, group_size: int) -> Any:
    """The model, with weights of so many bits where their rows can be divided into groups; None leaves it as it is.

    Raises:
        BenchError: it has no weight that can be quantised.
    """
    if bits is None:
        return model

    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

    if not any(fits(name, module) for name, module in model.named_modules()):
        raise BenchError(f"the model has no weights that can be quantised in groups of {group_size}")
    nn.quantize(model, group_size, bits, class_predicate=fits)
    return model


def preset_model(preset: str) -> Any:
    """The preset's model; its weights are lazy."""
    module, _, args, tied = PRESETS[preset]
    model = module.Model(module.ModelArgs(**args))
    if tied:
        model.sanitize({})
    return model


def random_model(preset: str, dtype: str | None, bits: int | None = None, group_size: int = 64) -> Any:
    """The preset's model with random weights, the same in every run; of so many bits, if that is said."""
    mx.random.seed(SEED)
    model = preset_model(preset)
    model.set_dtype(DTYPES[dtype or PRESETS[preset].dtype])
    quantized(model, bits, group_size)
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)  # one by one: each was larger before
    return model.eval()


def load_model(path: str, dtype: str | None, bits: int | None = None, group_size: int = 64) -> Any:
    """A model from a folder, as mlx-lm loads it, and then with weights of so many bits, if that is said."""
    from mlx_lm.utils import load_model as load

    if not Path(path).is_dir():
        raise BenchError(f"no such model folder: {path}")
    model, _ = load(Path(path))
    if dtype:
        model.set_dtype(DTYPES[dtype])
    quantized(model, bits, group_size)
    mx.eval(model.parameters())
    return model


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and the samples themselves."""
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": list(samples),
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Spread of the ratios of paired samples."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def show(values: dict[str, Any] | None, digits: int = 2) -> str:
    """``median (min..max)``, or a dash."""
    if values is None:
        return "-"
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f}..{values['max']:.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """LeftPadding as wide as their widest cell, right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        name = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if name.returncode == 0:
            return name.stdout.strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Hardware, system and versions, as far as figures depend on them."""
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": "gpu" if on_gpu else "cpu",
        "gpu": mx.device_info().get("device_name") if on_gpu else None,
        "cpu": _cpu_name(),
        "cores": usable,
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "mlx_paged")},
        "load_average": list(os.getloadavg()),
    }


def plot(results: Sequence[dict[str, Any]], path: Path, title: str) -> str | None:
    """Write the figure. Returns why it was not written, or None."""
    try:
        import matplotlib
    except ImportError:
        return "no bench.png: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with_prefill = results[0]["prefill_tokens_per_s"] is not None
    panels = [("decode_ms_per_token", "decode, ms/token")]
    if with_prefill:
        panels.append(("prefill_tokens_per_s", "prefill, tokens/s"))
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(4.6 * (len(panels) + 1), 4), layout="constrained")
    for axis, (field, label) in zip(axes, panels, strict=False):
        for side in dict.fromkeys(r["side"] for r in results):
            _line(axis, [r for r in results if r["side"] == side], field, side)
        axis.set_title(label)
        axis.set_ylim(bottom=0)
    for side in dict.fromkeys(r["side"] for r in results if r["block_size"] is not None):
        rows = [r for r in results if r["side"] == side]
        _line(axes[-1], rows, "decode_ratio", f"{side} decode")
        if with_prefill:
            _line(axes[-1], rows, "prefill_ratio", f"{side} prefill", linestyle="--")
    axes[-1].axhline(1, color="black", linewidth=0.8)
    axes[-1].set_title("time, paged / stock")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({r["context"] for r in results}))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.set_xlabel("context, tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return None


def _line(axis: Any, rows: Sequence[dict[str, Any]], field: str, label: str, **style: Any) -> None:
    medians = [r[field]["median"] for r in rows]
    below = [r[field]["median"] - r[field]["min"] for r in rows]
    above = [r[field]["max"] - r[field]["median"] for r in rows]
    axis.errorbar([r["context"] for r in rows], medians, [below, above], label=label, marker="o", capsize=3, **style)


def measure_append(sizes: Sequence[int], block_size: int, dtype: mx.Dtype, repeats: int) -> list[dict[str, Any]]:
    """Time of one append (reserve, write, evaluate) to pools of several sizes, per batch size."""
    if sum(sizes) > 0.9 * free_memory():
        raise BenchError(
            f"pools of {sum(sizes) / 1e9:.1f} GB together do not fit the {free_memory() / 1e9:.1f} GB that are free"
        )
    pools = [_append_pool(size, block_size, dtype) for size in sizes]
    results = []
    for batch in APPEND_BATCHES:
        x = mx.random.normal((batch, APPEND_HEADS, 1, APPEND_HEAD_DIM)).astype(dtype)
        mx.eval(x)
        samples: list[list[float]] = [[] for _ in pools]
        for repeat in range(repeats + 1):  # the first is the warm-up
            order = range(len(pools)) if repeat % 2 == 0 else reversed(range(len(pools)))
            for index in order:
                microseconds = _append_once(pools[index], batch, x)
                if repeat:
                    samples[index].append(microseconds)
        for pool, size, mine in zip(pools, sizes, samples, strict=True):
            results.append(
                {
                    "pool_bytes": size,
                    "pool_bytes_reserved": pool.stats().bytes_reserved,
                    "block_size": block_size,
                    "batch": batch,
                    "microseconds": spread(mine),
                    "ratio_to_first": ratios(mine, samples[0]),
                }
            )
    return results


def _append_pool(size: int, block_size: int, dtype: mx.Dtype) -> BlockPool:
    """A pool of one layer and ``size`` bytes, whose free blocks lie spread over all of it."""
    pool = BlockPool([LayerGroup((0,))], block_size=block_size)
    blocks = size // (block_size * APPEND_HEADS * APPEND_HEAD_DIM * 2 * dtype.size)
    needed = max(APPEND_BATCHES) * -(-APPEND_STEPS // block_size)
    if blocks < needed:
        raise BenchError(f"a pool of {size} bytes is too small: {blocks} blocks of {block_size}, {needed} needed")
    ids = pool.allocate(0, blocks)
    x = mx.zeros((1, APPEND_HEADS, 1, APPEND_HEAD_DIM), dtype)
    pool.set_geometry(0, x, x, batch=x.shape[0])
    pool.release(0, ids[:: blocks // needed])
    mx.eval(pool.fence(0))
    return pool


def _append_once(pool: BlockPool, batch: int, x: mx.array) -> float:
    """Mean microseconds of an append to ``batch`` sequences."""
    tables = [pool.new_table() for _ in range(batch)]
    begin = time.perf_counter()
    for _ in range(APPEND_STEPS):
        for sequence in tables:
            pool.append_tokens(sequence, 1)
        pool.write_decode(tables, 0, x, x)
        mx.eval(pool.fence(0))
    elapsed = time.perf_counter() - begin
    for sequence in tables:
        pool.release_table(sequence)
    return 1e6 * elapsed / APPEND_STEPS


def print_generation(results: Sequence[dict[str, Any]]) -> None:
    """The table, which paths ran, and whether both sides said the same."""
    header = (
        "context",
        "side",
        "prefill tok/s",
        "ratio",
        "decode ms/token",
        "ratio",
        "peak MB",
        "tokens",
        "decode path",
    )
    rows = [
        (
            str(r["context"]),
            r["side"],
            show(r["prefill_tokens_per_s"], 1),
            show(r["prefill_ratio"]),
            show(r["decode_ms_per_token"]),
            show(r["decode_ratio"]),
            f"{r['peak_bytes'] / 1e6:.0f}",
            "-" if r["block_size"] is None else "same" if r["same_tokens"] else "differ",
            "mlx-lm" if r["dispatch"] is None else r["dispatch"]["last"]["path"],
        )
        for r in results
    ]
    print("\nMedian (min..max) of the repeats. Ratios are times, paged / stock, of paired repeats: below 1 is faster.")
    print("Peak MB: beyond the model (and the caches all samples start from, where the prompt is not computed).\n")
    print(table(header, rows))
    paths = {reason for r in results if r["dispatch"] for reason in r["dispatch"]["decode"]}
    print(f"\nPaged decode ran through: {'; '.join(sorted(paths))}")
    largest = max(r["max_logprob_difference"] for r in results)
    differing = [f"{r['side']} at {r['context']} from token {r['first_different_token']}" for r in results]
    differing = [text for text, r in zip(differing, results, strict=True) if not r["same_tokens"]]
    verdict = "the same on both sides" if not differing else "DIFFERENT: " + ", ".join(differing)
    print(f"Greedy tokens: {verdict}. Largest difference of a log-probability: {largest:.2g}.")


def print_append(results: Sequence[dict[str, Any]]) -> None:
    header = ("block", "batch", "pool MB", "us/append", "ratio to the first pool")
    rows = [
        (
            str(r["block_size"]),
            str(r["batch"]),
            f"{r['pool_bytes_reserved'] / 1e6:.0f}",
            show(r["microseconds"], 1),
            show(r["ratio_to_first"]),
        )
        for r in results
    ]
    print("\nOne append to one layer: reserve, write_decode, evaluate.\n")
    print(table(header, rows))
