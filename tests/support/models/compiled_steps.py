"""Counts of compiled steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_paged.cache.batch import Batch
from mlx_paged.engine import compiled_step


class Taken(list[tuple[str, int]]):
    """The compiled steps taken: each one's kind ("alone", "rows" or "pack") and its number of rows."""

    def count_of(self, kind: str) -> int:
        return [own for own, _ in self].count(kind)


@contextmanager
def compiled_steps_taken(patience: int = 0) -> Iterator[Taken]:
    """Compile a step of a shape after ``patience`` others; with 0, every step but a pool's first."""
    taken, original = Taken(), compiled_step.CompiledStep._compiled

    def note(self: Any, rows: Any, *rest: Any) -> mx.array | None:
        logits = original(self, rows, *rest)
        if logits is not None:
            is_batch = isinstance(rows, Batch) and len(rows) > 1
            taken.append(("pack" if is_batch and rows.is_pack else "rows" if is_batch else "alone", logits.shape[0]))
        return logits

    with (
        mock.patch.object(compiled_step.CompiledStep, "_compiled", note),
        mock.patch.object(compiled_step, "PATIENCE", patience),
    ):
        yield taken
