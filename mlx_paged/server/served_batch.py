"""ServedBatch: a batch generator for requests of the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import make_stop_sequences

from ..engine.request import RequestOptions
from ..patches.cache.lru_prompt_cache import PagedPromptCache, PromptStore, salted_store
from ..patches.cache.pools import known_pool, prefix_pool_of
from ..patches.generate.batch_generator import PagedBatchGenerator
from ..prefix.prefix_cache import SharedPrefixes
from .grammars import behind_reasoning, with_thinking_budget
from .request import Prompt, ServerRequest
from .weights import Weights


class _Served(NamedTuple):
    """An answer in a batch: its request, the types of the prompt's segments left, last first, and how many tokens of
    the prompt came from the store."""

    request: ServerRequest
    types: list[str]
    num_cached: int


class ServedBatch(PagedBatchGenerator):
    """A batch generator for requests of the server. Where the engine does not share prefixes, it looks them up and
    inserts them itself.

    Args:
        cache: the prompt cache of all models.
        weights: the present model.
        args: arguments of the command line.
        stream: stream to compute on.
    """

    def __init__(self, cache: PromptStore, weights: Weights, args: Any, stream: mx.Stream) -> None:
        prefixes: SharedPrefixes | None = None
        if isinstance(cache, PagedPromptCache):
            prefixes = cache.shared_prefixes(weights.key, prefix_pool_of(weights.model))
        drafts: dict[str, Any] = {}
        if weights.draft_model is not None:
            drafts = {"draft_model": weights.draft_model, "num_draft_tokens": args.num_draft_tokens}
            draft_pool = known_pool(weights.draft_model)
            if isinstance(cache, PagedPromptCache) and draft_pool is not None:
                drafts["draft_prefixes"] = cache.shared_prefixes(weights.key, draft_pool, 1)
        super().__init__(
            weights.model,
            prefixes=prefixes,
            **drafts,
            completion_batch_size=args.decode_concurrency,
            prefill_batch_size=args.prompt_concurrency,
            prefill_step_size=args.prefill_step_size,
            stream=stream,
        )
        self._store, self._weights = cache, weights
        self._end_tokens = make_stop_sequences(weights.tokenizer)
        self._served: dict[int, _Served] = {}

    def insert_request(self, request: ServerRequest) -> list[int]:
        """Queue a request's answers. If it raises, nothing has been queued."""
        prompts = [request.prompt_of(index) for index in range(request.num_answers)]
        parts = [(prompt.segments, prompt.segment_types) for prompt in prompts]
        caches: Any = None
        num_cached = [0] * len(prompts)
        if not self.shares_prefixes:
            with salted_store(self._store, request.salt):
                found = [self._store.fetch_nearest_cache(self._weights.key, prompt.tokens) for prompt in prompts]
            caches = [cache for cache, _ in found]
            num_cached = [len(prompt.tokens) - len(rest) for prompt, (_, rest) in zip(prompts, found, strict=True)]
            parts = [_without(*each, number) for each, number in zip(parts, num_cached, strict=True)]
        elif not self.reuses_only_at_boundaries:  # chunks need not end with segments
            parts = [([prompt.tokens], ["assistant"]) for prompt in prompts]
        params = [request.sampling_of(index) for index in range(request.num_answers)]
        uids = self.insert_segments(
            [segments for segments, _ in parts],
            [request.max_tokens or 1] * len(prompts),
            caches,
            [prompt.tokens[:number] for prompt, number in zip(prompts, num_cached, strict=True)],
            stop_sequences=[self._end_tokens] * len(prompts),
            options=[
                RequestOptions(
                    request.salt,
                    each.seed,
                    grammar_of(request, prompt, self._weights.tokenizer),
                    request.prompt_lookup,
                    each,
                    priority=request.priority,
                    client=request.client,
                    num_draft_tokens=request.num_draft_tokens,
                    keep=request.num_kept(prompt),
                )
                for prompt, each in zip(prompts, params, strict=True)
            ],
        )
        for uid, (_, types), number in zip(uids, parts, num_cached, strict=True):
            self._served[uid] = _Served(request, list(types[::-1]), number)
        return uids

    def next(self) -> tuple[list[Any], list[Any]]:
        prompts, generated = super().next()
        if not self.shares_prefixes:
            for response in prompts:
                served = self._served.get(response.uid)
                if served is not None and served.types and response.end_of_segment and not response.end_of_prompt:
                    self._keep(served.request, self.extract_cache([response.uid]), served.types.pop())
            for response in generated:
                served = self._served.get(response.uid)
                response.num_cached = 0 if served is None else served.num_cached  # the engine got the cache as given
        return prompts, generated

    def end(self, response: Any) -> None:
        """End an answer with its last response, or with the response that completes a stop string, which the batch does
        not know of."""
        uid, is_running = response.uid, response.finish_reason is None
        served = self._served.pop(uid, None)
        if self.shares_prefixes:
            if is_running:
                self.finish([uid])
            return
        finished = {uid: (response.prompt_cache, response.all_tokens)}
        if is_running:
            finished = super().remove([uid], return_prompt_caches=True)
        if served is not None:
            self._keep(served.request, finished, "assistant")

    def _keep(self, request: ServerRequest, finished: Mapping[int, tuple[Any, Any]], kind: str) -> None:
        with salted_store(self._store, request.salt):
            for caches, tokens in finished.values():
                self._store.insert_cache(self._weights.key, tokens[:], caches, cache_type=kind)

    def remove(self, uids: Any, return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        for uid in uids:
            self._served.pop(uid, None)
        return super().remove(uids, return_prompt_caches)


def _without(segments: list[list[int]], types: list[str], num_cached: int) -> tuple[list[list[int]], list[str]]:
    """Return the segments after the first ``num_cached`` tokens."""
    segments, types = list(segments), list(types)
    while num_cached > 0:
        if num_cached < len(segments[0]):
            segments[0] = segments[0][num_cached:]
            break
        num_cached -= len(segments.pop(0))
        types.pop(0)
    return segments, types


def grammar_of(request: ServerRequest, prompt: Prompt, tokenizer: Any) -> Any:
    """Return the request's grammar, which begins after reasoning that the prompt has begun, and bounds reasoning by its
    budget."""
    grammar, reasons = request.grammar, prompt.initial_state == "reasoning"
    if not tokenizer.has_thinking:
        return grammar
    if grammar is not None and reasons:
        grammar = behind_reasoning(grammar, tokenizer)
    if request.thinking_budget is None:
        return grammar
    return with_thinking_budget(grammar, tokenizer, request.thinking_budget, is_open=reasons)
