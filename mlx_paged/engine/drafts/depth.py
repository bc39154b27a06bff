"""Depth: how many drafts a step is worth, from what steps take, what was accepted, and what drafts have cost so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

MEMORY = 16  # measurements that an estimate goes by, roughly
LEAST_KNOWN = 2  # plain steps of a number of rows before drafts are tried with it
MEASURE_EVERY = 256  # steps with drafts; then plain ones are timed again
EXPECTED = 0.7  # acceptance before anything is known
# What drafts may cost: a part of the time of all steps, and as much again of that of the first ones.
SHARE, FIRST_STEPS = 0.0075, 800
TRIAL = 1.25  # plain steps that a step with one draft is taken to cost beyond a plain one before any was measured
# Plain steps that a token of a prompt is taken to cost a draft model, before that is measured: on a GPU, and on a CPU.
PROMPT_PRICE, CPU_PROMPT_PRICE = 1 / 256, 1 / 8
TRIAL_CONTEXT = 16  # tokens of a row, its last ones, that a trial goes by where more are missing


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


class Candidate(NamedTuple):
    """A row that can have drafts.

    Attributes:
        acceptance: of its drafts.
        most: drafts in this step.
        left: tokens that it can still get.
        missing: tokens that have to be computed for it, by the proposer, before its first draft.
    """

    acceptance: Acceptance
    most: int
    left: int
    missing: int = 0


def expected_tokens(chance: float, drafts: int) -> float:
    """Return the tokens that a row gets in a step with so many drafts, each right with this chance."""
    return 1.0 + sum(chance**n for n in range(1, drafts + 1))


def _worth(chance: float, price: float, most: int) -> int:
    """Return how many drafts are right with a chance of half their price or more, up to ``most``."""
    found, right = 0, chance
    while found < most and right >= price / 2:
        found, right = found + 1, right * chance
    return found


class _Estimate:
    """A mean of the latest measurements."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def note(self, value: float, most: float) -> None:
        """Note a measurement, of which a pause of the process counts ``most``."""
        self.count += 1
        if self.value is None:
            self.value = value
        else:
            self.value += (min(value, most) - self.value) * max(1 / self.count, 2 / MEMORY)


class _Account:
    """Seconds that drafts may cost: a share of the time of all steps, and what drafts have saved.

    Attributes:
        saved: by all steps with drafts and the prompts computed for them; below 0: what they have cost.
    """

    def __init__(self) -> None:
        self.saved = 0.0
        self._allowed = self._for_trials = 0.0
        self._num_steps = 0

    def note_step(self, seconds: float, *, has_drafts: bool) -> None:
        """Note the time of a step."""
        self._num_steps += 1
        share = seconds * (2 * SHARE if self._num_steps <= FIRST_STEPS else SHARE)
        self._allowed += share
        self._for_trials += 0.0 if has_drafts else share

    def pay(self, seconds: float, *, is_trial: bool) -> None:
        """Take what drafts have cost; below 0: what they have saved. Trials are paid from the share of plain steps
        alone, or all that was saved would be lost when drafts do not pay any more."""
        self.saved -= seconds
        if is_trial:
            self._for_trials -= max(0.0, seconds)

    def has(self, seconds: float, *, for_trial: bool = False) -> bool:
        """Return whether so much may be spent."""
        return self._allowed + self.saved >= seconds and (not for_trial or self._for_trials >= seconds)


class _Step:
    """A step that has begun.

    Attributes:
        began: when.
        num_rows: of the batch.
        before: drafts verified in the step before it, if that was of the same rows and computed no prompt; None: it
            was not.
        proposed: drafts of a row, on average over the batch.
        accepted: tokens that rows got beyond their next ones, on average; None: no draft was verified.
        is_trial: drafts are not known to pay.
    """

    def __init__(self, began: float, num_rows: int, before: float | None) -> None:
        self.began, self.num_rows, self.before = began, num_rows, before
        self.proposed = 0.0
        self.accepted: float | None = None
        self.is_trial = False


