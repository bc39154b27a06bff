"""Models that the doctor runs: the demo model where it is already, or a small Llama with random weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

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
