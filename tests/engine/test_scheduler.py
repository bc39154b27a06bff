"""The scheduler over a memory of numbered blocks: no model, no tensors."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_paged.engine.request import Request
from mlx_paged.engine.scheduler import Growth, ScheduledStep
from mlx_paged.errors import RequestTooLargeError
from tests.support.scheduler_driver import BLOCK, Driver, FakeMemory


class CachingMemory(FakeMemory):
    """A memory that also holds prefixes; unused ones are evicted when blocks are needed.

    Attributes:
        cached: number of cached tokens of a request when it starts, by uid.
    """

    def __init__(self, num_blocks: int, cached: dict[int, int]) -> None:
        super().__init__(num_blocks)
        self.cached = cached

    def fits(self, growth: Growth) -> bool:
        found = {r.uid: self.blocks(self.cached[r.uid]) for r, _ in growth}
        return sum(self.blocks(r.length + n) - self.held.get(r.uid, found[r.uid]) for r, n in growth) <= self.free

    def admit(self, request: Request) -> None:
        super().admit(request)
        request.length = self.cached[request.uid]
        self.held[request.uid] = self.blocks(request.length)


def test_first_in_first_out_within_the_limits() -> None:
    driver = Driver(100, max_running=2, max_prefilling=1)
    for _ in range(5):
        driver.insert(prompt=9, extra=3)
    driver.run()
    assert driver.finished == [0, 1, 2, 3, 4]


def test_a_cached_prefix_is_not_taken_from_an_older_request() -> None:
    """The younger request's prefix could be evicted before it starts, so it waits while the older one continues."""
    driver = Driver(13)
    driver.memory = driver.scheduler.memory = CachingMemory(13, {0: 44, 1: 8})
    driver.insert(prompt=47, extra=2)
    driver.insert(prompt=11, extra=2)
    driver.run()
    assert driver.finished == [0, 1]
    assert 0 not in driver.memory.released


def test_decode_goes_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    driver = Driver(100)
    driver.insert(prompt=2, extra=20)
    driver.step()
    driver.insert(prompt=65, extra=1)
    plans = [driver.step() for _ in range(5)]
    assert all([r.uid for r in plan.decode] == [0] for plan in plans[:4])
    assert [chunk.num_tokens for plan in plans for chunk in plan.chunks] == [16, 16, 16, 16]


def test_prompts_are_not_starved_by_a_full_batch() -> None:
    driver = Driver(1000, token_budget=8, max_running=20, max_prefilling=20)
    for _ in range(12):
        driver.insert(prompt=1, extra=50)
    driver.step()
    driver.step()
    driver.insert(prompt=9, extra=1)
    plan = driver.step()
    assert len(plan.decode) == 12
    assert [chunk.num_tokens for chunk in plan.chunks] == [8], "decoding does not reduce the budget of prompts"


def test_chunks_end_at_boundaries_and_one_per_request_and_step() -> None:
    driver = Driver(100, token_budget=10)
    request = driver.insert(prompt=20, extra=1, boundaries=(3, 12))
    lengths = []
    while request.length < request.prefill_end:
        driver.step()
        lengths.append(request.length)
    assert lengths == [3, 12, 19]


def test_short_prompts_share_a_step() -> None:
    driver = Driver(100)
    for _ in range(3):
        driver.insert(prompt=6, extra=1)
    plan = driver.step()
    assert [(c.request.uid, c.num_tokens) for c in plan.chunks] == [(0, 5), (1, 5)]  # max_prefilling


def test_request_larger_than_the_budget_is_refused() -> None:
    driver = Driver(4)
    with pytest.raises(RequestTooLargeError):
        driver.insert(prompt=16, extra=1)
    assert len(driver.scheduler) == 0
    driver.insert(prompt=15, extra=1)
    driver.run()
    assert driver.finished == [0]


def test_request_waits_for_room_instead_of_failing() -> None:
    driver = Driver(6)
    driver.insert(prompt=16, extra=3)
    driver.insert(prompt=16, extra=3)
    driver.step()
    assert [r.uid for r in driver.scheduler.running] == [0]
    driver.run()
    assert driver.finished == [0, 1]
    assert driver.scheduler.preemptions == 0


