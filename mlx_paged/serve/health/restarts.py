"""Restarts: how often what computes had to be made anew, and whether once more is worth trying."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

MOST, WITHIN_SECONDS = 5, 600.0
FRESH_SECONDS = 60.0


class Restarts:
    """A cause that comes back at once is not mended by another restart: past :data:`MOST` of them within
    :data:`WITHIN_SECONDS` the process is better replaced.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        self.reason = ""
        self._clock = clock
        self._times: deque[float] = deque(maxlen=MOST)

    def note(self, reason: str) -> bool:
        """Something has to be made anew. Returns whether it is worth it."""
        now = self._clock()
        is_hopeless = len(self._times) == MOST and now - self._times[0] < WITHIN_SECONDS
        self.number += 1
        self.reason = reason
        self._times.append(now)
        return not is_hopeless

    @property
    def is_recent(self) -> bool:
        return bool(self._times) and self._clock() - self._times[-1] < FRESH_SECONDS

    def as_dict(self) -> dict[str, Any]:
        """For ``/health``."""
        seconds = round(self._clock() - self._times[-1], 1) if self._times else None
        return {"restarts": self.number, "last_restart": self.reason or None, "seconds_since_restart": seconds}
