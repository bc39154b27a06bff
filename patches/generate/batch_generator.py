"""Replacement for BatchGenerator of mlx_lm/generate.py, on block tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache

from ...cache.composites import leaves, with_leaves
from ...cache.paged_kv_cache import PagedKVCache
from ...device import device_errors
from ...engine.decode_batch import DecodeBatch
from ...engine.engine import Engine
from ...engine.request import Request, RequestOptions
from ...errors import ConfigError
from ...kv.lock import HeldLocks
from ...prefix.prefix_cache import SharedPrefixes
from ...warn import warn_once
from ..cache.layer_cache import PagedLayerCache
from ..cache.layout import name_of, pinned_in, reads_blocks_only, why_one_by_one
from ..cache.prompt_cache import check_given, factory_of
from ..patch import replaces
from ..samplers import resolved
from ..sharded import peers_of
from .drafting import NUM_DRAFT_TOKENS, proposer_for
from .upstream import UPSTREAM, Response, request_progress


class PagedBatchGenerator(BatchGenerator):  # type: ignore[misc]
    """mlx-lm's BatchGenerator, whose batches live in the model's block pool.

    The interface is mlx-lm's. Beyond it:

    - A request that does not fit the pool at present waits. If a running request needs a block and none is left, a
      running request is preempted and computed again later; no token is delivered twice.
    - ``insert`` raises RequestTooLargeError for a request that does not fit the whole budget.
    - ``next`` raises RequestFailedError, once, for a request that failed; the next call continues the others.
    - ``next`` raises DeviceError if the device has failed. All requests are lost, and nothing of them is kept; only
      ``remove`` and ``close`` can follow.
    - ``finish`` ends a request early and keeps its tokens in the prefix cache.
    - ``draft_model`` proposes up to ``num_draft_tokens`` tokens a step for each request. The model verifies them, so
      the answers stay the same. ConfigError says why a model cannot be used so. It may be the model's own head for
      multi-token prediction (:func:`mlx_paged.patches.models.mtp.load_head`).

    Rows of models that are not paged are computed one by one, with mlx-lm's own caches.
    """

    _uid_count: int

    def __init__(
        self,
        model: Any,
        *,
        prefixes: SharedPrefixes | None = None,
        draft_model: Any = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        draft_prefixes: SharedPrefixes | None = None,
        **options: Any,
    ) -> None:
        self._old_wired_limit = None  # close() reads it even if __init__ raises
        self._factory = factory_of(model, options.get("max_kv_size"))  # for all its requests
        super().__init__(model, **options)
        with self._computing():
            batch = decode_batch(model, self._factory())
            proposer = proposer_for(batch, draft_model, num_draft_tokens, self._factory.pool, draft_prefixes)
            self._engine = Engine(
                batch,
                self._counters,
                prefill_step_size=self.prefill_step_size,
                completion_batch_size=self.completion_batch_size,
                prefill_batch_size=self.prefill_batch_size,
                prefixes=prefixes,
                factory=self._factory,
                reads_blocks_only=reads_blocks_only(model),
                state_interval=self._factory.config.state_interval,
                prefill_latency=self._factory.config.prefill_latency,
                proposer=proposer,
            )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute on the generator's stream. Errors of the device are raised as DeviceError."""
        with mx.stream(self._stream), device_errors():
            yield

    def insert(self, prompts: list[list[int]], *args: Any, **options: Any) -> list[int]:
        """Queue requests whose prompts are not in segments; see :meth:`insert_segments`."""
        return self.insert_segments([[prompt] for prompt in prompts], *args, **options)

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[list[Any]] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: list[Any] | None = None,
        logits_processors: list[Any] | None = None,
        stop_sequences: list[Any] | None = None,
        *,
        options: Sequence[RequestOptions] | None = None,
    ) -> list[int]:
        """Queue requests, as in mlx-lm. ``options``, one per request, hold what mlx-lm has no argument for; None means
        the configured values.

        Raises:
            RequestTooLargeError: one could never run; PromptCacheError: a given cache is not the model's;
            ConfigError: a request has a seed that cannot be used, or the number of options is not that of the prompts.
            Nothing has been queued then.
        """
        if options is not None and len(options) != len(segments):
            raise ConfigError(f"options: expected {len(segments)} (one per prompt), got {len(options)}")
        with self._computing():
            fresh = self._factory()
            if caches is not None:
                caches = [
                    None if given is None else check_given(self.model, given, fresh, self._factory) for given in caches
                ]
        before: int = self._uid_count
        try:
            super().insert_segments(
                segments, max_tokens, caches, all_tokens, samplers, logits_processors, stop_sequences
            )
            queued = list(self._unprocessed_sequences)
            with self._computing():  # given caches are forked
                requests = [
                    self._request(*parts, options=own)
                    for parts, own in zip(queued, options or [RequestOptions()] * len(queued), strict=True)
                ]
            for request in requests:
                self._engine.check(request)
        except Exception:
            self._uid_count = before
            raise
        finally:
            self._unprocessed_sequences.clear()
        for request in requests:
            self._engine.add(request)
        return [request.uid for request in requests]

    def _request(
        self,
        uid: int,
        segments: Sequence[Sequence[int]],
        max_tokens: int,
        caches: Sequence[Any],
        history: Sequence[int],
        sampler: Any,
        processors: Sequence[Any],
        stops: Any,
        *,
        options: RequestOptions,
    ) -> Request:
        """Return a Request made from mlx-lm's queue entry for a prompt."""
        if options.prompt_lookup is None:
            options = options._replace(prompt_lookup=self.prompt_lookup)
        sampler, processors, options = resolved(sampler, processors or (), options)
        return Request(
            uid,
            segments,
            max_tokens=max_tokens,
            caches=caches,
            history=history,
            sampler=sampler,
            processors=processors,
            matcher=stops.matcher(),
            options=options,
        )

    def extract_cache(self, uids: Any) -> dict[int, tuple[list[Any], list[int]]]:
        """Return the caches of unfinished requests, as references to the same blocks, and the tokens in them."""
        engine = self._engine
        with self._computing():
            return {uid: engine.extract(uid) for uid in uids if uid in engine.requests}

    def remove(self, uids: Any, return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Cancel requests and release their blocks."""
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        with self._computing():
            self._engine.remove(list(dict.fromkeys(uids)))
        return caches

    def finish(self, uids: Sequence[int]) -> None:
        """End requests early. Like :meth:`remove`, but keeps all their tokens in the prefix cache, as after a stop
        token."""
        with self._computing():
            self._engine.remove(list(dict.fromkeys(uids)), finished=True)

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of the blocks and states that unfinished requests hold."""
        return self._engine.nbytes

    @property
    def prompt_lookup(self) -> int:
        """Default of the most tokens that are looked up in a step for a request."""
        return self._factory.config.prompt_lookup

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._engine.scheduler.preemptions

    @property
    def reuses_only_at_boundaries(self) -> bool:
        """Return whether prefixes are only found at the ends of segments and chunks, where a window or a state was
        kept."""
        sharing = self._engine.sharing
        return sharing is not None and sharing.reuses_only_at_boundaries

    @property
    def computed_prompt_tokens(self) -> int:
        """Number of prompt tokens computed, including those computed again after a preemption, without cached ones."""
        return self._engine.computed_prompt_tokens

    @property
    def num_steps(self) -> int:
        """Number of steps computed."""
        return self._engine.num_steps

    @property
    def admits(self) -> bool:
        """Return whether waiting requests may start beside running ones."""
        return self._engine.scheduler.admits

    @admits.setter
    def admits(self, value: bool) -> None:
        self._engine.scheduler.admits = value

    def preempt_last(self) -> bool:
        """Preempt the last running request unless it runs alone. Returns whether one was preempted."""
        with self._computing():
            return self._engine.scheduler.preempt_last()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._engine.scheduler.waiting)

    def progress(self) -> list[dict[str, Any]]:
        """Return the progress of each unfinished request. Any thread may call it; figures are approximate then."""
        return [request_progress(request) for request in list(self._engine.requests.values())]

    def next(self) -> tuple[list[Any], list[Any]]:
        """Return responses for prompts and for generated tokens; both are empty when nothing is left to do."""
        with self._computing(), HeldLocks():
            return self._engine.next()

    def next_generated(self) -> list[Any]:
        """Return the generated tokens; empty when nothing is left to do."""
        while True:
            prompts, generated = self.next()
            if generated or not prompts:
                return list(generated)


