"""Depth: how many drafts to verify in a step, by the time of steps, acceptance, and what drafts have cost so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

import mlx.core as mx

STEPS_AVERAGED = 16  # measurements that an estimate averages over, roughly
LEAST_KNOWN = 2  # measured plain steps of a number of rows before drafts are tried with it
MEASURE_EVERY = 256  # steps with drafts, after which plain steps are timed again
EXPECTED = 0.7  # acceptance before anything is known
# Share of the time of steps that drafts may cost: of all steps, and of the first ones.
SHARE, FIRST_SHARE, FIRST_STEPS = 0.005, 0.015, 256
MOST_PATIENCE = 8  # most times its price that a trial must save up; one more after each too expensive one
MOST_TRIED = 4  # most drafts of a row in a trial
COMPILING_STEPS = 8  # first measured steps with drafts, in which kernels may be compiled
LEAST_COST = 0.25  # least cost of drafts, in plain steps, that the cap on pauses assumes
WEIGHT = 0.25  # weight of the assumed share of the fixed part of a cost, in measurements
# Assumed cost of a prompt token in a draft model until it is measured, in plain steps: on a GPU, and on a CPU.
PROMPT_PRICE, CPU_PROMPT_PRICE = 1 / 256, 1 / 8
TRIAL_CONTEXT = 16  # last tokens of a row that a trial computes where more are missing


class Acceptance:
    """How often drafts of a row, or of all rows, were right, given that those before them in the step were.

    Args:
        memory: number of steps to average over, roughly.
        expected: the estimate before any step; weighs as much as 4 drafts.
    """

    def __init__(self, memory: int = STEPS_AVERAGED, expected: float = EXPECTED) -> None:
        self._keep = 1 - 1 / memory
        self._right, self._tried = 4 * expected, 4.0

    @property
    def chance(self) -> float:
        """Estimated chance that a draft is right."""
        return self._right / self._tried

    def chances(self, most: int) -> list[float]:
        """Return the chance of acceptance of each of ``most`` drafts, which requires that of all before it."""
        return list(accumulate(repeat(self.chance, most), mul))

    def note(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Note a step's drafts, by row; those after a wrong one do not count."""
        tried = sum(min(count, right + 1) for count, right in zip(drafted, accepted, strict=True))
        self._right = self._right * self._keep + sum(accepted)
        self._tried = self._tried * self._keep + tried


class Assumed(NamedTuple):
    """Assumed extra cost of a step with drafts over a plain step, in plain steps, until it is measured in batches of
    the same size.

    Attributes:
        fixed: cost whatever the number of drafts. As long as all measured steps had the same number of drafts, it has
            the share of their cost that is assumed here for one draft of each row.
        draft: cost of a draft of each row.
        token: cost of a draft of one row.
    """

    fixed: float
    draft: float
    token: float = 0.0

    def of(self, num_rows: int) -> _Cost:
        """Return the cost in batches of ``num_rows`` rows, without measurements."""
        return _Cost(self.fixed, self.draft + self.token * num_rows)


# Drafts computed by a model: on a GPU, where a step with drafts waits for its own tokens, and on a CPU.
COMPUTED, CPU_COMPUTED = Assumed(0.75, 0.25), Assumed(0.0, 1.25)
# Drafts that are looked up: on a GPU, whose small steps read the weights once, and on a CPU.
LOOKED_UP, CPU_LOOKED_UP = Assumed(1.0, 0.0, 1 / 32), Assumed(0.625, 0.625)


class Candidate(NamedTuple):
    """A row that can have drafts.

    Attributes:
        chances: chance of acceptance of each draft that it can have in this step, not increasing.
        left: tokens that it can still get.
        missing: tokens that the proposer has to compute for it before its first draft.
    """

    chances: Sequence[float]
    left: int
    missing: int = 0


