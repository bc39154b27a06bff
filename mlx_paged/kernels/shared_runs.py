"""Which rows of a decode step read blocks together: what the thread groups of shared_decode_tensor take.

A row's tokens are cut into partitions by what it sees alone (launch_shape.py). Rows with the same leading blocks and
equally long partitions have whole ones in common. A thread group then reads such a partition once for several rows.
A row's result has the same bits as by itself, whoever shares its blocks (docs/adr/0075).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .build import gpu_cores
from .cuda.device import cuda_limits
from .launch_shape import LaunchShape, Variant, shape_for

HEADER = 2  # of an item: partition, number of rows; their places in the batch follow

# What must not be read again, in tokens times KV heads, of heads up to 128 and wider; and of pages as they are and of
# quantised ones, where what several rows read soon after another costs less, that in tokens a row, and what part of all
# must be read together. From there on the kernel for common blocks is faster in all cases that were measured
# (docs/adr/0075). A thread group that takes fewer rows gains less.
LEAST_SAVED, LEAST_OF_A_ROW, LEAST_PART = (3 << 16, 15 << 13), (0, 1024), (0.5, 0.7)
ROWS_OF_LEAST, FEWEST_ROWS = 8, 4
# On Metal, where each machine measures whether that is faster (shared_trial.py).
LEAST_SAVED_ON_METAL = 1 << 16


class SharedCut(NamedTuple):
    """How the kernel for common blocks is cut for some layers.

    Attributes:
        variant, shape: of the kernel.
        num_kv_heads: of the layers; each item is a thread group for each of them.
        least_saved: tokens times KV heads of a step that must not be read again for the kernel to be faster.
        at_once: items for which a thread group of each KV head is on a multiprocessor of its own.
        least_of_a_row: tokens that must not be read again, on average of all rows.
        least_part: of all that rows see, that must be read together.
    """

    variant: Variant
    shape: LaunchShape
    num_kv_heads: int
    least_saved: int
    at_once: int = 1
    least_of_a_row: int = LEAST_OF_A_ROW[False]
    least_part: float = LEAST_PART[False]


class SharedRows(NamedTuple):
    """Rows in an order in which those with common blocks are neighbours.

    Attributes:
        order: places in the batch.
        common: leading tokens in blocks that each has in common with the one before it.
    """

    order: np.ndarray
    common: np.ndarray

    @property
    def of_rows(self) -> np.ndarray:
        """Leading tokens in blocks that each row, by its place in the batch, has in common with any other."""
        found = np.zeros_like(self.common)
        found[self.order] = np.maximum(self.common, np.append(self.common[1:], 0))
        return found


class Partitions(NamedTuple):
    """How what rows see is cut.

    Attributes:
        begins, ends: the first token that each row sees, and the one after the last.
        sizes: tokens of a row's partitions.
        origins: where the first one begins, before a window that begins inside it.
        counts: partitions, one at least: a row that sees nothing has its zeros to be written.
    """

    begins: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray
    origins: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, ends: np.ndarray, shape: LaunchShape, begins: np.ndarray | None = None) -> Partitions:
        """Return how a kernel of this shape cuts them; without ``begins``, from the first token on."""
        begins = np.zeros_like(ends) if begins is None else begins
        origins = begins // shape.alignment * shape.alignment
        doublings, most = np.zeros_like(ends), shape.span * shape.partition
        while (longer := ends - begins > most << 2 * doublings).any():
            doublings += longer
        first = max(shape.first, shape.partition)
        sizes = np.where(ends - origins <= shape.first, first, shape.partition << doublings)
        return cls(begins, ends, sizes, origins, np.maximum(-(-(ends - origins) // sizes), 1))

    @property
    def key(self) -> tuple[bytes, ...]:
        """What changes when rows have other partitions, or whole ones in other places."""
        return tuple(x.tobytes() for x in (self.sizes, self.origins, self.counts, self.begins > 0))


def shared_rows(tables: np.ndarray, counts: Sequence[int], block_size: int) -> SharedRows | None:
    """Return the rows of block tables ``[B, max_blocks]`` by what they have in common, None if that is nothing.

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
    # Block 0 stands where a window has left blocks behind: rows have nothing in common that only have that.
    equal[tables[order[1:], np.maximum(equal - 1, 0)] == 0] = 0
    common = np.minimum(equal, np.minimum(inside[1:], inside[:-1])) * block_size
    return SharedRows(order, np.append(0, common)) if common.any() else None