class Depth:
    """Decides how many drafts rows get in a step: the number ``k`` that makes the tokens of all rows,
    ``1 + a + ... + a^k`` of a row with acceptance ``a``, most for ``1 + k * price``, the time of the step in plain
    ones. In large batches each draft costs more of a step, so ``k`` falls. A row gets fewer where its drafts are not
    likely enough to be worth verifying; the price is that of the mean.

    Nothing is computed for drafts that could cost more than the account holds: 0.75% of the time of all steps, 1.5% of
    that of the first 800, and what drafts have saved. Where drafts are not known to pay they are tried, one a row, when
    the share of time that trials have allows it; what a row misses is then computed of its last tokens alone.

    Args:
        clock: in seconds, of what steps take or cost.
        prompt_price: of a token of a prompt, in plain steps, before that is measured.

    Attributes:
        steps: number of steps by the drafts of the row with most of them.
        acceptance: of all rows.
        pays: drafts were known to pay when they were chosen last.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, prompt_price: float = CPU_PROMPT_PRICE) -> None:
        self.acceptance = Acceptance(4 * MEMORY)
        self.steps: dict[int, int] = {}
        self.pays = False
        self.clock = clock
        self._account = _Account()
        self._prompt_price = prompt_price
        self._prompts: tuple[float, float] = (0.0, 0.0)  # seconds and tokens of prompts, the latest ones most
        self._plain: dict[int, _Estimate] = {}  # seconds of a plain step, by number of rows
        self._prices: dict[int, _Estimate] = {}  # plain steps that a draft of each row costs, by size of batch
        self._last: _Step | None = None
        self._since_measured = 0

    @property
    def seconds_saved(self) -> float:
        """Return the seconds that drafts have saved, as measured; below 0: that they have cost."""
        return self._account.saved

    # Time -----------------------------------------------------------------------------------------------------

    def begin(self, num_rows: int, *, is_like_last: bool) -> None:
        """Note that a step begins. The last one's time is known then, with what the caller did in between.

        Args:
            num_rows: of the batch.
            is_like_last: since the last step began no row has joined or left, and no prompt was computed.
        """
        now, last = self.clock(), self._last
        before = None
        if last is not None:
            self._note_time(last, now - last.began, is_like_last)
            before = (0.0 if last.accepted is None else last.proposed) if is_like_last else None
        self._last = _Step(now, num_rows, before)

    def _note_time(self, step: _Step, seconds: float, is_complete: bool) -> None:
        """Note what a step took. A plain step ends with the one before it, whose tokens it waits for; one with drafts
        waits for its own, too."""
        known = self._plain.setdefault(step.num_rows, _Estimate())
        plain = known.value
        is_measured = is_complete and step.before is not None
        if step.proposed:
            if plain is not None:
                self._note_drafts(step, plain, seconds if is_measured else None)
            return
        if is_measured and step.before == 0:
            known.note(seconds, 2 * (plain or seconds))
        self._account.note_step(seconds if is_measured else min(seconds, plain or 0.0), has_drafts=False)

    def _note_drafts(self, step: _Step, plain: float, seconds: float | None) -> None:
        """Note what a step with drafts took, None: not known, and what they have saved."""
        is_verified, gained = step.accepted is not None, 1 + (step.accepted or 0.0)
        if seconds is None:
            took = plain * (is_verified + step.proposed * self._price(step.num_rows))
        else:
            took = max(0.0, seconds - (plain if step.before == 0 else 0.0))
            took = min(took, 4 * plain * (1 + step.proposed))
            if is_verified:
                price = max(0.0, took / plain - 1) / step.proposed
                self._prices.setdefault(step.num_rows.bit_length(), _Estimate()).note(price, 4.0)
        self._account.note_step(took, has_drafts=True)
        self._account.pay(took - plain * gained * is_verified, is_trial=step.is_trial)

    def note_prompt(self, seconds: float, tokens: int) -> None:
        """Note what tokens of prompts took that were computed in the step that has begun, for drafts of the rows."""
        self._prompts = (self._prompts[0] * 0.75 + seconds, self._prompts[1] * 0.75 + tokens)
        self._account.pay(seconds, is_trial=self.is_trial)
        if self._last is not None:
            self._last.began += seconds  # it says nothing of the step

    def _price(self, num_rows: int) -> float:
        """Return the price of a draft in a batch: as measured, if need be with fewer or more rows."""
        size = num_rows.bit_length()
        nearest = min(self._prices, key=lambda known: (abs(known - size), -known), default=None)
        price = None if nearest is None else self._prices[nearest].value
        return TRIAL if price is None else price

    def _prompt_seconds(self, tokens: int) -> float:
        seconds, counted = self._prompts
        if counted:
            return tokens * seconds / counted
        plain = min(known.value for known in self._plain.values() if known.value is not None)
        return tokens * self._prompt_price * plain

    # Choosing -------------------------------------------------------------------------------------------------

    @property
    def is_trial(self) -> bool:
        """Return whether the drafts that were chosen last are not known to pay."""
        return self._last is not None and self._last.is_trial

    def choose(self, rows: Sequence[Candidate], num_rows: int) -> list[int]:
        """Return how many drafts each of these rows gets in the step that has begun. One that misses tokens gets some
        if these are to be computed.

        Args:
            rows: those that can have drafts.
            num_rows: of the batch, others included.
        """
        known = self._plain.get(num_rows)
        if self._since_measured >= MEASURE_EVERY:
            self._since_measured = 0
            if known is not None:
                known.count = 0
        if known is None or known.value is None or known.count < LEAST_KNOWN or not rows:
            return [0] * len(rows)
        counts = self._paying(rows, num_rows, known.value) if self._prices else None
        self.pays = counts is not None
        return self._tried(rows, num_rows, known.value) if counts is None else counts

    def _paying(self, rows: Sequence[Candidate], num_rows: int, plain: float) -> list[int] | None:
        """Return the numbers of drafts that pay, 0 where the account does not hold their price; None: drafts do not
        pay."""
        price, most = self._price(num_rows), max(row.most for row in rows)
        counts, rate = self._best(rows, num_rows, price, most)
        if not any(counts):
            return None
        started: dict[int, int] = {}
        cost = 0.0
        for index, row in enumerate(rows):
            if row.missing and counts[index]:
                seconds = self._prompt_seconds(row.missing)
                gain = row.left * plain * (1 - 1 / rate) / num_rows
                if seconds < gain and self._account.has(cost + seconds):
                    cost += seconds
                    started[index] = counts[index]
        if num_rows.bit_length() not in self._prices:
            most = min(most, 1)  # in a batch of this size the first one says what it costs
        ready = [row._replace(most=0) if row.missing else row for row in rows]
        counts, _ = self._best(ready, num_rows, price, most)
        while not self._account.has(cost + plain * price * sum(counts) / num_rows) and any(counts):
            counts = [min(count, max(counts) - 1) for count in counts]
        return [started.get(index, count) for index, count in enumerate(counts)]

    def _tried(self, rows: Sequence[Candidate], num_rows: int, plain: float) -> list[int]:
        """Return one draft for each row, if a trial may be made: of all rows, or it would not show what all cost."""
        counts = [min(row.most, 1) for row in rows]
        missing = sum(min(row.missing, TRIAL_CONTEXT) for row in rows if row.most)
        cost = plain * self._price(num_rows) * sum(counts) / num_rows + self._prompt_seconds(missing)
        if self._last is None or not any(counts) or not self._account.has(cost, for_trial=True):
            return [0] * len(rows)
        self._last.is_trial = True
        return counts

    def _best(self, rows: Sequence[Candidate], num_rows: int, price: float, most: int) -> tuple[list[int], float]:
        """Return the rows' numbers of drafts where a draft costs ``price``, and the tokens of a row for a plain step's
        time."""
        chances = [row.acceptance.chance for row in rows]
        worth = [_worth(chance, price, min(row.most, most)) for chance, row in zip(chances, rows, strict=True)]
        best, best_rate = 0, 1.0
        for depth in range(1, max(worth, default=0) + 1):
            counts = [min(n, depth) for n in worth]
            own = sum(map(expected_tokens, chances, counts))
            rate = (num_rows - len(rows) + own) / (num_rows + price * sum(counts))
            if rate > best_rate:
                best, best_rate = depth, rate
        return [min(n, best) for n in worth], best_rate

    # What came of it ------------------------------------------------------------------------------------------

    def note_proposed(self, num_drafts: int) -> None:
        """Note that drafts are being computed in the step that has begun, so many of all rows."""
        if self._last is not None:
            self._last.proposed = num_drafts / self._last.num_rows

    def note(self, num_rows: int, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Note what the step that has begun has verified of the rows with drafts, and what was accepted."""
        depth = max(drafted)
        self.steps[depth] = self.steps.get(depth, 0) + 1
        self._since_measured += 1
        self.acceptance.note(sum(drafted), sum(accepted))
        if self._last is not None:
            self._last.proposed = sum(drafted) / num_rows
            self._last.accepted = sum(accepted) / num_rows
