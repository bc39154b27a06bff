"""Response: one generated token, as mlx-lm's GenerationBatch reports it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from ..errors import PromptCacheError
from .row import Row, StepLogits


class Response(GenerationBatch.Response):  # type: ignore[misc]
    """A token of a request.

    Log-probabilities are computed when they are read. The cache of a finished request keeps that request's blocks, and
    no others, for as long as the response or the cache is kept; until somebody has read ``prompt_cache``, requests
    that need the blocks may take them.

    Attributes:
        num_cached: tokens of the prompt that were found in a prefix cache.
    """

    def __init__(
        self, uid: int, token: int, logits: tuple[StepLogits, int], finish_reason: str | None, num_cached: int = 0
    ) -> None:
        self.uid = uid
        self.token = token
        self.finish_reason = finish_reason
        self.num_cached = num_cached
        self.all_tokens: list[int] | None = None
        self._logits = logits
        self._row: Row | None = None
        self._claimed = self._given_up = False

    @property
    def logprobs(self) -> mx.array:
        """Log-probabilities ``[vocab]`` the token was sampled from."""
        step, index = self._logits
        return step.row(index)

    @property
    def prompt_cache(self) -> list[Any] | None:
        """The caches of all layers, if this is the request's last token.

        Raises:
            PromptCacheError: the blocks were needed before anybody read this.
        """
        if self._given_up:
            raise PromptCacheError(
                f"the cache of request {self.uid} was given up for requests that needed its blocks: "
                "read prompt_cache before the next call of the generator"
            )
        self._claimed = True
        return None if self._row is None else self._row.caches

    def attach(self, row: Row) -> None:
        """The finished request's row, which is this response's from now on."""
        self._row = row

    def give_up(self) -> bool:
        """Release the cache unless somebody has read it. Returns whether it was released."""
        if self._row is None or self._claimed or self._given_up:
            return False
        self._row.release()
        self._row, self._given_up = None, True
        return True

    def __repr__(self) -> str:
        return f"Response(uid={self.uid}, token={self.token}, finish_reason={self.finish_reason!r})"
