"""LoadedModels: the models that the server has loaded, and what it computes with them."""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import server as upstream
from mlx_lm import utils
from mlx_lm.generate import stream_generate
from mlx_lm.models import cache as stock_cache

from ..engine.constraint import GrammarProcessor
from ..engine.memory import PoolBudget
from ..engine.request import RequestOptions
from ..engine.sampling.params import SamplingParams
from ..errors import ConfigError, PagedCacheError, check_device
from ..kernels import availability, check
from ..kv.pool import BlockPool
from ..machine import memory_beside, usable_memory
from ..model_folder import check_model_folder, check_weight_files, explain_load_errors, weight_bytes
from ..patches.cache.lru_prompt_cache import PagedPromptCache
from ..patches.cache.pools import count_weights, known_pool, pool_of
from ..patches.cache.prompt_cache import factory_of
from ..patches.generate.batch_generator import PagedBatchGenerator
from ..patches.generate.drafting import check_same_tokens, share_budget, why_not_drafted
from ..patches.models.mtp import MTPHead, find_head, folder_of, load_head
from ..patches.patch import fingerprint
from ..patches.samplers import processors_of, sampler_of
from ..patches.sharded import sharded_load
from ..prefix.disk import DiskTier
from ..prefix.identity import identity_of
from ..prefix.shelf import Shelf
from ..ranks.ranks import Ranks
from .errors import not_found
from .grammars import with_thinking_budget
from .options import ServerConfig
from .request import ModelKey, Prompt, ServerRequest
from .texts import LoadedTexts

# Fingerprints of upstream's code whose behaviour this module relies on.
KNOWN = {"ResponseGenerator._tokenize": "ec31a09902520a3e"}
SLICE = 128  # tokens of a prompt that are scored at a time
MAX_TOKENS = 1 << 24  # of a sequence; a budget that holds these counts as unlimited
# Tokens of the prompts that are answered before the first client's: one alone, then two that share calls.
WARM_UP_PROMPTS = ((40,), (40, 20))


def check_known() -> None:
    """Raise ConfigError if mlx-lm's tokenization of requests is not the one that the server was written for."""
    ((name, known),) = KNOWN.items()
    if fingerprint(upstream.ResponseGenerator._tokenize) != known:
        raise ConfigError(f"the server does not support this version of mlx-lm: {name} has changed")


def capacity(pool: BlockPool | None, chunk: int) -> int | None:
    """Return the most tokens of one sequence, prompt and answer; None if unlimited or without a pool.

    Args:
        pool: the model's pool.
        chunk: tokens of a prompt that are computed at a time.
    """
    if pool is None or (budget := PoolBudget(pool, chunk=chunk)).holds(MAX_TOKENS):
        return None
    return bisect_left(range(1, MAX_TOKENS), True, key=lambda num_tokens: not budget.holds(num_tokens))


def make_prompt_cache(config: ServerConfig, max_size: int | None, ranks: Ranks | None) -> PagedPromptCache:
    """Return the prompt cache that the options ask for, which all models share. Without the prefix cache nothing is put
    into it."""
    disk, folder = None, config.prefix_cache_dir
    if folder is not None and ranks is None:
        disk = DiskTier(Shelf(folder, max_bytes=config.prefix_cache_dir_size))
    elif folder is not None and ranks is not None:
        folder /= f"rank-{ranks.rank}-of-{ranks.size}"
        disk = DiskTier(Shelf(folder, max_bytes=config.prefix_cache_dir_size), ranks.exchange)
    clock = time.monotonic if ranks is None else lambda: ranks.now
    return PagedPromptCache(max_size, ttl=config.prefix_cache_ttl, clock=clock, disk=disk)


class Weights(NamedTuple):
    """A loaded model.

    Attributes:
        key: folders or hub repositories that it was loaded from.
        is_batchable: whether its requests can be computed together.
    """

    key: ModelKey
    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    draft_model: nn.Module | None
    is_batchable: bool

    @property
    def arrays(self) -> list[mx.array]:
        models = (self.model, self.draft_model)
        return [x for model in models if model is not None for _, x in tree_flatten(model.parameters())]

    @property
    def separate_draft(self) -> nn.Module | None:
        """Return the draft model; None if there is none or it is a prediction head, which only batches use."""
        return None if isinstance(self.draft_model, MTPHead) else self.draft_model


