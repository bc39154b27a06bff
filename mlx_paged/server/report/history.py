"""History: what a server did in the last minutes, a few numbers for each short while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
        """For each while, oldest first and the present one left out: prompt and generated tokens a second; seconds to
        the first token and the share of prompt tokens that was cached, None where nobody came."""
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
