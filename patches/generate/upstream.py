"""What the engine uses of mlx-lm."""

from __future__ import annotations

from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache, TokenBuffer

from ...engine.upstream import Upstream
from .known_samplers import known_processors, known_sampler
from .response import Response

UPSTREAM = Upstream(Response, PromptProcessingBatch.Response, TokenBuffer, known_sampler, known_processors, ArraysCache)
