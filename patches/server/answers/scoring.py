"""PromptScoring: log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock_cache

CHUNK = 256  # tokens whose logits are alive together


class PromptScoring:
    """Of one prompt, for all answers to it; computed by the thread that computes.

    Args:
        num_top: how many of the likeliest tokens at each place are wanted.

    Attributes:
        logprobs: of each token but the first; None: not computed yet.
        top: ids and log-probabilities of the likeliest at the same places, the likeliest first.
    """

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self.logprobs: list[float] | None = None
        self.top: list[list[tuple[int, float]]] = []

    def compute(self, model: nn.Module, tokens: list[int]) -> None:
        """Run the model over the prompt, apart from the batch, with caches of its own.

        Args:
            model: that answers.
            tokens: of the prompt.
        """
        if self.logprobs is not None:
            return
        caches = stock_cache.make_prompt_cache(model)
        found: list[float] = []
        top: list[list[tuple[int, float]]] = []
        for begin in range(0, len(tokens) - 1, CHUNK):
            end = min(begin + CHUNK, len(tokens) - 1)
            logits = model(mx.array([tokens[begin:end]]), cache=caches)[0].astype(mx.float32)
            rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            wanted = mx.array(tokens[begin + 1 : end + 1])[:, None]
            num_top = min(self.num_top, rows.shape[-1])
            if num_top:
                likeliest = mx.argpartition(-rows, kth=num_top - 1, axis=-1)[:, :num_top]
                wanted = mx.concatenate([wanted, likeliest.astype(wanted.dtype)], axis=1)
            values = mx.take_along_axis(rows, wanted, axis=1)
            mx.eval(values, wanted)
            fetched: Any = wanted.tolist(), values.tolist()
            for words, logprobs in zip(*fetched, strict=True):
                found.append(logprobs[0])
                top.append(sorted(zip(words[1:], logprobs[1:], strict=True), key=lambda pair: -pair[1]))
        self.top, self.logprobs = top, found
