"""Faults injected into the calls of one phase of a request fail requests that run, and leave a usable engine."""

import functools
import gc
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import sharing as prefix_sharing
from mlx_paged.engine import sharing as snapshots
from mlx_paged.errors import RequestFailedError
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import quick
from tests.support.models.batch_runs import kv_budget, mlx_lm_generate, packing_generator
from tests.support.models.builders import build, greedy, prompt_of
from tests.support.models.recurrent import build_recurrent

BLOCK = 8
ROOT = Path(mlx_paged.__file__).parent
WATCHED = {str(path) for folder in ("kv", "cache", "prefix") for path in (ROOT / folder).rglob("*.py")}
WATCHED -= {str(ROOT / "kv" / "idle.py")}  # is called by finalizers, and calls nothing that raises
WATCHED |= {prefix_sharing.__file__, snapshots.__file__}


class Injected(RuntimeError):
    """The fault."""


class Faults:
    """Count the calls into the watched files that watched methods make, and raise at one of them.

    Attributes:
        paths: in a run without a fault, the numbers of the first and the last call by each chain of callers.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.calls = 0
        self.paths: dict[tuple[str, ...], tuple[int, int]] = {}
        self.where = ""
        self.is_after_the_end = False  # raised while a finished request's cache was dropped

    def watch(self, owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **options: Any) -> Any:
            with self._counting():
                return original(*args, **options)

        setattr(owner, name, watched)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        if self.where or sys.getprofile() is not None:  # raised already, or inside of another watched method
            yield
            return
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # A lambda may be the callback of a weak reference, where Python ignores exceptions.
        # A generator is also "called" when it is closed, where Python ignores exceptions, too.
        if event != "call" or code.co_filename not in WATCHED or code.co_name in ("<lambda>", "<genexpr>"):
            return
        self.calls += 1
        if self.at is None:
            chain: list[str] = []
            caller: FrameType | None = frame
            while caller is not None and caller.f_code.co_name != "watched":
                chain.append(caller.f_code.co_qualname)
                caller = caller.f_back
            first, _ = self.paths.setdefault(tuple(chain), (self.calls, self.calls))
            self.paths[tuple(chain)] = (first, self.calls)
        if self.calls == self.at:
            self.where = f"{Path(code.co_filename).name}:{code.co_qualname}"
            above: FrameType | None = frame
            while above is not None:
                self.is_after_the_end |= above.f_code.co_qualname == "Response.drop_cache"
                above = above.f_back
            raise Injected(self.where)


@functools.cache
def model_of(kind: str) -> Any:
    """Build a small model: only calls are counted here."""
    return build_recurrent(kind) if kind in ("falcon_h1", "qwen3_next", "mamba") else build(kind)


SYSTEM = prompt_of(3 * BLOCK + 3, seed=1).tolist()
PROMPTS = [SYSTEM + prompt_of(5 + n, seed=10 + n).tolist() for n in range(3)] + [prompt_of(30, seed=2).tolist()]


@functools.cache
def solos(kind: str, new: int) -> list[list[int]]:
    return [greedy(model_of(kind), mx.array(prompt), new)[0] for prompt in PROMPTS]


class Scene:
    """A generator over its own pool, with or without a prefix cache, given caches, and packs of prompts."""

    def __init__(
        self, kind: str, prefixes: bool, given: bool, num_blocks: int | None = None, new: int = 4, packs: bool = False
    ) -> None:
        self.new, self.expected = new, solos(kind, new)
        model = model_of(kind)
        budget = None if num_blocks is None else kv_budget(model, num_blocks, BLOCK)
        mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=budget))
        self.pool = mlx_paged.pool_of(model)
        if self.pool is None:
            mlx_lm_generate.make_prompt_cache(model)
            self.pool = mlx_paged.pool_of(model)
        caches = mlx_lm_generate.make_prompt_cache(model)
        self.tree = PrefixCache(prefix_pool_of(model)) if prefixes else None
        store = None if self.tree is None else SharedPrefixes(self.tree)
        options = {"prefixes": store, "prefill_step_size": 16, "completion_batch_size": 3}
        self.gen = packing_generator(model, 48, **options) if packs else PagedBatchGenerator(model, **options)
        self.caches: list[Any] | None = None
        if given:
            model(mx.array(SYSTEM)[None], cache=caches)
            mx.eval([cache.state for cache in caches])
            self.caches = caches

    def run(self) -> list[RequestFailedError]:
        """Run all requests to their ends; return the failures."""
        shared = len(SYSTEM)
        if self.caches is None:
            uids = self.gen.insert(PROMPTS, [self.new] * len(PROMPTS))
        else:
            tails = [prompt[shared:] if prompt[:shared] == SYSTEM else prompt for prompt in PROMPTS]
            caches = [self.caches if prompt[:shared] == SYSTEM else None for prompt in PROMPTS]
            told = [SYSTEM if cache is not None else [] for cache in caches]
            uids = self.gen.insert(tails, [self.new] * len(PROMPTS), caches=caches, all_tokens=told)
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        failures: dict[int, RequestFailedError] = {}
        while True:
            try:
                prompts, generated = self.gen.next()
            except RequestFailedError as error:
                assert error.uid not in failures
                failures[error.uid] = error
                continue
            if not prompts and not generated:
                break
            response = None
            for response in generated:
                assert response.uid not in failures
                tokens[response.uid].append(response.token)
            del prompts, generated, response  # they hold the caches of finished requests
        for uid, expected in zip(uids, self.expected, strict=True):
            got = tokens[uid]
            assert got == (expected[: len(got)] if uid in failures else expected)
            assert uid not in failures or len(got) < self.new  # a request fails or finishes, not both
        return list(failures.values())

    def check(self) -> None:
        gc.collect()  # an error's frames may hold tables; test_letting_go.py checks that without the collector
        engine = self.gen._engine
        assert not engine.requests and not len(engine.scheduler) and not engine.batch.rows
        assert not engine.memory.refused
        self.pool.collect()
        self.pool.check_integrity()
        held = 0
        if self.caches is not None:
            sequence = next(cache.sequence for cache in self.caches if hasattr(cache, "sequence"))
            held = sum(map(sequence.table.num_blocks, range(len(self.pool.groups))))
        if self.tree is not None:
            self.tree.check_integrity()
        stats = self.pool.stats()
        assert stats.live_blocks == stats.cached_blocks + held, stats


# Phases of a request, with the engine's methods of each.
PARTS = {
    "admission": ["memory.admit", "memory.fits"],
    "making room": ["memory.release"],
    "joining": ["batch.add", "batch.step"],
    "finishing": ["_deliver"],
    "inserting a chunk": ["sharing.insert_chunk"],
    "computing prompts": ["prefill.compute"],
}
SCENES = {
    "plain": ("llama", False, False),
    "plain, prefixes": ("llama", True, False),
    "plain, caches given": ("llama", False, True),
    "plain, prefixes, tight": ("llama", True, False, 13, 30),
    "windows": ("gemma3", False, False),
    "windows, prefixes": ("llama-sliding", True, False),
    "windows, prefixes, caches given": ("llama-sliding", True, True),
    "packs": ("llama-sliding", False, False, None, 4, True),
    "packs, prefixes": ("gemma3", True, False, None, 4, True),
    "hybrid": ("falcon_h1", False, False),
    "hybrid, checkpoints": ("qwen3_next", True, False),
    "hybrid, caches given": ("qwen3_next", False, True),
}
CASES = [(scene, "admission") for scene in SCENES if not scene.startswith("packs")]
CASES += [("plain, prefixes, tight", "making room"), ("plain, prefixes", "joining"), ("hybrid, checkpoints", "joining")]
CASES += [("windows, prefixes", "finishing"), ("hybrid, checkpoints", "finishing")]
CASES += [("windows, prefixes", "inserting a chunk")]
CASES += [("packs", "computing prompts"), ("packs, prefixes", "computing prompts")]
# The sampled test raises at two of the first, middle and last call of a case, chosen in turn; for admission, which most
# scenes have, at one of them.
SAMPLES = [(0, 1), (1, 2), (0, 2)]


def watched(scene: Scene, part: str, at: int | None = None) -> Faults:
    faults = Faults(at)
    for name in PARTS[part]:
        owner, _, method = f"_engine.{name}".rpartition(".")
        faults.watch(operator.attrgetter(owner)(scene.gen), method)
    return faults


def with_fault(scene_name: str, part: str, at: int) -> None:
    mlx_paged.remove_patches()
    scene = Scene(*SCENES[scene_name])
    faults = watched(scene, part, at)
    failures = scene.run()
    assert faults.where, "the calls of two runs differ"
    assert all(isinstance(failure.__cause__, Injected) for failure in failures), (faults.where, failures[0].__cause__)
    assert failures or part != "admission" or faults.is_after_the_end, f"{faults.where} was swallowed"
    del failures
    scene.check()
    assert not scene.run(), "the state is no longer usable"
    scene.check()


def calls_of(scene_name: str, part: str) -> list[int]:
    """Return the calls to raise at: the first and the last by each chain of callers."""
    mlx_paged.remove_patches()
    scene = Scene(*SCENES[scene_name])
    faults = watched(scene, part)
    assert not scene.run()
    scene.check()
    assert faults.calls > 0, "the scene has no such part"
    return sorted({call for ends in faults.paths.values() for call in ends})


@pytest.mark.parametrize(
    "scene, part", quick(CASES, ("windows, prefixes, caches given", "admission"),
    ("hybrid, checkpoints", "finishing"), ("packs", "computing prompts"))
)  # fmt: skip
def test_sampled_faults_leave_a_usable_engine(scene: str, part: str) -> None:
    calls = calls_of(scene, part)
    turn = CASES.index((scene, part)) % 3
    for index in [turn] if part == "admission" else SAMPLES[turn]:
        with_fault(scene, part, calls[index * (len(calls) - 1) // 2])


@pytest.mark.slow
@pytest.mark.timeout(3600)  # hundreds of runs
@pytest.mark.parametrize("scene, part", CASES)
def test_faults_by_every_chain_of_callers_leave_a_usable_engine(scene: str, part: str) -> None:
    for at in calls_of(scene, part):
        with_fault(scene, part, at)
