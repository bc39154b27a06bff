"""Faults and stress: random steps of the batch generator with failures, and many requests at once."""

import contextlib
import random

import pytest

from mlx_paged import PoolExhaustedError
from mlx_paged.errors import RequestFailedError, RequestTooLargeError
from tests.support.cases import slow
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.faulty import BLOCK, FEWEST_BLOCKS, MOST, PROMPTS, Driver, FaultySampler
from tests.support.models.packs import note_packs


@pytest.mark.parametrize("steps", [0, 5])
def test_failed_allocation_fails_one_request(steps: int) -> None:
    driver = Driver(80)
    for index in (6, 2, 3):
        driver.insert(index, 20)
    for _ in range(steps):
        driver.step()
    driver.fail_next_allocation()
    driver.finish()
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


def test_model_error_fails_the_requests_of_the_pack() -> None:
    driver = Driver(80, packs=45, prefill_batch_size=6, prefill_step_size=20)
    uids = [driver.insert(index, 20) for index in (6, 5, 1)]
    driver.step()
    assert driver.poison(uids[1])
    driver.finish()
    assert uids[1] in driver.failed and uids[2] not in driver.failed
    assert all("injected: model" in str(error) for error in driver.failed.values())


def test_failure_is_reported_once_also_through_next_generated() -> None:
    driver = Driver(80)
    uid = driver.insert(3, 20, FaultySampler(1))
    with pytest.raises(RequestFailedError) as caught:
        driver.gen.next_generated()
    assert caught.value.uid == uid and isinstance(caught.value.__cause__, ValueError)
    assert driver.gen.next_generated() == []


SLOW = pytest.mark.slow


def random_steps(num_blocks: int, num_steps: int, packs: int = 0, seed: int = 0, **options: int) -> Driver:
    rng = random.Random(1000 * seed + num_blocks)
    sizes = {"completion_batch_size": 8, "prefill_batch_size": 6 if packs else 3, "prefill_step_size": 20}
    driver = Driver(num_blocks, packs, **{**sizes, **options})
    for _ in range(num_steps):
        chance = rng.random()
        if chance < 0.15 and len(driver.active) < 12:
            for _ in range(4 if packs else 1):  # a pack needs several
                driver.insert(rng.randrange(len(PROMPTS)), rng.randint(1, MOST))
        elif chance < 0.18 and driver.active:
            driver.remove(rng.choice(driver.active))
        elif chance < 0.19:
            driver.insert(rng.randrange(len(PROMPTS)), MOST, FaultySampler(rng.randint(1, 9)))
        elif chance < 0.2 and driver.active:
            driver.poison(rng.choice(driver.active))
        elif chance < 0.21:  # one too large is refused, and nothing of the call is inserted
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


@pytest.mark.parametrize("num_steps", [120, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, *slow(24, 80)])
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


@pytest.mark.parametrize("num_blocks", [FEWEST_BLOCKS, *slow(24, 80)])
@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=SLOW)])
def test_random_steps_in_packs(num_blocks: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = note_packs(monkeypatch)
    with fake_kernels() if in_place else contextlib.nullcontext():
        driver = random_steps(num_blocks, 160, packs=45)
    assert driver.failed and len(packs) > 10 and max(map(len, packs)) >= 3
