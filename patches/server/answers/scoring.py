"""PromptScoring: log-probabilities of a prompt's own tokens."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock_cache

CHUNK = 256  # tokens whose logits are alive together
FIRST = 16  # tokens of a prompt's first slice, and the fewest: on a CPU 256 can take half a minute
SLICE_SECONDS = 0.25  # that others wait for a slice, about


class PromptScoring:
    """Scores one prompt for all answers to it, slice by slice: between two slices the thread that computes has others'
    turn, and may drop it.

    Args:
        num_top: how many of the likeliest tokens at each place are wanted.

    Attributes:
        logprobs: of each token but the first; None: not all of them are computed.
        top: ids and log-probabilities of the likeliest at the same places, the likeliest first.
    """

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self.logprobs: list[float] | None = None
        self.top: list[list[tuple[int, float]]] = []
        self._found: list[float] = []
        self._caches: list[Any] | None = None
        self._num_tokens = FIRST  # of the next slice

    def step(self, model: nn.Module, tokens: list[int]) -> bool:
        """Run the model over the next slice of the prompt, apart from the batch, in caches of its own. Return whether
        all is scored.

        Args:
            model: that answers.
            tokens: of the prompt.
        """
        if self.logprobs is not None:
            return True
        if self._caches is None:
            self._caches = stock_cache.make_prompt_cache(model)
        begin, last = len(self._found), len(tokens) - 1
        end = min(begin + min(self._num_tokens, CHUNK), last)
        if begin < end:
            started = time.perf_counter()
            self._score(model, tokens, begin, end)
            seconds = time.perf_counter() - started
            if seconds < SLICE_SECONDS / 2:
                self._num_tokens = min(2 * self._num_tokens, CHUNK)
            elif seconds > SLICE_SECONDS:
                self._num_tokens = max(self._num_tokens // 2, FIRST)
        if end < last:
            return False
        self.logprobs = self._found
        self._caches = None
        return True

    def drop(self) -> None:
        """Let go of what is held between slices; the next one is the first again."""
        self._caches = None
        if self.logprobs is None:
            self._found, self.top = [], []

    def _score(self, model: nn.Module, tokens: list[int], begin: int, end: int) -> None:
        logits = model(mx.array([tokens[begin:end]]), cache=self._caches)[0].astype(mx.float32)
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
            self._found.append(logprobs[0])
            self.top.append(sorted(zip(words[1:], logprobs[1:], strict=True), key=lambda pair: -pair[1]))
