"""The batch generator under random requests, cancellations, budgets from tight to ample, and injected faults."""

from __future__ import annotations

import contextlib
import random

import pytest

from mlx_paged.engine import prefill
from mlx_paged.errors import RequestTooLargeError
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.faulty import BLOCK, FEWEST_BLOCKS, MOST, PROMPTS, Driver, FaultySampler

SLOW = pytest.mark.slow


def random_steps(num_blocks: int, num_steps: int, packs: int = 0, seed: int = 0, **options: int) -> Driver:
    rng = random.Random(1000 * seed + num_blocks)
    sizes = {"completion_batch_size": 8, "prefill_batch_size": 6 if packs else 3, "prefill_step_size": 20}
    driver = Driver(num_blocks, packs, **{**sizes, **options})
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
        elif chance < 0.21:  # what can never run is refused, and nothing of the call is inserted
            before = driver.active
            with pytest.raises(RequestTooLargeError):
                driver.gen.insert([[1, 2, 3], [1] * num_blocks * BLOCK])
            assert driver.active == before
        elif chance < 0.22 and "allocate" not in driver.pool.__dict__:
            driver.fail_next_allocation()
        driver.step()
        assert driver.gen._counters.generation_tokens == driver.delivered
    driver.finish()
    return driver


@pytest.mark.parametrize("num_steps", [250, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, pytest.param(24, marks=SLOW), 80])
@pytest.mark.parametrize("in_place", [False, True])
def test_random_steps(num_blocks: int, num_steps: int, in_place: bool) -> None:
    with fake_kernels() if in_place else contextlib.nullcontext() as fake:
        driver = random_steps(num_blocks, num_steps)
    assert driver.failed, "no fault happened"
    assert driver.gen.preemptions > 0 or num_blocks > FEWEST_BLOCKS
    assert fake is None or fake.calls["append"] > num_steps


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_steps_of_any_sizes(seed: int) -> None:
    rng = random.Random(seed)
    running = rng.randint(1, 6)
    sizes = {"completion_batch_size": running, "prefill_batch_size": rng.randint(1, min(3, running))}
    random_steps(rng.randint(FEWEST_BLOCKS, 60), 400, seed=seed, prefill_step_size=rng.randint(1, 40), **sizes)


@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, pytest.param(24, marks=SLOW), 80])
@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=SLOW)])
def test_random_steps_in_packs(num_blocks: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = prefill.compute_pack
    monkeypatch.setattr(
        prefill, "compute_pack", lambda model, chunks: sizes.append(len(chunks)) or original(model, chunks)
    )
    with fake_kernels() if in_place else contextlib.nullcontext():
        driver = random_steps(num_blocks, 160, packs=45)
    assert driver.failed and len(sizes) > 10 and max(sizes) >= 3
