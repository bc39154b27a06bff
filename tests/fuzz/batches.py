"""A random case, run by stock mlx-lm one request after the other, and by the patched batch generator."""

import contextlib
import copy
import dataclasses
import importlib
import random
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as upstream_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.composites import leaves
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.engine.memory import PoolBudget
from mlx_paged.engine.request import RequestOptions
from mlx_paged.kv.pool import BlockPool
from mlx_paged.patches import registry
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.cache.prompt_cache import factory_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.prefix_cache import PrefixCache
from mlx_paged.prefix.shelf import Shelf
from tests.fuzz.cases import Case, Request, model_of
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import with_packs

mlx_lm_generate = importlib.import_module("mlx_lm.generate")
AMPLE = 1 << 26


def drawing() -> Any:
    """Return a sampler that draws; the patches must be applied."""
    return make_sampler(temp=0.9, top_p=0.95)


TOLERANCE = 1e-3
# Which of two tokens this close is chosen depends on the order of rounding.
TIE = 1e-5
MOST_CALLS = 20_000


class Expected(NamedTuple):
    """Result of stock mlx-lm's single run of a request."""

    tokens: list[int]
    logprobs: list[np.ndarray]
    reason: str
    stop: int | None


class Delivered:
    """What the batch generator has delivered of a request."""

    def __init__(self, request: Request, expected: Expected) -> None:
        self.request, self.expected = request, expected
        self.tokens: list[int] = []
        self.logprobs: list[np.ndarray] = []
        self.reason: str | None = None

    def check(self) -> None:
        """Raise AssertionError unless the tokens, their log-probabilities and the end are the single run's."""
        expected = self.expected
        for index, (token, wanted) in enumerate(zip(self.tokens, expected.tokens, strict=False)):
            difference = np.abs(self.logprobs[index] - expected.logprobs[index])
            assert difference[np.isfinite(difference)].max() < TOLERANCE, f"log-probabilities of token {index}"
            if token != wanted:
                logprobs = expected.logprobs[index]
                assert abs(logprobs[token] - logprobs[wanted]) < TIE, f"token {index} is {token}, not {wanted}"
                return  # after another token the texts differ
        if self.reason == "cancelled":
            assert len(self.tokens) <= len(expected.tokens)
        else:
            assert (len(self.tokens), self.reason) == (len(expected.tokens), expected.reason)


def run(case: Case) -> int:
    """Run a case both ways and compare. Returns the number of preemptions.

    Raises:
        AssertionError: they differ, or something is left over.
    """
    assert not mlx_paged.is_applied()
    rng = random.Random(f"{case.seed} as it runs")
    expected = expect(case, rng)
    caches = [_stock_cache(case, request) for request in case.requests]
    with tempfile.TemporaryDirectory() as folder:
        return sum(_live(case, expected, caches, rng, folder) for _ in range(1 + case.restarts))


def _live(case: Case, expected: list[Expected], caches: list[list[Any] | None], rng: random.Random, folder: str) -> int:
    """Run a case in the patched generator, with the prefixes that an earlier run left in the folder."""
    with patched(case, folder) as (pool, prefixes, store), with_packs(case.packs):
        generator = PagedBatchGenerator(
            model_of(case.family),
            prefixes=prefixes,
            completion_batch_size=case.running,
            prefill_batch_size=case.prefilling,
            prefill_step_size=case.step_size,
            max_kv_size=case.max_kv_size,
        )
        if case.packs is not None:
            assert generator._engine.packs == (case.packs and generator._engine.can_pack)
        delivered = [Delivered(request, wanted) for request, wanted in zip(case.requests, expected, strict=True)]
        Driver(case, generator, store, delivered, caches, rng).run()
        for each in delivered:
            each.check()
        preemptions = generator.preemptions
        generator.close()
        del generator
        if case.restarts and store is not None:
            store.tidy()
            store.disk = None  # killed: nothing is written any more
            for cache in store._caches.values():
                cache.tier = None
        check_nothing_left(pool, store)
    return preemptions