def test_youngest_is_preempted_and_resumes_first() -> None:
    driver = Driver(6, token_budget=64)
    for _ in range(3):
        driver.insert(prompt=5, extra=16)
    seen = []
    while len(driver.scheduler):
        driver.step()
        seen.append([r.uid for r in driver.scheduler.running])
    assert driver.finished == [0, 1, 2]
    assert driver.scheduler.preemptions > 0
    assert all(running == sorted(running) for running in seen)
    assert 0 not in driver.memory.released


def test_resumed_request_recomputes_its_tokens_and_continues() -> None:
    driver = Driver(4, token_budget=64)
    first = driver.insert(prompt=5, extra=11)
    second = driver.insert(prompt=5, extra=8)
    while not driver.memory.released:
        driver.step()
    assert driver.memory.released == [second.uid]
    assert (second.length, second.prefill_end) == (0, 8)
    driver.run()
    assert driver.finished == [first.uid, second.uid]


def test_lone_request_that_outgrows_memory_fails() -> None:
    driver = Driver(3)
    driver.insert(prompt=5, extra=100)
    driver.insert(prompt=5, extra=2)
    driver.run()
    assert driver.failed == [0]
    assert driver.finished == [1]


def test_admission_with_ample_memory_does_not_recount_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(10_000, token_budget=10_000, max_running=64, max_prefilling=64)
    counted: list[int] = []
    fits, most_blocks = driver.memory.fits, driver.memory.most_blocks
    monkeypatch.setattr(driver.memory, "fits", lambda growth: counted.append(len(growth)) or fits(growth))
    monkeypatch.setattr(driver.memory, "most_blocks", lambda tokens: counted.append(1) or most_blocks(tokens))
    for _ in range(64):
        driver.insert(prompt=9, extra=3)
    driver.step()
    assert len(driver.scheduler.running) == 64
    assert sum(counted) < 64 * 8, "not 64 times 64"


def test_running_and_waiting_requests_are_removed_together() -> None:
    driver = Driver(100, max_running=2)
    requests = [driver.insert(prompt=9, extra=3) for _ in range(6)]
    driver.step()
    driver.scheduler.remove_all([requests[1], requests[4], requests[2]])
    assert driver.scheduler.running == [requests[0]]
    assert list(driver.scheduler.waiting) == [requests[3], requests[5]]


def test_headroom_delays_admission() -> None:
    driver = Driver(5, headroom=BLOCK)
    driver.insert(prompt=8, extra=8)
    driver.step()
    driver.insert(prompt=8, extra=1)
    driver.step()
    assert [r.uid for r in driver.scheduler.running] == [0, 1]
    driver = Driver(4, headroom=BLOCK)
    driver.insert(prompt=8, extra=8)
    driver.step()
    driver.insert(prompt=8, extra=1)
    driver.step()
    assert [r.uid for r in driver.scheduler.running] == [0]
    driver.run()
    assert driver.scheduler.preemptions == 0


def test_same_calls_lead_to_the_same_decisions() -> None:
    def history() -> list[object]:
        driver = Driver(9, headroom=BLOCK)
        plans = []
        for index in range(12):
            driver.insert(prompt=1 + index * 5 % 17, extra=1 + index * 3 % 11)
            plan = driver.step()
            plans.append(
                ([r.uid for r in plan.decode], [(r.uid, n) for r, n in plan.chunks], driver.memory.released[:])
            )
        driver.run()
        return [plans, driver.finished]

    assert history() == history()


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


