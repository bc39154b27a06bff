"""Depth: how many drafts to verify in a step, by moving averages of the time of steps and of acceptance."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

import mlx.core as mx

EXPECTED = 0.7  # acceptance before anything is known
STEPS_AVERAGED = 16  # steps that the acceptance of a row averages over, roughly
TIMES_AVERAGED = 8  # measurements that a time averages over, roughly
LEAST_KNOWN = 2  # measured plain steps of a number of rows before drafts are tried with it
MEASURE_EVERY = 256  # steps with drafts after which a plain step is timed again
# Plain steps before the first trial of drafts, and most plain steps between two trials. A trial of one draft of each
# row costs 1 to 2.5 plain steps.
FIRST_TRIAL, MOST_BETWEEN = 48, 384
# Assumed time of a prompt token in a draft model, in plain steps: on a GPU, and on a CPU.
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


class _Average:
    """Moving average of measurements. One above twice the average counts as that: the process was paused."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def note(self, value: float) -> None:
        self.count += 1
        value = min(value, 2 * self.value) if self.value else value
        self.value += (value - self.value) / min(self.count, TIMES_AVERAGED)


@dataclass
class _Step:
    """A step that has begun.

    Attributes:
        began: when it began.
        num_rows: rows of the batch.
        before: drafts in the step before it; None unless that had the same rows and computed no prompt.
        drafts: its drafts.
        accepted: accepted drafts; None: no draft was verified.
        is_trial: its drafts are not known to pay.
        is_new: a step was compiled in it.
    """

    began: float
    num_rows: int
    before: int | None
    drafts: int = 0
    accepted: int | None = None
    is_trial: bool = False
    is_new: bool = False


class _Times:
    """Times of steps with drafts in batches of about one size, and when to try drafts again.

    Attributes:
        wait: plain steps between the last trial and the next one.
        left: plain steps until the next trial.
    """

    def __init__(self) -> None:
        self.wait = self.left = FIRST_TRIAL
        # Number of drafts and time of a step, in plain steps, by bit length of the number.
        self._known: dict[int, tuple[_Average, _Average]] = {}
        self._points = [(0.0, 1.0)]  # both, ascending

    @property
    def largest(self) -> int:
        """Largest number of drafts whose time is known."""
        return round(self._points[-1][0])

    def note(self, step: _Step, seconds: float, plain: float) -> None:
        """Note the time of a step with drafts. More than twice that of its tokens one by one counts as that, and less
        than half a plain step as half: the process was paused. A trial counts more, as earlier measurements are old."""
        size = step.drafts.bit_length()
        numbers, times = self._known.setdefault(size, (_Average(), _Average()))
        if step.is_trial:
            self._known = {known: value for known, value in self._known.items() if known <= size}
            times.count = min(times.count, 1)
        numbers.note(step.drafts)
        times.note(min(max(0.5, seconds / plain), 2 * (1 + step.drafts / step.num_rows)))
        self._points[1:] = sorted((number.value, time.value) for number, time in self._known.values())

    def of(self, drafts: int) -> float:
        """Return the time of a step with ``drafts`` drafts, in plain steps: on the line through the nearest two known
        times; beyond a single one the same time, which more drafts are tried to show."""
        points = self._points
        if len(points) == 1 or (len(points) == 2 and drafts >= points[1][0]):
            return points[-1][1]
        right = min(max(1, bisect_left(points, (drafts,))), len(points) - 1)
        (few, less), (many, more) = points[right - 1 : right + 1]
        return less + max(0.0, more - less) * (drafts - few) / (many - few)

    @property
    def price(self) -> float:
        """Time of one more draft in a step with many, in plain steps."""
        return (self.of(2 * self.largest) - self.of(self.largest)) / max(1, self.largest)

    def may_pay(self, num_rows: int) -> bool:
        """Return whether drafts would pay in a batch of ``num_rows`` if all of them were right."""
        numbers = [*(round(drafts) for drafts, _ in self._points[1:]), 2 * self.largest]
        return any(self.of(drafts) < 1 + drafts / num_rows for drafts in numbers)


