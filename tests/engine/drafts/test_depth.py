"""Depth: how many drafts per step pay, by a simulated clock."""

import time
from collections.abc import Callable

import numpy as np
import pytest

from mlx_paged.drafts.depth import (
    CPU_PROMPT_PRICE,
    FIRST_TRIAL,
    MEASURE_EVERY,
    MOST_BETWEEN,
    PROMPT_PRICE,
    TRIAL_CONTEXT,
    Acceptance,
    Candidate,
    Depth,
)
from mlx_paged.drafts.draft_model import MOST_BEHIND
from tests.support.cases import crossed, quick

FIRST = 100  # first steps, in which drafts may cost 5 %; later 2 %


def expected_tokens(chance: float, drafts: int) -> float:
    """Return the tokens that a row gets in a step with ``drafts`` drafts, each right with probability ``chance``."""
    return 1.0 + sum(chance**n for n in range(1, drafts + 1))


def flat(tokens: float, rows: int) -> float:
    """Return the time of a step that verifies ``tokens`` tokens on a GPU, which reads the weights once a step."""
    return 1.0 + 0.02 * (tokens - rows) / rows


def each(tokens: float, rows: int) -> float:
    """Return the time on a CPU, where it grows with the number of tokens."""
    return tokens / rows


class Machine:
    """Simulated rows whose drafts are right with a given probability, on a device whose plain step takes 1. As in the
    engine, a plain step returns when the one before it ends, and a step with drafts waits for its own tokens.

    Args:
        rows: rows of each step.
        chance: probability that a draft is right.
        draft: time to draft one token for all rows.
        verify: returns the time of a step, given its tokens and rows.
        most: most drafts per row.
        prompt: prompt tokens of each row that the draft model lacks.
        prompt_price: time to compute one of them.
    """

    def __init__(
        self,
        rows: int = 1,
        chance: float = 0.8,
        draft: float = 0.1,
        verify: Callable[[float, int], float] = flat,
        most: int = 4,
        prompt: int = 0,
        prompt_price: float = 0.0,
        depth: Depth | None = None,
    ) -> None:
        self.rows, self.chance, self.draft, self.verify, self.most = rows, chance, draft, verify, most
        self.prompt_price = prompt_price
        self.host, self.device = 0.0, 1.0  # time of a plain step on each
        self.now = self.ends = 0.0  # time on the host; end of the step not waited for
        self.depth = depth or Depth(time.perf_counter, CPU_PROMPT_PRICE if verify is each else PROMPT_PRICE)
        self.depth.clock = lambda: self.now
        self.rng = np.random.default_rng(0)
        self.tokens = self.num_steps = self.prompts = 0
        self.worst = self.worst_later = 1.0  # lowest rate up to any of the first steps, and up to any later one
        self.join(prompt)

    def join(self, prompt: int = 0) -> None:
        """Replace the rows by new ones."""
        self.acceptances = [Acceptance(expected=self.depth.acceptance.chance) for _ in range(self.rows)]
        self.behind = [prompt] * self.rows  # tokens that the draft model lacks

    def step(self, *, is_like_last: bool = True, left: int = 10_000) -> int:
        """Take a step; return its depth."""
        self.depth.begin(self.rows, is_like_last=is_like_last)
        self.now += self.host
        missing = [behind if behind > MOST_BEHIND else 0 for behind in self.behind]
        counts = self.choose(left, missing)
        for index, (count, lacks) in enumerate(zip(counts, missing, strict=True)):
            if count and lacks:
                counts[index] = count * self._catch_up(index)
        deepest = max(counts)
        accepted = 0
        if deepest:
            accepted = self._verify(counts, deepest)
        else:
            before, self.ends = self.ends, max(self.now, self.ends) + self.device
            self.now = max(self.now, before)
        self.behind = [0 if count else behind + 1 for count, behind in zip(counts, self.behind, strict=True)]
        self.tokens += self.rows + accepted
        self.num_steps += 1
        if self.num_steps > 3 * FIRST:
            self.worst_later = min(self.worst_later, self.rate)
        elif self.num_steps > 8:
            self.worst = min(self.worst, self.rate)
        return deepest

    def choose(self, left: int, missing: list[int]) -> list[int]:
        """Return how many drafts each row gets."""
        parts = zip(self.acceptances, missing, strict=True)
        return self.depth.choose([Candidate(own.chances(self.most), left, miss) for own, miss in parts], self.rows)

    def _catch_up(self, index: int) -> bool:
        """Compute a chunk of what the draft model lacks of a row; return whether nothing is left."""
        if self.depth.is_trial:
            self.behind[index] = min(self.behind[index], TRIAL_CONTEXT)
        chunk = min(512, self.behind[index])
        self.now = max(self.now, self.ends) + chunk * self.prompt_price
        self.depth.note_prompt(chunk * self.prompt_price)
        self.prompts += chunk
        self.behind[index] -= chunk
        return self.behind[index] == 0

    def _verify(self, counts: list[int], deepest: int) -> int:
        self.depth.note_proposed(sum(counts))
        self.now = max(self.now, self.ends) + deepest * self.draft
        self.now += self.verify(self.rows + sum(counts), self.rows)
        wrong = [np.flatnonzero(self.rng.random(count) >= self.chance) for count in counts]
        accepted = [int(places[0]) if len(places) else n for places, n in zip(wrong, counts, strict=True)]
        for acceptance, count, right in zip(self.acceptances, counts, accepted, strict=True):
            if count:
                acceptance.note([count], [right])
        self.depth.note(counts, accepted)
        return sum(accepted)

    def run(self, steps: int) -> list[int]:
        return [self.step() for _ in range(steps)]

    @property
    def rate(self) -> float:
        """Tokens per row in the time of a plain step."""
        return self.tokens / self.rows / self.passed

    @property
    def passed(self) -> float:
        """Time that the steps have taken."""
        return max(self.now, self.ends)


