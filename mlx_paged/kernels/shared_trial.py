"""Measures on each machine whether Metal's kernel for common blocks is faster than reading each row by itself."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..device import confirm
from . import ops as kernels
from .quantized import new_blocks
from .shared_runs import Partitions, SharedCut, items_for, shared_rows
from .trial import LAUNCHES, seconds_of

ROWS = 8
OWN = 256  # tokens of each row that no other row has
MOST_SECONDS = 0.3  # after which no further chain is timed

_measured: dict[SharedCut, bool] = {}


def is_faster(cut: SharedCut) -> bool:
    """Return whether the kernel is faster for rows that save about ``cut.least_saved``. Timed once per process and cut;
    the kernel has passed its self-check."""
    if cut not in _measured:
        confirm()  # what fails from here on is the kernel's fault
        try:
            together, alone = _seconds(cut)
            _measured[cut] = together <= alone
        except (RuntimeError, ValueError):  # the kernel fails, or memory is short
            _measured[cut] = False
    return _measured[cut]


def _seconds(cut: SharedCut) -> tuple[float, float]:
    """Return the shortest seconds of a chain of launches that read blocks together, and of one that does not."""
    variant = cut.variant
    block, n_kv, n_q = variant.block_size, cut.num_kv_heads, cut.num_kv_heads * variant.gqa
    whole = cut.shape.partition * cut.shape.span  # tokens; a multiple of the partition, so all are read together
    saved = (ROWS - -(-ROWS // cut.shape.rows)) * n_kv * whole
    common = -(-cut.least_saved // saved) * whole
    tables = np.arange(ROWS * (common + OWN) // block, dtype=np.int32).reshape(ROWS, -1)
    tables[:, : common // block] = tables[0, : common // block]
    lengths = np.full(ROWS, common + OWN)
    rows = shared_rows(tables, [tables.shape[1]] * ROWS, block)
    items = None if rows is None else items_for(rows, Partitions.of(lengths, cut.shape), cut)
    assert items is not None
    dims = variant.head_dim, variant.value_dim
    pools = new_blocks(tables.size, n_kv, block, dims, variant.dtype, variant.pages)
    ends = mx.array(lengths[:, None].astype(np.int32))
    visible = mx.array(tables), ends, mx.zeros_like(ends)
    q = mx.zeros((ROWS, n_q, 1, variant.head_dim), variant.dtype)
    sinks = mx.zeros((n_q,)) if variant.sinks else None
    mx.eval(pools, visible, q)

    def seconds(given: mx.array | None) -> float:
        launch = kernels.prepare_decode(
            *pools, visible, n_q_heads=n_q, scale=1.0, softcap=1.0 if variant.softcap else None,
            sinks=variant.sinks, pages=variant.pages, items=given,
        )  # fmt: skip

        def chain() -> list[mx.array]:
            fence, outs = kernels.new_fence(), []
            for _ in range(LAUNCHES):
                out, fence = launch(q, *pools, fence, sinks)
                outs.append(out)
            return outs

        return seconds_of(chain, MOST_SECONDS)

    return seconds(mx.array(items)), seconds(None)
