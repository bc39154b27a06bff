"""Layers with states: packs, gated delta nets (Qwen3-Next, Qwen3.5, OLMo hybrid), Mamba 2, n-gram embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...cache.packed_states import PackedStates
from ...kernels import delta_rule
from ..patch import replaces

# Classes whose ``__call__`` reads and writes a layer's state, and its fingerprints.
MIXERS = {
    "bailing_hybrid:LinearAttention": "8e96bfec8ac78ed2",
    "bailing_moe_linear:LinearAttention": "cf3e3d916d14b062",
    "bailing_moe_v3:BailingKDA": "a5dd764cec4c25cc",
    "falcon_h1:FalconH1Mixer": "d5e0f7262ee49d67",
    "gear:ConvKVGatedMixer": "01dffbc49d52fe4e",
    "granitemoehybrid:GraniteMoeHybridMamba2Mixer": "1ae1fe3eae6db01d",
    "jamba:JambaMambaMixer": "5b45359a8f0a9b59",
    "kimi_k3:KimiK3DeltaAttention": "d214790e5caaaaac",
    "kimi_linear:KimiDeltaAttention": "45378c30af84780a",
    "lfm2:ShortConv": "96fd13d287863e28",
    "lfm2_moe:ShortConv": "96fd13d287863e28",
    "mamba:MambaBlock": "723c09aaef1fe179",
    "mamba2:Mamba2Block": "95d33863ff17654e",
    "nemotron_h:NemotronHMamba2Mixer": "1ae1fe3eae6db01d",
    "olmo_hybrid:GatedDeltaNet": "149de2850220fa45",
    "plamo2:Mamba": "8e8dd67701548362",
    "qwen3_5:GatedDeltaNet": "6749a12b1dae07b9",
    "qwen3_next:Qwen3NextGatedDeltaNet": "0fe328fa5f10af94",
    "recurrent_gemma:RecurrentBlock": "6f93b864d9891593",
    "rwkv7:Rwkv7ChannelMixing": "28724bb0e0516cdd",
    "rwkv7:Rwkv7TimeMixing": "3393aa53f33176a3",
}


def adapt_mixer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement that computes a pack's tokens sequence by sequence, or several sequences side by side."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, PackedStates):
                return given.run(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return __call__


for _target, _fingerprint in MIXERS.items():
    replaces(f"mlx_lm.models.{_target}.__call__", _fingerprint)(adapt_mixer)


@replaces("mlx_lm.models.gated_delta:gated_delta_ops", "dbaebb7ab54e37d2")
def adapt_gated_delta(original: delta_rule.DeltaRule) -> delta_rule.DeltaRule:
    """Return the replacement of mlx-lm's loop over tokens, which computes prompts by chunks of tokens. On Metal mlx-lm
    calls its own kernel instead of this loop."""

    def gated_delta_ops(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        compute = delta_rule.chunked if delta_rule.is_supported(q, v, g) else original
        return compute(q, k, v, g, beta, state, mask)

    return gated_delta_ops


@replaces("mlx_lm.models.ssm:ssm_attn", "1667919b35dc6e1e")
def adapt_ssm(original: Callable[..., tuple[mx.array, mx.array]]) -> Callable[..., tuple[mx.array, mx.array]]:
    """Return the replacement of mlx-lm's state-space layer (Falcon-H1, Granite hybrid, Nemotron-H, Mamba 2, PLaMo 2)
    where mlx-lm has no kernel: one token of each sequence takes 35 nodes of MLX's graph instead of 69. On Metal mlx-lm
    calls its own kernel instead."""
    from mlx_lm.models import ssm  # imported only with the first model that has such layers

    def ssm_attn(
        x: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
        step: int = 256,
    ) -> tuple[mx.array, mx.array]:
        if x.shape[1] > 1 or state is None or mask is not None or lengths is not None:
            return original(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths, step)
        return _one_token(x, A_log, B, C, D, ssm.compute_dt(dt, dt_bias, time_step_limit), state)

    return ssm_attn


def _one_token(
    x: mx.array, A_log: mx.array, B: mx.array, C: mx.array, D: mx.array, dt: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the result of ``ssm_attn`` for one token ``[batch, 1, heads, size]`` of each sequence, bit for bit,
    without multiplications by one and sums over one token."""
    batch, _, num_heads, size = x.shape
    groups, state_size = B.shape[2:]
    by_group = batch, groups, num_heads // groups
    decay = mx.exp(dt * -mx.exp(A_log).astype(dt.dtype)).reshape(*by_group, 1, 1)
    written = (dt[..., None] * x).reshape(*by_group, size, 1)
    of_group = batch, groups, 1, 1, state_size
    B, C = B.reshape(of_group), C.reshape(of_group).swapaxes(3, 4)
    grouped = state.reshape(*by_group, size, state_size)
    read = (B @ C) * written + decay * (grouped @ C)
    y = read.reshape(x.shape).astype(x.dtype) + x * D[:, None]
    return y, (written * B + decay * grouped).reshape(state.shape)


@replaces("mlx_lm.models.longcat_flash_ngram:NgramEmbedding.__call__", "062dbfc9a30b941b")
def adapt_ngrams(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a replacement that always keeps n - 1 tokens, padded with zeros in front: rows must have equal
    numbers to be batched. The embedding itself uses zeros for tokens before the first one."""

    def __call__(self: Any, input_ids: mx.array, cache: Any = None) -> mx.array:
        if isinstance(cache, PackedStates):
            embedded: mx.array = cache.run(__call__, self, input_ids, cache)
            return embedded
        embedded = original(self, input_ids, cache)
        if cache is not None and (missing := self.n - 1 - cache[0].shape[-1]) > 0:
            cache[0] = mx.pad(cache[0], [(0, 0), (missing, 0)])
        return embedded

    return __call__
