"""Request: one sequence to be computed, from insertion to its last token. TokenLogits: what a token is chosen from."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.batch_cache import first_paged
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.sequence import SequenceTables
from ..kv.block_table import BlockTable
from .constraint import Constraining
from .sampling.params import SamplingParams

Sampler = Callable[[mx.array], mx.array]


class TokenLogits:
    """The logits that a token is chosen from: one row of a step's ``[B, vocab]``. Log-probabilities are computed on
    request. The rows of a step share memory: to keep one for longer, copy it (:meth:`detach`)."""

    __slots__ = ("__weakref__", "_index", "_is_detached", "_logits")

    def __init__(self, logits: mx.array, index: int) -> None:
        self._logits, self._index = logits, index
        self._is_detached = False

    def logprobs(self) -> mx.array:
        """Return the log-probabilities ``[vocab]``."""
        return normalised(self._logits[self._index])

    def detach(self) -> None:
        """Copy the row, and drop the reference to the others."""
        if not self._is_detached:
            row = mx.contiguous(self._logits[self._index : self._index + 1])
            self._logits, self._index, self._is_detached = row, 0, True
            mx.async_eval(row)


def normalised(logits: mx.array) -> mx.array:
    """Return log-probabilities of logits ``[..., vocab]``."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class RequestOptions(NamedTuple):
    """Options of one request.

    Attributes:
        salt: only requests with the same salt share prefixes.
        seed: the answer's tokens depend only on it and on the logits, in any batch; None draws from ``mx.random``'s
            state. It has no effect on samplers that mlx-lm's ``make_sampler`` did not make.
        grammar: constrains the answer; None: unconstrained.
        prompt_lookup: most drafts per step from prompt lookup, i.e. from earlier tokens of the prompt or the answer; 0:
            none; None: as configured.
        sampling: how tokens are chosen, but for what the request's own sampler and processors do; None: greedily.
        priority: requests with lower numbers are admitted first, and preempt those with higher ones.
        client: clients of one priority are admitted in turns, one request each.
        num_draft_tokens: most drafts per step from a draft model, if there is one; 0: none; None: as configured.
        keep: number of tokens at the prompt's start that the prefix cache evicts after others.
    """

    salt: Hashable = None
    seed: int | None = None
    grammar: Constraining | None = None
    prompt_lookup: int | None = None
    sampling: SamplingParams | None = None
    priority: int = 0
    client: Hashable = None
    num_draft_tokens: int | None = None
    keep: int = 0


