"""Row: one request of a batch, from insertion to its last token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx

from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.sequence import SequenceTables
from ..kv.block_table import BlockTable
from .scheduler import Request

Sampler = Callable[[mx.array], mx.array]


class StepLogits:
    """The logits ``[B, vocab]`` of one step. Log-probabilities are computed when somebody asks for them, and take the
    logits' place."""

    def __init__(self, logits: mx.array, *, is_normalised: bool = False) -> None:
        self._values = logits
        self._is_normalised = is_normalised

    def logprobs(self) -> mx.array:
        """Of all rows, ``[B, vocab]``."""
        if not self._is_normalised:
            self._values, self._is_normalised = normalised(self._values), True
        return self._values

    def row(self, index: int) -> mx.array:
        """Of one row, ``[vocab]``."""
        values = self._values[index]
        return values if self._is_normalised else normalised(values)

    def ranking(self) -> mx.array:
        """``[B, vocab]``, whose largest in a row is the token that mlx-lm chooses. That is the first of the largest
        log-probabilities as they are rounded: in 16 bits, logits that differ can have the same (docs/adr/0015)."""
        return self._values if self._values.dtype == mx.float32 else self.logprobs()

    def kept(self, index: int) -> StepLogits:
        """One row of it, without the others' memory."""
        return StepLogits(mx.contiguous(self._values[index : index + 1]), is_normalised=self._is_normalised)


def normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class Row:
    """A request, its tokens and where they are cached.

    The cache holds ``history + source[: request.length - base]``.

    Attributes:
        request: what the scheduler knows of it.
        history: tokens in the cache that came with the request, as far as the caller told them.
        base: length of that cache.
        source: tokens computed here: the prompt, then what was generated and delivered.
        prompt_length: of the prompt.
        given: the cache that came with the request, never written to; None if there was none.
        caches: one per layer while the request runs, else None.
        num_cached: tokens it found computed when it first started; None before.
        num_reported: tokens of the prompt whose progress was reported.
        num_generated: tokens delivered.
        undelivered: the next token and where its log-probabilities are, when neither is in a batch; see ``logits``.
        logits: step and row that the next token was sampled from; None as long as nothing was sampled.
        context: its tokens, for its processors; None outside of a batch or without any.
        alone: its prompt is computed in calls of its own, because one with others failed.
        salt: only requests with the same one share prefixes.
        common: tokens that its own and those of other requests, by uid, begin with alike, where they differ after them.
    """

    def __init__(
        self,
        uid: int,
        segments: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        caches: list[Any],
        history: Sequence[int],
        sampler: Sampler,
        processors: Sequence[Callable[..., mx.array]],
        matcher: Any,
        salt: Hashable = None,
    ) -> None:
        self.salt = salt
        self.history = list(history)
        self.given = caches if any(not cache.empty() for cache in caches) else None
        sequence = sequence_of(caches)
        if self.given is None:
            self.base = 0
        else:
            self.base = len(self.history) if sequence is None else sequence.tables[0].length
        self.source = [token for segment in segments for token in segment]
        self.prompt_length = len(self.source)
        ends = [self.base]
        for segment in segments[:-1]:
            ends.append(ends[-1] + len(segment))
        # Where tokens are pinned, chunks must be those of a run alone, which begins at the cache that was given.
        pins_tokens = sequence is not None and sequence.pool.pins_tokens
        self.request = Request(
            uid,
            goal=self.base + self.prompt_length - 1,
            kept=self.base,
            boundaries=ends[1:],
            origin=self.base if pins_tokens else 0,
        )
        self.segment_ends = frozenset(ends[1:])
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.processors = processors
        self.matcher = matcher
        self.caches: list[Any] | None = None
        self.num_cached: int | None = None
        self.num_reported = 0
        self.num_generated = 0
        self.undelivered: int | None = None
        self.logits: tuple[StepLogits, int] | None = None
        self.context: Any = None
        self.alone = False
        self.common: dict[int, int] = {}
        self._known: tuple[list[Any] | None, SequenceTables | None] = (None, None)  # caches, and the tables behind them

    @property
    def uid(self) -> int:
        return self.request.uid

    @property
    def sequence(self) -> SequenceTables | None:
        """The block tables it holds, those of the cache it came with included."""
        caches = self.caches if self.caches is not None else self.given
        if self._known[0] is not caches:  # asked for in every step
            self._known = (caches, sequence_of(caches or ()))
        return self._known[1]

    @property
    def tables(self) -> list[BlockTable] | None:
        """The tables of :attr:`sequence`."""
        return None if self.sequence is None else self.sequence.tables

    @property
    def num_missing(self) -> int:
        """Tokens that are still to be put into its cache if it generates as many as it may, and the one computed
        ahead of them."""
        return self.base + self.prompt_length + self.max_tokens - self.request.length

    def cached_tokens(self) -> list[int]:
        """The tokens in its cache."""
        return self.history + self.source[: self.request.length - self.base]

    def chunk(self, num_tokens: int) -> list[int]:
        """The next tokens to compute. The block tables learn which of them had been decoded before."""
        start = self.request.length - self.base
        if self.sequence is not None:
            self.sequence.decoded = range(self.base + self.prompt_length - 1, self.request.goal)
        return self.source[start : start + num_tokens]

    def next_input(self) -> int:
        """The token it decodes next: one sampled before it made room, or the last of its prompt."""
        if self.undelivered is not None:
            return self.undelivered
        return self.source[-1]

    def release(self) -> None:
        """Give back the blocks that it holds beyond the cache it came with."""
        # Let go first: whatever happens below, tables that nobody holds give their blocks back.
        caches, self.caches, self._known = self.caches, None, (None, None)
        sequence = sequence_of(caches or ())
        if sequence is not None:
            for table in sequence.tables:
                sequence.pool.release_table(table)


def sequence_of(caches: Sequence[Any]) -> SequenceTables | None:
    """The block tables behind a prompt cache, or None if no layer is paged."""
    return next((cache.sequence for cache in leaves(caches) if isinstance(cache, PagedKVCache)), None)
