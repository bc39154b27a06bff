"""Random-weight models of each adapted family: small, but with grouped queries, several layers and odd sizes."""

from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama, qwen3

from scripts.support import model_configs

VOCAB = 320
WINDOW = 40
COMMON = {"hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-5, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}

LATENT_SIZES = {"kv_lora_rank": 64, "qk_rope_head_dim": 64, "index_head_dim": 128}  # sizes that the kernels take
KINDS = ("llama", "llama-sliding", "qwen3", "gemma3")
WINDOWED = ("llama-sliding", "gemma3")


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Return a model of one of KINDS with random float32 weights."""
    mx.random.seed(seed)
    if kind == "llama":
        args = {**COMMON, **HEADS, "model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False}
        model = llama.Model(llama.ModelArgs(**{**args, **changes}))
    elif kind == "llama-sliding":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        args = {**COMMON, **HEADS, "model_type": "llama", "num_hidden_layers": 3, "layer_types": layers}
        model = llama.Model(llama.ModelArgs(**{**args, "sliding_window": WINDOW, **changes}))
    elif kind == "qwen3":
        args = {**COMMON, **HEADS, "model_type": "qwen3", "num_hidden_layers": 2, "max_position_embeddings": 4096}
        model = qwen3.Model(qwen3.ModelArgs(**{**args, "tie_word_embeddings": True, "rope_theta": 1e4, **changes}))
    else:
        args = {**COMMON, **HEADS, "model_type": "gemma3_text", "num_hidden_layers": 3, "query_pre_attn_scalar": 32}
        args = {**args, "sliding_window": WINDOW, "sliding_window_pattern": 3}
        model = gemma3_text.Model(gemma3_text.ModelArgs(**{**args, **changes}))
    model.eval()
    mx.eval(model.parameters())
    return model


def any_model(name: str) -> Any:
    """Return a model of one of KINDS, or of one of mlx-lm's modules."""
    return build(name) if name in KINDS else model_configs.build(name)


def wide(name: str) -> Any:
    """Return a model of one of mlx-lm's modules with head sizes that the kernels take."""
    sizes = {"hidden_size": 256, "hidden_dim": 256, "intermediate_size": 256, "head_dim": 64}
    sizes |= {"hidden_size_per_head": 64, "query_pre_attn_scalar": 64}
    own = model_configs.OVERRIDES.get(name, {})
    inner = own.get("text_config", {})
    sizes = {key: value for key, value in sizes.items() if key not in own}
    inner = inner if isinstance(inner, dict) else {}
    with mock.patch.dict(model_configs.COMMON, sizes), mock.patch.dict(inner, sizes if inner else {}):
        return model_configs.build(name)


def build_latent(name: str) -> Any:
    """Return a model with multi-head latent attention of sizes that the kernels take."""
    with mock.patch.dict(model_configs.COMMON, LATENT_SIZES):
        override = model_configs.OVERRIDES.get(name, {})
        inner = override.get("text_config", {})
        with mock.patch.dict(inner, LATENT_SIZES) if isinstance(inner, dict) and inner else mock.patch.dict(override):
            return model_configs.build(name)


def perturbed(kind: str, scale: float, **changes: Any) -> Any:
    """Return the model of a kind with noise added to its weights, ``scale`` times their deviation: as a draft it often
    agrees."""
    return with_noise(build(kind, **changes), scale)


def with_noise(model: Any, scale: float) -> Any:
    """Add noise to a model's weights, ``scale`` times their deviation, and return it."""
    mx.random.seed(1)
    noisy = tree_map(lambda w: w + scale * mx.std(w) * mx.random.normal(w.shape), model.parameters())
    model.update(noisy)
    mx.eval(model.parameters())
    return model


def prompt_of(length: int, seed: int = 0) -> mx.array:
    """Return random token ids ``[length]``."""
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB, length), dtype=mx.uint32)


def small_prompt(length: int, seed: int = 0) -> mx.array:
    """Like :func:`prompt_of`, of the vocabulary of ``model_configs``."""
    return prompt_of(length, seed) % model_configs.VOCAB


def greedy(model: Any, prompt: mx.array, num_tokens: int = 64, **kwargs: Any) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens and their log-probabilities ``[num_tokens, vocab]`` by mlx-lm's generate_step."""
    tokens, logprobs = [], []
    for token, logprob in generate_step(prompt, model, max_tokens=num_tokens, **kwargs):
        tokens.append(token)
        logprobs.append(np.array(logprob.astype(mx.float32)))
    return tokens, np.stack(logprobs)


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)))


def tolerance_of(kind: str, num_tokens: int) -> float:
    """Return the largest RMS by which float32 log-probabilities after ``num_tokens`` tokens may differ from mlx-lm's:
    it sums over a full window in its ring's order, and sums of floats depend on the order. Otherwise they are bitwise
    equal."""
    return 1e-5 if kind in WINDOWED and num_tokens > WINDOW else 0.0


def assert_same(
    got: tuple[list[int], np.ndarray], expected: tuple[list[int], np.ndarray], tolerance: float = 0.0
) -> None:
    """Assert equal tokens, and log-probabilities whose RMS difference is at most ``tolerance``."""
    assert got[0] == expected[0]
    assert rms(got[1], expected[1]) <= tolerance
