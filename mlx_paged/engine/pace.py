"""How many tokens of prompts a step takes where time bounds them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..kernels.availability import on_metal

LATENCY_MS = 500  # default for the prompts of a step beside requests that decode or wait
ALONE_SECONDS = 5.0  # for a prompt with nobody beside it: until then it cannot be cancelled
LEAST_TOKENS = 32  # fewer take hardly less time: the weights are read once for all of them
GRID = 32  # tokens; shapes that are multiples of it recur
# Operations a second until a step has shown how many there are: of some CPU cores, in float32; with quantised weights.
ASSUMED_SPEED, ASSUMED_QUANTIZED_SPEED = 1e11, 3e9
ASSUMED_METAL_SPEED = 5e12  # of an Apple GPU, with any weights
WEIGHTS_PER_WORD = 8  # of quantised weights in 4 bits


class PrefillPace:
    """Learns how long prompt tokens take, and bounds a step by time: on a CPU, and on Metal (docs/adr/0063).

    There a chunk of 2,048 tokens can take seconds or minutes. Where it takes less than the bound, nothing changes.

    Args:
        model: whose parameters give the first estimate.
        latency_ms: for the prompts of a step beside requests that decode or wait.
        least_alone: tokens of a step without such requests, however long they take.
    """

    def __init__(self, model: Any, latency_ms: int = LATENCY_MS, least_alone: int = 0) -> None:
        self.latency = latency_ms / 1000
        self.least_alone = max(least_alone, LEAST_TOKENS)
        parameters: Any = getattr(model, "parameters", dict)()
        arrays = [array for _, array in tree_flatten(parameters) if isinstance(array, mx.array)]
        quantized = sum(array.size for array in arrays if array.dtype == mx.uint32) * WEIGHTS_PER_WORD
        others = sum(array.nbytes for array in arrays if array.dtype != mx.uint32) / 4
        speeds = (ASSUMED_METAL_SPEED,) * 2 if on_metal() else (ASSUMED_SPEED, ASSUMED_QUANTIZED_SPEED)
        self.seconds_per_token = 2 * others / speeds[0] + 2 * quantized / speeds[1]

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step's chunks: their tokens, and how long they took."""
        if num_tokens >= LEAST_TOKENS:  # fewer cost more each
            self.seconds_per_token += (seconds / num_tokens - self.seconds_per_token) / 2

    def most_tokens(self, is_alone: bool) -> int | None:
        """Return the prompt tokens of the next step, a multiple of :data:`GRID`; None if there is no bound.

        Args:
            is_alone: there is one request in all.
        """
        if not self.seconds_per_token:
            return None
        seconds, least = (ALONE_SECONDS, self.least_alone) if is_alone else (self.latency, LEAST_TOKENS)
        return max(least, int(seconds / self.seconds_per_token) // GRID * GRID)
