"""Run: requests that a generator answers, with the times that its caller sees."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx

PERCENTILES = (50, 95, 99)


class Request(NamedTuple):
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    num_tokens: int


class SequenceGenerator:
    """mlx-lm's ``generate_step``, called like its batch generator, for one request."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps: Iterator[Any] = iter(())
        self._left = 0

    def insert_segments(self, segments: list[list[list[int]]], max_tokens: list[int]) -> list[int]:
        (prompt,), (self._left,) = segments[0], max_tokens
        self._steps = importlib.import_module("mlx_lm.generate").generate_step(
            mx.array(prompt), self._model, max_tokens=self._left, prefill_step_size=2048
        )
        return [0]

    def next(self) -> tuple[list[Any], list[Any]]:
        token, _ = next(self._steps)
        self._left -= 1
        return [], [SimpleNamespace(uid=0, token=token, finish_reason=None if self._left else "length")]

    def close(self) -> None:
        self._steps = iter(())


class Run:
    """One run of requests that come together, or, if the first one ``leads``, when that has its first token.

    Attributes:
        seconds: what it took.
        first: per request, in the order of their first tokens, seconds from when it came to that.
        last_first: seconds until all requests had one.
        first_finish: seconds to the first end of a request.
        gaps: seconds between tokens of one request.
        steps: (time, number of tokens) of each call that returned tokens.
        tokens: of each request, by uid.
    """

    def __init__(self, generator: Any, requests: Sequence[Request], *, leads: bool = False, **options: Any) -> None:
        self.generator = generator
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.steps: list[tuple[float, int]] = []
        self.last_first = self.seconds = 0.0
        self.first_finish: float | None = None
        self._requests, self._leads, self._options = requests, leads, options
        self.tokens: dict[int, list[int]] = {}
        self._came: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def go(self) -> None:
        """Run to the end."""
        begin = time.perf_counter()
        left = len(self._requests)
        coming = 1 if self._leads else left
        while left:
            if coming:
                now, come = time.perf_counter() - begin, self._requests[len(self.tokens) :][:coming]
                prompts, counts = [[each.prompt] for each in come], [each.num_tokens for each in come]
                uids = self.generator.insert_segments(prompts, counts, **self._options)
                self._came.update(dict.fromkeys(uids, now))
                self.tokens.update((uid, []) for uid in uids)
            _, generated = self.generator.next()
            left -= self._take(generated, time.perf_counter() - begin)
            coming = len(self._requests) - len(self.tokens) if self.first else 0
        self.seconds = time.perf_counter() - begin

    def _take(self, generated: Sequence[Any], now: float) -> int:
        finished = 0
        for response in generated:
            uid = response.uid
            self.tokens[uid].append(response.token)
            if uid in self._last:
                self.gaps.append(now - self._last[uid])
            else:
                self.first.append(now - self._came[uid])
                self.last_first = now
            self._last[uid] = now
            finished += response.finish_reason is not None
        if generated:
            self.steps.append((now, len(generated)))
        if finished:
            self.first_finish = self.first_finish or now
        return finished

    def decode_rate(self) -> float | None:
        """Return the tokens per second of the steps in which every row decodes; None if there are too few."""
        end = self.first_finish or self.seconds
        # The call after the last first token may have computed a prompt, too.
        timed = [step for step in self.steps if self.last_first < step[0] <= end][1:]
        if len(timed) < 3:
            return None
        return sum(count for _, count in timed[1:]) / (timed[-1][0] - timed[0][0])


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 by nearest rank, in the samples' unit."""
    ranked = sorted(samples)
    return {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in PERCENTILES} if ranked else {}
