"""Small Llama 4 models, and a dense reference with plain masks over all keys, without a cache and MLX's attention."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama4

VOCAB = 96
# Twice: three layers that see chunks and one that sees everything; experts in every second layer.
CONFIG = {
    "model_type": "llama4_text", "vocab_size": VOCAB, "hidden_size": 64, "head_dim": 64, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_bias": False,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "use_qk_norm": True, "floor_scale": 16,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip


def build(chunk: int, seed: int = 0, **changes: Any) -> Any:
    """Return a model with random float32 weights and chunks of ``chunk`` tokens."""
    mx.random.seed(seed)
    text = {**CONFIG, "attention_chunk_size": chunk, **changes}
    model = llama4.Model(llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": text}))
    model.eval()
    mx.eval(model.parameters())
    return model


def dense_logprobs(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probabilities ``[len(tokens), vocab]`` of what follows each token."""
    text = model.language_model.model
    length, chunk = len(tokens), text.attention_chunk_size
    own, other = np.arange(length)[:, None], np.arange(length)[None]
    causal = other <= own
    in_chunk = causal & (own // chunk == other // chunk)
    h = text.embed_tokens(mx.array(tokens)[None])
    for index, layer in enumerate(text.layers):
        mask = mx.array(causal if index % 4 == 3 else in_chunk)
        h = h + _attention(layer.self_attn, layer.input_layernorm(h), mask)
        h = h + layer.feed_forward(layer.post_attention_layernorm(h))
    logits = model.language_model.lm_head(text.norm(h))[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _attention(self: Any, x: mx.array, mask: mx.array) -> mx.array:
    batch, length, _ = x.shape
    q, k, v = (
        layer(x).reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
        for layer, heads in (
            (self.q_proj, self.n_heads),
            (self.k_proj, self.n_kv_heads),
            (self.v_proj, self.n_kv_heads),
        )
    )
    if self.use_rope:
        q, k = self.rope(q), self.rope(k)
        q, k = (mx.fast.rms_norm(heads, weight=None, eps=1e-6) for heads in (q, k))
    else:
        positions = np.arange(1, length + 1)
        factors = np.log(np.floor(positions / self.floor_scale) + 1.0) * self.attn_scale + 1.0
        q = q * mx.array(factors.astype(np.float32))[:, None]
    k, v = (mx.repeat(heads, self.n_heads // self.n_kv_heads, axis=1) for heads in (k, v))
    weights = mx.softmax(mx.where(mask, q @ k.swapaxes(-1, -2) * self.scale, -mx.inf), axis=-1)
    return self.o_proj((weights @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1))


def check(model: Any, prompt: Sequence[int], tokens: Sequence[int], logprobs: np.ndarray) -> None:
    """Assert that the tokens after the prompt, with their log-probabilities ``[n, vocab]``, are the dense reference's
    greedy ones."""
    dense = dense_logprobs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    assert np.argmax(dense, axis=-1).tolist() == list(tokens)
    assert np.sqrt(np.mean((dense - logprobs) ** 2)) <= (1e-5 if mx.default_device() == mx.Device(mx.cpu) else 1e-4)
