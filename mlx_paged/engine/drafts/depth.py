"""Depth: how many drafts a step is worth, from what steps have taken and what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

MEMORY = 16  # steps that an estimate of time or acceptance goes by, roughly
LEAST_KNOWN = 2  # plain steps of a size of batch before drafts are tried in it
LOST = 0.01  # most of the time of all steps that tries may cost
MEASURE_EVERY = 256  # steps with drafts; then plain ones are timed again
EXPECTED = 0.7  # acceptance before anything is known


class Acceptance:
    """How often drafts of a row, or of all of them, were right, given that those before them in the step were.

    Args:
        memory: steps that it goes by.
        expected: what it is before there are any; weighs as much as 4 drafts.
    """

    def __init__(self, memory: int = MEMORY, expected: float = EXPECTED) -> None:
        self._keep = 1 - 1 / memory
        self._right, self._tried = 4 * expected, 4.0

    @property
    def chance(self) -> float:
        """Return the estimate: the chance of a draft of being right."""
        return self._right / self._tried

    def note(self, drafted: int, accepted: int) -> None:
        """Note a step: drafts behind one that was wrong say nothing."""
        self._right = self._right * self._keep + accepted
        self._tried = self._tried * self._keep + min(drafted, accepted + 1)


def expected_tokens(chance: float, drafts: int) -> float:
    """Return the tokens that a row gets in a step with so many drafts, each right with this chance."""
    return 1.0 + sum(chance**n for n in range(1, drafts + 1))


def _worth(chance: float, price: float, most: int) -> int:
    """Return how many drafts are right with a chance of half their price or more, up to ``most``."""
    found, right = 0, chance
    while found < most and right >= price / 2:
        found, right = found + 1, right * chance
    return found


class _Seconds:
    """Seconds of steps of one size of batch.

    Attributes:
        plain: of a step without drafts; None: not known.
        draft: beyond that, for each token that rows are drafted; None: not known.
    """

    def __init__(self) -> None:
        self.plain: float | None = None
        self.draft: float | None = None
        self.num_plain = 0

    def note(self, seconds: float, depth: int) -> None:
        if depth == 0:
            self.num_plain += 1
            # The first one follows a step with drafts, or rows that joined: it waits for more than itself.
            self.plain = seconds if self.num_plain <= LEAST_KNOWN else _nearer(self.plain, seconds)
        elif self.plain is not None:
            self.draft = _nearer(self.draft, max(0.0, seconds - self.plain) / depth)


def _nearer(known: float | None, seconds: float) -> float:
    """Return an estimate after another measurement, of which a pause of the process counts twice the estimate."""
    if known is None:
        return seconds
    return known + (min(seconds, 2 * known) - known) * 2 / MEMORY if known > 0 else seconds


class Depth:
    """Decides how many drafts rows get in a step: the number ``k`` that makes the tokens of all rows,
    ``1 + a + ... + a^k`` of a row with acceptance ``a``, most for ``plain + k * draft``, the seconds that a step of so
    many rows takes. In large batches each draft costs more of a step, so ``k`` falls. A row gets fewer where its drafts
    are not likely enough to be worth verifying.

    A batch for which drafts do not pay tries them now and then, in case that has changed: as long as what drafts have
    lost in all is less than 1% of the time of all steps.

    Args:
        clock: in seconds.

    Attributes:
        steps: number of steps by the drafts of the row with most of them.
        acceptance: of all rows.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.acceptance = Acceptance(4 * MEMORY)
        self.steps: dict[int, int] = {}
        self._clock = clock
        self._seconds: dict[int, _Seconds] = {}
        self._last: tuple[float, int, int] | None = None  # when the last step began, its number of rows and drafts
        self._gained = 1.0  # tokens of each row in it
        self._lost = self._total = 0.0
        self._since_measured = 0

    def begin(self, num_rows: int, *, is_like_last: bool) -> None:
        """Note that a step begins. The last one's time is known then, with what the caller did in between.

        Args:
            num_rows: of the batch.
            is_like_last: since the last step began no row has joined or left, and no prompt was computed.
        """
        now = self._clock()
        if self._last is not None and is_like_last:
            began, rows, depth = self._last
            seconds, known = now - began, self._known(rows)
            self._total += seconds
            if depth and known.plain is not None:
                self._lost = max(
                    0.0, self._lost + min(seconds, 4 * known.plain * (1 + depth)) - known.plain * self._gained
                )
            known.note(seconds, depth)
        self._last = (now, num_rows, 0)
        self._gained = 1.0

    def _known(self, num_rows: int) -> _Seconds:
        return self._seconds.setdefault(num_rows.bit_length(), _Seconds())

    def choose(self, rows: Sequence[tuple[Acceptance, int]], num_rows: int) -> list[int]:
        """Return how many drafts each of these rows gets in the step that has begun.

        Args:
            rows: acceptance of those that can have drafts, and most drafts of each.
            num_rows: of the batch, others included.
        """
        known = self._known(num_rows)
        counts = [0] * len(rows)
        if known.num_plain < LEAST_KNOWN or self._since_measured >= MEASURE_EVERY:
            if self._since_measured >= MEASURE_EVERY:
                known.num_plain = self._since_measured = 0
            return counts
        assert known.plain is not None
        if known.draft is None:
            counts = [most for _, most in rows]
        elif known.plain > 0:
            counts = self._best(rows, num_rows, known.draft / known.plain)
        if not any(counts):
            counts = [min(2, most) for _, most in rows]
            return counts if self._lost + 2 * known.plain < LOST * self._total else [0] * len(rows)
        return counts

    def _best(self, rows: Sequence[tuple[Acceptance, int]], num_rows: int, price: float) -> list[int]:
        """Return the rows' numbers of drafts where a draft costs ``price`` of a plain step."""
        chances = [acceptance.chance for acceptance, _ in rows]
        worth = [_worth(chance, price, most) for chance, (_, most) in zip(chances, rows, strict=True)]
        best, best_rate = 0, float(num_rows)
        for depth in range(1, max(worth, default=0) + 1):
            own = (expected_tokens(chance, min(n, depth)) for chance, n in zip(chances, worth, strict=True))
            rate = (num_rows - len(rows) + sum(own)) / (1 + depth * price)
            if rate > best_rate:
                best, best_rate = depth, rate
        return [min(n, best) for n in worth]

    def note(self, num_rows: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Note what the step that has begun has drafted for the rows with drafts, and what was accepted."""
        depth = max(drafted)
        self.steps[depth] = self.steps.get(depth, 0) + 1
        self._since_measured += 1
        self._gained = 1.0 + sum(accepted) / num_rows
        self.acceptance.note(sum(drafted), sum(accepted))
        if self._last is not None:
            self._last = (*self._last[:2], depth)
