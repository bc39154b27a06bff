"""Multi-token prediction: the heads that some checkpoints contain and mlx-lm drops, and how they are loaded."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm import utils
from mlx_lm.models.base import create_attention_mask

from ...cache.batch_cache import PagedBatchKVCache, first_paged
from ...engine.hidden_states import HiddenStates
from ...errors import ConfigError
from .model_calls import adapt, locking

LAYER = "model.layers.0."  # in the model of one layer that the head's layer is taken from


class Layout(NamedTuple):
    """How a family's checkpoints name a head's weights, and what the head computes.

    Attributes:
        own: prefix of the names of the head's own weights; ``{n}`` stands for the model's number of layers.
        layer: prefix of the names of its decoder layer's weights.
        names: names of the norms of the token's embedding and of the hidden state, the projection, and the final norm.
        hidden_first: the hidden state comes before the embedding in the input of the projection.
        goes_on_normed: the hidden state for the next draft is the head's output after the final norm, not before it.
        one_layer: arguments of a model whose only layer is of the head's kind.
    """

    own: str
    layer: str
    names: tuple[str, str, str, str]
    hidden_first: bool
    goes_on_normed: bool
    one_layer: Mapping[str, Any]

    def prefixes(self, num_layers: int) -> tuple[str, str]:
        """Return :attr:`own` and :attr:`layer` for a model."""
        return self.own.format(n=num_layers), self.layer.format(n=num_layers)


PARTS = ("token_norm", "hidden_norm", "projection", "norm")
QWEN = Layout(
    "mtp.",
    "mtp.layers.0.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    hidden_first=False,
    goes_on_normed=True,
    one_layer={"full_attention_interval": 1, "decoder_sparse_step": 1, "mlp_only_layers": []},
)
DEEPSEEK = Layout(
    "model.layers.{n}.",
    "model.layers.{n}.",
    ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    hidden_first=False,
    goes_on_normed=False,
    one_layer={"first_k_dense_replace": 0},
)
MIMO = Layout(
    "model.mtp_layers.0.",
    "model.mtp_layers.0.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    hidden_first=True,
    goes_on_normed=True,
    one_layer={},
)
LAYOUTS = {
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MIMO,
}
# The embedding and output layer that the head shares with the model; some checkpoints contain a second copy.
SHARED = ("embed_tokens.", "shared_head.head.")


def language_model_of(model: Any) -> Any:
    """Return the language model within a model: the module with the body and the output layer."""
    return getattr(model, "language_model", model)


def logits_of(model: Any, hidden: mx.array) -> mx.array:
    """Return the model's logits for its last hidden states."""
    inner = language_model_of(model)
    logits: mx.array = inner.lm_head(hidden) if "lm_head" in inner else inner.model.embed_tokens.as_linear(hidden)
    return logits


class MTPHead(nn.Module):  # type: ignore[misc]
    """A head that predicts the token after the next one.

    Args:
        model: the model whose embedding and output layer it shares.
        layer: its decoder layer, a module of mlx-lm's.
        layout: layout of the model's family.
    """

    def __init__(self, model: Any, layer: Any, layout: Layout) -> None:
        super().__init__()
        args = language_model_of(model).args
        size, eps = args.hidden_size, args.rms_norm_eps
        self.token_norm, self.hidden_norm, self.norm = (nn.RMSNorm(size, eps) for _ in range(3))
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layer = layer
        self.args = args
        self._layout = layout
        self._model = lambda: model  # in a function: nn.Module would count its weights as the head's

    @property
    def layers(self) -> list[Any]:
        """Return the decoder layers."""
        return [self.layer]

    @property
    def model(self) -> Any:
        """Return the model that the head belongs to."""
        return self._model()

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None, hidden: mx.array | None = None) -> mx.array:
        """Return hidden states ``[B, L, hidden]``, for :meth:`logits` and for the head's next call.

        Args:
            inputs: tokens ``[B, L]``.
            cache: a list of the layer's cache.
            hidden: hidden states of the tokens before them, from the model or the head; None: zeros.
        """
        tokens = language_model_of(self.model).model.embed_tokens(inputs)
        hidden = mx.zeros_like(tokens) if hidden is None else hidden.astype(tokens.dtype)
        both = [self.token_norm(tokens), self.hidden_norm(hidden)]
        x = self.projection(mx.concatenate(both[::-1] if self._layout.hidden_first else both, axis=-1))
        own = None if cache is None else cache[0]
        # Latent attention adds the mask to the scores, so it must be an array.
        mask = create_attention_mask(x, own, return_array=hasattr(self.args, "kv_lora_rank"))
        x = self.layer(x, mask, own)
        return self.norm(x) if self._layout.goes_on_normed else x

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits of the tokens after the head's inputs, given the hidden states that it returned."""
        return logits_of(self.model, hidden if self._layout.goes_on_normed else self.norm(hidden))


