"""StepRecord: what a rank has decided so far, as a number that ranks compare, and the last of it in words."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping

KEPT = 4  # entries that a report can show; others may have been a step ahead


class StepRecord:
    """A running checksum of integers.

    Attributes:
        count: entries so far.
        checksum: of all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.checksum = 0
        self._last: deque[tuple[int, str, dict[str, list[int]]]] = deque(maxlen=KEPT)

    def note(self, what: str, values: Mapping[str, Iterable[int]], remark: str = "") -> None:
        """Add an entry: ``what`` it is, integers by what they are, and a remark for reports, which is not compared."""
        listed = {name: list(each) for name, each in values.items()}
        self.count += 1
        flat = [each for name in listed for each in (len(listed[name]), *listed[name])]
        self.checksum = zlib.crc32(array("q", flat).tobytes(), zlib.crc32(what.encode(), self.checksum))
        self._last.append((self.count, f"{what}{remark and f' ({remark})'}", listed))

    def describe(self) -> str:
        """The last entries."""
        return " | ".join(
            f"{count}. {what}: " + ", ".join(f"{name} {_short(each)}" for name, each in listed.items())
            for count, what, listed in self._last
        )


def _short(values: list[int]) -> str:
    most = 24
    return str(values) if len(values) <= most else f"{values[:most]} and {len(values) - most} more"
