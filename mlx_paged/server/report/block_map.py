"""block_map(): the state of every block of a pool, for people to look at."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from ...kv.allocator import NULL_BLOCK
from ...kv.pool import BlockPool

# free; live: one sequence holds it; shared: several, or a sequence and a prefix cache; cached: a prefix cache alone.
STATES = {"f": "free", "l": "live", "s": "shared", "c": "cached"}


def block_map(pool: BlockPool) -> list[list[tuple[str, int]]]:
    """For each group, runs of blocks in the same state: ``[("l", 12), ("f", 3), ...]``, in order of their ids."""
    return pool.turn.glance(lambda _: [_runs(pool, index) for index in range(len(pool.groups))])


def _runs(pool: BlockPool, index: int) -> list[tuple[str, int]]:
    allocator = pool.groups[index].allocator
    held: Counter[int] = Counter()
    for holder in pool.holders():
        for block_ids in holder.held(index):
            held.update(block_ids)

    def state(block_id: int) -> str:
        references = allocator.refcount(block_id)
        if not references:
            return "f"
        if held[block_id] == references:
            return "c"
        return "s" if references > 1 else "l"

    states = (state(block_id) for block_id in range(NULL_BLOCK + 1, allocator.num_blocks))
    return [(name, sum(1 for _ in run)) for name, run in groupby(states)]