# Loading ------------------------------------------------------------------------------------------------------------


def find_head(folder: Path) -> tuple[Path, Layout]:
    """Return a model's folder and the layout of its head. Reads only the configuration and the names of weights.

    Raises:
        ConfigError: the folder has no head.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config.get("model_type")
    layout = LAYOUTS.get(kind)
    if layout is None:
        raise ConfigError(f"mtp: model type {kind} is not supported; supported: {', '.join(LAYOUTS)}")
    own, layer = layout.prefixes(config.get("text_config", config)["num_hidden_layers"])
    names = {name for file in sorted(folder.glob("*.safetensors")) for name in _names_in(file)}
    needed = [f"{own}{name}.weight" for name in layout.names] + [f"{layer}input_layernorm.weight"]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ConfigError(
            f"mtp: the checkpoint {folder} has no {missing[0]}: converters often drop the weights of the multi-token "
            "prediction head; use the published checkpoint"
        )
    return folder, layout


def _names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        return [name for name in json.loads(opened.read(size)) if name != "__metadata__"]


def folder_of(name: str) -> Path:
    """Return the folder of a model, given as a path or as a hub repository, which is downloaded if necessary."""
    folder = Path(name).expanduser()
    return folder if folder.exists() else Path(utils._download(name))


def load_head(model: Any, files: tuple[Path, Layout]) -> MTPHead:
    """Return the head of a model that was loaded from the same folder. Its weights are read when they are first used.

    Raises:
        ConfigError: weights are missing or do not fit the head.
    """
    folder, layout = files
    shell = _one_layer(model, layout)
    weights: dict[str, mx.array] = {}
    convolutions: dict[str, mx.array] = {}
    own, layer = layout.prefixes(language_model_of(model).args.num_hidden_layers)
    for file in sorted(folder.glob("*.safetensors")):
        loaded: Any = mx.load(str(file))
        for name, value in loaded.items():
            if name.startswith(own) and not name.removeprefix(own).startswith(SHARED):
                weights[name] = value
            elif name.endswith("conv1d.weight"):
                convolutions = {"conv1d.weight": value}
    try:
        found = _sanitized(shell, weights, convolutions, layout, own, layer)
        head = MTPHead(model, shell.layers[0], layout)
        nn.quantize(
            head,
            class_predicate=lambda path, module: (
                hasattr(module, "to_quantized")
                and f"{path}.scales" in found
                and utils.infer_quant_config(path, module, found)
            ),
        )
        head.load_weights(list(found.items()))
    except (ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"mtp: the weights of the prediction head in {folder} do not fit it: {said}") from error
    head.eval()
    return head


def _one_layer(model: Any, layout: Layout) -> Any:
    """Return a model of the same kind whose only layer is of the head's kind; its weights are never computed."""
    args = language_model_of(model).args
    fields = {field.name for field in dataclasses.fields(args)}
    changed = {name: value for name, value in layout.one_layer.items() if name in fields}
    if language_model_of(model) is model:
        return type(model)(dataclasses.replace(args, num_hidden_layers=1, **changed))
    text = {**model.args.text_config, "num_hidden_layers": 1, **changed}
    return type(model)(dataclasses.replace(model.args, text_config=text))