class Depth:
    """Decides how many drafts rows get in a step, for any proposer: the number with the most expected tokens for the
    time of the step, counting one token of each row and the chances of its drafts. At most twice as many as were timed
    are drafted. Where no number pays, one is tried after 48 plain steps, and then after 96, 192 and every 384.

    A plain step ends with the one before it; a step with drafts waits for its own tokens, too. So the first of several
    steps with drafts takes as much longer as the plain one after the last takes less: a single step with drafts is
    timed together with the plain one after it.

    Args:
        clock: returns seconds; times the steps.
        prompt_price: assumed time of a prompt token, in plain steps.

    Attributes:
        acceptance: acceptance of all rows' drafts.
        pays: drafts were known to pay at the last choice.
        seconds_saved: seconds that drafts have saved, as far as measured; negative: lost.
        caller: ``id`` of the proposer that began the last step, where several share this.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, prompt_price: float = CPU_PROMPT_PRICE) -> None:
        self.acceptance = Acceptance(4 * STEPS_AVERAGED)
        self.pays = False
        self.seconds_saved = 0.0
        self.caller = 0
        self.clock = clock
        self._prompt_price = prompt_price
        self._plain: defaultdict[int, _Average] = defaultdict(_Average)  # seconds of a plain step, by number of rows
        self._times: defaultdict[int, _Times] = defaultdict(_Times)  # by bit length of the number of rows
        self._last: _Step | None = None
        # The step before, if it was the first with drafts after a plain one, and its seconds.
        self._first: tuple[_Step | None, float] = (None, 0.0)
        self._since_measured = 0  # steps with drafts since a plain one was timed

    def _times_of(self, num_rows: int) -> _Times:
        return self._times[num_rows.bit_length()]

    def begin(self, num_rows: int, *, is_like_last: bool) -> None:
        """Note that a step begins, and the time of the last one, which ends now: the caller's work in between counts.

        Args:
            num_rows: rows of the batch.
            is_like_last: since the last step began no row has joined or left, and no prompt was computed.
        """
        now, last = self.clock(), self._last
        if last is not None:
            self._note_time(last, now - last.began, is_like_last and last.before is not None and not last.is_new)
        self._last = _Step(now, num_rows, last.drafts if last is not None and is_like_last else None)

    def _note_time(self, step: _Step, seconds: float, is_measured: bool) -> None:
        (first, waited), self._first = self._first, (None, 0.0)
        times, plain = self._times_of(step.num_rows), self._plain[step.num_rows]
        is_measured = is_measured and (plain.value > 0 or not step.drafts)
        if first is not None:
            if is_measured and not step.drafts and plain.value > 0:
                times.note(first, waited + seconds - plain.value, plain.value)
            self._note_gain(first, plain.value)
        if not step.drafts:
            times.left -= 1
            if is_measured and not step.before:
                plain.note(seconds)
                self._since_measured = 0
        elif is_measured and not step.before and step.accepted is not None:
            self._first = step, seconds
        else:
            if step.accepted is None:  # such as for lack of blocks: nothing is known to pay until the next trial
                self._times[step.num_rows.bit_length()] = _Times()
            elif is_measured:
                times.note(step, seconds, plain.value)
            elif step.is_new and step.is_trial:
                times.left = 0  # once more, without compiling
            self._note_gain(step, plain.value)

    def _note_gain(self, step: _Step, plain: float) -> None:
        """Note what the drafts of a step have saved. The more they lose, the longer the next trial waits."""
        times = self._times_of(step.num_rows)
        gain = 1 + (step.accepted or 0) / step.num_rows - times.of(step.drafts)
        self.seconds_saved += plain * gain
        times.wait = min(max(FIRST_TRIAL, times.wait - round(FIRST_TRIAL * gain)), MOST_BETWEEN)
        times.left = min(times.left, times.wait)

    def note_prompt(self, seconds: float) -> None:
        """Note the time of prompts that were computed for drafts in the current step."""
        self.seconds_saved -= seconds
        if self._last is not None:
            self._last.began += seconds  # not part of the step's time

    @property
    def is_trial(self) -> bool:
        """Whether the drafts chosen last are a trial: they are not known to pay."""
        return self._last is not None and self._last.is_trial

    def may_choose(self, num_rows: int) -> bool:
        """Return whether rows could get drafts in the current step; if not, proposers need not search for any."""
        times, is_known = self._times_of(num_rows), self._plain[num_rows].count >= LEAST_KNOWN
        return is_known and self._since_measured < MEASURE_EVERY and (times.left <= 0 or times.may_pay(num_rows))

    def choose(self, rows: Sequence[Candidate], num_rows: int) -> list[int]:
        """Return how many drafts each of these rows gets in the current step. A row that misses tokens gets drafts only
        if those tokens are to be computed now.

        Args:
            rows: rows that can have drafts.
            num_rows: rows of the batch, others included.
        """
        if not rows or not self.may_choose(num_rows):
            return [0] * len(rows)
        times = self._times_of(num_rows)
        rate, _ = _best(rows, num_rows, times)
        self.pays = rate > 1 and times.largest > 0
        if self.pays:
            # A row's missing tokens must not take longer than the drafts of its remaining ones save.
            saved = (1 - 1 / rate) / num_rows
            worth = [row.missing * self._prompt_price < row.left * saved for row in rows]
            ready = [row if own else row._replace(chances=()) for row, own in zip(rows, worth, strict=True)]
            return _best(ready, num_rows, times)[1]
        if times.left > 0 or self._last is None:
            return [0] * len(rows)
        self._last.is_trial = True
        times.wait = times.left = min(2 * times.wait, MOST_BETWEEN)
        return _best(rows, num_rows, times, has_to_pay=False)[1]

    def note_proposed(self, num_drafts: int) -> None:
        """Note the number of drafts, of all rows, that are computed in the current step."""
        if self._last is not None:
            self._last.drafts = num_drafts

    def note(self, drafted: Sequence[int], accepted: Sequence[int], *, is_new: bool = False) -> None:
        """Note the numbers of drafts that the current step verified and accepted, by row. With ``is_new`` a step was
        compiled in it, so its time says nothing."""
        self.acceptance.note(drafted, accepted)
        self._since_measured += 1
        if self._last is not None:
            self._last.drafts, self._last.accepted, self._last.is_new = sum(drafted), sum(accepted), is_new


def _best(
    rows: Sequence[Candidate], num_rows: int, times: _Times, *, has_to_pay: bool = True
) -> tuple[float, list[int]]:
    """Return the expected tokens per row in the time of a plain step, and the drafts of each row, where that is most.
    All rows get the same number, but no drafts less likely than half their price.

    Args:
        has_to_pay: give no drafts if none pay; False: give some.
    """
    least, best_rate = (times.price * num_rows / 2, 1.0) if has_to_pay else (0.0, 0.0)
    worth = [sum(chance >= least for chance in row.chances) for row in rows]
    best, drafts, tokens = 0, 0, float(num_rows)
    for depth in range(1, max(worth, default=0) + 1):
        more = [row.chances[depth - 1] for row, most in zip(rows, worth, strict=True) if most >= depth]
        drafts, tokens = drafts + len(more), tokens + sum(more)
        if depth > 1 and drafts > 2 * times.largest:
            break
        rate = tokens / num_rows / times.of(drafts)
        if rate > best_rate:
            best, best_rate = depth, rate
    return best_rate, [min(most, best) for most in worth]


def new_depth() -> Depth:
    """Return a :class:`Depth` for the default device. On a CPU it measures the process's own CPU time, so that other
    processes do not count; on a GPU the time that passes."""
    if mx.default_device() == mx.Device(mx.cpu):
        return Depth(time.process_time, CPU_PROMPT_PRICE)
    return Depth(time.perf_counter, PROMPT_PRICE)
