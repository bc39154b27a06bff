"""The batch generator under random requests, cancellations, tight budgets and injected faults."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_paged.engine import prefill
from mlx_paged.errors import RequestTooLargeError
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.faulty import BLOCK, FEWEST_BLOCKS, MOST, PROMPTS, Driver, FaultyModel, FaultySampler
from tests.support.samples import each_value


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


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, 24, 80])
def test_random_steps(num_blocks: int, num_steps: int) -> None:
    random_steps(num_blocks, num_steps)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, 80])
def test_random_steps_in_place(num_blocks: int, num_steps: int) -> None:
    with fake_kernels() as fake:
        random_steps(num_blocks, num_steps)
    assert fake.calls["append"] > num_steps


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(("num_blocks", "in_place"), each_value([FEWEST_BLOCKS, 24, 80], [False, True]))
def test_random_steps_in_packs(num_blocks: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = prefill.compute_pack
    monkeypatch.setattr(
        prefill, "compute_pack", lambda model, chunks: sizes.append(len(chunks)) or original(model, chunks)
    )
    with fake_kernels() if in_place else contextlib.nullcontext():
        random_steps(num_blocks, 160, packs=45, prefill_batch_size=6)
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