class LookUpMachine(Machine):
    """Rows that look tokens up: the chances of drafts are known, and drafts are not computed.

    Args:
        rows: rows of each step.
        chance: probability that a draft is right.
        verify: returns the time of a step, given its tokens and rows.
        repeats: probability that a row has drafts in a step.
        host: time of a plain step on the host; it overlaps the time on the device.
    """

    def __init__(
        self,
        rows: int,
        chance: float,
        verify: Callable[[float, int], float],
        repeats: float = 1.0,
        host: float = 0.0,
        depth: Depth | None = None,
    ) -> None:
        super().__init__(rows, chance, 0.0, verify, 8, depth=depth)
        self.repeats = repeats
        self.host, self.device = host, 1.0 if host < 1 else 0.6
        self.looked = 0  # steps in which rows were looked at

    def choose(self, left: int, missing: list[int]) -> list[int]:
        if not self.depth.may_choose(self.rows):
            return [0] * self.rows
        self.looked += 1
        able = [self.rng.random() < self.repeats for _ in range(self.rows)]
        chances = [self.chance**n for n in range(1, min(self.most, left) + 1)]
        found = iter(self.depth.choose([Candidate(chances, left) for each in able if each], self.rows))
        return [next(found) if each else 0 for each in able]

    @property
    def passed(self) -> float:
        return self.now if self.host else super().passed


def costs_little(machine: Machine) -> bool:
    """Return whether drafts have cost at most 5 % of the first steps, and at most 2 % of all steps later."""
    return machine.worst > 0.95 and machine.worst_later > 0.98


def best_rate(machine: Machine) -> float:
    rows = machine.rows
    return max(
        expected_tokens(machine.chance, n) / (machine.verify(rows * (1 + n), rows) + n * machine.draft if n else 1.0)
        for n in range(machine.most + 1)
    )


@pytest.mark.parametrize("verify", [flat, each], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("rows", "chance", "draft"),
    quick(
        [(rows, chance, draft) for rows in (1, 3, 32) for chance in (0.0, 0.3, 0.6, 0.9) for draft in (0.0, 0.15, 0.5)],
        *[(1, 0.9, 0.0), (3, 0.6, 0.15), (3, 0.3, 0.5), (1, 0.0, 0.15)],
    ),
)
def test_the_rate_is_near_the_best_and_drafts_cost_little(
    rows: int, chance: float, draft: float, verify: Callable[[float, int], float]
) -> None:
    machine = Machine(rows, chance, draft, verify)
    machine.run(3000)
    assert costs_little(machine) and machine.rate > 0.9 * best_rate(machine)


