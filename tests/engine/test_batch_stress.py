"""The batch generator under random requests, cancellations, tight budgets and injected faults."""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from typing import Any, ClassVar

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlx_lm.models import llama

import mlx_paged
from mlx_paged import PagedConfig, PoolExhaustedError, SequenceTables
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.packed_cache import PackedKVCache
from mlx_paged.engine import prefill
from mlx_paged.errors import RequestFailedError, RequestTooLargeError
from mlx_paged.patches import registry
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import generator, packing_generator
from tests.support.models.builders import greedy, prompt_of

VOCAB, BLOCK, MOST = 64, 8, 30
PROMPTS = (1, 3, 8, 9, 17, 31, 50)
BYTES_PER_BLOCK = BLOCK * 2 * 2 * 1 * 16 * 4  # two layers, keys and values, one head of 16
FEWEST_BLOCKS = 13  # the longest request alone: 80 tokens, a block more for the next one, the null block


class FaultyModel(llama.Model):
    """A tiny model that raises, after it has written its keys, for the sequences in ``poisoned``."""

    poisoned: ClassVar[weakref.WeakSet[SequenceTables]] = weakref.WeakSet()

    def __call__(self, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
        output = super().__call__(inputs, cache, **options)
        if FaultyModel.poisoned:
            first = cache[0]
            if isinstance(first, PagedBatchKVCache):
                rows = first.batch.rows
            else:
                rows = first.pack.rows if isinstance(first, PackedKVCache) else (first.sequence,)
            if any(row in FaultyModel.poisoned for row in rows):
                raise RuntimeError("injected: model")
        return output


class FaultySampler:
    """Greedy; raises at its n-th call and ever after."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.calls -= 1
        if self.calls <= 0:
            raise ValueError("injected: sampler")
        return mx.argmax(logprobs, axis=-1)


@functools.cache
def model() -> FaultyModel:
    mx.random.seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5}
    made = FaultyModel(llama.ModelArgs(model_type="llama", tie_word_embeddings=False, **shape, **heads))
    mx.eval(made.parameters())
    return made


def prompt(index: int) -> list[int]:
    return (prompt_of(PROMPTS[index], seed=index) % VOCAB).tolist()


@functools.cache
def solos() -> list[list[int]]:
    """Each prompt's greedy tokens by stock mlx-lm."""
    registry.remove_patches()
    return [greedy(model(), mx.array(prompt(index)), MOST)[0] for index in range(len(PROMPTS))]


class Driver:
    """A generator, and what is known of its requests. With ``packs`` prompts go in packs of so many tokens."""

    def __init__(self, num_blocks: int, packs: int = 0, **options: int) -> None:
        solos()
        registry.remove_patches()  # with its pool: every history starts from the same state
        mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=num_blocks * BYTES_PER_BLOCK))
        FaultyModel.poisoned.clear()
        self.gen = packing_generator(model(), packs, **options) if packs else generator(model(), **options)
        self.pool = mlx_paged.pool_of(model())
        self.num_blocks = num_blocks
        self.expected: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.failed: dict[int, BaseException] = {}
        self.may_fail: set[int] = set()
        self.faults = 0
        self.delivered = 0

    @property
    def active(self) -> list[int]:
        return sorted(self.expected)

    def insert(self, index: int, num_tokens: int, sampler: FaultySampler | None = None) -> int:
        samplers = None if sampler is None else [sampler]
        (uid,) = self.gen.insert([prompt(index)], [num_tokens], samplers=samplers)
        self.expected[uid], self.got[uid] = solos()[index][:num_tokens], []
        if sampler is not None:
            self.may_fail.add(uid)
        return uid

    def poison(self, uid: int) -> bool:
        """From now on the model raises whenever it meets this request."""
        row = self.gen._engine.requests.get(uid)
        if row is None or row.caches is None:
            return False
        FaultyModel.poisoned.add(row.sequence)
        self.may_fail.add(uid)
        return True

    def fail_next_allocation(self) -> None:
        original = self.pool.allocate

        def allocate(group: int, count: int) -> list[int]:
            if not count:
                return original(group, count)
            del self.pool.allocate
            self.faults += 1
            raise OSError("injected: allocation")

        self.pool.allocate = allocate

    def step(self) -> bool:
        """One call of next(); False when nothing is left to do."""
        try:
            prompts, generated = self.gen.next()
        except RequestFailedError as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                self.faults -= 1
            else:
                assert error.uid in self.may_fail, error
                assert not isinstance(cause, PoolExhaustedError)
            self.failed[error.uid] = cause
            del self.expected[error.uid]
            self.check()
            return True
        for token in [(r.uid, r.token, r.finish_reason) for r in generated]:
            self.take(*token)
        more = bool(prompts or generated)
        del prompts, generated  # with the caches of finished requests
        self.check()
        return more

    def take(self, uid: int, token: int, reason: str | None) -> None:
        self.delivered += 1
        tokens = self.got[uid]
        tokens.append(token)
        assert tokens == self.expected[uid][: len(tokens)]
        if reason is not None:
            assert tokens == self.expected.pop(uid)

    def remove(self, uid: int) -> None:
        self.gen.remove([uid])
        del self.expected[uid]
        self.check()

    def check(self) -> None:
        if "allocate" in self.pool.__dict__:
            return  # a fault waits to happen
        self.pool.check_integrity()
        rows = self.gen._engine.requests.values()
        held = sum(-(-row.length // BLOCK) for row in rows if row.caches is not None)
        stats = self.pool.stats()
        # A block that the failed step had reserved goes when its row does.
        assert stats.live_blocks == held
        assert stats.live_blocks + stats.free_blocks == stats.total_blocks < self.num_blocks
        assert stats.preemptions == self.gen.preemptions

    def finish(self) -> None:
        while self.step():
            pass
        assert not self.expected, "requests are left over"
        assert self.pool.stats().live_blocks == 0
        assert not self.gen._engine.requests and not len(self.gen._engine.scheduler)


class GeneratorMachine(RuleBasedStateMachine):
    """Random requests, steps, cancellations and faults in budgets from tight to ample."""

    def __init__(self) -> None:
        super().__init__()
        self.driver: Driver | None = None

    @precondition(lambda self: self.driver is None)
    @rule(
        num_blocks=st.integers(FEWEST_BLOCKS, 60),
        running=st.integers(1, 6),
        prefilling=st.integers(1, 3),
        step=st.integers(1, 40),
    )
    def make(self, num_blocks: int, running: int, prefilling: int, step: int) -> None:
        self.driver = Driver(
            num_blocks,
            completion_batch_size=running,
            prefill_batch_size=min(running, prefilling),
            prefill_step_size=step,
        )

    @precondition(lambda self: self.driver is not None)
    @rule(index=st.integers(0, len(PROMPTS) - 1), num_tokens=st.integers(1, MOST))
    def insert(self, index: int, num_tokens: int) -> None:
        self.driver.insert(index, num_tokens)

    @precondition(lambda self: self.driver is not None)
    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver is not None and self.driver.active)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.driver.remove(data.draw(st.sampled_from(self.driver.active)))

    @precondition(lambda self: self.driver is not None and self.driver.active)
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        self.driver.poison(data.draw(st.sampled_from(self.driver.active)))

    @precondition(lambda self: self.driver is not None)
    @rule(index=st.integers(0, len(PROMPTS) - 1), calls=st.integers(1, 12))
    def insert_with_a_sampler_that_raises(self, index: int, calls: int) -> None:
        self.driver.insert(index, MOST, FaultySampler(calls))

    @precondition(lambda self: self.driver is not None)
    @rule()
    def insert_what_can_never_run(self) -> None:
        before = self.driver.active
        with pytest.raises(RequestTooLargeError):
            self.driver.gen.insert([[1, 2, 3], [1] * self.driver.num_blocks * BLOCK])
        assert self.driver.active == before

    @precondition(lambda self: self.driver is not None and "allocate" not in self.driver.pool.__dict__)
    @rule()
    def allocation_fails(self) -> None:
        self.driver.fail_next_allocation()

    @invariant()
    def statistics_add_up(self) -> None:
        if self.driver is not None:
            counters = self.driver.gen._counters
            assert counters.generation_tokens == self.driver.delivered

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.finish()
            FaultyModel.poisoned.clear()


TestGeneratorMachine = GeneratorMachine.TestCase
TestGeneratorMachine.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_many_random_histories() -> None:
    machine = GeneratorMachine.TestCase
    machine.settings = settings(TestGeneratorMachine.settings, max_examples=400, stateful_step_count=60)
    machine().runTest()


NUM_STEPS = [250, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, 24, 80])
def test_random_steps(num_blocks: int, num_steps: int) -> None:
    random_steps(num_blocks, num_steps)


