"""Conversion of SmolLM2 from a GGUF file to a folder that mlx-lm reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GGUF_BLOCK = 32  # Q4_1 and Q8_0 both quantise blocks of 32 weights
TOKEN_CONTROL = 3
TOKEN_USER_DEFINED = 4

_TOP_LEVEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in the file ``gguf`` to ``folder`` in the form that ``mlx_lm.load`` reads.

    Quantised tensors keep their bits: MLX's affine quantisation holds Q4_1 and Q8_0. Everything else, scales included,
    becomes float32, and with it the activations: it loses nothing, and on a CPU MLX's quantised matrix product is
    some 30 times slower in float16.
    """
    import mlx.core as mx

    with mx.stream(mx.cpu):
        tensors, metadata = mx.load(str(gguf), format="gguf", return_metadata=True)
        weights = {}
        for name, tensor in tensors.items():
            if mx.issubdtype(tensor.dtype, mx.floating):
                tensor = tensor.astype(mx.float32)
            weights[_mlx_name(name)] = tensor
        config = _model_config(metadata, weights)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    _write_tokenizer(metadata, folder)


def _mlx_name(name: str) -> str:
    """Translate a GGUF tensor name: ``blk.3.attn_q.scales`` -> ``model.layers.3.self_attn.q_proj.scales``."""
    module, _, kind = name.rpartition(".")
    if module in _TOP_LEVEL_NAMES:
        return f"{_TOP_LEVEL_NAMES[module]}.{kind}"
    parts = module.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.{kind}"
    raise ValueError(f"unknown tensor {name}")


def _scalar(value: Any) -> Any:
    """Return a metadata value as a Python scalar; float32 values as the short decimal they were written as."""
    value = value.item() if hasattr(value, "item") else value
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _model_config(metadata: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    def get(key: str) -> Any:
        return _scalar(metadata[key])

    heads = get("llama.attention.head_count")
    hidden = get("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "max_position_embeddings": get("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": get("llama.block_count"),
        "num_key_value_heads": get("llama.attention.head_count_kv"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": get("llama.rope.freq_base"),
        # GGUF stores the rows of q and k reordered for rotary embeddings on neighbouring pairs.
        "rope_traditional": True,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "quantization": _quantization(weights),
    }


def _quantization(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return mlx-lm's ``quantization`` entry: the commonest width for all, and one override per layer that differs."""
    bits = {}
    for name, scales in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "scales":
            bits[module] = weights[f"{module}.weight"].shape[-1] * 32 // (scales.shape[-1] * GGUF_BLOCK)
    common = Counter(bits.values()).most_common(1)[0][0]
    quantization: dict[str, Any] = {"group_size": GGUF_BLOCK, "bits": common, "mode": "affine"}
    for module, width in bits.items():
        if width != common:
            quantization[module] = {"group_size": GGUF_BLOCK, "bits": width, "mode": "affine"}
    return quantization


def _write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` from the GGUF file's tokenizer metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges: list[tuple[str, str]] = []
    for merge in metadata["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        merges.append((left, right))

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == TOKEN_CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (TOKEN_CONTROL, TOKEN_USER_DEFINED)
        ]
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

    def named(role: str) -> str:
        token_id: int = _scalar(metadata[f"tokenizer.ggml.{role}_token_id"])
        return tokens[token_id]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": _scalar(metadata["llama.context_length"]),
        "chat_template": metadata["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as indented JSON in UTF-8, with a line end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
