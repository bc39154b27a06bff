"""PagedCacheStats: counts of what a pool holds; and a check that its accounts agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..errors import BlockStateError
from .allocator import NULL_BLOCK
from .block_table import BlockTable
from .group import Group

if TYPE_CHECKING:
    from .pool import BlockPool


@dataclass(frozen=True)
class PagedCacheStats:
    """A snapshot of one pool, summed over its groups. Counted, never estimated.

    Attributes:
        block_size: tokens per block.
        total_blocks: blocks that exist (null blocks not counted); ``live_blocks + free_blocks``.
        live_blocks: blocks with at least one reference.
        peak_live_blocks: most live blocks so far (summed over groups, each at its own peak).
        free_blocks: blocks without a reference.
        shared_blocks: blocks with more than one reference.
        bytes_reserved: bytes of the pool's tensors.
        bytes_in_use: bytes of the live blocks.
        budget_bytes: the most that tensors and states may take.
        cow_forks: blocks copied because a sequence wrote to a shared one.
        cached_blocks: live blocks that only a prefix cache holds.
        evictions: blocks that prefix caches have freed, to make room, by age or by a limit.
        prefix_hit_tokens: tokens that sequences took from a prefix cache instead of computing them.
        preemptions: sequences that gave their blocks back to make room, to be computed again later.
        peak_bytes_in_use: bytes of the peak live blocks.
        quantized_tokens: tokens appended whose keys and values were quantised when they were written. Tokens that came
            with a prefix or from a file are not counted.
        quantized_layers: layers whose pages hold quantised keys and values.
        dense_layers: layers whose pages hold unquantised keys and values.
        bytes_per_token: bytes of K and V of one token in all layers; 0 before the first write.
        drafted_tokens: drafts that were verified: tokens proposed by a draft model, by the model's prediction head, or
            because a prompt or an answer had them before.
        accepted_tokens: drafts that the model would have chosen.
        draft_steps: steps in which drafts were verified.
        draft_depth: most drafts of a request in the latest step; 0 if it had none.
        draft_ms_saved: milliseconds that drafts have saved, as measured; negative if they have cost time.
        checkpoint_bytes: bytes of states beside keys and values that prefix caches hold; they count in the budget.
    """

    block_size: int
    total_blocks: int
    live_blocks: int
    peak_live_blocks: int
    free_blocks: int
    shared_blocks: int
    bytes_reserved: int
    bytes_in_use: int
    budget_bytes: int
    cow_forks: int
    cached_blocks: int = 0
    evictions: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    peak_bytes_in_use: int = 0
    quantized_tokens: int = 0
    quantized_layers: int = 0
    dense_layers: int = 0
    bytes_per_token: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_steps: int = 0
    draft_depth: int = 0
    draft_ms_saved: int = 0
    checkpoint_bytes: int = 0

    @classmethod
    def of(cls, pool: BlockPool) -> PagedCacheStats:
        """Count what a pool holds."""
        groups, holders = pool.groups, pool.memory.holders()
        allocators = [group.allocator for group in groups]
        return cls(
            block_size=pool.block_size,
            total_blocks=sum(a.num_blocks - 1 for a in allocators),
            live_blocks=sum(a.num_live for a in allocators),
            peak_live_blocks=sum(a.peak_live for a in allocators),
            free_blocks=sum(a.num_free for a in allocators),
            shared_blocks=sum(a.num_shared for a in allocators),
            bytes_reserved=sum(g.bytes_reserved for g in groups),
            bytes_in_use=sum(g.bytes_per_block * g.allocator.num_live for g in groups),
            budget_bytes=pool.memory_budget,
            cow_forks=pool.cow_forks,
            cached_blocks=sum(_num_cached(pool, group) for group in groups),
            evictions=sum(holder.evictions for holder in holders),
            prefix_hit_tokens=sum(holder.hit_tokens for holder in holders),
            preemptions=pool.preemptions,
            peak_bytes_in_use=sum(g.bytes_per_block * g.allocator.peak_live for g in groups),
            quantized_tokens=pool.appended_tokens if any(g.is_quantized for g in groups) else 0,
            quantized_layers=sum(len(g.spec.layers) for g in groups if g.is_quantized),
            dense_layers=sum(len(g.spec.layers) for g in groups if g.geometry is not None and not g.is_quantized),
            bytes_per_token=sum(g.bytes_per_block for g in groups) // pool.block_size,
            drafted_tokens=pool.drafted,
            accepted_tokens=pool.accepted,
            draft_steps=pool.draft_steps,
            draft_depth=pool.draft_depth,
            draft_ms_saved=pool.draft_ms_saved,
            checkpoint_bytes=sum(holder.state_nbytes for holder in holders),
        )

    def as_dict(self) -> dict[str, int]:
        """Return the figures by name."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"blocks of {self.block_size} tokens: {self.live_blocks} live (peak {self.peak_live_blocks}, "
            f"{self.shared_blocks} shared), "
            f"{self.free_blocks} free; {self.bytes_in_use / 1e6:.1f} MB in use "
            f"(peak {self.peak_bytes_in_use / 1e6:.1f} MB), "
            f"{self.bytes_reserved / 1e6:.1f} MB reserved of {self.budget_bytes / 1e6:.0f} MB; "
            f"{self.cow_forks} copy-on-write fork(s); {self.bytes_per_token:,} bytes a token"
            + (f", quantised in {self.quantized_layers} layer(s)" if self.quantized_layers else "")
            + (f", not in {self.dense_layers}" if self.quantized_layers and self.dense_layers else "")
            + (f"; {self.accepted_tokens} of {self.drafted_tokens} draft(s) accepted" if self.drafted_tokens else "")
        )


def _num_cached(pool: BlockPool, group: Group) -> int:
    held, refcount = pool.memory.cached_references(group.index), group.allocator.refcount
    return sum(block_id != NULL_BLOCK and refcount(block_id) == n for block_id, n in held.items())


def check_group(group: Group, tables: Sequence[BlockTable], held: Sequence[Sequence[int]]) -> None:
    """Raise BlockStateError unless a group's reference counts, free list, tables and tensors agree.

    ``held``: block ids held by tables and prefix caches, one entry per reference.
    """
    group.allocator.check_integrity(held)
    for table in tables:
        ids, start = table.block_ids[group.index], table.starts[group.index]
        entries = -(-table.length // group.block_size)
        # A table that starts inside a block has no entry for that block until tokens are appended.
        fewest = table.length // group.block_size if table.length == start else entries
        if len(ids) not in (fewest, entries):
            raise BlockStateError(f"{table} must have {entries} block ids, got {len(ids)}")
        if NULL_BLOCK in ids[start // group.block_size :]:
            raise BlockStateError(f"{table} has released a block that is still visible")
    if not group.has_tensors and group.allocator.num_blocks == 1:
        return
    for blocks in group.blocks:
        excess = blocks.num_blocks - group.allocator.num_blocks
        if excess < 0 or (excess and not group.resize_failed):
            raise BlockStateError(
                f"a layer's tensors have {blocks.num_blocks} blocks, the allocator {group.allocator.num_blocks}"
            )
