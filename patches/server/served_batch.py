"""ServedBatch: the batch that a server's requests of one model run in, and where their answers go."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import server as upstream
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from ...engine.request_options import RequestOptions
from ...errors import PoolExhaustedError, RequestFailedError
from ...prefix.store import NoPrefixStore, PrefixStore
from ...serve.report.server_stats import ServerStats
from ..cache.lru_prompt_cache import PagedPromptCache, PromptStore, salted_store
from ..cache.pools import pool_of
from ..generate.batch_generator import PagedBatchGenerator, seeds_rows
from .answer_queue import AnswerQueue
from .model_switch import ModelKey
from .prepared_request import PreparedRequest
from .wanted_logprobs import NOT_WANTED, ToldLogprobs, WantedLogprobs, told_logprobs

if TYPE_CHECKING:
    from .response_generator import PagedResponseGenerator


class Served(NamedTuple):
    """A request that runs or waits in the batch."""

    queue: AnswerQueue
    ctx: upstream.GenerationContext
    detokenizer: Any
    segment_types: list[str]
    wanted: WantedLogprobs | None
    salt: str | None


class ServedBatch:
    """One model's batch generator and the requests in it. For the thread that computes.

    Args:
        owner: mlx-lm's response generator, which tokenizes.
        model, tokenizer, key: as loaded.
        prompt_cache: of all models.
        stats: of the server.
        stream: to compute on.
    """

    def __init__(
        self,
        owner: PagedResponseGenerator,
        model: nn.Module,
        tokenizer: Any,
        key: ModelKey,
        prompt_cache: PromptStore,
        stats: ServerStats,
        stream: mx.Stream,
    ) -> None:
        self.owner, self.tokenizer, self.key = owner, tokenizer, key
        self.prompt_cache, self.stats = prompt_cache, stats
        self.served: dict[int, Served] = {}
        pool = pool_of(model)
        prefixes: PrefixStore | None = None
        if isinstance(prompt_cache, PagedPromptCache):
            prefixes = NoPrefixStore() if pool is None else prompt_cache.shared_prefixes(key, pool)
        cli_args = owner.cli_args
        self.generator = PagedBatchGenerator(
            model,
            prefixes=prefixes,
            completion_batch_size=cli_args.decode_concurrency,
            prefill_batch_size=cli_args.prompt_concurrency,
            prefill_step_size=cli_args.prefill_step_size,
            stream=stream,
        )
        self._num_computed = 0

    @property
    def num_steps(self) -> int:
        """Changes with each step that computes something; also while nothing of it can be told."""
        return self.generator.num_steps

    def progress(self) -> list[dict[str, Any]]:
        """How far each request is, as its generator knows, and of which client. May be called by any thread."""
        served = dict(self.served)
        return [
            {**each, "number": of.queue.number, "age_seconds": round(time.monotonic() - of.queue.asked_at, 1)}
            for each in self.generator.progress()
            if (of := served.get(each["uid"])) is not None
        ]

    def insert(self, queue: AnswerQueue, request: PreparedRequest, args: upstream.GenerationArguments) -> None:
        """Queue a request; its context goes to the client.

        Raises:
            Exception: it cannot be served; nothing has been queued.
        """
        tokenizer = self.tokenizer
        prompt, segments, segment_types, initial_state, _ = self.owner._tokenize(tokenizer, request, args)
        stop_sequences, text_sm = self.owner._make_state_machine(self.key, tokenizer, args.stop_words)
        caches, num_cached = None, 0
        if self.generator.shares_prefixes:
            if not self.generator.has_windows:  # any prefix can be served to the token: no need to stop anywhere
                segments, segment_types = [prompt], ["assistant"]
        else:
            with salted_store(self.prompt_cache, request.salt):
                caches, rest = self.prompt_cache.fetch_nearest_cache(self.key, prompt)
            num_cached = len(prompt) - len(rest)
            segments, segment_types = _without(segments, segment_types, num_cached)
        ctx = upstream.GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=initial_state,
            prompt=prompt,
            prompt_cache_count=num_cached,
        )
        (uid,) = self.generator.insert_segments(
            segments=[segments],
            max_tokens=[args.max_tokens],
            caches=None if caches is None else [caches],
            all_tokens=[prompt[:num_cached]],
            samplers=[upstream._make_sampler(args, tokenizer)],
            logits_processors=[upstream._make_logits_processors(args)],
            stop_sequences=[stop_sequences],
            options=[RequestOptions(request.salt, args.seed, request.grammar_from(tokenizer), request.prompt_lookup)],
        )
        queue.counts_prompt = not self.generator.counts_prompt_tokens
        wanted = WantedLogprobs.of(args)
        self.served[uid] = Served(queue, ctx, tokenizer.detokenizer, segment_types[::-1], wanted, request.salt)
        queue.put(ctx)
        self._trim()

    def step(self) -> None:
        """Compute until there is something to tell, and tell it. A request that failed is told so; others go on."""
        self.drop_unwanted()
        if not self.served:
            return
        try:
            prompts, generated = self.generator.next()
        except RequestFailedError as error:
            self._fail(error.uid, error)
            return
        finally:
            computed = self.generator.computed_prompt_tokens
            self.stats.count_computed(computed - self._num_computed)
            self._num_computed = computed
        if not prompts and not generated:  # nothing is left to do, and so nobody may be waiting for it
            self.fail_all(RuntimeError("the batch has lost the request"))
            return
        for response in prompts:
            if response.uid in self.served:
                self.served[response.uid].queue.put(tuple(response.progress))
        if not self.generator.shares_prefixes:
            self._save_segments(prompts)
        asking = [(r, wanted) for r in generated if r.uid in self.served and (wanted := self.served[r.uid].wanted)]
        try:
            told = told_logprobs(asking, self.tokenizer)
        except Exception as error:
            told = {}
            for response, _ in asking:
                self.generator.remove([response.uid])
                self._fail(response.uid, error)
        for response in generated:
            if response.uid in self.served:
                try:
                    self._deliver(response, told.get(response.uid, NOT_WANTED))
                except Exception as error:
                    self.generator.remove([response.uid])
                    self._fail(response.uid, error)

    def drop_unwanted(self) -> None:
        """Free what requests hold whose clients have gone."""
        unwanted = [uid for uid, served in self.served.items() if not served.queue.is_wanted]
        if unwanted:
            self.generator.remove(unwanted)
            for uid in unwanted:
                self._fail(uid, InterruptedError("the client has gone"))

    def _fail(self, uid: int, error: Exception) -> None:
        if isinstance(error.__cause__, PoolExhaustedError) and isinstance(self.prompt_cache, PagedPromptCache):
            self.prompt_cache.others.trim_to(n_sequences=0)  # copies that the pool cannot ask for their blocks
        served = self.served.pop(uid, None)
        if served is not None:
            served.queue.put(error)

    def fail_all(self, error: Exception) -> None:
        for uid in list(self.served):
            self._fail(uid, error)

    def close(self) -> None:
        self.generator.remove(list(self.served))
        self.generator.close()

    # Inside ---------------------------------------------------------------------------------------------------

    def _deliver(self, response: GenerationBatch.Response, told: ToldLogprobs) -> None:
        served = self.served[response.uid]
        detokenizer = served.detokenizer
        if self.generator.shares_prefixes:
            served.ctx.prompt_cache_count = response.num_cached
        if response.finish_reason != "stop":  # the stop token has no text
            detokenizer.add_token(response.token)
        if response.finish_reason is not None:
            detokenizer.finalize()
        answer = upstream.Response(
            detokenizer.last_segment, response.token, told.logprob, response.finish_reason, told.top
        )
        served.queue.put(answer)
        if response.finish_reason is not None or served.queue.is_stopped:
            self._keep(response)
            self._trim()
            del self.served[response.uid]
            served.queue.put(None)

    def _keep(self, response: GenerationBatch.Response) -> None:
        """An answer is at its end: what its request holds stays in the prompt cache, and is free otherwise."""
        generator, uid = self.generator, response.uid
        is_running = response.finish_reason is None  # a stop string was found: the generator knows tokens only
        if generator.shares_prefixes:
            if is_running:
                generator.finish([uid])
            return
        if is_running:
            finished = generator.remove([uid], return_prompt_caches=True)
        else:
            finished = {uid: (response.prompt_cache, response.all_tokens)}
        with salted_store(self.prompt_cache, self.served[uid].salt):
            for caches, tokens in finished.values():
                self.prompt_cache.insert_cache(self.key, tokens[:], caches, cache_type="assistant")

    def _save_segments(self, prompts: list[PromptProcessingBatch.Response]) -> None:
        ends = [
            response.uid
            for response in prompts
            if response.end_of_segment
            and not response.end_of_prompt
            and response.uid in self.served
            and self.served[response.uid].segment_types
        ]
        for uid in ends:
            try:
                with salted_store(self.prompt_cache, self.served[uid].salt):
                    for caches, tokens in self.generator.extract_cache([uid]).values():
                        kind = self.served[uid].segment_types.pop()
                        self.prompt_cache.insert_cache(self.key, tokens[:], caches, cache_type=kind)
            except Exception as error:
                self.generator.remove([uid])
                self._fail(uid, error)

    def _trim(self) -> None:
        """Keep the prompt cache within the limits that the command line gave."""
        cli_args = self.owner.cli_args
        if cli_args.prompt_cache_size is not None and self.generator.shares_prefixes:
            self.prompt_cache.trim_to(n_sequences=cli_args.prompt_cache_size)
        if cli_args.prompt_cache_bytes is not None:
            active = self.generator.prompt_cache_nbytes
            self.prompt_cache.trim_to(n_bytes=cli_args.prompt_cache_bytes - active)


def batched_args(args: upstream.GenerationArguments, model: nn.Module) -> upstream.GenerationArguments:
    """What mlx-lm is to decide by whether a request can be batched: it takes a seed for a reason against it, and so it
    is where rows of the model cannot have seeds."""
    if args.seed is None or not seeds_rows(model):
        return args
    return dataclasses.replace(args, seed=None)


def _without(segments: list[list[int]], types: list[str], num_cached: int) -> tuple[list[list[int]], list[str]]:
    """The segments behind the first ``num_cached`` tokens."""
    segments, types = list(segments), list(types)
    while num_cached > 0:
        if num_cached < len(segments[0]):
            segments[0] = segments[0][num_cached:]
            break
        num_cached -= len(segments.pop(0))
        types.pop(0)
    return segments, types
