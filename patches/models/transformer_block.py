"""Transformer blocks of Llama and Qwen3, and MLPs of these and of Gemma 3. In a compiled decode step, activations and
additions of the residual are fused with the products before them, if there is such a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from ...cache.batch_cache import PagedBatchKVCache
from ...kernels.inference import thread
from ...kernels.nvidia import added, gated, projected
from ..patch import replaces

ModuleCall = Callable[..., mx.array]


@replaces("mlx_lm.models.llama:MLP.__call__", "ec6fbfefb1f0b4c0")
@replaces("mlx_lm.models.qwen3:MLP.__call__", "ec6fbfefb1f0b4c0")
def adapt_mlp(original: ModuleCall) -> ModuleCall:
    """Return the replacement of ``MLP.__call__``. Its attribute ``before_output`` does everything but ``down_proj``."""

    def activated(self: Any, x: mx.array) -> mx.array:
        fused = gated(self.gate_proj, self.up_proj, x)
        return swiglu(self.gate_proj(x), self.up_proj(x)) if fused is None else fused

    def __call__(self: Any, x: mx.array) -> mx.array:
        section = thread.inference
        if section is None or not section.allowed:  # no kernel applies: skip the checks, which cost host time
            return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(activated(self, x))

    __call__.before_output = activated  # type: ignore[attr-defined]
    return __call__


@replaces("mlx_lm.models.llama:TransformerBlock.__call__", "4614a766e7f00ade")
@replaces("mlx_lm.models.qwen3:TransformerBlock.__call__", "4614a766e7f00ade")
def adapt(original: ModuleCall) -> ModuleCall:
    """Replace upstream's ``TransformerBlock.__call__``. While a step is traced and attention and MLP are adapted, their
    output layers add the residual."""

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any | None = None) -> mx.array:
        if not isinstance(cache, PagedBatchKVCache) or not cache.batch.is_traced:
            return original(self, x, mask, cache)
        attention, mlp = self.self_attn, self.mlp
        attended, activated = _before_output(attention), _before_output(mlp)
        if attended is None or activated is None:
            return original(self, x, mask, cache)
        h = added(attention.o_proj, attended(attention, self.input_layernorm(x), mask, cache), x)
        return added(mlp.down_proj, activated(mlp, self.post_attention_layernorm(h)), h)

    return __call__


def _before_output(module: Any) -> ModuleCall | None:
    return getattr(type(module).__call__, "before_output", None)


@replaces("mlx_lm.models.gemma3_text:MLP.__call__", "40fa7af8e58d245e")
def adapt_gemma_mlp(original: ModuleCall) -> ModuleCall:
    """Replace Gemma 3's ``MLP.__call__`` by one that projects gate and up together if a kernel can."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        gate, up = projected((self.gate_proj, self.up_proj), x)
        return self.down_proj(nn.gelu_approx(gate) * up)

    return __call__