def decode_batch(model: Any, fresh: Sequence[Any]) -> DecodeBatch:
    """Return a batch that computes all rows in one call if the model's attention allows it, else row by row."""
    kept = next((cache for cache in leaves(fresh) if not isinstance(cache, PagedKVCache) and pinned_in(cache)), None)
    if kept is not None:
        why: str | None = f"batches of {type(kept).__name__} do not keep the first tokens (max_kv_size)"
    elif all(type(cache) is KVCache for cache in leaves(fresh)):
        why = "their layers are not paged"
    else:
        stock = [c.to_stock() if isinstance(c, PagedLayerCache) else c for c in leaves(fresh)]
        why = why_one_by_one(model, with_leaves(fresh, stock))
    if why is None:
        return DecodeBatch(model, UPSTREAM, peers_of(model))
    warn_once(f"rows of a batch are computed one by one in models of type {name_of(model)}: {why}")
    return DecodeBatch(model, UPSTREAM, peers_of(model), takes_rows=False)


@replaces("mlx_lm.generate:BatchGenerator", "fb1a2ed5f7ece4b2")
def adapt(original: type) -> type:
    """Return the replacement of ``BatchGenerator``."""
    assert original is BatchGenerator
    return PagedBatchGenerator


__all__ = ["PagedBatchGenerator", "Response", "adapt"]
