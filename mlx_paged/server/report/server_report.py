"""server_report(): what ``/v1/cache/stats`` says of a running server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ...attention.dispatch import dispatch_counts
from ...kv.allocator import NULL_BLOCK
from ...kv.group import BlockGroup
from ...kv.pool import BlockPool
from .server_stats import ServerStats

# free; live: one sequence holds it; shared: several, or a sequence and a prefix cache; cached: a prefix cache alone.
STATES = {"f": "free", "l": "live", "s": "shared", "c": "cached"}


def block_map(pool: BlockPool) -> list[list[tuple[str, int]]]:
    """Return, per group, runs of blocks in the same state: ``[("l", 12), ("f", 3), ...]``, in order of their ids."""
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


def server_report(
    stats: ServerStats,
    pool: BlockPool | None,
    requests: Sequence[dict[str, Any]],
    num_waiting: int,
    prefix_cache: dict[str, Any] | None,
    *,
    model: str | None = None,
    health: dict[str, Any] | None = None,
    clients: Sequence[dict[str, Any]] = (),
    with_blocks: bool = False,
) -> dict[str, Any]:
    """Figures of the server, its pool and its prefix cache. May be called by any thread, and waits for none.

    Args:
        stats: of the server.
        pool: of the present model.
        requests: how far each is.
        num_waiting: requests that have not started.
        prefix_cache: figures of it.
        model: the present one's name.
        health: what ``/health`` says.
        clients: figures of each.
        with_blocks: also the state of every block, the requests, and the last minutes.
    """
    report: dict[str, Any] = {
        "model": model,
        "health": health,
        "server": stats.as_dict(),
        "clients": list(clients),
        "running": {"running": sum(not each["waiting"] for each in requests), "waiting": num_waiting},
        "pool": None if pool is None else pool.stats().as_dict(),
        "pages": [] if pool is None else [_pages_of(group) for group in pool.groups],
        "prefix_cache": prefix_cache,
        "dispatch": [
            {"path": choice.path, "reason": choice.reason, "count": count}
            for choice, count in dispatch_counts().items()
        ],
    }
    if with_blocks:
        runs = [] if pool is None else zip(pool.groups, block_map(pool), strict=True)
        report |= {"history": stats.history(), "sequences": requests}
        report["blocks"] = [
            {"group": group.spec.name, "bytes_per_block": group.bytes_per_block, "runs": of_group}
            for group, of_group in runs
        ]
    return report


def _pages_of(group: BlockGroup) -> dict[str, Any]:
    """Return how a group's pages hold keys and values; where that is not what was asked for, why."""
    geometry = group.geometry
    return {
        "group": group.spec.name,
        "layers": len(group.spec.layers),
        "format": None if geometry is None else str(geometry.format or geometry.dtype),
        "bytes_per_token": group.bytes_per_block // group.block_size,
        "reason": group.dense_reason,
    }
