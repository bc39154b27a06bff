"""Response: one generated token, as mlx-lm's GenerationBatch reports it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from ...engine.request import Request
from ...engine.step_logits import TokenLogits
from ...errors import PromptCacheError
from ...kv.allocator import NULL_BLOCK


def request_progress(request: Request) -> dict[str, Any]:
    """May be called by any thread, and is only about right then.

    ``tokens`` are in its cache, ``cached_tokens`` of them were found there, ``computing_tokens`` are being computed
    behind them; ``blocks`` are, for each group, runs of the blocks that it holds: ``[first, number]``.
    """
    tables = request.tables if request.caches is not None else None
    is_prefilled = request.is_prefilled
    computing = 0 if not tables or is_prefilled else max(0, tables[0].length - request.length)
    has_begun = request.num_reported > 0 or request.num_generated > 0
    if tables is None and request.caches is None:
        state = "preempted" if has_begun else "waiting"
    else:
        state = "decode" if is_prefilled else "prefill"
    return {
        "uid": request.uid,
        "state": state,
        "waiting": request.caches is None,
        "prompt_tokens": request.kept + request.prompt_length,
        "cached_tokens": request.num_cached or 0,
        "tokens": request.length,
        "computing_tokens": computing,
        "generated_tokens": request.num_generated,
        "blocks": [runs(list(table.block_ids)) for table in tables or ()],
    }


def runs(block_ids: Iterable[int]) -> list[list[int]]:
    """Consecutive ids as ``[first, number]``, without null blocks."""
    found: list[list[int]] = []
    for block_id in sorted({block_id for block_id in block_ids if block_id != NULL_BLOCK}):
        if found and block_id == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([block_id, 1])
    return found


class Response(GenerationBatch.Response):  # type: ignore[misc]
    """A token of a request; a dataclass with the fields of mlx-lm's, which can be set and replaced as there.

    Log-probabilities are computed when they are read. The cache of a finished request keeps that request's blocks, and
    no others, for as long as the response or the cache is kept; until ``prompt_cache`` was read, requests
    that need the blocks may take them.

    Args:
        logprobs: of the token's step, ``[vocab]``, or where they are to be had from.

    Attributes:
        num_cached: tokens of the prompt that were found in a prefix cache. Not a field: 0 in what
            ``dataclasses.replace`` makes.
    """

    def __init__(
        self,
        uid: int,
        token: int,
        logprobs: mx.array | TokenLogits,
        finish_reason: str | None,
        prompt_cache: list[Any] | None = None,
        all_tokens: list[int] | None = None,
        *,
        num_cached: int = 0,
    ) -> None:
        self.uid = uid
        self.token = token
        self.finish_reason = finish_reason
        self.num_cached = num_cached
        self.all_tokens = all_tokens
        self._logprobs = logprobs
        self._request: Request | None = None
        self._prompt_cache = prompt_cache
        self._claimed = self._is_dropped = False

    @property
    def logprobs(self) -> mx.array:
        """Log-probabilities ``[vocab]`` the token was sampled from."""
        if isinstance(self._logprobs, mx.array):
            return self._logprobs
        return self._logprobs.logprobs()

    @logprobs.setter
    def logprobs(self, value: mx.array) -> None:
        self._logprobs = value

    @property
    def prompt_cache(self) -> list[Any] | None:
        """The caches of all layers, if this is the request's last token. Setting it lets go of them.

        Raises:
            PromptCacheError: the blocks were needed before this was read.
        """
        if self._is_dropped:
            raise PromptCacheError(
                f"the cache of request {self.uid} was given up for requests that needed its blocks: "
                "read prompt_cache before the next call of the generator"
            )
        if self._request is None:
            return self._prompt_cache
        self._claimed = True
        return self._request.caches

    @prompt_cache.setter
    def prompt_cache(self, value: list[Any] | None) -> None:
        self._request, self._prompt_cache, self._is_dropped = None, value, False

    def attach(self, request: Request) -> None:
        """Hand over the finished request, which is this response's from now on."""
        self._request = request

    def drop_cache(self) -> bool:
        """Release the cache unless it was read. Returns whether it was released."""
        if self._request is None or self._claimed:
            return False
        request, self._request, self._is_dropped = self._request, None, True
        with suppress(Exception):  # the request has ended; its tables give their blocks back when they are dropped
            request.release()
        return True

    def __repr__(self) -> str:
        return f"Response(uid={self.uid}, token={self.token}, finish_reason={self.finish_reason!r})"
