"""server_report(): what ``/v1/cache/stats`` says of a running server."""

from __future__ import annotations

from typing import Any

from ..attention.dispatch import dispatch_counts
from ..serve.block_map import block_map
from .pools import known_pool
from .prefix_cache import PagedPromptCache


def server_report(generator: Any, *, with_blocks: bool = False) -> dict[str, Any]:
    """Figures of the server, its pool and its prefix cache. May be called by any thread.

    Args:
        generator: a PagedResponseGenerator.
        with_blocks: also the state of every block, and the sequences.
    """
    model = generator.model_provider.model
    pool = None if model is None else known_pool(model)
    batch = generator.batch
    sequences = [] if batch is None else batch.generator.progress()
    waiting = generator.num_waiting
    report: dict[str, Any] = {
        "server": generator.stats.as_dict(),
        "running": {"running": sum(not each["waiting"] for each in sequences), "waiting": waiting},
        "pool": None if pool is None else pool.stats().as_dict(),
        "prefix_cache": None,
        "dispatch": [
            {"path": choice.path, "reason": choice.reason, "count": count}
            for choice, count in dispatch_counts().items()
        ],
    }
    cache = getattr(generator, "prompt_cache", None)  # gone when the server shuts down
    if isinstance(cache, PagedPromptCache):
        report["prefix_cache"] = {
            "entries": len(cache),
            "bytes": cache.nbytes,
            "nodes": cache.num_nodes,
            "by_type": cache.stats_by_type(),
            "on_disk": None if cache.spill is None else {"blocks": len(cache.spill), "bytes": cache.spill.nbytes},
        }
    if with_blocks:
        report["sequences"] = sequences
        report["blocks"] = (
            []
            if pool is None
            else [
                {"group": group.spec.name, "runs": runs}
                for group, runs in zip(pool.groups, block_map(pool), strict=True)
            ]
        )
    return report