@pytest.mark.parametrize(("rows", "fixed"), quick(crossed([1, 8], [0.7, 0.9, 0.97]), (1, 0.7), (1, 0.97), (8, 0.9)))
def test_several_drafts_are_used_where_one_alone_hardly_pays(rows: int, fixed: float) -> None:
    """A step with drafts waits for its own tokens: with one row of a 1B model on an H100 three drafts cost .79 of a
    plain step, one nearly as much; with 8 rows .97."""

    def cost(tokens: float, rows: int) -> float:
        return 1 + fixed + 0.02 * (tokens - rows) / rows

    machine = Machine(rows, 0.8, 0.01, cost, depth=Depth(prompt_price=PROMPT_PRICE))
    machine.run(1000)
    assert costs_little(machine) and machine.rate > 0.9 * best_rate(machine) > 1.4


def test_short_answers_share_what_is_known() -> None:
    """Times and acceptance carry over to the next request."""
    machine = Machine(chance=0.9, prompt_price=0.005)
    depths = []
    for _ in range(30):
        machine.join(40)
        machine.step(is_like_last=False)
        depths.append([machine.step(left=32 - n) for n in range(31)])
    assert not any(depths[0])
    assert np.mean([max(each) > 0 for each in depths[5:]]) == 1.0, "known to pay, from the first steps on"
    assert costs_little(machine)


@pytest.mark.parametrize("verify", [flat, each], ids=["gpu", "cpu"])
def test_a_trial_computes_the_last_tokens_of_a_prompt(verify: Callable[[float, int], float]) -> None:
    machine = Machine(chance=0.0, verify=verify, prompt=3000, prompt_price=0.07)
    depths = machine.run(2000)
    tries = sum(depth > 0 for depth in depths)
    assert 0 < tries < 20 and 0 < machine.prompts <= tries * TRIAL_CONTEXT and costs_little(machine)


def test_prompts_are_computed_where_drafts_are_known_to_pay() -> None:
    machine = Machine(chance=0.9, prompt=1000, prompt_price=0.01)
    depths = machine.run(400)
    assert machine.prompts < 100 and np.mean([depth > 0 for depth in depths[200:]]) > 0.9
    before = machine.prompts
    machine.join(1000)
    assert max(machine.step(left=400) for _ in range(20)) > 0
    assert machine.prompts - before in (1000, 1001)
    before = machine.prompts
    machine.join(1000)
    assert not any(machine.step(left=5) for _ in range(5)), "the answer ends before that has paid off"
    assert machine.prompts == before and costs_little(machine)


def test_expensive_drafts_stop_and_are_retried_now_and_then() -> None:
    machine = Machine(8, 0.5, 2.0)
    depths = machine.run(2000)
    tries = [depth for depth in depths if depth]
    assert 0 < len(tries) < 20 and costs_little(machine)
    machine.draft = 0.05  # as when others leave the device
    later = machine.run(2000)
    assert np.mean([depth > 0 for depth in later[-500:]]) > 0.9


def test_batches_of_another_size_have_times_of_their_own() -> None:
    machine = Machine(2, 0.8)
    assert any(machine.run(200)[-20:])
    large = Machine(64, 0.8, verify=each, depth=machine.depth)
    large.now = large.ends = machine.now
    large.step(is_like_last=False)
    depths = large.run(1000)
    assert 0 < sum(depth > 0 for depth in depths) < 20
    assert large.tokens / 64 / (large.now - machine.now) > 0.985


def test_row_with_low_acceptance_gets_fewer_drafts() -> None:
    machine = Machine(2, 1.0, 0.2)
    machine.run(200)
    machine.depth.begin(2, is_like_last=True)
    often, seldom = Acceptance(), Acceptance()
    for _ in range(60):
        often.note([4], [4])
        seldom.note([4], [0])
    first, second = machine.depth.choose([Candidate(often.chances(8), 100), Candidate(seldom.chances(8), 100)], 2)
    assert first >= 6 and second == 0
    chosen = machine.depth.choose([Candidate(often.chances(3), 3), Candidate(seldom.chances(8), 100)], 2)
    assert chosen == [3, 0], "an answer that ends gets no more than it can use"


def test_steps_with_prompts_or_other_rows_are_not_timed() -> None:
    machine = Machine(2, 0.9)
    for _ in range(200):
        assert not machine.step(is_like_last=False)
        machine.now += 30.0
    assert any(machine.run(400))


def test_a_trial_that_is_compiled_is_repeated_at_once() -> None:
    machine = Machine(1, 0.8)
    note = machine.depth.note
    machine.depth.note = lambda *given: note(*given, is_new=True)
    depths = machine.run(FIRST_TRIAL + 10)
    first = next(place for place, depth in enumerate(depths) if depth)
    assert all(depths[first:])
    machine.depth.note = note
    assert machine.run(4)[-1] > 1


