"""request_progress(): how far a request of a batch is, for people to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...engine.request import Request
from ...kv.allocator import NULL_BLOCK


def request_progress(request: Request) -> dict[str, Any]:
    """May be called by any thread, and is only about right then.

    ``tokens`` are in its cache, ``cached_tokens`` of them were found there, ``computing_tokens`` are being computed
    behind them; ``blocks`` are, for each group, runs of the blocks that it holds: ``[first, number]``.
    """
    tables = request.tables if request.caches is not None else None
    is_prefilled = request.is_prefilled
    computing = 0 if not tables or is_prefilled else max(0, tables[0].length - request.length)
    has_begun = request.num_reported > 0 or request.num_generated > 0
    if tables is None and request.caches is None:
        state = "preempted" if has_begun else "waiting"
    else:
        state = "decode" if is_prefilled else "prefill"
    return {
        "uid": request.uid,
        "state": state,
        "waiting": request.caches is None,
        "prompt_tokens": request.kept + request.prompt_length,
        "cached_tokens": request.num_cached or 0,
        "tokens": request.length,
        "computing_tokens": computing,
        "generated_tokens": request.num_generated,
        "blocks": [runs(list(table.block_ids)) for table in tables or ()],
    }


def runs(block_ids: Iterable[int]) -> list[list[int]]:
    """Consecutive ids as ``[first, number]``, without null blocks."""
    found: list[list[int]] = []
    for block_id in sorted({block_id for block_id in block_ids if block_id != NULL_BLOCK}):
        if found and block_id == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([block_id, 1])
    return found