@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, 80])
def test_random_steps_in_place(num_blocks: int, num_steps: int) -> None:
    with fake_kernels() as fake:
        random_steps(num_blocks, num_steps)
    assert fake.calls["append"] > num_steps


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, 24, 80])
def test_random_steps_in_packs(num_blocks: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = prefill.compute_pack
    monkeypatch.setattr(
        prefill, "compute_pack", lambda model, chunks: sizes.append(len(chunks)) or original(model, chunks)
    )
    with fake_kernels() if in_place else contextlib.nullcontext():
        random_steps(num_blocks, 250, packs=45, prefill_batch_size=6)
    assert len(sizes) > 10 and max(sizes) >= 3


def random_steps(num_blocks: int, num_steps: int, packs: int = 0, prefill_batch_size: int = 3) -> None:
    rng = random.Random(num_blocks)
    options = {"completion_batch_size": 8, "prefill_batch_size": prefill_batch_size, "prefill_step_size": 20}
    driver = Driver(num_blocks, packs, **options)
    for _ in range(num_steps):
        chance = rng.random()
        if chance < 0.15 and len(driver.active) < 12:
            for _ in range(4 if packs else 1):  # a pack is of several
                driver.insert(rng.randrange(len(PROMPTS)), rng.randint(1, MOST))
        elif chance < 0.18 and driver.active:
            driver.remove(rng.choice(driver.active))
        elif chance < 0.19:
            driver.insert(rng.randrange(len(PROMPTS)), MOST, FaultySampler(rng.randint(1, 9)))
        elif chance < 0.2 and driver.active:
            driver.poison(rng.choice(driver.active))
        driver.step()
    driver.finish()
    assert driver.failed, "no fault happened"
    assert driver.gen.preemptions > 0 or num_blocks > FEWEST_BLOCKS


# Faults one by one ------------------------------------------------------------------------------------------------


def ran(driver: Driver, uids: list[int]) -> None:
    """All finished but those that failed, each with its solo tokens (checked by the driver)."""
    driver.finish()
    done = [uid for uid in uids if uid not in driver.failed]
    assert all(len(driver.got[uid]) == 20 for uid in done)


def test_model_that_raises_for_one_row_of_a_batch() -> None:
    driver = Driver(80)
    uids = [driver.insert(index, 20) for index in range(7)]
    for _ in range(6):
        driver.step()
    driver.poison(uids[3])
    ran(driver, uids)
    assert list(driver.failed) == [uids[3]]
    assert "injected: model" in str(driver.failed[uids[3]])


def test_model_that_raises_while_a_prompt_is_computed() -> None:
    driver = Driver(80, prefill_step_size=10)
    first = driver.insert(2, 20)
    for _ in range(4):
        driver.step()
    second, third = driver.insert(6, 20), driver.insert(5, 20)
    driver.step()
    assert driver.poison(second)
    ran(driver, [first, second, third])
    assert list(driver.failed) == [second]


def test_sampler_that_raises() -> None:
    driver = Driver(80)
    uids = [driver.insert(index, 20) for index in range(4)]
    uids.insert(2, driver.insert(3, 20, FaultySampler(5)))
    ran(driver, uids)
    assert list(driver.failed) == [uids[2]]
    assert len(driver.got[uids[2]]) == 4


def test_processor_that_raises() -> None:
    driver = Driver(80)

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size > 20:
            raise KeyError("injected: processor")
        return logits

    uids = [driver.insert(index, 20) for index in range(3)]
    (bad,) = driver.gen.insert([prompt(4)], [20], logits_processors=[[processor]])
    driver.expected[bad], driver.got[bad] = solos()[4][:20], []
    driver.may_fail.add(bad)
    ran(driver, [*uids, bad])
    assert list(driver.failed) == [bad]


@pytest.mark.parametrize("steps", [0, 5])
def test_allocation_that_fails(steps: int) -> None:
    driver = Driver(80)
    uids = [driver.insert(index, 20) for index in (6, 2, 3)]
    for _ in range(steps):
        driver.step()
    driver.fail_next_allocation()
    ran(driver, uids)
    assert len(driver.failed) == 1 and driver.faults == 0


def test_a_request_that_outgrows_the_whole_pool_fails_alone() -> None:
    driver = Driver(7)
    uids = [driver.insert(1, 20), driver.insert(5, 30), driver.insert(2, 20)]
    driver.may_fail.add(uids[1])
    failures = []
    while True:
        try:
            prompts, generated = driver.gen.next()
        except RequestFailedError as error:
            failures.append((error.uid, type(error.__cause__)))
            continue
        if not prompts and not generated:
            break
        for response in generated:
            driver.got[response.uid].append(response.token)
    assert failures == [(uids[1], PoolExhaustedError)]
    assert [len(driver.got[uid]) for uid in (uids[0], uids[2])] == [20, 20]
    assert driver.got[uids[1]] == driver.expected[uids[1]][: len(driver.got[uids[1]])]


def test_failure_is_reported_once_also_through_next_generated() -> None:
    driver = Driver(80)
    uid = driver.insert(3, 20, FaultySampler(1))
    with pytest.raises(RequestFailedError) as caught:
        driver.gen.next_generated()
    assert caught.value.uid == uid and isinstance(caught.value.__cause__, ValueError)
    assert driver.gen.next_generated() == []
