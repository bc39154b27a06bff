"""changed_preset(): shapes of random weights with other arguments, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.bench_common import PRESETS


@contextmanager
def changed_preset(preset: str, **args: Any) -> Iterator[None]:
    """While a preset's models have other arguments."""
    before = PRESETS[preset]
    PRESETS[preset] = before._replace(args={**before.args, **args})
    try:
        yield
    finally:
        PRESETS[preset] = before
