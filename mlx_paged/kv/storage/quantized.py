"""QuantizedStorage: one layer's K and V blocks as rows of codes, scales and biases in ordinary MLX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...kernels.quantized import rotate
from ..block_table import BlockTable
from ..step import Columns, Step
from .attention_params import QueryHeads
from .base import Geometry, Storage, StorageChoice
from .functional import FunctionalStorage, GatheredStorage


def functional_form(geometry: Geometry) -> Callable[[Geometry, int, int], Storage]:
    """Return the form that works everywhere."""
    return FunctionalStorage if geometry.format is None else QuantizedStorage


def functional_storage(geometry: Geometry, block_size: int, heads: QueryHeads | None) -> StorageChoice:
    """Return the choice that works everywhere."""
    return StorageChoice(functional_form(geometry), "the pool was made without kernels")


class QuantizedStorage(GatheredStorage):
    """:class:`FunctionalStorage` of rows (see :class:`QuantizedRows`): keys and values are quantised when they are
    written, and dequantised, one layer at a time, when they are read. If the format says so, the rows are those of
    rotated keys and values, which only code that moves rows sees."""

    def __init__(self, geometry: Geometry, block_size: int, num_blocks: int) -> None:
        forms = geometry.rows
        assert forms is not None and geometry.format is not None
        self.geometry = geometry
        self.num_quantized = 0
        self._k, self._v = forms
        self._rotates = geometry.format.rotate
        self._rows = FunctionalStorage(geometry.stored, block_size, num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._rows.num_blocks

    def write(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        self._rows.write(tables, step, *self._quantized(k, v))

    def write_stored(self, tables: Sequence[BlockTable], step: Step, k: mx.array, v: mx.array) -> None:
        self._rows.write(tables, step, k, v)

    def _quantized(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        self.num_quantized += k.shape[0] * k.shape[2]
        if self._rotates:
            k, v = rotate(k), rotate(v)
        return self._k.quantize(k), self._v.quantize(v)

    def read_visible(self, table: BlockTable, *, copy: bool = True) -> tuple[mx.array, mx.array]:
        return self._dequantized(*self._rows.read_visible(table, copy=copy))

    def read_rows(self, columns: Columns) -> tuple[mx.array, mx.array]:
        return self._dequantized(*self._rows.read_rows(columns))

    def read_stored(self, table: BlockTable) -> tuple[mx.array, mx.array]:
        return self._rows.read_stored(table)

    def _dequantized(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        k, v = self._k.dequantize(k), self._v.dequantize(v)
        return (rotate(k), rotate(v)) if self._rotates else (k, v)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._rows.copy_blocks(sources, targets)

    def resize(self, num_blocks: int) -> None:
        self._rows.resize(num_blocks)

    def after_writes(self, *arrays: mx.array) -> list[mx.array]:
        return self._rows.after_writes(*arrays)

    def fence(self) -> mx.array:
        return self._rows.fence()

    def latest(self) -> list[mx.array]:
        return self._rows.latest()

    def forget_failed_writes(self) -> None:
        self._rows.forget_failed_writes()

    def checkpoint(self) -> Any:
        return self._rows.checkpoint(), self.num_quantized

    def go_back(self, checkpoint: Any) -> None:
        rows, self.num_quantized = checkpoint
        self._rows.go_back(rows)
