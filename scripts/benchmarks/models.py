"""The models that benchmarks run: random weights of known shapes, or a folder."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, llama, qwen3, qwen3_5, qwen3_moe

import mlx_paged
from mlx_paged import PagedConfig

from .report import BenchError

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
SEED = 7
GROUP_SIZE = 64  # of quantised weights
CPU_CACHE_LIMIT = 1 << 30  # MLX's CPU build keeps 32 MB of freed buffers; larger temporaries are paged in each time


class Preset(NamedTuple):
    """A model of random weights.

    Attributes:
        module: mlx-lm's module of the architecture.
        dtype: the default dtype.
        args: arguments of the module's ModelArgs.
        tied: whether the embedding is the output layer too, where the arguments do not say so: for Gemma 3, mlx-lm
            infers it from the weights.
    """

    module: Any
    dtype: str
    args: dict[str, Any]
    tied: bool


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


def _preset(module: Any, dtype: str, shape: dict[str, Any], *, tied: bool = False, **more: Any) -> Preset:
    """Return a preset of a module that has its model type's name."""
    return Preset(module, dtype, {"model_type": module.__name__.rpartition(".")[2], **shape, **more}, tied)


# hidden, layers, query/KV heads, head dimension, MLP, vocabulary.
PRESETS = {
    "tiny": _preset(llama, "float32", _shape(128, 2, "4/2", 64, 256, 512)),
    # Computes next to nothing, so a step takes the host's time.
    "deep": _preset(llama, "float32", _shape(64, 32, "4/2", 16, 64, 512), tie_word_embeddings=False),
    "llama-22m": _preset(llama, "float32", _shape(256, 8, "8/4", 32, 1024, 49152)),
    "llama-135m": _preset(llama, "float32", _shape(576, 30, "9/3", 64, 1536, 49152)),
    "llama-1b": _preset(llama, "bfloat16", _shape(2048, 16, "32/8", 64, 8192, 128256)),
    "llama-8b": _preset(
        llama, "bfloat16", _shape(4096, 32, "32/8", 128, 14336, 128256), tie_word_embeddings=False, rope_theta=5e5
    ),
    "qwen3-4b": _preset(
        qwen3, "bfloat16", _shape(2560, 36, "32/8", 128, 9728, 151936), tie_word_embeddings=True, rope_theta=1e6
    ),
    # A third of the layers of Qwen3 30B-A3B, with half of its experts.
    "qwen3-moe": _preset(
        qwen3_moe, "bfloat16", _shape(2048, 16, "32/4", 128, 6144, 151936), tie_word_embeddings=False, rope_theta=1e6,
        norm_topk_prob=True, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    # Very narrow layers of Qwen3.5's kinds, 1 in 4 with full attention.
    "qwen3.5-tiny": _preset(
        qwen3_5, "float32", {}, text_config={
            "model_type": "qwen3_5_text", "tie_word_embeddings": True, "full_attention_interval": 4,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, **_shape(64, 24, "4/2", 16, 128, 49152),
        },
    ),
    "gemma3-4b": _preset(
        gemma3_text, "bfloat16", _shape(2560, 34, "8/4", 256, 10240, 262208), tied=True,
        sliding_window=1024, sliding_window_pattern=6,
    ),
}  # fmt: skip


def quantized(model: Any, bits: int | None) -> Any:
    """Return the model with weights of ``bits`` where rows divide into groups; None leaves it unchanged."""
    if bits is None:
        return model

    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0

    nn.quantize(model, GROUP_SIZE, bits, class_predicate=fits)
    return model


def random_model(preset: str, dtype: str | None, bits: int | None = None, **changed: Any) -> Any:
    """Return the preset's model with random weights, the same in every run; quantised if ``bits`` is given.

    Args:
        changed: arguments of the model that differ from the preset's.
    """
    module, _, args, tied = PRESETS[preset]
    mx.random.seed(SEED)
    model = module.Model(module.ModelArgs(**args | changed))
    if tied:
        model.sanitize({})
    model.set_dtype(DTYPES[dtype or PRESETS[preset].dtype])
    quantized(model, bits)
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)  # one by one, since each was larger before its conversion
    return model.eval()


def load_model(path: str, dtype: str | None, bits: int | None = None) -> Any:
    """Load a model from a folder with mlx-lm; quantise it if ``bits`` is given."""
    from mlx_lm.utils import load_model as load

    if not Path(path).is_dir():
        raise BenchError(f"no such model folder: {path}")
    model, _ = load(Path(path))
    if dtype:
        model.set_dtype(DTYPES[dtype])
    quantized(model, bits)
    mx.eval(model.parameters())
    return model


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the model; see :func:`chosen_model`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--random", choices=sorted(PRESETS), default="tiny", help="a model of random weights")
    source.add_argument("--model", default=None, help="a model folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=None, help="of weights (default: the model's)")
    parser.add_argument(
        "--bits", type=int, choices=(2, 3, 4, 5, 6, 8), help="quantise the weights (default: as they are)"
    )


def chosen_model(args: argparse.Namespace) -> Any:
    """Return the model that the arguments name, ``tiny`` if they name none."""
    if not on_gpu():
        mx.set_cache_limit(CPU_CACHE_LIMIT)
    if args.model:
        return load_model(args.model, args.dtype, args.bits)
    return random_model(args.random, args.dtype, args.bits)


def patch_anew(args: argparse.Namespace) -> None:
    """Patch mlx-lm with a new pool, configured by the arguments."""
    mlx_paged.remove_patches()
    gc.collect()  # frees the former pool
    mlx_paged.apply_patches(PagedConfig.from_env().with_arguments(args))


def vocabulary_of(model: Any) -> int:
    """Return the size of a model's vocabulary."""
    return int(model.args.vocab_size) if hasattr(model, "args") else 1000


def on_gpu() -> bool:
    """Return whether MLX computes on a GPU."""
    return mx.default_device() != mx.Device(mx.cpu)