def _sanitized(
    shell: Any,
    weights: Mapping[str, mx.array],
    convolutions: Mapping[str, mx.array],
    layout: Layout,
    own: str,
    layer: str,
) -> dict[str, mx.array]:
    """Return a head's weights by the names of its modules, sanitized by mlx-lm like those of the model.

    Args:
        convolutions: one of the model's, from which mlx-lm tells whether norms are stored minus one.
        own: prefix of the head's own weights.
        layer: prefix of its layer's weights.
    """
    names = {f"{own}{name}": part for name, part in zip(layout.names, PARTS, strict=True)}
    own_part = {name: next((p for p in names if name.startswith(f"{p}.")), None) for name in weights}
    as_layer = {f"{LAYER}{k.removeprefix(layer)}": v for k, v in weights.items() if own_part[k] is None}
    # The head's own weights go in beside the layer's: the projection may have 8-bit scales, which mlx-lm dequantises.
    as_layer |= {f"{LAYER}{names[p]}{k.removeprefix(p)}": weights[k] for k, p in own_part.items() if p is not None}
    given = as_layer[f"{LAYER}input_layernorm.weight"]
    found: dict[str, mx.array] = {}
    for name, value in shell.sanitize({**convolutions, **as_layer}).items():
        inner = name.removeprefix("language_model.")
        if inner.startswith(LAYER):
            found[inner.removeprefix(LAYER)] = value
    offset = found["input_layernorm.weight"] is not given  # then norms are stored minus one
    result = {}
    for name, value in found.items():
        part = name.partition(".")[0]
        if part in PARTS:
            result[name] = value + 1.0 if offset and part != "projection" else value
        else:
            result[f"layer.{name}"] = value
    return result


# Hidden states ------------------------------------------------------------------------------------------------------


def _with_hidden(model: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    """Return logits and last hidden states of tokens ``[B, 1]``, joined: a compiled step returns one array."""
    hidden = language_model_of(model).model(inputs, cache=cache)
    logits = logits_of(model, hidden)
    return mx.concatenate([logits, hidden.astype(logits.dtype)], axis=-1)


def _hidden(model: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    """Return last hidden states."""
    hidden: mx.array = language_model_of(model).model(inputs, cache=cache)
    return hidden


_compiled_call: Callable[..., mx.array] = locking(_with_hidden, adapt(_with_hidden))
_plain_call: Callable[..., mx.array] = locking(_hidden)


def _may_be_compiled(inputs: mx.array, caches: Sequence[Any]) -> bool:
    """Return whether a compiled step may compute the call: all logits are needed, and all blocks are in place."""
    first = first_paged(caches)
    if not isinstance(first, PagedBatchKVCache) or inputs.shape[1] > 1:
        return False
    if first.batch.is_pack and not first.batch.as_rows:
        return False
    return all(group.in_place for group in first.pool.groups)


class HiddenCall:
    """A replacement of a model in calls, which also notes the last hidden states.

    Args:
        model: a model of a family with heads.
        states: where the hidden states are noted.
    """

    def __init__(self, model: Any, states: HiddenStates) -> None:
        self.model, self.states = model, states

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits."""
        places = self.states.places(cache, inputs.shape[1])
        if _may_be_compiled(inputs, cache):
            both = _compiled_call(self.model, inputs, cache=cache)
            size = language_model_of(self.model).args.hidden_size
            logits, hidden = both[..., :-size], both[..., -size:] * 1  # a copy: a view would keep the logits
        else:
            hidden = _plain_call(self.model, inputs, cache=cache)
            logits = logits_of(self.model, hidden)
            mx.async_eval(hidden)  # else a prompt's may be computed later, when blocks must not be read
        self.states.note(places, hidden.reshape(-1, hidden.shape[-1]))
        return logits
