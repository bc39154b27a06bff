"""What the engine uses of mlx-lm."""

from __future__ import annotations

from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache, TokenBuffer
from mlx_lm.sample_utils import greedy_sampler

from ...engine.upstream import Upstream
from .response import Response

UPSTREAM = Upstream(Response, PromptProcessingBatch.Response, TokenBuffer, greedy_sampler, ArraysCache)
