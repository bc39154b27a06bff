"""The scheduler over a memory of numbered blocks: no model, no tensors."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_paged.engine.scheduler import ScheduledStep
from tests.support.scheduler_driver import BLOCK, Driver


@pytest.mark.parametrize(("num_blocks", "sizes"), [(100, {"max_running": 2, "max_prefilling": 1}), (6, {})])
def test_first_in_first_out_within_limits_of_rows_or_memory(num_blocks: int, sizes: dict[str, int]) -> None:
    driver = Driver(num_blocks, **sizes)
    for _ in range(5):
        driver.insert(prompt=16, extra=3)
    driver.run()
    assert driver.finished == [0, 1, 2, 3, 4] and driver.scheduler.preemptions == 0


def test_youngest_is_preempted_and_resumes_first_by_recomputing_its_tokens() -> None:
    driver = Driver(6, token_budget=64)
    requests = [driver.insert(prompt=5, extra=16) for _ in range(3)]
    seen = []
    while len(driver.scheduler):
        released = len(driver.memory.released)
        driver.step()
        seen.append([r.uid for r in driver.scheduler.running])
        for uid in driver.memory.released[released:]:
            assert (requests[uid].length, requests[uid].prefill_end) == (0, 4 + requests[uid].num_generated)
    assert driver.finished == [0, 1, 2]
    assert driver.scheduler.preemptions > 0
    assert all(running == sorted(running) for running in seen)
    assert 0 not in driver.memory.released


def test_lone_request_that_outgrows_memory_fails() -> None:
    driver = Driver(3)
    driver.insert(prompt=5, extra=100)
    driver.insert(prompt=5, extra=2)
    driver.run()
    assert driver.failed == [0]
    assert driver.finished == [1]


@pytest.mark.parametrize(("num_blocks", "running"), [(5, [0, 1]), (4, [0])])
def test_headroom_delays_admission(num_blocks: int, running: list[int]) -> None:
    driver = Driver(num_blocks, headroom=BLOCK)
    for extra in (8, 1):
        driver.insert(prompt=8, extra=extra)
        driver.step()
    assert [r.uid for r in driver.scheduler.running] == running
    driver.run()
    assert driver.scheduler.preemptions == 0


def admitted(driver: Driver) -> list[int]:
    """Run to the end. Return the requests in the order of their first admission."""
    requests = list(driver.requests.values())
    driver.run()
    assert all(request.admitted is not None for request in requests)
    return [request.uid for request in sorted(requests, key=lambda request: request.admitted or 0)]


def test_clients_are_admitted_in_turns() -> None:
    driver = Driver(100, max_running=2)
    for _ in range(6):
        driver.insert(prompt=5, extra=3, client="a")
    driver.step()
    driver.insert(prompt=5, extra=3, client="b")
    driver.insert(prompt=5, extra=3, client="b")
    assert admitted(driver) == [0, 1, 6, 7, 2, 3, 4, 5]  # a's second one was preempted, and resumes before the third


def test_returning_client_has_one_turn_and_no_credit() -> None:
    driver = Driver(100, max_running=1)
    driver.insert(prompt=5, extra=3, client="b")
    for _ in range(4):
        driver.insert(prompt=5, extra=3, client="a")
    for _ in range(20):
        driver.step()
    for _ in range(3):
        driver.insert(prompt=5, extra=3, client="b")
        driver.insert(prompt=5, extra=3, client="a")
    order = admitted(driver)
    clients = ["b" if uid in (0, 5, 7, 9) else "a" for uid in order]
    assert "bbb" not in "".join(clients) and "aaa" not in "".join(clients)


FLOODS: dict[str, tuple[int, dict[str, int | None], int, int]] = {  # blocks, options, prompt and answer of the flood
    "slots full of long answers": (1000, {}, 5, 400),
    "prompts without end": (1000, {"max_running": 8}, 160, 2),
    "few prompts at a time": (1000, {"max_running": 8, "max_prefilling": 2}, 400, 2),
    "memory full": (60, {"max_running": 8, "max_prefilling": 8}, 20, 60),
    "chunks on a grid": (1000, {"max_running": 8, "grid": 8, "chunk": 16}, 160, 2),
}


@pytest.mark.parametrize(("num_blocks", "options", "prompt", "extra"), FLOODS.values(), ids=FLOODS)
def test_a_flood_at_most_doubles_the_steps_of_others(
    num_blocks: int, options: dict[str, int | None], prompt: int, extra: int
) -> None:
    """Count the steps to the first token of three requests, alone and beside a client with 40 requests."""
    driver, alone = Driver(num_blocks, **options), Driver(num_blocks, **options)
    flood = [driver.insert(prompt, extra, client="a") for _ in range(40)]
    for _ in range(30):
        driver.step()
    for _ in range(3):
        numbers = []
        for each in (alone, driver):
            request = each.insert(prompt=64, extra=5, client="b")
            numbers.append(next(number for number in range(1, 200) if request in each.step().decode))
            for _ in range(5):
                each.step()
            assert request.uid in each.finished
        assert numbers[1] <= 2 * numbers[0] + 1
    driver.run(40_000)
    assert {request.uid for request in flood} <= set(driver.finished)


def test_priorities_come_before_turns() -> None:
    driver = Driver(100, max_running=1)
    driver.insert(prompt=5, extra=3, client="a")
    driver.step()
    driver.insert(prompt=5, extra=3, client="b")
    driver.insert(prompt=5, extra=3, client="a", priority=-1)
    driver.insert(prompt=5, extra=3, client="c", priority=2)
    # The first is preempted, and resumes before those of its priority that never ran.
    driver.step()
    assert [request.uid for request in driver.scheduler.running] == [2]
    driver.run()
    assert driver.finished == [2, 0, 1, 3]


def test_less_urgent_requests_are_preempted_for_memory() -> None:
    driver = Driver(8, token_budget=64)
    slow = [driver.insert(prompt=12, extra=4, priority=5) for _ in range(2)]
    driver.step()
    assert driver.scheduler.running == slow
    urgent = driver.insert(prompt=12, extra=4)
    driver.step()
    assert driver.scheduler.running == [urgent, slow[0]], "only as many as are needed"
    other = driver.insert(prompt=12, extra=4)
    driver.step()
    assert driver.scheduler.running == [urgent, other]
    driver.run()
    assert driver.finished == [2, 3, 0, 1]


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler under random requests, steps and cancellations, with budgets from tight to ample."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(8)
        self.inserted = self.cancelled = 0

    @rule(
        num_blocks=st.integers(3, 24),
        budget=st.integers(1, 20),
        running=st.integers(1, 5),
        grid=st.none() | st.integers(1, 20),
        chunk=st.none() | st.integers(1, 60),
    )
    @precondition(lambda self: self.inserted == 0)
    def configure(self, num_blocks: int, budget: int, running: int, grid: int | None, chunk: int | None) -> None:
        options = {"grid": grid, "chunk": chunk}
        self.driver = Driver(num_blocks, token_budget=budget, max_running=running, headroom=BLOCK, **options)

    @rule(
        prompt=st.integers(1, 40),
        extra=st.integers(1, 30),
        at=st.integers(1, 40),
        priority=st.sampled_from([0, 0, 1, -1]),
        client=st.sampled_from("ab"),
    )
    def insert(self, prompt: int, extra: int, at: int, priority: int, client: str) -> None:
        if self.driver.memory.blocks(prompt + 1) <= self.driver.memory.num_blocks:  # the engine refuses others
            self.driver.insert(prompt, extra, (at,) if at < prompt else (), priority=priority, client=client)
            self.inserted += 1

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            had_work = len(self.driver.scheduler) > 0
            plan = self.driver.step()
            for planned in (plan.decode, [chunk.request for chunk in plan.chunks]):
                assert len(set(planned)) == len(planned)
            assert not had_work or plan.decode or plan.chunks or plan.failed or self.driver.scheduler.running

    @rule(data=st.data())
    @precondition(lambda self: self.driver.requests)
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(data.draw(st.sampled_from(sorted(self.driver.requests))))
        self.cancelled += 1

    @invariant()
    def accounts_agree(self) -> None:
        driver = self.driver
        memory, running, waiting = driver.memory, driver.scheduler.running, driver.scheduler.waiting
        assert memory.free >= 0
        assert set(memory.held) == {request.uid for request in running}
        assert all(memory.held[r.uid] == memory.blocks(r.length) for r in running)
        order = [(request.options.priority, request.admitted) for request in running]
        assert order == sorted(order)
        assert {request.uid for request in running} <= set(driver.requests)
        assert len(running) + len(waiting) == len(driver.requests)
        assert len(running) <= driver.scheduler.max_running
        done = len(driver.finished) + len(driver.failed) + self.cancelled + len(driver.requests)
        assert done == self.inserted

    def teardown(self) -> None:
        self.driver.run(5000)
        assert not self.driver.memory.held
        assert len(self.driver.finished) + len(self.driver.failed) + self.cancelled == self.inserted


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_prompts_are_cut_at_multiples_of_the_grid() -> None:
    driver = Driver(200, grid=16, max_running=6, max_prefilling=6)
    driver.insert(3, 60)  # decodes throughout
    driver.step()
    lengths = (50, 100, 7, 33)
    for length in lengths:
        driver.insert(length, 1, boundaries=(20,) if length == 100 else ())
    ends: dict[int, list[int]] = {}
    for _ in range(40):
        plan = driver.step()
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= 16
        for chunk in plan.chunks:
            ends.setdefault(chunk.request.uid, []).append(chunk.request.length)
    assert ends == {1: [16, 32, 48, 49], 2: [16, 20, 32, 48, 64, 80, 96, 99], 3: [6], 4: [16, 32]}


# Several chunks a step -----------------------------------------------------------------------------------------------


def burst_driver(**options: int) -> Driver:
    sizes = {"token_budget": 128, "chunk": 32, "grid": 16, "max_running": 40, "max_prefilling": 40}
    return Driver(10_000, **{**sizes, **options})


def sizes_of(plan: ScheduledStep) -> dict[int, int]:
    return {chunk.request.uid: chunk.num_tokens for chunk in plan.chunks}


def test_a_step_takes_chunks_of_many_prompts() -> None:
    driver = burst_driver()
    for length in (100, 20, 71, 6, 90, 50):
        driver.insert(length, 1)
    # At most a chunk per prompt, cut at the grid; a prompt waits if neither its end nor the grid fits.
    assert sizes_of(driver.step()) == {0: 32, 1: 19, 2: 32, 3: 5, 4: 32}


def test_has_prompts_until_all_prompts_are_computed() -> None:
    driver = burst_driver(max_running=1)
    assert not driver.scheduler.has_prompts
    driver.insert(40, 2)
    driver.insert(4, 1)
    seen = []
    while len(driver.scheduler):
        seen.append(driver.scheduler.has_prompts)
        driver.step()
    assert seen == [True, True, True, True, True, False], "one runs, one waits"