class Request:
    """A request, its tokens and where they are cached. Positions count from the start of its cache, which holds
    ``history + source[: length - kept]``.

    Args:
        uid: the caller's id; later requests have larger ones.
        segments: parts of the prompt; chunks end where they do.
        max_tokens: most tokens to generate.
        caches: one per layer, empty or filled by the caller. Filled ones are forked, so that the caller may use them.
        history: the tokens in filled caches, as far as the caller gave them.
        sampler: the caller's own sampler; None: tokens are sampled by ``options.sampling``.
        processors: the caller's own logits processors, called after the penalties of ``options.sampling``.
        matcher: mlx-lm's matcher of stop sequences, or a compatible one.
        options: other options.

    Attributes:
        admitted: number of its first admission; None before.
        length: tokens in its cache now; the device may still be computing the last of them.
        prefill_end: tokens that must be in its cache before it decodes: the prompt without its last token, and after a
            preemption all that was computed.
        kept: tokens in the cache that came with the request; a preemption does not release them.
        boundaries: positions where a chunk must end, ascending.
        source: the prompt's tokens, then those generated and delivered; without the history.
        prompt_length: tokens of the prompt.
        given: a fork of the cache that came with the request, never written to; None if there was none.
        caches: one per layer while the request runs, else None.
        num_cached: tokens it found cached when it first started; None before.
        num_reported: tokens of the prompt whose progress was reported.
        num_generated: tokens delivered.
        undelivered: the next token, if the request left the batch between its computation and its delivery; else None.
        sampling: its sampling parameters.
        logits: the logits of the next token; None until one is sampled.
        context: token buffer for its processors; None before it is in a batch, or without processors.
        grammar: state of its grammar after the delivered tokens; None: unconstrained.
        common: length of the common prefix with other requests, by uid, if both go on after it.
    """

    def __init__(
        self,
        uid: int,
        segments: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        caches: Sequence[Any],
        history: Sequence[int],
        sampler: Sampler | None,
        processors: Sequence[Callable[..., mx.array]],
        matcher: Any,
        options: RequestOptions = RequestOptions(),  # noqa: B008 - a tuple, never changed
    ) -> None:
        self.uid = uid
        self.options = options
        self.admitted: int | None = None
        self.history = list(history)
        self.given = copy.deepcopy(list(caches)) if any(not cache.empty() for cache in caches) else None
        sequence = sequence_of(self.given or caches)
        if self.given is None:
            self.kept = 0
        else:
            self.kept = len(self.history) if sequence is None else sequence.table.length
        self.length = self.kept
        self.source = [token for segment in segments for token in segment]
        self.prompt_length = len(self.source)
        self.prefill_end = self.kept + self.prompt_length - 1
        ends = [self.kept]
        for segment in segments[:-1]:
            ends.append(ends[-1] + len(segment))
        self.boundaries = deque(ends[1:])
        self.segment_ends = frozenset(ends[1:])
        self.max_tokens = max_tokens
        self.sampling = options.sampling or SamplingParams()
        self.sampler = sampler
        self.processors = processors
        self.matcher = matcher
        self.caches: list[Any] | None = None
        self.num_cached: int | None = None
        self.num_reported = 0
        self.num_generated = 0
        self.undelivered: int | None = None
        self.logits: TokenLogits | None = None
        self.context: Any = None
        self.grammar = None if options.grammar is None else options.grammar.start()
        self.common: dict[int, int] = {}
        self._known: tuple[list[Any] | None, SequenceTables | None] = (None, None)  # caches, and the table behind them

    def __repr__(self) -> str:
        return f"Request(uid={self.uid}, length={self.length}, prefill_end={self.prefill_end})"

    @property
    def knows_history(self) -> bool:
        """Whether :meth:`cached_tokens` are all tokens in its cache: it came without one, or with all of its tokens."""
        return self.given is None or 0 < len(self.history) == self.kept

    @property
    def is_prefilled(self) -> bool:
        """Whether its prefill is done, so that it decodes."""
        return self.length >= self.prefill_end

    def chunk_length(self, most: int | None, grid: int | None = None) -> int:
        """Return the length of its next chunk: up to the next boundary or the end of the prefill, at most ``most``
        tokens. With ``grid``, a chunk that is cut ends at its last multiple within ``most`` tokens, or at the next one
        if there is none; without ``most``, it always ends at the next one."""
        while self.boundaries and self.boundaries[0] <= self.length:
            self.boundaries.popleft()
        end = min(self.boundaries[0], self.prefill_end) if self.boundaries else self.prefill_end
        left = end - self.length
        if grid is not None and (most is None or left > most):
            behind = self.length % grid
            most = max(1, (behind + (most or 0)) // grid) * grid - behind
        return left if most is None else min(most, left)

    @property
    def sequence(self) -> SequenceTables | None:
        """Block table of its caches; while it does not run, those of the cache it came with."""
        caches = self.caches if self.caches is not None else self.given
        if self._known[0] is not caches:  # asked for in every step
            self._known = (caches, sequence_of(caches or ()))
        return self._known[1]

    @property
    def table(self) -> BlockTable | None:
        """The block table of :attr:`sequence`."""
        return None if self.sequence is None else self.sequence.table

    @property
    def takes_drafts(self) -> bool:
        """Whether several of its tokens can be chosen in one step: it has no sampler or processors of the caller's own,
        which have to be called for each token in order."""
        return self.sampler is None and not self.processors

    def cached_tokens(self) -> list[int]:
        """Return the tokens in its cache."""
        return self.history + self.source[: self.length - self.kept]

    def next_tokens(self, num_tokens: int) -> list[int]:
        """Return the next tokens to compute."""
        start = self.length - self.kept
        return self.source[start : start + num_tokens]

    def next_input(self) -> int:
        """Return the token it decodes next: the one sampled before it left the batch, or the last of its prompt."""
        if self.undelivered is not None:
            return self.undelivered
        return self.source[-1]

    def release(self) -> None:
        """Release the blocks that it holds beyond the cache it came with."""
        # Cleared first: if a release below fails, the dropped tables give their blocks back.
        caches, self.caches, self._known = self.caches, None, (None, None)
        sequence = None if caches is None else sequence_of(caches)
        if sequence is not None:
            sequence.pool.release_table(sequence.table)


def sequence_of(caches: Sequence[Any]) -> SequenceTables | None:
    """Return the block table behind a prompt cache, or None if no layer is paged."""
    first = first_paged(caches)
    return first.sequence if isinstance(first, PagedKVCache) else None
