"""PagedCacheStats: what a pool holds, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class PagedCacheStats:
    """A snapshot of one pool, summed over its groups. Counted, never estimated.

    Attributes:
        block_size: tokens per block.
        total_blocks: blocks that exist (null blocks not counted); ``live_blocks + free_blocks``.
        live_blocks: blocks with at least one reference.
        peak_live_blocks: the most there have been (summed over groups, each at its own peak).
        free_blocks: blocks without a reference.
        shared_blocks: blocks with more than one reference.
        bytes_reserved: bytes of the pool's tensors.
        bytes_in_use: bytes of the live blocks.
        budget_bytes: the most the tensors may take.
        cow_forks: blocks copied because a sequence wrote to a shared one.
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

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"blocks of {self.block_size} tokens: {self.live_blocks} live (peak {self.peak_live_blocks}, "
            f"{self.shared_blocks} shared), "
            f"{self.free_blocks} free; {self.bytes_in_use / 1e6:.1f} MB in use, "
            f"{self.bytes_reserved / 1e6:.1f} MB reserved of {self.budget_bytes / 1e6:.0f} MB; "
            f"{self.cow_forks} copy-on-write fork(s)"
        )