@pytest.mark.parametrize(("yields", "holds"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("num_blocks", "options", "prompt", "extra"), FLOODS.values(), ids=FLOODS)
def test_a_flood_at_most_doubles_the_steps_of_others(
    num_blocks: int, options: dict[str, int | None], prompt: int, extra: int, yields: bool, holds: bool
) -> None:
    """Count the steps to the first token of three requests, alone and beside a client with 40 requests."""
    driver, alone = Driver(num_blocks, **options), Driver(num_blocks, **options)
    driver.scheduler.yields, driver.scheduler.holds_rows = yields, holds
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
        assert numbers[1] <= 2 * numbers[0]
    driver.run(40_000)
    assert {request.uid for request in flood} <= set(driver.finished)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(("client", "priority"), [("a", 9), ("b", 0)], ids=["batch job", "another client"])
def test_prompts_of_others_wait_for_a_first_token(client: str, priority: int, holds: bool) -> None:
    """Until a request's first token, steps compute its prompt and the tokens of rows only, without the rows' tokens if
    rows are held."""
    driver = Driver(1000, token_budget=64, max_running=8, max_prefilling=8)
    driver.scheduler.yields, driver.scheduler.holds_rows = True, holds
    flood = [driver.insert(prompt=40, extra=6, client=client, priority=priority) for _ in range(200)]
    for _ in range(20):
        driver.step()
    for _ in range(3):
        request = driver.insert(prompt=30, extra=2, client="a" if client == "b" else "b")
        prompts, rows = [], []
        while not request.num_generated:
            plan = driver.step()
            prompts += plan.chunks
            rows += plan.decode
            assert bool(plan.held) is holds and not {*plan.held} & {*plan.decode}
        assert [chunk.request for chunk in prompts] == [request]
        assert (rows == [request]) is holds
        plan = driver.step()
        assert len(plan.decode) > 1 if holds else plan.chunks, "the flood goes on"
        assert not plan.held
    driver.run(4000)
    assert {each.uid for each in flood} <= set(driver.finished)


@pytest.mark.parametrize(("client", "priority"), [("a", 9), ("b", 0)], ids=["batch job", "another client"])
@pytest.mark.parametrize("num_rows", [8, 24, 64])
def test_prompt_gets_most_of_the_tokens_beside_a_flood(num_rows: int, client: str, priority: int) -> None:
    """If steps are short, the flood's rows get at most one token per two tokens of the prompt."""
    driver = Driver(4000, token_budget=2048, max_running=80, max_prefilling=80)
    driver.scheduler.yields = driver.scheduler.holds_rows = True
    driver.scheduler.token_budget = 16  # as if more took too long
    for _ in range(num_rows):
        driver.insert(prompt=2, extra=400, client=client, priority=priority)
    while driver.scheduler.has_prompts:
        driver.step()
    request = driver.insert(prompt=501, extra=2, client="a" if client == "b" else "b")
    num_row_tokens, chunks = 0, []
    while not request.num_generated:
        plan = driver.step()
        num_row_tokens += sum(row is not request for row in plan.decode)
        chunks += [chunk.num_tokens for chunk in plan.chunks]
    assert set(chunks[:-1]) == {2 * num_rows} and sum(chunks) == 500
    assert 0 < num_row_tokens < 500 / 2
    request = driver.insert(prompt=501, extra=2, client=client, priority=priority)
    assert [driver.step().chunks for _ in range(3)] == [[(request, 16)]] * 3, "the flood gets its usual chunks"


def test_prefill_step_size_limits_prompts_beside_a_flood() -> None:
    driver = Driver(1000, token_budget=24, max_running=40, max_prefilling=40)
    driver.scheduler.yields = True
    driver.scheduler.token_budget = 8
    for _ in range(30):
        driver.insert(prompt=1, extra=400, client="a")
    driver.step()
    driver.insert(prompt=61, extra=2, client="b")
    assert [sum(chunk.num_tokens for chunk in driver.step().chunks) for _ in range(3)] == [24, 24, 12]


@pytest.mark.parametrize("holds", [False, True])
def test_first_tokens_of_others_do_not_starve_a_client(holds: bool) -> None:
    driver = Driver(1000, token_budget=64, max_running=8, max_prefilling=8)
    driver.scheduler.yields, driver.scheduler.holds_rows = True, holds
    flood = [driver.insert(prompt=40, extra=6, client="a") for _ in range(10)]
    for _ in range(200):
        driver.insert(prompt=40, extra=2, client="b")  # one in each step
        driver.step()
    assert {each.uid for each in flood} <= set(driver.finished)


def test_rows_wait_no_longer_than_a_chunk_and_its_first_token() -> None:
    """A flood decodes during a long prompt of another client except for its last chunk. Beside a client that keeps
    asking, it decodes after each first token."""
    driver = Driver(1000, token_budget=64, max_running=8, max_prefilling=8)
    driver.scheduler.yields = driver.scheduler.holds_rows = True
    for _ in range(6):
        driver.insert(prompt=4, extra=400, client="a")
    driver.step()
    driver.insert(prompt=193, extra=1, client="b")
    assert [bool(driver.step().held) for _ in range(5)] == [False, False, True, True, False]
    waits = []
    for _ in range(40):
        driver.insert(prompt=30, extra=1, client="b")
        waits.append(bool(driver.step().held))
    assert waits == [True, True, False] * 13 + [True]


def test_late_first_token_does_not_hold_rows_for_long() -> None:
    driver = Driver(1000, max_running=8, max_prefilling=8)
    driver.scheduler.yields = driver.scheduler.holds_rows = True
    for _ in range(6):
        driver.insert(prompt=4, extra=400, client="a")
    driver.step()
    request = driver.insert(prompt=9, extra=100, client="b")
    waits = []
    for _ in range(8):
        waits.append(bool(driver.step().held))
        request.num_generated = 0
    assert waits == [True] * 3 + [False] + [True] * 3 + [False]


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
        holds=st.booleans(),
    )
    @precondition(lambda self: self.inserted == 0)
    def configure(
        self, num_blocks: int, budget: int, running: int, grid: int | None, chunk: int | None, holds: bool
    ) -> None:
        options = {"grid": grid, "chunk": chunk}
        self.driver = Driver(num_blocks, token_budget=budget, max_running=running, headroom=BLOCK, **options)
        self.driver.scheduler.yields = self.driver.scheduler.holds_rows = holds

    @rule(
        prompt=st.integers(1, 40),
        extra=st.integers(1, 30),
        at=st.integers(1, 40),
        priority=st.sampled_from([0, 0, 1, -1]),
        client=st.sampled_from("ab"),
    )
    def insert(self, prompt: int, extra: int, at: int, priority: int, client: str) -> None:
        before = len(self.driver.scheduler)
        try:
            self.driver.insert(prompt, extra, (at,) if at < prompt else (), priority=priority, client=client)
            self.inserted += 1
        except RequestTooLargeError:
            assert -(-(prompt + 1) // BLOCK) > self.driver.memory.num_blocks
            assert len(self.driver.scheduler) == before

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            had_work = len(self.driver.scheduler) > 0
            plan = self.driver.step()
            for planned in ([*plan.decode, *plan.held], [chunk.request for chunk in plan.chunks]):
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
        assert {request.uid for request in (*running, *waiting)} == set(driver.requests)
        assert len(running) <= driver.scheduler.max_running
        done = len(driver.finished) + len(driver.failed) + self.cancelled + len(driver.requests)
        assert done == self.inserted

    def teardown(self) -> None:
        self.driver.run(5000)
        assert not self.driver.memory.held
        assert len(self.driver.finished) + len(self.driver.failed) + self.cancelled == self.inserted


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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


def test_rows_decode_after_every_chunk_of_a_prompt() -> None:
    driver = burst_driver()
    driver.insert(1, 60)
    driver.step()
    driver.insert(100, 1)
    steps = []
    while driver.requests.get(1) and not driver.requests[1].is_prefilled:
        plan = driver.step()
        assert [request.uid for request in plan.decode] == [0]
        steps.append(sizes_of(plan)[1])
    assert steps == [32, 32, 32, 3], "no more than a chunk, cut at the grid"


def test_burst_of_prompts_fills_steps_while_rows_decode() -> None:
    driver = burst_driver()
    driver.insert(1, 100)
    driver.step()
    for _ in range(30):
        driver.insert(33, 60)
    steps = []
    while sum(steps) < 30 * 32:
        plan = driver.step()
        assert plan.decode
        steps.append(sum(sizes_of(plan).values()))
    assert steps == [128] * 7 + [64]


def test_a_step_computes_no_more_than_its_budget() -> None:
    driver = burst_driver(chunk=1000)
    driver.insert(1, 100)
    driver.step()
    driver.insert(9000, 1)
    assert sizes_of(driver.step()) == {1: 128}


def test_same_calls_of_a_burst_give_the_same_plans() -> None:
    def history() -> list[object]:
        driver = burst_driver(max_running=5)
        plans = []
        for index in range(15):
            driver.insert(1 + index * 37 % 90, 1 + index * 3 % 11)
            plan = driver.step()
            plans.append(([request.uid for request in plan.decode], sizes_of(plan)))
        driver.run()
        return [plans, driver.finished]

    assert history() == history()


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
