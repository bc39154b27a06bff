"""LoadedModels: the models that the server has loaded, and what it computes with them."""

from __future__ import annotations

import functools
import gc
import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm import server as upstream
from mlx_lm.generate import stream_generate
from mlx_lm.models import cache as stock_cache
from mlx_lm.models.cache import LRUPromptCache

from ..by_model import ByModel
from ..engine.constraint import GrammarProcessor
from ..engine.memory import PoolBudget
from ..engine.request import RequestOptions
from ..engine.sampling.params import SamplingParams
from ..errors import ConfigError, PagedCacheError, check_device
from ..kernels import availability, check
from ..kv.pool import BlockPool
from ..machine import usable_memory
from ..patches.cache.lru_prompt_cache import PagedPromptCache, PromptStore, salted_store
from ..patches.cache.pools import known_pool, pool_of, probe_geometry
from ..patches.generate.batch_generator import PagedBatchGenerator
from ..patches.generate.drafting import BudgetShare, known_factory
from ..patches.patch import fingerprint
from ..patches.samplers import processors_of, sampler_of
from ..prefix.disk import DiskTier
from ..prefix.identity import identity_of
from ..prefix.shelf import Shelf
from ..ranks.ranks import Ranks
from .errors import not_found
from .logprobs import gather_logprobs
from .options import ServerConfig
from .request import ModelKey, ServerRequest
from .served_batch import ServedBatch, grammar_of
from .texts import LoadedTexts
from .weights import Weights, load_weights

# Fingerprints of upstream's code whose behaviour this module relies on.
KNOWN = {"ResponseGenerator._tokenize": "ec31a09902520a3e"}
SLICE, SLICE_BESIDE = 128, 32  # tokens of a prompt that are scored at a time, alone and between steps of other requests
MAX_TOKENS = 1 << 24  # of a sequence; a budget that holds these counts as unlimited
_shares: ByModel[BudgetShare] = ByModel("budget share")  # of draft models, as long as they are loaded
# Tokens of the prompts that are answered before the first client's: one alone, then two that share calls.
WARM_UP_PROMPTS = ((40,), (40, 20))


def changed() -> list[str]:
    """Return the names of mlx-lm's server whose source is not the one this module was written for."""
    return [name for name, known in KNOWN.items() if not _is_known(name, known)]


def _is_known(name: str, known: str) -> bool:
    try:
        return fingerprint(functools.reduce(getattr, name.split("."), upstream)) == known
    except (AttributeError, OSError, TypeError):
        return False


def capacity(pool: BlockPool | None, chunk: int) -> int | None:
    """Return the most tokens of one sequence, prompt and answer; None if unlimited or without a pool.

    Args:
        pool: the model's pool.
        chunk: tokens of a prompt that are computed at a time.
    """
    if pool is None or (budget := PoolBudget(pool, chunk=chunk)).holds(MAX_TOKENS):
        return None
    return bisect_left(range(1, MAX_TOKENS), True, key=lambda num_tokens: not budget.holds(num_tokens))


def make_prompt_cache(config: ServerConfig, max_size: int | None, ranks: Ranks | None) -> PromptStore:
    """Return the prompt cache that the options ask for; all models share it."""
    if not config.prefix_cache:
        return LRUPromptCache(max_size=0)  # keeps nothing
    disk, folder = None, config.prefix_cache_dir
    if folder is not None and ranks is None:
        disk = DiskTier(Shelf(folder, max_bytes=config.prefix_cache_dir_size))
    elif folder is not None and ranks is not None:
        folder /= f"rank-{ranks.rank}-of-{ranks.size}"
        disk = DiskTier(Shelf(folder, max_bytes=config.prefix_cache_dir_size), ranks.exchange)
    clock = time.monotonic if ranks is None else lambda: ranks.now
    return PagedPromptCache(max_size, ttl=config.prefix_cache_ttl, clock=clock, disk=disk)