def expect(case: Case, rng: random.Random) -> list[Expected]:
    """Return stock mlx-lm's single runs. Most prompts that follow another request are made to continue its answer."""
    options = {} if case.max_kv_size is None else {"max_kv_size": case.max_kv_size}
    expected: dict[int, Expected] = {}
    for request in case.requests:
        if request.follows is not None and rng.random() < 0.7:
            request.replace_prompt(request.follows.prompt + expected[id(request.follows)].tokens + request.prompt[-3:])
        tokens, logprobs = [], []
        drawn = iter(()) if request.seed is None else iter(_drawn(case, request))
        for token, logprob in mlx_lm_generate.generate_step(
            mx.array(request.prompt, mx.uint32),
            model_of(case.family),
            max_tokens=request.num_tokens,
            sampler=request.sampler if request.seed is None else lambda _, drawn=drawn: mx.array([next(drawn, 0)]),
            logits_processors=make_logits_processors(**request.changes),
            prefill_step_size=case.step_size,
            **options,
        ):
            tokens.append(token)
            logprobs.append(np.array(logprob.astype(mx.float32)))
        stop = rng.choice(tokens) if request.has_stop else None
        end = len(tokens) if stop is None else tokens.index(stop) + 1
        expected[id(request)] = Expected(tokens[:end], logprobs, "length" if stop is None else "stop", stop)
    return [expected[id(request)] for request in case.requests]


def _drawn(case: Case, request: Request) -> list[int]:
    """Return the tokens that a request with a seed draws when it runs alone and nothing is cached."""
    with patched(dataclasses.replace(case, prefixes="none", budget_slack=None), ""):
        generator = PagedBatchGenerator(
            model_of(case.family), prefill_step_size=case.step_size, max_kv_size=case.max_kv_size
        )
        generator.insert_segments(
            [[request.prompt]],
            [request.num_tokens],
            samplers=[drawing()],
            options=[RequestOptions(seed=request.seed)],
        )
        tokens = []
        while any(answer := generator.next()):
            tokens += [response.token for response in answer[1]]
        generator.close()
    return tokens


def _stock_cache(case: Case, request: Request) -> list[Any] | None:
    """Return mlx-lm's own cache of the request's first tokens, if the request comes with one."""
    if request.given is None or request.given[0] != "stock":
        return None
    return _filled_cache(case, request)


