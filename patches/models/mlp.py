"""MLPs of Llama, Qwen3 and Gemma 3 on CUDA: in a decode step, one launch multiplies by the weights of gate and up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...kernels.nvidia import part
from ..patch import replaces

MLPCall = Callable[[Any, mx.array], mx.array]


@replaces("mlx_lm.models.llama:MLP.__call__", "ec6fbfefb1f0b4c0", only_cuda=True)
@replaces("mlx_lm.models.qwen3:MLP.__call__", "ec6fbfefb1f0b4c0", only_cuda=True)
def adapt(original: MLPCall) -> MLPCall:
    """Return the replacement of ``MLP.__call__``, whose launch applies the activation, too."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        activated = part("narrow_layers").gated(self.gate_proj, self.up_proj, x)
        return original(self, x) if activated is None else self.down_proj(activated)

    return __call__


@replaces("mlx_lm.models.gemma3_text:MLP.__call__", "40fa7af8e58d245e", only_cuda=True)
def adapt_gemma(original: MLPCall) -> MLPCall:
    """Return the replacement of Gemma 3's ``MLP.__call__``."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        found = part("narrow_layers").fused_projections((self.gate_proj, self.up_proj), x)
        return original(self, x) if found is None else self.down_proj(nn.gelu_approx(found[0]) * found[1])

    return __call__
