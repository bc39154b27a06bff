"""Group: the layers that share geometry, window and block ids, with the blocks of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..errors import ConfigError, GeometryError
from ..warn import warn_once
from .allocator import NULL_BLOCK, BlockAllocator
from .block_table import BlockTable
from .blocks import (
    Blocks,
    BlocksChoice,
    ChooseBlocks,
    host_blocks,
    kernel_unsupported_reason,
    prefill_unsupported_reason,
)
from .device_blocks import DeviceBlocks
from .geometry import Geometry, PageFormat, QueryHeads, Window

MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 4, 128
# Doubling a large pool would reserve up to twice what is in use; see docs/adr/0099.
FIRST_BLOCKS = 8
DOUBLE_UP_TO_BYTES = 16 << 20
GROWTH_ABOVE = 1.125
# In-place tensors grow in larger steps: a GPU fills them faster, and each growth stops the pipeline and requires a new
# trace of a compiled step.
IN_PLACE_BUDGET_SHARE = 512
IN_PLACE_MOST_BYTES = 512 << 20
IN_PLACE_FIRST_BYTES = 64 << 20


class LayerGroup(NamedTuple):
    """The specification of a group: its model layers, and what their tokens see.

    Attributes:
        layers: indices of the model's layers, in order.
        window: most tokens that a query sees, itself included, or None.
        name: for messages and statistics.
        latent: some layer computes with what it wrote itself, as with MLA's latents, not by an attention function.
        stride: the first token that a query sees is at a multiple of it: 1 for a sliding window; the window's size if
            each token sees the chunk that contains it.
        split_keys: the layers keep one vector per token, such as an indexer's key: pages hold its first half as the key
            and its second half as the value.
    """

    layers: tuple[int, ...]
    window: int | None = None
    name: str = "global"
    latent: bool = False
    stride: int = 1
    split_keys: bool = False

    @property
    def sees(self) -> Window | None:
        """Window of a token, or None if it sees all tokens before it."""
        return None if self.window is None else Window(self.window, self.stride)

    @property
    def ring(self) -> int | None:
        """Slots of the rotating buffer that mlx-lm has for the window, or None if it has none."""
        return self.window if self.stride == 1 else None

    @property
    def always_dense_reason(self) -> str | None:
        """Reason why pages of the group are never quantised, or None."""
        return "the model computes with the cached latents directly" if self.latent else None

    def first_kept(self, length: int) -> int:
        """Return the first position that the next token of a sequence of ``length`` tokens sees."""
        return 0 if self.window is None else Window(self.window, self.stride).first_seen(length)

    def most_blocks(self, length: int, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most blocks that a sequence of ``length`` tokens holds while ``num_tokens`` are appended,
        ``chunk`` at a time."""
        end = -(-(length + num_tokens) // block_size)
        if self.window is None:
            return end
        # The window and a chunk are this many consecutive tokens, which may begin anywhere in a block.
        in_a_row = self.window - 1 + min(num_tokens, chunk)
        widest = min(end - self.first_kept(length) // block_size, (in_a_row + block_size - 2) // block_size + 1)
        return min(end, widest)


def check_layout(groups: Sequence[LayerGroup], block_size: int) -> None:
    """Raise ConfigError unless a pool can be made of these groups and blocks."""
    if not (MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE and block_size & (block_size - 1) == 0):
        raise ConfigError(
            f"block size must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, not {block_size}"
        )
    layers = [layer for group in groups for layer in group.layers]
    if len(set(layers)) != len(layers) or not all(group.layers for group in groups):
        raise ConfigError("each layer must belong to exactly one group, and each group must have a layer")
    for group in groups:
        if group.window is not None and group.window < 1:
            raise ConfigError(f"window must be at least 1, got {group.window}")
        if group.stride not in (1, group.window):
            raise ConfigError(f"stride must be 1 or equal to window ({group.window}), got {group.stride}")


class Group:
    """Allocator and each layer's blocks of one :class:`LayerGroup`; one block id stands for a block in every layer."""

    def __init__(
        self,
        index: int,
        spec: LayerGroup,
        block_size: int,
        choose_blocks: ChooseBlocks = host_blocks,
        page_format: PageFormat | None = None,
    ) -> None:
        self.index = index  # in the pool
        self.spec, self.sees = spec, spec.sees
        self.block_size = block_size
        self.allocator = BlockAllocator()
        self.geometry: Geometry | None = None
        self.heads: QueryHeads | None = None  # of the queries that the blocks were chosen for, with the geometry
        self.blocks: list[Blocks] = []  # of each layer; none before the geometry is known
        self.has_kernel = False  # whether kernels may attend over the blocks
        self.in_place = False  # whether kernels write and read the blocks, on a GPU
        self.blocks_reason = "nothing written yet"
        self.page_format = page_format  # the format asked for
        self.dense_reason: str | None = None  # why pages are not quantised although a format was asked for
        self.resize_failed = False  # if the latest did, some layers' tensors may have more blocks than there are ids
        # Why a kernel cannot serve queries with these heads, or None; by heads and whether it is the prefill kernel.
        self.unsupported: dict[tuple[QueryHeads, bool], str | None] = {}
        # Rises with each change of a table or of a reference count: what was derived from them is not used any more.
        self.epoch = 0
        self._choose_blocks = choose_blocks

    # Blocks of tables -----------------------------------------------------------------------------------------

    def tail_references(self, table: BlockTable) -> int:
        """Return the reference count of the block that the table's next token goes into, or 0 if there is none yet. A
        block with more than one reference is copied first."""
        tail, ids = table.length // self.block_size, table.block_ids[self.index]
        return self.allocator.refcount(ids[tail]) if tail < len(ids) else 0

    def slide(self, table: BlockTable) -> bool:
        """Release the blocks that the table's next token does not see. Returns whether it sees less than before."""
        start = 0 if self.sees is None else self.sees.first_seen(table.length)
        if start <= table.starts[self.index]:
            return False
        behind = table.behind(self.index, start)
        if behind.start < behind.stop:  # not in most decode steps
            ids = table.block_ids[self.index]
            gone = ids[behind]
            self.allocator.release(gone)
            ids[behind] = [NULL_BLOCK] * len(gone)
            table.forget_indices(self.index)
        table.starts[self.index] = start
        self.epoch += 1
        return True

    def drop_blocks(self, table: BlockTable, keep: int) -> None:
        """Release the table's blocks but the first ``keep``."""
        ids = table.block_ids[self.index]
        self.allocator.release(ids[keep:])
        del ids[keep:]
        table.forget_indices(self.index)
        self.epoch += 1

    def blocks_to_append(
        self, table: BlockTable | None, num_tokens: int, *, chunk: int | None = None, forked: bool = False
    ) -> int:
        """Return the most blocks that an append takes at any time, beyond those that the table holds after
        :meth:`slide`.

        Args:
            table: the table that the tokens are appended to; None: one that holds nothing yet.
            num_tokens: tokens to append.
            chunk: most tokens at a time; blocks behind a window are released in between. None: all at once.
            forked: the table stays as it is, and a fork of it takes the tokens.
        """
        chunk = num_tokens if chunk is None else chunk
        if table is None:
            return self.spec.most_blocks(0, num_tokens, chunk, self.block_size)
        missing = table.blocks_for(self.index, num_tokens)
        most = self.spec.most_blocks(table.length, num_tokens, chunk, self.block_size)
        if forked:
            return min(missing + bool(table.length % self.block_size), most)
        if self.spec.window is not None and num_tokens > chunk:
            behind = table.block_ids[self.index][table.behind(self.index, self.spec.first_kept(table.length))]
            held = table.num_blocks(self.index) - len(behind) + behind.count(NULL_BLOCK)
            missing = max(0, most - held, table.blocks_for(self.index, chunk))
        return missing + (self.tail_references(table) > 1)

    # Tensors --------------------------------------------------------------------------------------------------

    @property
    def is_quantized(self) -> bool:
        """Whether the pages hold quantised keys and values, so that reads differ from what was written."""
        return self.geometry is not None and self.geometry.format is not None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all layers of the group; 0 before the first write."""
        if self.geometry is None:
            return 0
        return self.block_size * self.geometry.bytes_per_token() * len(self.spec.layers)

    @property
    def has_tensors(self) -> bool:
        """Whether there are tensors: they are made when the first block is taken, and dropped with the last."""
        return any(blocks.num_blocks for blocks in self.blocks)

    @property
    def bytes_reserved(self) -> int:
        """Bytes of the group's tensors."""
        return self.bytes_per_block * self.allocator.num_blocks if self.has_tensors else 0

    def unsupported_reason(self, heads: QueryHeads, *, is_prefill: bool = False) -> str | None:
        """Return why the decode kernel, or the prefill kernel, cannot serve such queries over the blocks, or None. The
        first call self-checks it."""
        if not self.has_kernel:
            return self.blocks_reason
        key = heads, is_prefill
        if key not in self.unsupported:
            find = prefill_unsupported_reason if is_prefill else kernel_unsupported_reason
            assert self.geometry is not None
            self.unsupported[key] = find(self.geometry, self.block_size, heads)
        return self.unsupported[key]

    def validate(self, k: mx.array, v: mx.array, batch: int) -> Geometry:
        """Check k and v, and return their geometry.

        Args:
            k: keys ``[batch, n_kv_heads, n, k_head_dim]``.
            v: values ``[batch, n_kv_heads, n, v_head_dim]``.
            batch: number of sequences expected.

        Raises:
            GeometryError: says what differs. Nothing has been changed.
        """
        fixed = self.geometry
        if fixed is not None and k.ndim == 4:
            heads, k_dim, v_dim, dtype, _ = fixed
            shape = k.shape
            lead = (batch, heads, shape[2])
            if shape == (*lead, k_dim) and v.shape == (*lead, v_dim) and k.dtype == dtype and v.dtype == dtype:
                return fixed
        if k.ndim != 4 or v.ndim != 4:
            raise GeometryError(
                f"keys and values must be [batch, n_kv_heads, tokens, head_dim]; got shapes {k.shape} and {v.shape}"
            )
        if k.shape[:3] != v.shape[:3]:
            raise GeometryError(f"keys {k.shape} and values {v.shape} differ in batch, heads or tokens")
        if k.shape[0] != batch:
            raise GeometryError(f"keys must be of {batch} sequence(s), got {k.shape[0]}")
        if k.dtype != v.dtype:
            raise GeometryError(f"keys and values must have one dtype, got {k.dtype} and {v.dtype}")
        if not mx.issubdtype(k.dtype, mx.floating):
            raise GeometryError(f"keys must be floating point, not {k.dtype}")
        geometry = Geometry.of(k, v)
        if fixed is not None and geometry != fixed._replace(format=None):
            raise GeometryError(f"group '{self.spec.name}' holds {self.geometry}, got keys and values of {geometry}")
        return geometry

    def next_size(self, least: int, budget: int) -> int:
        """Return the number of blocks to grow to if ``least`` are needed; the budget may allow fewer. A GPU's sizes
        have three significant bits: sequences of about one length, one after the other, get the same one, for which
        steps are compiled already."""
        total = self.allocator.num_blocks
        if self.in_place:
            step = min(budget // IN_PLACE_BUDGET_SHARE, IN_PLACE_MOST_BYTES) // self.bytes_per_block
            first = IN_PLACE_FIRST_BYTES // self.bytes_per_block
            more = max(min(max(first, 3 * total), step), int(total * (GROWTH_ABOVE - 1)))
            size = max(FIRST_BLOCKS, least, total + more)
            grain = 1 << max(0, size.bit_length() - 3)
            return -(-size // grain) * grain
        if self.bytes_per_block * total < DOUBLE_UP_TO_BYTES:
            return max(2 * total, FIRST_BLOCKS)
        return int(total * GROWTH_ABOVE)

    def set_geometry(self, geometry: Geometry, heads: QueryHeads | None) -> None:
        """Fix the geometry, choose the kind of blocks and make the tensors for the blocks known so far.

        Raises:
            KernelUnavailableError: a kernel is demanded and there is none. Nothing has been changed, nor by an error of
                MLX, such as a lack of memory.
        """
        geometry, dense_reason = geometry.in_format(self.page_format, self.spec.always_dense_reason)
        choice = self._choose_blocks(geometry, self.block_size, heads)
        self.blocks = self._new_blocks(choice, geometry, self.allocator.num_blocks)
        self.geometry, self.has_kernel, self.in_place = geometry, choice.has_kernel, self.blocks[0].in_place
        self.dense_reason, self.blocks_reason = dense_reason, choice.reason
        self.heads = heads or QueryHeads(geometry.num_kv_heads)
        if self.dense_reason is not None:
            warn_once(
                f"keys and values of {len(self.spec.layers)} layer(s) (group '{self.spec.name}') are not quantised: "
                f"{self.dense_reason}"
            )

    def _new_blocks(self, choice: BlocksChoice, geometry: Geometry, num_blocks: int) -> list[Blocks]:
        return [choice.form(geometry, self.block_size, num_blocks) for _ in self.spec.layers]

    def drop(self) -> None:
        """Drop every layer's tensors and all ids; no block may be held. Any thread may call it: it computes nothing."""
        for blocks in self.blocks:
            blocks.drop()
        self.resize_failed = False
        self.allocator.clear()
        self.epoch += 1

    def grow(self, num_blocks: int) -> None:
        """Grow every layer's tensors, one layer after the other, then make the ids known. If it fails, some tensors are
        larger."""
        had_tensors = self.has_tensors
        try:
            mx.async_eval([blocks.resize(num_blocks) for blocks in self.blocks])
        except Exception:
            self.resize_failed = True
            raise
        self.resize_failed = False
        if had_tensors:
            mx.clear_cache()  # frees the old tensors
        self.allocator.grow(num_blocks)
        self.epoch += 1

    def device(self, position: int) -> DeviceBlocks:
        """Return a layer's blocks, which are a GPU's (:attr:`in_place`)."""
        blocks = self.blocks[position]
        assert isinstance(blocks, DeviceBlocks)
        return blocks

    @property
    def pending(self) -> list[mx.array]:
        """Small arrays that are ready when all writes so far are."""
        return [array for blocks in self.blocks for array in blocks.pending]
