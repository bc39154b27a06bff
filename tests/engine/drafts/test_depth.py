"""Depth: how many drafts a step is worth, by a clock of the test's own."""

import numpy as np
import pytest

from mlx_paged.engine.drafts.depth import LOST, MEASURE_EVERY, Acceptance, Depth, expected_tokens
from tests.support.cases import quick


class Machine:
    """Rows whose drafts are right with a chance, on a device whose steps take a time."""

    def __init__(self, rows: int, chance: float, price: float, most: int = 4, seed: int = 0) -> None:
        self.rows, self.chance, self.price = rows, chance, price
        self.now = 0.0
        self.most = most
        self.depth = Depth(lambda: self.now)
        self.acceptances = [Acceptance() for _ in range(rows)]
        self.rng = np.random.default_rng(seed)
        self.tokens = 0
        self.num_plain = 0

    def step(self, *, is_like_last: bool = True) -> int:
        """Take a step; return its depth."""
        self.depth.begin(self.rows, is_like_last=is_like_last)
        counts = self.depth.choose([(acceptance, self.most) for acceptance in self.acceptances], self.rows)
        deepest = max(counts)
        self.now += 1.0 + deepest * self.price
        self.tokens += self.rows
        if deepest:
            wrong = [np.flatnonzero(self.rng.random(count) >= self.chance) for count in counts]
            accepted = [int(each[0]) if len(each) else n for each, n in zip(wrong, counts, strict=True)]
            for acceptance, count, right in zip(self.acceptances, counts, accepted, strict=True):
                acceptance.note(count, right)
            self.depth.note(self.rows, counts, accepted)
            self.tokens += sum(accepted)
        return deepest

    def run(self, steps: int) -> list[int]:
        return [self.step() for _ in range(steps)]

    @property
    def rate(self) -> float:
        """Tokens of a row in the time of a plain step."""
        return self.tokens / self.rows / self.now


def best_rate(chance: float, price: float, most: int) -> float:
    return max(expected_tokens(chance, n) / (1 + n * price) for n in range(most + 1))


def test_expected_tokens_are_those_of_the_formula() -> None:
    assert expected_tokens(0.0, 5) == 1.0 and expected_tokens(1.0, 5) == 6.0 and expected_tokens(0.3, 0) == 1.0
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


@pytest.mark.parametrize(
    ("rows", "chance", "price"),
    quick(
        [(rows, chance, price) for rows in (1, 3, 32) for chance in (0.0, 0.3, 0.6, 0.9) for price in (0.02, 0.3, 1.0)],
        *[(1, 0.9, 0.02), (32, 0.6, 0.3), (3, 0.3, 1.0), (1, 0.0, 0.3), (32, 0.9, 1.0)],
    ),
)
def test_the_rate_is_near_the_best_and_never_below_098(rows: int, chance: float, price: float) -> None:
    machine = Machine(rows, chance, price)
    machine.run(3000)
    assert machine.rate > 0.98
    assert machine.rate > 0.93 * best_rate(chance, price, 4)


def test_dear_drafts_stop_and_are_tried_again_within_a_hundredth() -> None:
    machine = Machine(8, 0.5, 2.0)
    depths = machine.run(4000)
    tries = [depth for depth in depths[100:] if depth]
    assert 0 < len(tries) < 40 and machine.rate > 1 - 2 * LOST
    machine.price = 0.05  # as when others leave the device
    later = machine.run(4000)
    assert np.mean([depth > 0 for depth in later[-500:]]) > 0.9


def test_the_depth_falls_with_the_acceptance() -> None:
    found = []
    for chance in (0.95, 0.6, 0.05):
        machine = Machine(4, chance, 0.15, most=8)
        depths = machine.run(600)
        found.append(float(np.mean(depths[200:])))
    assert found[0] > found[1] + 1 > found[2] + 1 and found[2] < 1


def test_a_row_that_is_seldom_right_gets_fewer_drafts() -> None:
    depth = Depth(iter(np.arange(0, 100, 1.0)).__next__)
    for _ in range(4):
        depth.begin(2, is_like_last=True)
    often, seldom = Acceptance(), Acceptance()
    for _ in range(60):
        often.note(4, 4)
        seldom.note(4, 0)
    depth._known(2).draft = 0.2
    first, second = depth.choose([(often, 8), (seldom, 8)], 2)
    assert first >= 6 and second == 0
    assert depth.choose([(often, 3), (seldom, 8)], 2) == [3, 0], "an answer that ends gets no more than it can use"


def test_steps_with_prompts_or_other_rows_say_nothing_of_time() -> None:
    machine = Machine(2, 0.9, 0.1)
    for _ in range(50):
        machine.step(is_like_last=False)
        machine.now += 30.0
    assert machine.depth._known(2).plain is None and not machine.depth.steps
    machine.run(4)
    assert machine.depth._known(2).plain == 1.0


def test_plain_steps_are_timed_again_now_and_then() -> None:
    machine = Machine(1, 1.0, 0.01)
    depths = machine.run(3 * MEASURE_EVERY)
    plain = [place for place, depth in enumerate(depths) if depth == 0]
    assert plain[-1] > MEASURE_EVERY and len(plain) < 16
