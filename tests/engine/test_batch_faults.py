"""The batch generator when one thing fails: the request it happened to fails, and no other."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_paged import PoolExhaustedError
from mlx_paged.errors import RequestFailedError
from tests.support.models.faulty import Driver, FaultySampler, prompt, solos


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