class _Estimate:
    """Moving average of the latest measurements."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def note(self, value: float, most: float) -> None:
        """Note a measurement; all but the first are capped at ``most``, in case the process was paused."""
        self.count += 1
        if self.value is None:
            self.value = value
        else:
            self.value += (min(value, most) - self.value) * max(1 / self.count, 2 / STEPS_AVERAGED)


class _Cost:
    """Extra cost of steps with drafts over plain ones, in plain steps: a fixed part and a price of a draft of each
    row, fitted to the latest measurements by least squares. One below half the known cost nearly replaces the others.

    Args:
        fixed: fixed part before anything is measured.
        price: price of a draft of each row before anything is measured.

    Attributes:
        fixed: fixed part.
        price: price of a draft of each row.
        count: number of measurements.
    """

    def __init__(self, fixed: float, price: float) -> None:
        self.fixed, self.price = fixed, price
        self.count = 0
        self._assumed = fixed / (fixed + price)
        self._ones = self._drafts = self._squares = self._costs = self._products = 0.0

    def of(self, drafts: float) -> float:
        """Return the cost of a step with ``drafts`` per row, on average."""
        return self.fixed + self.price * drafts

    def note(self, drafts: float, cost: float) -> None:
        """Note a measurement."""
        self.count += 1
        keep = 1 - 1 / STEPS_AVERAGED
        if cost < self.of(drafts) / 2:
            keep = 1 / STEPS_AVERAGED
        self._ones = self._ones * keep + 1.0
        self._drafts = self._drafts * keep + drafts
        self._squares = self._squares * keep + drafts * drafts
        self._costs = self._costs * keep + cost
        self._products = self._products * keep + cost * drafts
        part, rest = self._assumed, 1 - self._assumed
        ones, squares = self._ones + WEIGHT * rest * rest, self._squares + WEIGHT * part * part
        both = self._drafts - WEIGHT * part * rest
        determinant = ones * squares - both * both
        fixed = (self._costs * squares - self._products * both) / determinant
        price = (self._products * ones - self._costs * both) / determinant
        if price < 0:
            fixed, price = self._costs / self._ones, 0.0
        elif fixed < 0:
            fixed, price = 0.0, self._products / self._squares
        self.fixed, self.price = max(0.0, fixed), max(0.0, price)


class _Account:
    """Seconds that drafts may cost: a share of the time of all steps, and what drafts have saved.

    Attributes:
        saved: seconds saved by all steps with drafts, less the prompts computed for them; negative: lost.
    """

    def __init__(self) -> None:
        self.saved = 0.0
        self._allowed = self._for_trials = 0.0
        self._num_steps = 0

    def note_step(self, seconds: float, *, has_drafts: bool) -> None:
        """Note the time of a step."""
        self._num_steps += 1
        share = seconds * (FIRST_SHARE if self._num_steps <= FIRST_STEPS else SHARE)
        self._allowed += share
        self._for_trials += 0.0 if has_drafts else share

    def pay(self, seconds: float, patience: int = 0) -> None:
        """Charge what drafts have cost; negative: what they have saved. A trial is also charged ``patience`` times to
        the share of plain steps, or all savings would be lost once drafts no longer pay. Other steps have 0."""
        self.saved -= seconds
        self._for_trials -= max(0.0, seconds) * patience

    def has(self, seconds: float) -> bool:
        """Return whether this much may be spent."""
        return self._allowed + self.saved >= seconds

    def has_for_trial(self, seconds: float, patience: int) -> bool:
        """Return whether this much may be spent on a trial that is charged ``patience`` times."""
        return self.has(seconds) and self._for_trials >= seconds * patience


class _Step:
    """A step that has begun.

    Attributes:
        began: when it began.
        num_rows: rows of the batch.
        before: drafts per row verified in the step before it; None unless that had the same rows and computed no
            prompt.
        proposed: drafts per row of the batch, on average.
        accepted: accepted drafts per row of the batch, on average; None: no draft was verified.
        patience: how many times a trial is charged; 0: no trial, as drafts are known to pay.
        is_new: a step was compiled in it.
    """

    def __init__(self, began: float, num_rows: int, before: float | None) -> None:
        self.began, self.num_rows, self.before = began, num_rows, before
        self.proposed = 0.0
        self.accepted: float | None = None
        self.patience = 0
        self.is_new = False


class _First(NamedTuple):
    """A step with drafts after a plain one, until the next plain step shows how long it waited for that one.

    Attributes:
        step: the step.
        seconds: its duration.
        waited: part of a plain step that it was assumed to wait for.
    """

    step: _Step
    seconds: float
    waited: float


class Depth:
    """Decides how many drafts rows get in a step, for any proposer: the number with the most expected tokens for the
    time of the step, counting one token of each row and the chances of its drafts. Large batches get fewer, because
    each draft costs more of a step. A row gets fewer where its drafts are too unlikely to be worth verifying.

    Nothing is computed for drafts that could cost more than the account holds: 0.5% of the time of all steps, 1.5% of
    that of the first 256, and what drafts have saved. Where drafts are not known to pay, trials of up to four drafts of
    a row are made as the trials' share of the time allows; only the last tokens that a row misses are computed for
    them. Trials that would be too expensive even if all their drafts were right become rarer.

    Args:
        clock: returns seconds; times the steps.
        prompt_price: assumed cost of a prompt token until it is measured, in plain steps.
        assumed: assumed cost of drafts until it is measured.

    Attributes:
        verifications: number of verifications, by the largest number of drafts of a row in them.
        acceptance: acceptance of all rows' drafts.
        pays: drafts were known to pay at the last choice.
        caller: ``id`` of the proposer that began the last step, where several share this.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        prompt_price: float = CPU_PROMPT_PRICE,
        assumed: Assumed = COMPUTED,
    ) -> None:
        self.acceptance = Acceptance(4 * STEPS_AVERAGED)
        self.verifications: dict[int, int] = {}
        self.pays = False
        self.caller = 0
        self.clock = clock
        self._account = _Account()
        self._prompt_price, self._assumed = prompt_price, assumed
        self._prompts: tuple[float, float] = (0.0, 0.0)  # seconds and tokens of prompts, the latest weighted most
        self._plain: dict[int, _Estimate] = {}  # seconds of a plain step, by number of rows
        self._costs: dict[int, _Cost] = {}  # of steps with drafts, by size of batch
        self._failed_trials: dict[int, int] = {}  # latest trials in a row that were too expensive, by size of batch
        # Price in seconds that the account lacked at the last choice, and whether of a trial, by size of batch.
        self._price_awaited: dict[int, tuple[float, bool]] = {}
        self._last: _Step | None = None
        self._first: _First | None = None
        # Part of a plain step that the next one waits for: all of it, unless the host is slower than the device.
        self._waited = _Estimate()
        self._since_measured = 0

    @property
    def seconds_saved(self) -> float:
        """Seconds that drafts have saved, as measured; negative: lost."""
        return self._account.saved

    # Time -----------------------------------------------------------------------------------------------------

    def begin(self, num_rows: int, *, is_like_last: bool) -> None:
        """Note that a step begins, and the time of the last one, which ends now: the caller's work in between counts.

        Args:
            num_rows: rows of the batch.
            is_like_last: since the last step began no row has joined or left, and no prompt was computed.
        """
        now, last = self.clock(), self._last
        before = None
        if last is not None:
            self._note_time(last, now - last.began, is_like_last)
            before = (0.0 if last.accepted is None else last.proposed) if is_like_last else None
        self._last = _Step(now, num_rows, before)

    def _note_time(self, step: _Step, seconds: float, is_complete: bool) -> None:
        """Note the time of a step. A plain step waits for the tokens of the step before it; one with drafts waits for
        its own, too. So the plain step after it waits for nothing, and is as much shorter as that one was longer."""
        known = self._plain.setdefault(step.num_rows, _Estimate())
        plain = known.value
        is_measured = is_complete and step.before is not None
        if not is_measured:
            self._end_first(None)
        if step.proposed:
            if plain:
                self._note_drafts(step, plain, seconds if is_measured and not step.is_new else None)
            return
        if is_measured and step.before == 0:
            known.note(seconds, 2 * (plain or seconds))
        elif is_measured and plain:
            self._end_first(max(0.0, 1 - seconds / plain))
        self._account.note_step(seconds if is_measured else min(seconds, plain or 0.0), has_drafts=False)

    def _note_drafts(self, step: _Step, plain: float, seconds: float | None) -> None:
        """Note the time of a step with drafts, None if it is not known, and what the drafts saved."""
        is_verified, gained = step.accepted is not None, 1 + (step.accepted or 0.0)
        if seconds is None:
            took = plain * (is_verified + self._cost(step.num_rows, step.proposed))
        else:
            waited = 0.0 if step.before else 1.0
            if is_verified and waited and self._waited.value is not None:
                waited = self._waited.value
            took = self._took(step, seconds - waited * plain, plain)
            if is_verified and step.before:
                self._note_cost(step, took / plain - 1)
            elif is_verified:
                self._first = _First(step, seconds, waited)
        self._account.note_step(took, has_drafts=True)
        self._account.pay(took - plain * gained * is_verified, step.patience)
        if step.patience:
            size, is_dear = step.num_rows.bit_length(), took > plain * (1 + step.proposed)
            self._failed_trials[size] = self._failed_trials.get(size, 0) + 1 if is_dear else 0

    def _end_first(self, waited: float | None) -> None:
        """Note the cost of the first of several steps with drafts, once it is measured which part of a plain step it
        waited for; None: it will not be measured."""
        first, self._first = self._first, None
        if first is None:
            return
        plain = self._plain[first.step.num_rows].value
        assert plain
        if waited is None:
            waited = first.waited
        else:
            self._waited.note(waited, 1.0)
            self._account.pay((first.waited - waited) * plain)
        self._note_cost(first.step, self._took(first.step, first.seconds - waited * plain, plain) / plain - 1)

    def _took(self, step: _Step, seconds: float, plain: float) -> float:
        """Return the time that counts for a step of this duration. Pauses are capped: at twice the known cost of drafts
        in the first steps with drafts, in which kernels are compiled, later at 4 plain steps per token of a row."""
        known = self._costs.get(step.num_rows.bit_length())
        if known is None or known.count < COMPILING_STEPS:
            most = plain * (1 + 2 * max(LEAST_COST, self._cost(step.num_rows, step.proposed)))
        else:
            most = 4 * plain * (1 + step.proposed)
        return max(0.0, min(seconds, most))

    def _note_cost(self, step: _Step, cost: float) -> None:
        known = self._costs.setdefault(step.num_rows.bit_length(), self._assumed.of(step.num_rows))
        known.note(step.proposed, cost)

    def note_prompt(self, seconds: float, tokens: int) -> None:
        """Note the time of prompt tokens that were computed for drafts in the current step."""
        self._prompts = (self._prompts[0] * 0.75 + seconds, self._prompts[1] * 0.75 + tokens)
        self._account.pay(seconds, 0 if self._last is None else self._last.patience)
        if self._last is not None:
            self._last.began += seconds  # not part of the step's time

    def _measured(self, num_rows: int) -> _Cost | None:
        """Return the measured cost in batches of this size, or else of the nearest size; None: nothing is measured."""
        size = num_rows.bit_length()
        nearest = min(self._costs, key=lambda known: (abs(known - size), -known), default=None)
        return None if nearest is None else self._costs[nearest]

    def _cost(self, num_rows: int, drafts: float) -> float:
        """Return the cost of drafts in plain steps: as measured in batches of this size; until then the larger of the
        assumed cost and that of the nearest measured size."""
        known = self._costs.get(num_rows.bit_length())
        if known is not None:
            return known.of(drafts)
        nearest = self._measured(num_rows)
        assumed = self._assumed.of(num_rows).of(drafts)
        return assumed if nearest is None else max(assumed, nearest.of(drafts))

    def _prompt_seconds(self, tokens: int) -> float:
        seconds, counted = self._prompts
        if counted:
            return tokens * seconds / counted
        plain = min(known.value for known in self._plain.values() if known.value is not None)
        return tokens * self._prompt_price * plain

    # Choosing -------------------------------------------------------------------------------------------------

    @property
    def is_trial(self) -> bool:
        """Whether the drafts chosen last are a trial: they are not known to pay."""
        return self._last is not None and self._last.patience > 0

    def _plain_seconds(self, num_rows: int) -> float | None:
        """Return the time of a plain step; None if it has to be measured first."""
        known = self._plain.get(num_rows)
        if known is None or known.count < LEAST_KNOWN:
            return None
        return known.value

    def may_choose(self, num_rows: int) -> bool:
        """Return whether rows could get drafts in the current step: whether the account holds the price that it lacked
        at the last choice. Until then proposers need not search for drafts: no account covers the host's time."""
        plain = self._plain_seconds(num_rows)
        if plain is None:
            return False
        size = num_rows.bit_length()
        if size not in self._price_awaited:
            self._price_awaited[size] = plain * self._cost(num_rows, 1.0), True
        seconds, is_trial = self._price_awaited[size]
        if is_trial:
            return self._account.has_for_trial(seconds, self._patience(num_rows))
        return self._account.has(seconds)

    def choose(self, rows: Sequence[Candidate], num_rows: int) -> list[int]:
        """Return how many drafts each of these rows gets in the current step. A row that misses tokens gets drafts only
        if those tokens are to be computed now.

        Args:
            rows: rows that can have drafts.
            num_rows: rows of the batch, others included.
        """
        if self._since_measured >= MEASURE_EVERY and num_rows in self._plain:
            self._since_measured = 0
            self._plain[num_rows].count = 0
        plain = self._plain_seconds(num_rows)
        if plain is None or not rows:
            return [0] * len(rows)
        counts = self._paying(rows, num_rows, plain)
        self.pays = counts is not None
        return self._tried(rows, num_rows, plain) if counts is None else counts

    def _paying(self, rows: Sequence[Candidate], num_rows: int, plain: float) -> list[int] | None:
        """Return the numbers of drafts that pay, 0 if the account does not hold their price; None: no drafts pay."""
        known = self._measured(num_rows)
        if known is None:
            return None
        best = _best(rows, num_rows, known)
        if not any(best.counts):
            return None
        size = num_rows.bit_length()
        self._failed_trials[size] = 0
        started: dict[int, int] = {}
        cost, lacked = 0.0, []
        for index, row in enumerate(rows):
            if row.missing and best.counts[index]:
                seconds = self._prompt_seconds(row.missing)
                gain = row.left * plain * (1 - 1 / best.rate) / num_rows
                if seconds < gain and self._account.has(cost + seconds):
                    cost += seconds
                    started[index] = best.counts[index]
                elif seconds < gain:
                    lacked.append(seconds)
        # In a batch of a new size one draft of each row measures the cost.
        most = None if size in self._costs else 1
        ready = [row._replace(chances=() if row.missing else row.chances[:most]) for row in rows]

        def price(drafts: float) -> float:
            return plain * self._cost(num_rows, drafts)

        best = _best(ready, num_rows, known, lambda drafts: self._account.has(cost + price(drafts)))
        if best.least is not None:
            lacked.append(price(best.least))
        self._price_awaited[size] = 0.0 if started or any(best.counts) else min(lacked, default=0.0), False
        return [started.get(index, count) for index, count in enumerate(best.counts)]

    def _tried(self, rows: Sequence[Candidate], num_rows: int, plain: float) -> list[int]:
        """Return the numbers of drafts of a trial, those that come nearest to paying; zeros if none may be made."""
        none = [0] * len(rows)
        known = self._measured(num_rows) or self._assumed.of(num_rows)
        few = [row._replace(chances=row.chances[:MOST_TRIED]) for row in rows]
        counts = _best(few, num_rows, known, has_to_pay=False).counts
        if self._last is None or self._first is not None or not any(counts):  # what the last one cost is not known yet
            return none
        missing = sum(min(row.missing, TRIAL_CONTEXT) for row in rows if row.chances)
        seconds = plain * self._cost(num_rows, sum(counts) / num_rows) + self._prompt_seconds(missing)
        self._price_awaited[num_rows.bit_length()] = seconds, True
        patience = self._patience(num_rows)
        if not self._account.has_for_trial(seconds, patience):
            return none
        self._last.patience = patience
        return counts

    def _patience(self, num_rows: int) -> int:
        return min(1 + self._failed_trials.get(num_rows.bit_length(), 0), MOST_PATIENCE)

    # What came of it ------------------------------------------------------------------------------------------

    def note_proposed(self, num_drafts: int) -> None:
        """Note the number of drafts, of all rows, that are computed in the current step."""
        if self._last is not None:
            self._last.proposed = num_drafts / self._last.num_rows

    def note(self, num_rows: int, drafted: Sequence[int], accepted: Sequence[int], *, is_new: bool = False) -> None:
        """Note the numbers of drafts that the current step verified and accepted, by row. With ``is_new`` a step was
        compiled in it, so the known or assumed cost counts, not its time."""
        depth = max(drafted)
        self.verifications[depth] = self.verifications.get(depth, 0) + 1
        self._since_measured += 1
        self.acceptance.note(drafted, accepted)
        if self._last is not None:
            self._last.proposed = sum(drafted) / num_rows
            self._last.accepted = sum(accepted) / num_rows
            self._last.is_new = is_new


