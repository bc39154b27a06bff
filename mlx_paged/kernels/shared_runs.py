"""Items of the kernels for common blocks: which rows of a decode step read which partitions together.

Only what a row sees decides its partitions (launch_shape.py). Rows with the same leading blocks and equally long
partitions have whole partitions in common, and a thread group reads such a partition once for several rows. A row's
result has the same bits as without sharing, whichever rows share its blocks (docs/adr/0075).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .availability import cuda_limits
from .launch_shape import LaunchShape, Variant, shape_for

HEADER = 2  # integers at the start of an item: partition, number of rows; the rows' places in the batch follow

# Rows are read together if they save at least LEAST_SAVED tokens in a step; only rows that share at least LEAST_COMMON
# count. Near this border the gains on an NVIDIA H100 are 1.0 to 1.2 (docs/adr/0075). Thread groups take at least
# FEWEST_ROWS rows.
LEAST_COMMON, LEAST_SAVED, FEWEST_ROWS = 2048, 3 << 13, 4


class SharedCut(NamedTuple):
    """Launch shape of the kernel for common blocks, for some layers, and when it is used.

    Attributes:
        variant, shape: of the kernel.
        at_once: items with enough thread groups, one per KV head, to give every multiprocessor one.
    """

    variant: Variant
    shape: LaunchShape
    at_once: int


class SharedRows(NamedTuple):
    """Rows in an order in which rows with common blocks are neighbours.

    Attributes:
        order: the rows' places in the batch.
        common: leading tokens, in whole blocks, that each row has in common with the row before it.
    """

    order: np.ndarray
    common: np.ndarray

    @property
    def common_by_row(self) -> np.ndarray:
        """Leading tokens, in whole blocks, that each row has in common with any other, by place in the batch."""
        found = np.zeros_like(self.common)
        found[self.order] = np.maximum(self.common, np.append(self.common[1:], 0))
        return found


class Partitions(NamedTuple):
    """Partitions of the tokens that rows see.

    Attributes:
        begins, ends: the first token that each row sees, and the one after the last.
        sizes: tokens of each of a row's partitions.
        origins: where the first partition begins; a window may begin inside it.
        counts: partitions of each row, at least one, which writes the zeros of a row that sees nothing.
    """

    begins: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray
    origins: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, ends: np.ndarray, shape: LaunchShape, begins: np.ndarray | None = None) -> Partitions:
        """Return the partitions of a kernel of this shape; without ``begins``, from the first token on."""
        begins = np.zeros_like(ends) if begins is None else begins
        origins = begins // shape.alignment * shape.alignment
        doublings, most = np.zeros_like(ends), shape.span * shape.partition
        while (longer := ends - begins > most << 2 * doublings).any():
            doublings += longer
        sizes = shape.partition << doublings
        return cls(begins, ends, sizes, origins, np.maximum(-(-(ends - origins) // sizes), 1))

    @property
    def key(self) -> tuple[bytes, ...]:
        """Key that changes when a row's partitions change, or a row no longer sees from its first token on."""
        return tuple(x.tobytes() for x in (self.sizes, self.origins, self.counts, self.begins > 0))


def shared_rows(tables: np.ndarray, counts: Sequence[int], block_size: int) -> SharedRows | None:
    """Return the rows of block tables ``[B, max_blocks]`` with their common blocks; None if there are none.

    Args:
        tables: block ids by absolute position.
        counts: blocks of each row.
        block_size: tokens of a block.
    """
    if len(counts) < 2 or len(np.unique(tables[: len(counts), 0])) == len(counts):
        return None
    rows = [row.tobytes() for row in np.ascontiguousarray(tables[: len(counts)])]
    order = np.array(sorted(range(len(counts)), key=rows.__getitem__))
    inside = np.array(counts)[order]
    differs = tables[order[1:]] != tables[order[:-1]]
    equal = np.where(differs.any(1), differs.argmax(1), tables.shape[1])
    # Block 0 stands where a window has left blocks behind; rows that share only block 0 have nothing in common.
    equal[tables[order[1:], np.maximum(equal - 1, 0)] == 0] = 0
    common = np.minimum(equal, np.minimum(inside[1:], inside[:-1])) * block_size
    return SharedRows(order, np.append(0, common)) if common.any() else None


def items_for(rows: SharedRows, seen: Partitions, cut: SharedCut) -> np.ndarray | None:
    """Return :func:`shared_items` in launch order; None if the rows do not share enough."""
    common = np.maximum(rows.common - seen.begins[rows.order], 0)
    if common[common >= LEAST_COMMON].sum() < LEAST_SAVED:
        return None
    items = shared_items(rows, seen, cut.shape)
    return interleaved(items, cut.at_once) if (items[:, 1] > 1).any() else None


def interleaved(items: np.ndarray, at_once: int) -> np.ndarray:
    """Return items in the order in which thread groups take them. If there are at least as many items of single rows as
    of several, half of them move forward to run beside those: they wait for memory, the others for tensor cores."""
    common = items[:, 1] > 1
    together, own = items[common], items[~common]
    if len(own) < len(together):
        return items
    half = len(own) // 2
    return np.concatenate([together[:at_once], own[:half], together[at_once:], own[half:]])


def cut_of(variant: Variant, num_kv_heads: int) -> SharedCut:
    """Return the cut for layers with ``num_kv_heads``."""
    return SharedCut(variant, shape_for(variant), -(-cuda_limits().multiprocessors // num_kv_heads))


def shared_items(rows: SharedRows, seen: Partitions, shape: LaunchShape) -> np.ndarray:
    """Return the items that thread groups take, int32 ``[n, HEADER + shape.rows]``: each partition of each row once,
    common partitions for several rows together.

    Args:
        rows: rows of the batch.
        seen: partitions of each row; rows beyond those of ``rows`` see nothing.
        shape: launch shape of the kernel.
    """
    num_rows, rest = len(rows.order), len(seen.ends) - len(rows.order)
    begins, ends, sizes, origins, lengths = (x[rows.order] for x in seen)
    # Only whole partitions before the newest token are common, as each row stores that token itself.
    common = np.minimum(rows.common, np.minimum(ends, np.roll(ends, 1)) - 1) - origins
    is_alike = (sizes == np.roll(sizes, 1)) & (origins == np.roll(origins, 1))
    together = np.where(is_alike, common // sizes, 0)
    together[0] = 0
    partitions = np.arange(lengths.max())[:, None]
    live = lengths > partitions
    # A window may begin inside a row's first partition, which is then read for this row alone.
    joins = (together > partitions) & (partitions >= ((begins > 0) | (np.roll(begins, 1) > 0)))
    place = np.arange(num_rows)
    # Position of a row among those that it reads a partition with; a thread group takes `shape.rows` of them.
    before = place - np.maximum.accumulate(np.where(joins, 0, place), axis=1)
    leads = live & (before % shape.rows == 0)
    number = np.cumsum(leads).reshape(leads.shape) - 1
    items = np.zeros((number[-1, -1] + 1 + rest, HEADER + shape.rows), np.int32)
    at, slot = number[live], (before % shape.rows)[live]
    items[at, 0] = np.broadcast_to(partitions, live.shape)[live]
    items[: number[-1, -1] + 1, 1] = np.bincount(at)
    items[at, HEADER + slot] = np.broadcast_to(rows.order, live.shape)[live]
    if rest:  # padding
        items[number[-1, -1] + 1 :, 1] = 1
        items[number[-1, -1] + 1 :, HEADER] = np.arange(num_rows, num_rows + rest)
    return items