def load_weights(key: ModelKey, cli_args: Any, *, group: Any = None) -> Weights:
    """Load a model as mlx-lm's server does, except for the bytes of its weights, which are read on first use.

    Args:
        key: folders or hub repositories.
        cli_args: arguments of the command line.
        group: the ranks that the model is sharded over; None: this process has all of it.

    Raises:
        Exception: the model cannot be loaded.
    """
    path, adapter, draft = key
    for name in (path, draft):
        check_model_folder(name)
        if name is not None and group is None:
            check_weight_files(Path(name) if Path(name).exists() else utils._download(name))
    memory_beside(weight_bytes(path, draft, adapter=adapter) // (1 if group is None else group.size()))
    if adapter is not None and not (Path(adapter) / "adapter_config.json").exists():
        raise ValueError(f"the adapter {adapter} has no adapter_config.json")
    head = find_head(folder_of(path)) if cli_args.mtp and draft is None and path is not None else None
    tokenizer_config: dict[str, Any] = {"trust_remote_code": cli_args.trust_remote_code}
    if cli_args.chat_template:
        tokenizer_config["chat_template"] = cli_args.chat_template
    options: dict[str, Any] = {"tokenizer_config": tokenizer_config, "return_config": True}
    options["trust_remote_code"] = cli_args.trust_remote_code
    if group is not None:
        load = explain_load_errors(sharded_load)
        model, tokenizer, config = load(path, tensor_group=group, **options)
    else:
        load = explain_load_errors(utils.load)
        model, tokenizer, config = load(path, adapter_path=adapter, lazy=True, **options)
    if cli_args.use_default_chat_template and tokenizer.chat_template is None:
        tokenizer.chat_template = tokenizer.default_chat_template
    draft_model = None
    if draft is not None:
        draft_model, draft_tokenizer = load(draft, lazy=True)
        check_same_tokens(tokenizer, draft_tokenizer)
    elif head is not None:
        draft_model = load_head(model, head)
    count_weights(model, *([] if draft_model is None else [draft_model]))
    together = all(hasattr(c, "merge") for c in stock_cache.make_prompt_cache(model))
    if draft_model is not None and (why_not := why_not_drafted(model, draft_model)) is not None:
        logging.warning("requests run one at a time, as in mlx-lm: %s", why_not)
        together = False
    return Weights(key, model, tokenizer, config, draft_model, together)


def grammar_of(request: ServerRequest, prompt: Prompt, tokenizer: Any) -> Any:
    """Return the request's grammar, which begins after reasoning that the prompt has begun, and bounds reasoning by its
    budget."""
    grammar, reasons = request.grammar, prompt.initial_state == "reasoning"
    if not tokenizer.has_thinking:
        return grammar
    if grammar is not None and reasons:
        grammar = grammar.begins_after(tokenizer.think_end_tokens)
    if request.thinking_budget is None:
        return grammar
    return with_thinking_budget(grammar, tokenizer, request.thinking_budget, is_open=reasons)


class LoadedModels:
    """The present model and those that can replace it; models of the command line stay loaded while memory allows.

    Args:
        cli_args: arguments of the command line.
        config: options of the server.
        ranks: the ranks that compute the model together; None: this process has all of it.
    """

    def __init__(self, cli_args: Any, config: ServerConfig, ranks: Ranks | None = None) -> None:
        self.cli_args, self.config, self.ranks = cli_args, config, ranks
        self.texts: LoadedTexts | None = None
        self.weights: Weights | None = None
        self._loaded: OrderedDict[ModelKey, tuple[Weights, LoadedTexts]] = OrderedDict()  # least recently used first
        self._all_texts: dict[ModelKey, LoadedTexts] = {}  # also of unloaded models of the command line
        self.prompt_cache = make_prompt_cache(config, cli_args.prompt_cache_size, ranks)
        if self.prompt_cache.disk is not None:
            self.prompt_cache.identify = self._identify

    def texts_of(self, key: ModelKey | None) -> LoadedTexts | None:
        texts = self.texts
        return texts if key is None or (texts is not None and texts.key == key) else self._all_texts.get(key)

    def is_present(self, key: ModelKey) -> bool:
        return self.weights is not None and self.texts is not None and self.weights.key == key

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
            self.weights, self.texts = found
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
            self.weights = self.texts = None
        if key.model not in self.cli_args.models:
            del self._all_texts[key]
        del weights
        gc.collect()
        mx.clear_cache()

    def unload(self) -> None:
        self.prompt_cache.tidy()
        self.prompt_cache.forget_unloaded()
        texts = self.texts  # they stay
        while self._loaded:
            self._drop_oldest()
        self.texts = texts

    def _activate(self, weights: Weights) -> None:
        """Make a loaded model the present one. If it cannot be served, the present one stays as it is."""
        caches, texts = self._prepare(weights)
        self.weights, self.texts = weights, texts
        self._loaded[weights.key], self._all_texts[weights.key] = (weights, texts), texts
        self.prompt_cache.forget_unloaded()
        if self.config.prefix_cache:
            self.prompt_cache.learn_layout(weights.key, caches)  # so that its prefixes on disk are found

    def _log_ready(self) -> None:
        assert self.weights is not None
        size, pool = "no paged KV cache", pool_of(self.weights.model)
        if pool is not None:
            most = None if self.texts is None else self.texts.capacity
            tokens = "a request of any length" if most is None else f"{most:,} tokens"
            size = f"a KV cache of {pool.memory_budget:,} bytes, which holds {tokens}"
        disk = self.prompt_cache.disk
        kept = "" if disk is None else f"; {len(disk.shelf)} blocks of prefixes are on disk"
        logging.info("the model %s is ready, with %s%s", self.weights.key.model, size, kept)

    def _prepare(self, weights: Weights) -> tuple[list[Any], LoadedTexts]:
        """Make the model's pool. Returns a prompt cache over it, and the model's texts."""
        caches = stock_cache.make_prompt_cache(weights.model)
        if weights.separate_draft is not None:
            caches += stock_cache.make_prompt_cache(weights.separate_draft)
        if weights.draft_model is not None and weights.is_batchable:
            own, draft_pool = known_pool(weights.model), factory_of(weights.draft_model, None).pool
            if own is not None and draft_pool is not None:
                share_budget(own, draft_pool)
        if self.config.prefix_cache and (pool := known_pool(weights.model)) is not None:
            self.prompt_cache.cache_of(pool)  # with it requests need more; `capacity` counts that
        most = capacity(pool_of(weights.model), self.cli_args.prefill_step_size)
        return caches, LoadedTexts(weights, self.cli_args.chat_template_args, most)

    def _identify(self, key: Any) -> str | None:
        """Return the identity of a loaded model on disk; over ranks, None on all if one rank has none."""
        found, identity = self._loaded.get(key), None
        if found is not None:
            weights, _ = found
            draft = weights.separate_draft
            identity = identity_of([weights.model, *([] if draft is None else [draft])])
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

    def scores(self, tokens: list[int], num_top: int) -> Iterator[tuple[list[float], list[Any]] | None]:
        """Run the model over a prompt slice by slice, apart from the batch and with caches of its own."""
        assert self.weights is not None
        model = self.weights.model
        caches = stock_cache.make_prompt_cache(model)
        found: list[float] = []
        top: list[list[tuple[int, float]]] = []
        end = 0
        while end < len(tokens) - 1:
            begin, end = end, min(end + SLICE, len(tokens) - 1)
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
        with self.prompt_cache.salted(request.salt):
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
            generated.uid, generated.num_cached = 0, num_cached  # as responses of a batch have
            yield generated
            if generated.finish_reason is not None:
                break
        if self.config.prefix_cache:
            with self.prompt_cache.salted(request.salt):
                self.prompt_cache.insert_cache(weights.key, key, cache)

    def trim(self, batch: PagedBatchGenerator | None) -> None:
        args, cache = self.cli_args, self.prompt_cache
        if args.prompt_cache_size is not None:
            cache.trim_to(n_sequences=args.prompt_cache_size)
        if args.prompt_cache_bytes is not None:
            active = 0 if batch is None else batch.prompt_cache_nbytes
            cache.trim_to(n_bytes=args.prompt_cache_bytes - active)

    def close(self) -> None:
        self.prompt_cache.close()  # to disk, if it has a folder
        self.texts = self.weights = None
        self._loaded.clear()
        gc.collect()


# Log-probabilities --------------------------------------------------------------------------------------------------


def fetch_logprobs(asking: list[tuple[Any, int]]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """Return, by uid, the log-probability of each token and of the most likely ones.

    Args:
        asking: responses, each with its number of most likely tokens.
    """
    if not asking:
        return {}
    rows, tokens = mx.stack([response.logprobs for response, _ in asking]), [response.token for response, _ in asking]
    found = gather_logprobs(rows, tokens, max(top for _, top in asking))
    wanted = zip(asking, found, strict=True)
    return {response.uid: (logprob, likeliest[:top]) for (response, top), (logprob, likeliest) in wanted}


def gather_logprobs(
    rows: mx.array, tokens: list[int], num_top: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the log-probability of each row's token, and the row's ``num_top`` most likely tokens with theirs, in one
    transfer."""
    wanted, most = mx.array(tokens)[:, None], min(num_top, rows.shape[-1])
    if most:
        likeliest = mx.argpartition(-rows, kth=most - 1, axis=-1)[:, :most].astype(mx.int32)
        wanted = mx.concatenate([wanted, likeliest], axis=1)
    values = mx.take_along_axis(rows, wanted, axis=1).astype(mx.float32)
    # Ids and values in one array: float32 is exact for ids up to 2**24.
    fetched: Any = mx.stack([wanted.astype(mx.float32), values], axis=1).tolist()
    return [
        (logprobs[0], tuple(sorted(zip(map(int, ids[1:]), logprobs[1:], strict=True), key=lambda pair: -pair[1])))
        for ids, logprobs in fetched
    ]