class _Best(NamedTuple):
    """The numbers of drafts with the most expected tokens for the time.

    Attributes:
        counts: drafts of each row.
        rate: expected tokens per row in the time of a plain step.
        least: fewest drafts per row, on average, that pay; None: none do.
    """

    counts: list[int]
    rate: float
    least: float | None


def _best(
    rows: Sequence[Candidate],
    num_rows: int,
    cost: _Cost,
    may: Callable[[float], bool] = lambda drafts: True,
    *,
    has_to_pay: bool = True,
) -> _Best:
    """Return the best numbers of drafts. All rows get the same, but no drafts less likely than half their price.

    Args:
        may: returns whether a step may have this many drafts per row, on average.
        has_to_pay: give no drafts if none pay; False: give each row some, however unlikely.
    """
    least_chance, best_rate = (cost.price / 2, 1.0) if has_to_pay else (0.0, 0.0)
    worth = [sum(chance >= least_chance for chance in row.chances) for row in rows]
    best, drafts, tokens, least = 0, 0, float(num_rows), None
    for depth in range(1, max(worth, default=0) + 1):
        more = [row.chances[depth - 1] for row, most in zip(rows, worth, strict=True) if most >= depth]
        drafts, tokens = drafts + len(more), tokens + sum(more)
        rate = tokens / num_rows / (1 + cost.of(drafts / num_rows))
        if rate > 1.0 and least is None:
            least = drafts / num_rows
        if rate > best_rate and may(drafts / num_rows):
            best, best_rate = depth, rate
    return _Best([min(most, best) for most in worth], best_rate, least)


def new_depth(assumed: Assumed = COMPUTED, on_cpu: Assumed = CPU_COMPUTED) -> Depth:
    """Return a :class:`Depth` for the default device. On a CPU it measures the process's own CPU time, so that other
    processes do not count; on a GPU the time that passes."""
    if mx.default_device() == mx.Device(mx.cpu):
        return Depth(time.process_time, CPU_PROMPT_PRICE, on_cpu)
    return Depth(time.perf_counter, PROMPT_PRICE, assumed)
