"""RowByRowBatch: rows that share steps but not model calls, for models that compute one sequence at a time only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..cache.batch_tables import FailedRow
from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..errors import without_frames
from .decode_batch import DecodeBatch
from .request import Request


class RowByRowBatch(DecodeBatch):
    """A DecodeBatch whose rows keep their own caches, each of which sees a single sequence.

    Slower than one call for all rows, and right for every model: nothing is padded, and offsets are numbers.
    """

    kind = "one by one"

    def _merge(self, rows: Sequence[Request]) -> None:
        self._collect([*self.rows, *rows])

    def _collect(self, rows: Sequence[Request]) -> None:
        """What is to be computed with each step beside the logits, and counted: the caches without blocks."""
        self._caches = [c for row in rows for c in leaves(row.caches or []) if not isinstance(c, PagedKVCache)]

    def remove(self, rows: Sequence[Request], *, keep_caches: bool = True) -> None:
        leaving = self.members.intersection(rows)
        if not leaving:
            return
        keep = [index for index, row in enumerate(self.rows) if row not in leaving]
        if not keep:
            self._clear()
            return
        assert self._inputs is not None
        self._inputs = self._inputs[mx.array(keep)]
        self.choice.keep(keep)
        self.rows = [self.rows[index] for index in keep]
        self.members -= leaving
        self._collect(self.rows)

    def fork(self, row: Request) -> list[Any]:
        assert row.caches is not None
        memo: dict[int, Any] = {}
        return [copy.deepcopy(cache, memo) for cache in row.caches]

    def reserve(self) -> FailedRow | None:
        """A block position for every row's next token in every group; the layers find it when they are computed."""
        done = []
        for index, row in enumerate(self.rows):
            sequence = row.sequence
            if sequence is None:
                continue
            for group, table in enumerate(sequence.tables):
                try:
                    if table.length == max(
                        sequence.offsets[layer] for layer in sequence.pool.groups[group].spec.layers
                    ):
                        sequence.pool.append_tokens(table, 1)
                        done.append((sequence.pool, table))
                except Exception as error:
                    for pool, reserved in done:
                        pool.trim(reserved, 1)
                    return FailedRow(index, without_frames(error))
        return None

    def _forward(self) -> mx.array | None:
        assert self._inputs is not None
        found: list[mx.array] = []
        broken: list[tuple[Request, Exception]] = []
        for index, row in enumerate(self.rows):
            try:
                found.append(self.call(self._inputs[index : index + 1, None], cache=row.caches)[:, -1, :])
            except Exception as error:
                broken.append((row, error))
        self.failed += broken
        self.remove([row for row, _ in broken], keep_caches=False)
        return mx.concatenate(found) if found else None