class LoadedModels:
    """The present model and those that can replace it; models of the command line stay loaded while memory allows.

    Args:
        cli_args: arguments of the command line.
        config: options of the server.
        ranks: the ranks that compute the model together; None: this process has all of it.
    """

    def __init__(self, cli_args: Any, config: ServerConfig, ranks: Ranks | None = None) -> None:
        self.cli_args, self.config, self.ranks = cli_args, config, ranks
        self._texts: LoadedTexts | None = None
        self.weights: Weights | None = None
        self.idle_unload = config.idle_unload
        self._loaded: OrderedDict[ModelKey, tuple[Weights, LoadedTexts]] = OrderedDict()  # least recently used first
        self._all_texts: dict[ModelKey, LoadedTexts] = {}  # also of unloaded models of the command line
        self.prompt_cache = make_prompt_cache(config, cli_args.prompt_cache_size, ranks)
        if isinstance(self.prompt_cache, PagedPromptCache) and self.prompt_cache.disk is not None:
            self.prompt_cache.identify = self._identify

    @property
    def texts(self) -> LoadedTexts | None:
        return self._texts

    def texts_of(self, key: ModelKey | None) -> LoadedTexts | None:
        texts = self._texts
        return texts if key is None or (texts is not None and texts.key == key) else self._all_texts.get(key)

    def is_present(self, key: ModelKey) -> bool:
        return self.weights is not None and self._texts is not None and self.weights.key == key

    @property
    def default_key(self) -> ModelKey:
        args = self.cli_args
        return ModelKey(args.model, args.adapter_path, args.draft_model)

    def load_default(self) -> None:
        """Load the model of the command line, if there is one. Raises Exception if it cannot be served."""
        if self.cli_args.model is None:
            return
        group = None if self.ranks is None else self.ranks.group
        weights = load_weights(self.default_key, self.cli_args, group=group)
        self._activate(weights)
        pool = known_pool(weights.model)
        if pool is not None:  # the smallest request has one token of prompt and one of answer
            budget = PoolBudget(pool, chunk=self.cli_args.prefill_step_size)
            if not budget.holds(2):
                raise ConfigError(
                    f"KV cache budget of {pool.memory_budget:,} bytes is too small: one request of this model needs at "
                    f"least {budget.bytes_for(2):,} bytes; raise kv_cache_memory (--kv-cache-memory)"
                )
        mx.eval(weights.arrays)
        self._log_ready()
        if self.ranks is not None and not (weights.is_batchable and known_pool(weights.model) is not None):
            raise ConfigError("serving over several ranks requires a model with batching and paged caches")
        if self.ranks is None and weights.is_batchable and pool is not None:
            self._warm_up(weights)

    def _warm_up(self, weights: Weights) -> None:
        """On a GPU, answer short prompts, so that no client waits until kernels are compiled and checked."""
        if availability.device_unsupported_reason() is not None:
            return
        begin = time.monotonic()
        batch = PagedBatchGenerator(weights.model, stream=mx.new_stream(mx.default_device()))
        drawn = RequestOptions(seed=0, sampling=SamplingParams(temperature=1.0))
        try:
            for lengths in WARM_UP_PROMPTS:
                prompts = [[1 + i % 100 for i in range(length)] for length in lengths]
                batch.insert(prompts, [3] * len(prompts), options=[RequestOptions(), drawn][: len(prompts)])
                while batch.next() != ([], []):
                    pass
        except PagedCacheError as error:  # the budget holds less
            check_device(error)
            logging.warning("kernels are tried by the first request: %s", error)
        finally:
            batch.close()
        logging.info("%s; the first prompts took %.1f s", check.summary(), time.monotonic() - begin)

    def load(self, key: ModelKey, make_way: Callable[[], None]) -> None:
        """Load another model in place of the present one. It stays if the other cannot be loaded, unless it was dropped
        to make room for the weights.

        Everything but the bytes of the weights is read first: configuration, tokenizer, names and shapes. So what is
        wrong with a model shows while the present one is still loaded.

        Raises:
            RequestRefused: 404, it cannot be loaded. Only the log says why: clients must not learn what is on disk.
        """
        if (found := self._loaded.get(key)) is not None:
            make_way()
            self.weights, self._texts = found
            self._loaded.move_to_end(key)
            return
        try:
            self._load(key, make_way)
            return
        except Exception as error:
            check_device(error)
            logging.warning("the model %.200r cannot be loaded: %s: %.500s", key.model, type(error).__name__, error)
        gc.collect()  # what was read of it
        mx.clear_cache()
        message = "the model cannot be loaded: see the server's log"
        raise not_found(message, param="model", code="model_not_found")

    def _load(self, key: ModelKey, make_way: Callable[[], None]) -> None:
        weights = load_weights(key, self.cli_args)
        if isinstance(self.prompt_cache, PagedPromptCache):
            self.prompt_cache.tidy()  # the model's prefixes are dropped with it
        make_way()
        needed = sum(x.nbytes for x in weights.arrays)
        while self._loaded and needed > usable_memory() - mx.get_active_memory():
            oldest = next(iter(self._loaded)).model
            logging.warning("unloading %.200s: not enough memory for another model", oldest)
            self._drop_oldest()
        mx.eval(weights.arrays)
        self._activate(weights)
        self._log_ready()
        while len(self._loaded) > max(1, len(self.cli_args.models)):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, (weights, _) = self._loaded.popitem(last=False)
        if self.weights is weights:
            self.weights = self._texts = None
        if key.model not in self.cli_args.models:
            del self._all_texts[key]
        del weights
        gc.collect()
        mx.clear_cache()

    def unload(self) -> None:
        if isinstance(self.prompt_cache, PagedPromptCache):
            self.prompt_cache.tidy()
            self.prompt_cache.forget_unloaded()
        texts = self._texts  # they stay
        while self._loaded:
            self._drop_oldest()
        self._texts = texts

    def _activate(self, weights: Weights) -> None:
        """Make a loaded model the present one. If it cannot be served, the present one stays as it is."""
        caches, texts = self._prepare(weights)
        self.weights, self._texts = weights, texts
        self._loaded[weights.key], self._all_texts[weights.key] = (weights, texts), texts
        if isinstance(self.prompt_cache, PagedPromptCache):
            self.prompt_cache.forget_unloaded()
            self.prompt_cache.learn_layout(weights.key, caches)  # so that its prefixes on disk are found

    def _log_ready(self) -> None:
        assert self.weights is not None
        size, pool = "no paged KV cache", pool_of(self.weights.model)
        if pool is not None:
            most = None if self._texts is None else self._texts.capacity
            tokens = "a request of any length" if most is None else f"{most:,} tokens"
            size = f"a KV cache of {pool.memory_budget:,} bytes, which holds {tokens}"
        disk = getattr(self.prompt_cache, "disk", None)
        kept = "" if disk is None else f"; {len(disk.shelf)} blocks of prefixes are on disk"
        logging.info("the model %s is ready, with %s%s", self.weights.key.model, size, kept)

    def _prepare(self, weights: Weights) -> tuple[list[Any], LoadedTexts]:
        """Make the model's pool. Returns a prompt cache over it, and the model's texts."""
        caches = stock_cache.make_prompt_cache(weights.model)
        probe_geometry(weights.model, caches)
        if weights.separate_draft is not None:
            caches += stock_cache.make_prompt_cache(weights.separate_draft)
        if weights.draft_model is not None and weights.is_batchable:
            own, draft_pool = known_pool(weights.model), known_factory(weights.draft_model).pool
            if own is not None and draft_pool is not None:
                _shares.put(weights.draft_model, BudgetShare(own, draft_pool))
        if isinstance(self.prompt_cache, PagedPromptCache) and (pool := known_pool(weights.model)) is not None:
            self.prompt_cache.cache_of(pool)  # with it requests need more; `capacity` counts that
        most = capacity(pool_of(weights.model), self.cli_args.prefill_step_size)
        return caches, LoadedTexts(weights, self.cli_args.chat_template_args, most)

    def _identify(self, key: Hashable) -> str | None:
        """Return the identity of a loaded model on disk; over ranks, None on all if one rank has none."""
        found, identity = [each for each, _ in self._loaded.values() if each.key == key], None
        if not found and self.weights is not None and self.weights.key == key:
            found = [self.weights]
        for weights in found:
            identity = identity_of(
                [weights.model, *([] if weights.separate_draft is None else [weights.separate_draft])]
            )
        if self.ranks is not None and not all(self.ranks.exchange(identity is not None)):
            return None
        return identity

    @property
    def pool(self) -> BlockPool | None:
        return None if self.weights is None else known_pool(self.weights.model)

    # Computing ------------------------------------------------------------------------------------------------

    def can_batch(self, request: ServerRequest) -> bool:
        weights = self.weights
        assert weights is not None
        if not weights.is_batchable or self.cli_args.kv_bits is not None:
            return False
        return all(prompt.vision is None for prompt in request.prompts)

    def batch(self, stream: mx.Stream) -> ServedBatch:
        assert self.weights is not None
        return ServedBatch(self.prompt_cache, self.weights, self.cli_args, stream)

    def scores(
        self, tokens: list[int], num_top: int, is_alone: Callable[[], bool]
    ) -> Iterator[tuple[list[float], list[Any]] | None]:
        """Run the model over a prompt slice by slice, apart from the batch and with caches of its own."""
        assert self.weights is not None
        model = self.weights.model
        caches = stock_cache.make_prompt_cache(model)
        found: list[float] = []
        top: list[list[tuple[int, float]]] = []
        end = 0
        while end < len(tokens) - 1:
            begin, end = end, min(end + (SLICE if is_alone() else SLICE_BESIDE), len(tokens) - 1)
            logits = model(mx.array([tokens[begin:end]]), cache=caches)[0].astype(mx.float32)
            rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            for logprob, likeliest in gather_logprobs(rows, tokens[begin + 1 : end + 1], num_top):
                found.append(logprob)
                top.append(list(likeliest))
            yield None
        yield found, top

    def generate_alone(
        self, request: ServerRequest, index: int, stream: mx.Stream, on_progress: Callable[[int, int], None]
    ) -> Iterator[Any]:
        """Compute one answer in mlx-lm's own loop: with images, or a draft model or caches that cannot be batched."""
        weights, args = self.weights, self.cli_args
        assert weights is not None
        prompt, params = request.prompt_of(index), request.sampling_of(index)
        vision = prompt.vision
        if params.seed is not None:
            mx.random.seed(params.seed)
        key = list(vision.cache_key if vision is not None else prompt.tokens)
        with salted_store(self.prompt_cache, request.salt):
            cache, rest = self.prompt_cache.fetch_nearest_cache(weights.key, key)
        num_cached = len(prompt.tokens) - len(rest)
        tokens = prompt.tokens[num_cached:]
        if cache is None:
            cache = stock_cache.make_prompt_cache(weights.model)
            if weights.separate_draft is not None:
                cache += stock_cache.make_prompt_cache(weights.separate_draft)
        embeddings = None
        if vision is not None:
            num_seen = sum(start < num_cached for start in vision.starts)
            if pixels := vision.pixel_values[num_seen:]:
                embeddings = weights.model.embed_inputs(mx.array(tokens), pixel_values=pixels)
                mx.eval(embeddings)  # the prefill runs on another stream
        grammar = grammar_of(request, prompt, weights.tokenizer)
        processors = [] if grammar is None else [GrammarProcessor(grammar)]
        draft_tokens = request.num_draft_tokens
        for generated in stream_generate(
            model=weights.model,
            stream=stream,
            tokenizer=weights.tokenizer,
            prompt=tokens,
            max_tokens=request.max_tokens,
            sampler=sampler_of(params),
            logits_processors=[*processors, *processors_of(params)],
            prompt_cache=cache,
            draft_model=weights.separate_draft,
            num_draft_tokens=args.num_draft_tokens if draft_tokens is None else draft_tokens,
            input_embeddings=embeddings,
            prompt_progress_callback=on_progress,
            prefill_step_size=args.prefill_step_size,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
        ):
            key.append(generated.token)
            yield SimpleNamespace(
                uid=0,
                token=generated.token,
                text=generated.text,
                finish_reason=generated.finish_reason,
                logprobs=generated.logprobs,
                num_cached=num_cached,
            )
            if generated.finish_reason is not None:
                break
        with salted_store(self.prompt_cache, request.salt):
            self.prompt_cache.insert_cache(weights.key, key, cache)

    def trim(self, batch: ServedBatch | None) -> None:
        args, cache = self.cli_args, self.prompt_cache
        if args.prompt_cache_size is not None and (batch is None or batch.shares_prefixes):
            cache.trim_to(n_sequences=args.prompt_cache_size)
        if args.prompt_cache_bytes is not None:
            active = 0 if batch is None else batch.prompt_cache_nbytes
            cache.trim_to(n_bytes=args.prompt_cache_bytes - active)

    def close(self) -> None:
        if isinstance(self.prompt_cache, PagedPromptCache):
            self.prompt_cache.close()  # to disk, if it has a folder
        self._texts = self.weights = None
        self._loaded.clear()
        gc.collect()