def _filled_cache(case: Case, request: Request) -> list[Any]:
    """Return a cache of the request's first tokens, of the kind that make_prompt_cache makes now."""
    assert request.given is not None
    model = model_of(case.family)
    cache: list[Any] = upstream_cache.make_prompt_cache(model)
    model(mx.array(request.prompt[: request.given[1]])[None], cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


@contextlib.contextmanager
def patched(case: Case, folder: str) -> Iterator[tuple[BlockPool | None, Any, PagedPromptCache | None]]:
    """Apply the patches with the case's configuration. Yields its pool, the prefixes for the generator and their cache,
    which spills to the folder if the case does."""
    with contextlib.ExitStack() as stack:
        if case.in_place:
            stack.enter_context(fake_kernels())
        stack.callback(registry.remove_patches)
        config = PagedConfig(block_size=case.block_size, kv_cache_memory=AMPLE, state_interval=case.interval)
        mlx_paged.apply_patches(config)
        if case.budget_slack is not None and (budget := _least_budget(case)) is not None:
            registry.remove_patches()
            mlx_paged.apply_patches(dataclasses.replace(config, kv_cache_memory=budget))
        caches = factory_of(model_of(case.family), case.max_kv_size)()
        pool = mlx_paged.pool_of(model_of(case.family))
        if case.prefixes == "none":
            yield pool, None, None
            return
        if case.prefixes == "disk":
            store = PagedPromptCache(None, disk=DiskTier(Shelf(folder)), identify=lambda key: f"model {key}")
        else:
            store = PagedPromptCache(None)
        stack.callback(store.close)
        store.learn_layout("key", caches)
        del caches
        yield pool, store.shared_prefixes("key", prefix_pool_of(model_of(case.family))), store


def _least_budget(case: Case) -> int | None:
    """Return the bytes that hold the longest request alone, plus the case's slack; None if its layers are not paged."""
    model = model_of(case.family)
    caches = factory_of(model, case.max_kv_size)()
    pool = mlx_paged.pool_of(model)
    if pool is None or case.max_kv_size is not None:
        return None
    tree = None if case.prefixes == "none" else PrefixCache(pool)  # with it, a sequence takes a block more per group
    assert pool.memory.holders() == ([] if tree is None else [tree])
    has_states = not all(isinstance(cache, PagedKVCache) for cache in leaves(caches))
    pool.memory.keeps_states = tree is not None and has_states  # as the engine sets it
    longest = max(len(request.prompt) + request.num_tokens + 1 for request in case.requests)
    least = PoolBudget(pool, chunk=case.step_size).bytes_for(longest)
    assert case.budget_slack is not None
    return least + case.budget_slack * max(group.bytes_per_block for group in pool.groups)


class Driver:
    """Driver of a generator: inserts, cancels and steps as the case says, and collects the responses."""

    def __init__(
        self,
        case: Case,
        generator: Any,
        store: PagedPromptCache | None,
        delivered: list[Delivered],
        caches: list[list[Any] | None],
        rng: random.Random,
    ) -> None:
        self.case, self.generator, self.store, self.rng = case, generator, store, rng
        self.delivered, self.caches = delivered, caches
        self.by_uid: dict[int, Delivered] = {}

    def run(self) -> None:
        pending = sorted(range(len(self.delivered)), key=lambda index: self.delivered[index].request.arrives)
        is_busy = True
        for call in range(MOST_CALLS):
            while pending and (self.delivered[pending[0]].request.arrives <= call or not is_busy):
                self._insert(pending.pop(0))
            self._cancel(call)
            if self.store is not None and self.rng.random() < 0.05:
                self._meddle()
            is_busy = self._step()
            if self.case.preempts and self.rng.random() < self.case.preempts:
                self.generator.preempt_last()
            if not is_busy and not pending:
                return
        raise AssertionError("it does not come to an end")

    def _insert(self, index: int) -> None:
        each = self.delivered[index]
        self.case.tell(each.request.prompt, each.expected.tokens)
        request, prompt, options = each.request, each.request.prompt, {}
        if request.given is not None:
            kind, length = request.given
            cache = copy.deepcopy(self.caches[index]) if kind == "stock" else _filled_cache(self.case, request)
            options = {"caches": [cache], "all_tokens": [prompt[:length]]}
            prompt = prompt[length:]
        segments = [prompt] if request.cut is None else [prompt[: request.cut], prompt[request.cut :]]
        if each.expected.stop is not None:
            options["stop_sequences"] = [mlx_lm_generate.StopSequences([[each.expected.stop]])]
        (uid,) = self.generator.insert_segments(
            [segments],
            [request.num_tokens],
            samplers=[request.sampler if request.seed is None else drawing()],
            logits_processors=[make_logits_processors(**request.changes)],
            **options,
            options=[RequestOptions(prompt_lookup=self.case.lookup or None, seed=request.seed)],
        )
        self.by_uid[uid] = each

    def _cancel(self, call: int) -> None:
        for uid, each in self.by_uid.items():
            due = each.request.cancelled
            if due is not None and due <= call and each.reason is None:
                self.generator.remove([uid], return_prompt_caches=self.rng.random() < 0.3)
                each.reason = "cancelled"

    def _meddle(self) -> None:
        """Do what a server does between steps."""
        assert self.store is not None
        if self.rng.random() < 0.3:
            self.store.trim_to(n_sequences=self.rng.randint(0, 2))
        elif self.store.disk is not None:
            self.store.tidy()

    def _step(self) -> bool:
        prompts, generated = self.generator.next()
        for response in generated:
            each = self.by_uid[response.uid]
            assert each.reason is None, "a token after the last one"
            each.tokens.append(response.token)
            each.logprobs.append(np.array(response.logprobs.astype(mx.float32)))
            each.reason = response.finish_reason
            if each.reason is not None:
                assert response.all_tokens == each.request.prompt + each.tokens
                if self.rng.random() < 0.3:
                    assert response.prompt_cache is not None
        return bool(prompts or generated)


def check_nothing_left(pool: BlockPool | None, store: PagedPromptCache | None) -> None:
    """Raise AssertionError unless only the prefix cache holds blocks and states, and gives them back when closed."""
    if pool is None:
        return
    pool.check_integrity()
    stats = pool.stats()
    assert stats.live_blocks == stats.cached_blocks
    if store is not None:
        store.close()
        stats = pool.stats()
        assert stats.live_blocks == stats.checkpoint_bytes == 0
