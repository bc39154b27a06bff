"""Multi-token prediction heads with random weights, and checkpoints with the published names."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_paged.patches.models import mtp
from scripts.support import model_configs
from tests.support.models.builders import wide

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mimo"]
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", "q_norm.weight")


def model_of(name: str, scale: float = 1.0, *, is_wide: bool = False) -> Any:
    """Return a model of the family; a wide one has head sizes that the kernels take. With a small ``scale`` of what its
    layers add, the next token depends almost only on the last one."""
    model = wide(name) if is_wide else model_configs.build(name)
    _quieten(model, scale)
    return model


def _quieten(model: Any, scale: float) -> None:
    ends = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
    model.update(tree_map_with_path(lambda p, w: w * scale if p.endswith(ends) else w, model.parameters()))
    mx.eval(model.parameters())


def head_of(name: str, model: Any, scale: float | None = None, seed: int = 1) -> Any:
    """Return a head of the model with random weights. With a ``scale`` of what its layer adds, it ignores the hidden
    state and predicts from the last token's embedding, as a model of a small scale does."""
    layout = mtp.LAYOUTS[name]
    mx.random.seed(seed)
    head = mtp.MTPHead(model, mtp._one_layer(model, layout).layers[0], layout)
    head.set_dtype(mx.float32)
    head.update(tree_map_with_path(lambda _, w: w + 0.05 * mx.random.normal(w.shape), head.parameters()))
    if scale is not None:
        size = head.projection.weight.shape[0]
        parts = [mx.eye(size), mx.zeros((size, size))]
        head.projection.weight = mx.concatenate(parts[::-1] if layout.hidden_first else parts, axis=1)
        head.token_norm.weight = mx.ones(size)
        head.norm.weight = mtp.language_model_of(model).model.norm.weight
        _quieten(head, scale)
    head.eval()
    mx.eval(head.parameters())
    return head


# Checkpoints ------------------------------------------------------------------------------------------------------


def published(name: str, args: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Convert weights by mlx-lm's names to the family's published checkpoint format."""
    found: dict[str, mx.array] = {}
    is_qwen = name.startswith("qwen")
    for key, value in weights.items():
        if is_qwen and key.endswith("conv1d.weight"):
            value = value.moveaxis(1, 2)
        if is_qwen and value.ndim == 1 and (key.endswith(NORMS) or key.endswith("k_norm.weight")):
            value = value - 1.0
        prefix, is_experts, rest = key.partition("switch_mlp.")
        if is_experts and name == "qwen3_5_moe":
            if rest == "gate_proj.weight":
                up = weights[f"{prefix}switch_mlp.up_proj.weight"]
                found[f"{prefix}experts.gate_up_proj"] = mx.concatenate([value, up], axis=-2)
            elif rest == "down_proj.weight":
                found[f"{prefix}experts.down_proj"] = value
        elif is_experts:
            found |= {f"{prefix}experts.{number}.{rest}": each for number, each in enumerate(value)}
        elif key.endswith("embed_q.weight"):
            values = weights[key.replace("embed_q", "unembed_out")]
            both = mx.concatenate([value.swapaxes(-1, -2), values], axis=1)
            found[key.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not key.endswith("unembed_out.weight"):
            found[key] = value
    if name.startswith("qwen3_5"):
        found = {
            key.replace("language_model.model.", "model.language_model.").removeprefix("language_model."): value
            for key, value in found.items()
        }
    return found


def write_checkpoint(name: str, folder: Path) -> tuple[Any, Any]:
    """Write a model and its head, in two files, by the published names. Return both as they should be loaded."""
    config = model_configs.config_of(name)
    if name == "deepseek_v3":
        config["num_hidden_layers"] = 61  # mlx-lm drops the head's layer only under this number
    model = _built(name, config)
    head = head_of(name, model)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": name}))
    args = mtp.language_model_of(model).args
    mx.save_safetensors(
        str(folder / "model-00001-of-00002.safetensors"),
        published(name, args, dict(tree_flatten(model.parameters()))),
    )
    mx.save_safetensors(str(folder / "model-00002-of-00002.safetensors"), published_head(name, head))
    return model, head


def _built(name: str, config: dict[str, Any]) -> Any:
    kinds = model_configs.importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = kinds.Model(kinds.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)
    model.eval()
    model.update(tree_map_with_path(lambda _, w: w + 0.02 * mx.random.normal(w.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


def published_head(name: str, head: Any) -> dict[str, mx.array]:
    """Return a head's weights by the names of the family's checkpoints."""
    layout = mtp.LAYOUTS[name]
    own, layer = layout.prefixes(head.args.num_hidden_layers)
    weights = dict(tree_flatten(head.parameters()))
    shell = {f"model.layers.0.{k[6:]}": v for k, v in weights.items() if k.startswith("layer.")}
    found = {key.replace("model.layers.0.", layer): value for key, value in published(name, head.args, shell).items()}
    for part, known in zip(mtp.PARTS, layout.names, strict=True):
        value = weights[f"{part}.weight"]
        found[f"{own}{known}.weight"] = value - 1.0 if name.startswith("qwen") and value.ndim == 1 else value
    if name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite"):  # their checkpoints repeat these
        found[f"{own}embed_tokens.weight"] = head.model.model.embed_tokens.weight
        found[f"{own}shared_head.head.weight"] = head.model.lm_head.weight
    return found