def items_for(rows: SharedRows, seen: Partitions, cut: SharedCut) -> np.ndarray | None:
    """Return :func:`shared_items`; None where each row by itself is as fast."""
    known = len(rows.order)
    if int(np.maximum(rows.common - seen.begins[rows.order], 0).sum()) * cut.num_kv_heads < cut.least_saved:
        return None  # not even if all of it could be read together
    items = shared_items(rows, seen, cut.shape)
    common = items[items[:, 1] > 1]
    sizes, read = seen.sizes[common[:, HEADER]], int((seen.ends - seen.begins)[:known].sum())
    together = int((sizes * common[:, 1]).sum())
    least = max(cut.least_saved / cut.num_kv_heads, cut.least_of_a_row * known)
    if together < cut.least_part * read or together - int(sizes.sum()) < least:
        return None
    return in_turns(items, cut.at_once)


def in_turns(items: np.ndarray, at_once: int) -> np.ndarray:
    """Return items in the order in which thread groups take them. Where single rows read as many partitions as rows
    together, half of these come earlier, and both run at the same time: one waits for memory, one for tensor cores."""
    common = items[:, 1] > 1
    together, own = items[common], items[~common]
    if len(own) < len(together):
        return items
    half = len(own) // 2
    return np.concatenate([together[:at_once], own[:half], together[at_once:], own[half:]])


def cut_of(variant: Variant, num_kv_heads: int, shape: LaunchShape | None = None) -> SharedCut:
    """Return the cut of layers with so many KV heads.

    Args:
        variant: of the kernel.
        shape: of the kernel, as it is chosen by default.
    """
    shape = shape or shape_for(variant, gpu_cores())
    if variant.backend == "metal":
        return SharedCut(variant, shape, num_kv_heads, LEAST_SAVED_ON_METAL)
    least, is_quantised = LEAST_SAVED[max(variant.head_dim, variant.value_dim) > 128], variant.pages is not None
    if not is_quantised:
        least = max(least, least * ROWS_OF_LEAST // shape.rows)
    at_once = -(-cuda_limits().multiprocessors // num_kv_heads)
    limits = LEAST_OF_A_ROW[is_quantised], LEAST_PART[is_quantised]
    return SharedCut(variant, shape, num_kv_heads, least, at_once, *limits)


def shared_items(rows: SharedRows, seen: Partitions, shape: LaunchShape) -> np.ndarray:
    """Return what thread groups take, int32 ``[n, HEADER + shape.rows]``: each partition of each row once, common
    partitions of several rows together.

    Args:
        rows: the batch's.
        seen: by each row; rows beyond those of ``rows`` see nothing.
        shape: of the kernel.
    """
    known, rest = len(rows.order), len(seen.ends) - len(rows.order)
    begins, ends, sizes, origins, lengths = (x[rows.order] for x in seen)
    # Whole partitions before the newest token, which the row itself stores.
    common = np.minimum(rows.common, np.minimum(ends, np.roll(ends, 1)) - 1) - origins
    is_alike = (sizes == np.roll(sizes, 1)) & (origins == np.roll(origins, 1))
    together = np.where(is_alike, common // sizes, 0)
    together[0] = 0
    partitions = np.arange(lengths.max())[:, None]
    live = lengths > partitions
    # A window may begin inside a row's first partition: that is the row's alone.
    joins = (together > partitions) & (partitions >= ((begins > 0) | (np.roll(begins, 1) > 0)))
    place = np.arange(known)
    # Rows before this one, of those that it reads a partition with: in groups of as many as a thread group takes.
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
        items[number[-1, -1] + 1 :, HEADER] = np.arange(known, known + rest)
    return items
