"""ServerStats: what a server has done, counted by the threads that do it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SECONDS = 2  # of a while
WHILES = 90
FIGURES = ("prompt", "cached", "computed", "generated", "first_tokens", "first_token_seconds")


class History:
    """Sums of the last :data:`WHILES` whiles of :data:`SECONDS` each. To add is to look at a clock and add a number,
    whatever has been added before. Not locked.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._whiles: deque[tuple[int, dict[str, float]]] = deque(maxlen=WHILES)

    def add(self, **figures: float) -> None:
        """Count something now; names as in :data:`FIGURES`."""
        now = int(self._clock() // SECONDS)
        if not self._whiles or self._whiles[-1][0] != now:
            self._whiles.append((now, dict.fromkeys(FIGURES, 0.0)))
        sums = self._whiles[-1][1]
        for name, number in figures.items():
            sums[name] += number

    def as_dict(self) -> dict[str, Any]:
        """Return, per interval, oldest first, excluding the current one: prompt and generated tokens a second; seconds
        to the first token and the share of prompt tokens that was cached, None where nobody came."""
        last = int(self._clock() // SECONDS)
        known = dict(self._whiles)
        nothing = dict.fromkeys(FIGURES, 0.0)
        sums = [known.get(number, nothing) for number in range(last - WHILES + 1, last)]
        return {
            "seconds": SECONDS,
            "prompt_tokens_per_second": [round(each["computed"] / SECONDS, 1) for each in sums],
            "generated_tokens_per_second": [round(each["generated"] / SECONDS, 1) for each in sums],
            "first_token_seconds": [_ratio(each["first_token_seconds"], each["first_tokens"]) for each in sums],
            "hit_rate": [_ratio(each["cached"], each["prompt"]) for each in sums],
        }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


RATE_SECONDS = 10.0


@dataclass
class ServerStats:
    """Counts since the start. Every method may be called by any thread.

    Attributes:
        started: time of the start, in seconds of the epoch.
        requests: by outcome: ``ok``, ``refused`` (4xx), ``failed`` (5xx), ``cancelled``.
        prompt_tokens: of requests whose prompt is done.
        cached_tokens: of these, found in the prefix cache.
        computed_prompt_tokens: prompt tokens computed, again after a preemption included.
        generated_tokens: delivered.
        first_tokens: requests whose first token has come.
        first_token_seconds: that they have waited for it, in all.
        history: of the last minutes.
        observe: told the name and the value of each figure that has a distribution: ``first_token_seconds``,
            ``between_tokens_seconds``, ``queue_seconds``, ``request_prompt_tokens``, ``request_generated_tokens``.
    """

    clock: Callable[[], float] = time.monotonic
    started: float = field(default_factory=time.time)
    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    observe: Callable[[str, float], None] = lambda name, value: None  # for distributions

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.history = History(self.clock)
        self._recent: deque[tuple[float, int]] = deque()  # seconds, tokens generated in them

    def count_request(self, outcome: str) -> None:
        with self._lock:
            self.requests[outcome] += 1

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        with self._lock:
            self.prompt_tokens += num_tokens
            self.cached_tokens += num_cached
            self.history.add(prompt=num_tokens, cached=num_cached)
        self.observe("request_prompt_tokens", num_tokens)

    def count_start(self, seconds: float) -> None:
        """The first part of a request has been computed, so long after the request."""
        self.observe("queue_seconds", seconds)

    def count_answer(self, num_tokens: int) -> None:
        """An answer is at its end."""
        self.observe("request_generated_tokens", num_tokens)

    def count_computed(self, num_tokens: int) -> None:
        with self._lock:
            self.computed_prompt_tokens += num_tokens
            self.history.add(computed=num_tokens)

    def count_first_token(self, seconds: float) -> None:
        """A request's first token has come, so long after the request."""
        with self._lock:
            self.first_tokens += 1
            self.first_token_seconds += seconds
            self.history.add(first_tokens=1, first_token_seconds=seconds)
        self.observe("first_token_seconds", seconds)

    def count_generated(self, num_tokens: int, seconds: float | None = None) -> None:
        """Tokens have been generated, so long after the answer's last one."""
        now = self.clock()
        if seconds is not None:
            self.observe("between_tokens_seconds", seconds)
        with self._lock:
            self.generated_tokens += num_tokens
            self.history.add(generated=num_tokens)
            if self._recent and now - self._recent[-1][0] < 0.1:
                self._recent[-1] = (self._recent[-1][0], self._recent[-1][1] + num_tokens)
            else:
                self._recent.append((now, num_tokens))
            self._forget(now)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated, over the last ten seconds."""
        now = self.clock()
        with self._lock:
            self._forget(now)
            if not self._recent:
                return 0.0
            span = max(1.0, now - self._recent[0][0])
            return sum(num_tokens for _, num_tokens in self._recent) / span

    def history_dict(self) -> dict[str, Any]:
        """See :meth:`History.as_dict`."""
        with self._lock:
            return self.history.as_dict()

    def as_dict(self) -> dict[str, Any]:
        return {
            "uptime_seconds": round(time.time() - self.started, 1),
            "requests": {name: self.requests[name] for name in ("ok", "refused", "failed", "cancelled")},
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_prompt_tokens": self.computed_prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "first_tokens": self.first_tokens,
            "first_token_seconds": round(self.first_token_seconds, 3),
            "hit_rate": round(self.hit_rate, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
