"""Multi-token prediction heads: their equations against NumPy, and loading of checkpoints with the published names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import load_model

import mlx_paged
from mlx_paged import ConfigError
from mlx_paged.patches.models import mtp
from tests.support.cases import quick
from tests.support.models.prediction_heads import FAMILIES, head_of, model_of, published_head, write_checkpoint

Array = np.ndarray[Any, Any]
TOKENS = [3, 1, 4, 1, 5, 9]


def numpy(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32), np.float64)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def mimo_layer(x: Array, weights: dict[str, Array], args: Any) -> Array:
    """A layer of Qwen2's kind: attention with rotation and biases, then a gated product."""
    length, heads, kv_heads = len(x), args.num_attention_heads, args.num_key_value_heads
    size = args.hidden_size // heads
    normed = rms_norm(x, weights["input_layernorm.weight"], args.rms_norm_eps)

    def projected(name: str, num: int) -> Array:
        made = normed @ weights[f"self_attn.{name}.weight"].T + weights[f"self_attn.{name}.bias"]
        return made.reshape(length, num, size).transpose(1, 0, 2)

    angles = np.arange(length)[:, None] * args.rope_theta ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles), np.sin(angles)

    def rotated(y: Array) -> Array:
        first, second = y[..., : size // 2], y[..., size // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    queries, keys = rotated(projected("q_proj", heads)), rotated(projected("k_proj", kv_heads))
    values = projected("v_proj", kv_heads)
    keys, values = (np.repeat(y, heads // kv_heads, axis=0) for y in (keys, values))
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(size)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (scores / scores.sum(-1, keepdims=True)) @ values
    x = x + attended.transpose(1, 0, 2).reshape(length, -1) @ weights["self_attn.o_proj.weight"].T
    normed = rms_norm(x, weights["post_attention_layernorm.weight"], args.rms_norm_eps)
    gate = silu(normed @ weights["mlp.gate_proj.weight"].T) * (normed @ weights["mlp.up_proj.weight"].T)
    return x + gate @ weights["mlp.down_proj.weight"].T


def mlx_lms_layer(x: Array, head: Any) -> Array:
    """The family's own layer, as mlx-lm computes it."""
    made = mx.array(x, mx.float32)[None]
    mask = create_attention_mask(made, None, return_array=hasattr(head.args, "kv_lora_rank"))
    return numpy(head.layer(made, mask, None)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_computes_the_published_equations(name: str) -> None:
    """Uses the weights as stored in the checkpoint; Qwen's norm weights are stored minus one."""
    model = model_of(name)
    head = head_of(name, model)
    layout = mtp.LAYOUTS[name]
    own, layer = layout.prefixes(head.args.num_hidden_layers)
    weights = {key: numpy(value) for key, value in published_head(name, head).items()}
    offset, eps = float(name.startswith("qwen")), head.args.rms_norm_eps
    norms = {
        key: weights[f"{own}{key}.weight"] + offset for key in layout.names if weights[f"{own}{key}.weight"].ndim == 1
    }
    text = mtp.language_model_of(model)
    embedding = numpy(text.model.embed_tokens.weight)
    output = numpy(text.lm_head.weight) if "lm_head" in text else embedding
    token_norm, hidden_norm, projection, norm = layout.names
    hidden = np.random.default_rng(0).normal(size=(len(TOKENS), head.args.hidden_size))

    token = rms_norm(embedding[TOKENS], norms[token_norm], eps)
    before = rms_norm(hidden, norms[hidden_norm], eps)
    both = [before, token] if name == "mimo" else [token, before]
    x = np.concatenate(both, axis=-1) @ weights[f"{own}{projection}.weight"].T
    if name == "mimo":
        inner = {k.removeprefix(layer): v for k, v in weights.items()}
        x = mimo_layer(x, inner, head.args)
    else:
        x = mlx_lms_layer(x, head)
    normed = rms_norm(x, norms[norm], eps)
    expected = x if name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite") else normed

    found = head(mx.array([TOKENS], mx.uint32), hidden=mx.array(hidden, mx.float32)[None])
    assert np.abs(numpy(found[0]) - expected).max() < 2e-4 * np.abs(expected).max()
    logits = normed @ output.T
    assert np.abs(numpy(head.logits(found)[0]) - logits).max() < 2e-4 * np.abs(logits).max()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(FAMILIES, "qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe", "mimo"))
def test_published_checkpoint_loads_model_and_head(name: str, tmp_path: Path) -> None:
    model, head = write_checkpoint(name, tmp_path / "made")
    loaded, _ = load_model(tmp_path / "made")
    found = mtp.load_head(loaded, mtp.find_head(tmp_path / "made"))
    for mine, theirs in ((model, loaded), (head, found)):
        expected, got = (dict(tree_flatten(each.parameters())) for each in (mine, theirs))
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            assert mx.allclose(value, got[key], atol=1e-6).item(), key
    tokens = mx.array([TOKENS], mx.uint32)
    hidden = mx.random.normal((1, len(TOKENS), head.args.hidden_size))
    assert mx.allclose(head(tokens, hidden=hidden), found(tokens, hidden=hidden), atol=1e-4).item()


def test_quantised_weights_of_a_head_are_loaded(tmp_path: Path) -> None:
    _, head = write_checkpoint("mimo", tmp_path)
    nn.quantize(head, 32, 8)
    mx.save_safetensors(str(tmp_path / "model-00002-of-00002.safetensors"), _published_quantised(head))
    loaded, _ = load_model(tmp_path)
    found = mtp.load_head(loaded, mtp.find_head(tmp_path))
    assert isinstance(found.projection, nn.QuantizedLinear) and isinstance(found.layer.mlp.up_proj, nn.QuantizedLinear)
    assert found.projection.bits == 8 and found.projection.group_size == 32
    tokens = mx.array([TOKENS], mx.uint32)
    assert mx.allclose(head(tokens), found(tokens), atol=1e-4).item()


def _published_quantised(head: Any) -> dict[str, mx.array]:
    names = dict(zip(mtp.PARTS, mtp.MIMO.names, strict=True))
    found = {}
    for key, value in tree_flatten(head.parameters()):
        part, _, rest = key.partition(".")
        found[mtp.MIMO.own + (f"{names[part]}.{rest}" if part in names else rest)] = value
    return found


# Refused ----------------------------------------------------------------------------------------------------------


UP = "model.mtp_layers.0.mlp.up_proj.weight"
REFUSED: dict[str, tuple[Callable[[dict[str, mx.array]], Any], str]] = {
    "no head": (lambda weights: weights.clear(), r"mtp: the checkpoint .* has no model\.mtp_layers\.0\.token_"),
    "a missing weight": (lambda weights: weights.pop(UP), "the prediction head in .* do not fit it: .*up_proj"),
    "a shape": (lambda weights: weights.update({UP: weights[UP][:-1]}), "do not fit it: .*up_proj"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_unusable_weights_of_a_head_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    model, head = write_checkpoint("mimo", tmp_path)
    weights, before = published_head("mimo", head), mlx_paged.by_model.kept_of(model)
    change(weights)
    mx.save_safetensors(str(tmp_path / "model-00002-of-00002.safetensors"), weights)
    with pytest.raises(ConfigError, match=message):
        mtp.load_head(model, mtp.find_head(tmp_path))
    assert mlx_paged.by_model.kept_of(model) == before
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model type llama is not supported; supported: "):
        mtp.find_head(tmp_path)