def test_drafts_that_are_not_verified_wait_for_the_next_trial() -> None:
    """Drafts are computed but cannot be verified, because no blocks are free."""
    machine = Machine(chance=1.0)
    machine.run(200)
    proposed = 0
    for _ in range(2000):
        machine.depth.begin(1, is_like_last=True)
        (count,) = machine.depth.choose([Candidate(machine.acceptances[0].chances(4), 100)], 1)
        if count:
            machine.depth.note_proposed(count)
            proposed += 1
        machine.now += 1.0 + 0.5 * count
    assert 0 < proposed <= 2000 / FIRST_TRIAL


def test_plain_steps_are_timed_again_now_and_then() -> None:
    depths = Machine(1, 1.0, 0.01).run(3 * MEASURE_EVERY)
    plain = [place for place, depth in enumerate(depths) if depth == 0]
    assert plain[-1] > MEASURE_EVERY and len([place for place in plain if place > 200]) < 16


# Look-up ------------------------------------------------------------------------------------------------------------

# Extra cost of a step with drafts, in plain steps: a fixed part, and a part per draft of each row. "measured" is near
# an H100 with a 1B model; with "dear" drafts never pay for 32 rows; with "flat" they are nearly free even for these.
COSTS = {
    "measured": {1: (1.1, 0.01), 8: (1.1, 0.07), 32: (1.1, 0.3)},
    "dear": {1: (0.3, 0.04), 8: (0.5, 0.2), 32: (1.0, 1.3)},
    "flat": {1: (0.05, 0.0), 8: (0.2, 0.0), 32: (0.6, 0.0)},
}


def verification(costs: str, host: float = 0.0) -> Callable[[float, int], float]:
    """Return the function that gives the device's time of a step with these costs."""

    def verify(tokens: float, rows: int) -> float:
        fixed, price = COSTS[costs][rows]
        return 1 + fixed + price * (tokens - rows) / rows - host

    return verify


def best_of_look_up(machine: LookUpMachine) -> float:
    """Return the best rate if all rows have drafts in every step."""
    rows = machine.rows
    times = [machine.host + machine.verify(rows * (1 + n), rows) for n in range(1, machine.most + 1)]
    return max(1.0, *(expected_tokens(machine.chance, n) / times[n - 1] for n in range(1, machine.most + 1)))


@pytest.mark.parametrize(
    ("rows", "costs", "host"),
    quick(crossed([1, 8, 32], COSTS, [0.0, 1.0]), (1, "flat", 0.0), (8, "measured", 1.0)),
)
def test_look_up_is_used_where_it_pays(rows: int, costs: str, host: float) -> None:
    """A plain step is bound by the device or by the host. Only if by the device, the first step with drafts waits for
    the plain step before it."""
    for chance in (0.1, 0.9):
        for repeats in (1.0, 0.3):
            machine = LookUpMachine(rows, chance, verification(costs, host), repeats, host)
            machine.run(2000)
            assert costs_little(machine), f"{chance}, {repeats}"
            if repeats == 1:
                assert machine.rate > 0.95 * best_of_look_up(machine), chance
            assert machine.depth.seconds_saved == pytest.approx(machine.tokens / rows - machine.passed, abs=12.0)


def test_slow_first_draft_is_forgotten() -> None:
    """The first one compiled a kernel."""
    machine = LookUpMachine(1, 0.9, verification("measured"))
    slow = iter([30.0])
    verify = machine.verify
    machine.verify = lambda tokens, rows: next(slow, 0.0) + verify(tokens, rows)
    machine.run(3000)
    assert machine.rate > 0.5 * best_of_look_up(machine)


def test_rows_are_not_looked_at_where_even_right_drafts_would_not_pay() -> None:
    machine = LookUpMachine(32, 1.0, verification("dear"))
    assert not any(machine.run(1000)[FIRST_TRIAL + 20 : FIRST_TRIAL + 80])
    assert machine.looked < 20


def test_paused_plain_steps_do_not_make_drafts_free() -> None:
    """Drafts that seemed to take no time made the choice divide by zero."""
    machine = Machine()
    machine.device = 100.0
    machine.run(FIRST_TRIAL - 2)
    machine.device = 1.0
    machine.run(2 * MOST_BETWEEN)
    assert machine.rate > 0
