"""The server's figures, its metrics, what ``/v1/cache/stats`` says, and the page ``/cache``."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from importlib import resources
from itertools import chain, groupby
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..attention.dispatch import dispatch_counts
from ..kv.allocator import NULL_BLOCK
from ..kv.group import Group
from ..kv.pool import BlockPool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RATE_SECONDS = 10  # over which tokens per second are averaged
OUTCOMES = ("ok", "refused", "failed", "cancelled")

_GAUGES = {
    "total_blocks": "Blocks in the pool",
    "live_blocks": "Blocks with at least one reference",
    "free_blocks": "Blocks without a reference",
    "shared_blocks": "Blocks with more than one reference",
    "cached_blocks": "Blocks that only the prefix cache holds",
    "bytes_reserved": "Bytes of the pool's tensors",
    "bytes_in_use": "Bytes of the live blocks",
    "budget_bytes": "Limit on the bytes of tensors and states",
    "checkpoint_bytes": "Bytes of states other than keys and values that the prefix cache holds",
    "bytes_per_token": "Bytes of the keys and values of one token in all layers",
    "quantized_layers": "Layers whose pages hold quantised keys and values",
    "dense_layers": "Layers whose pages hold unquantised keys and values",
    "draft_depth": "Largest number of draft tokens of a request in the latest step",
    "draft_ms_saved": "Milliseconds saved by drafts; negative if they cost time",
}
_COUNTERS = {
    "cow_forks": "Blocks copied because a sequence wrote to a shared one",
    "evictions": "Blocks evicted from the prefix cache",
    "prefix_hit_tokens": "Tokens that sequences took from the prefix cache",
    "preemptions": "Times a request was preempted",
    "quantized_tokens": "Tokens quantised when they were written",
    "drafted_tokens": "Draft tokens verified (draft model, prediction head or prompt lookup)",
    "accepted_tokens": "Draft tokens that the model accepted",
    "draft_steps": "Steps in which drafts were verified",
}
_SERVER_COUNTERS = {
    "prompt_tokens": "Prompt tokens",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "computed_prompt_tokens": "Prompt tokens computed",
    "generated_tokens": "Generated tokens",
    "first_tokens": "Answers whose first token has been generated",
}
_CLIENT_COUNTERS = {
    "requests": "Requests",
    **{name: _SERVER_COUNTERS[name] for name in ("prompt_tokens", "cached_tokens", "generated_tokens")},
}
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_HISTOGRAMS = {
    "first_token_seconds": ("Seconds from the arrival of a request to the first token of an answer", _SECONDS),
    "between_tokens_seconds": ("Seconds between tokens of an answer", _BETWEEN),
    "queue_seconds": (
        "Seconds from the arrival of a request until the first part of its prompt was computed",
        _SECONDS,
    ),
    "request_prompt_tokens": ("Tokens of a request's prompt", _TOKENS),
    "request_generated_tokens": ("Tokens of an answer", _TOKENS),
}


class ServerStats:
    """Counts since the start. Every method may be called by any thread.

    Args:
        clock: the time in seconds.

    Attributes:
        requests: number by outcome: ``ok``, ``refused`` (4xx), ``failed`` (5xx), ``cancelled``; only one thread counts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requests: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._clock, self._started, self._lock = clock, time.time(), threading.Lock()
        self._totals: Counter[str] = Counter()
        self._recent: deque[tuple[int, float]] = deque(maxlen=RATE_SECONDS + 1)  # seconds, and the tokens in each
        self._registry = CollectorRegistry(auto_describe=False)
        self._histograms = {
            name: Histogram(f"mlx_paged_{name}", text, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def count(self, **figures: float) -> None:
        """Add to the counters; names of histograms are also observed.

        Args:
            figures: ``prompt_tokens`` of requests whose prompt is computed, ``cached_tokens`` of these;
                ``computed_prompt_tokens``, including those computed again after a preemption; ``generated_tokens``;
                ``first_tokens``, requests whose first token has come; and names of histograms.
        """
        second, num_tokens = int(self._clock()), figures.get("generated_tokens", 0)
        with self._lock:
            self._totals.update(figures)  # type: ignore[arg-type]
            if num_tokens:
                known = self._recent.pop()[1] if self._recent and self._recent[-1][0] == second else 0
                self._recent.append((second, known + num_tokens))
        for name in figures.keys() & self._histograms.keys():
            self._histograms[name].observe(figures[name])

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second, over the last 10 seconds."""
        now = self._clock()
        with self._lock:
            recent = [each for each in self._recent if each[0] > now - RATE_SECONDS]
        return sum(tokens for _, tokens in recent) / max(1.0, now - recent[0][0]) if recent else 0.0

    def as_dict(self) -> dict[str, Any]:
        with self._lock:
            totals = self._totals.copy()
        return {
            "uptime_seconds": round(time.time() - self._started, 1),
            "requests": dict(self.requests),
            **{name: totals[name] for name in _SERVER_COUNTERS},
            "first_token_seconds": round(totals["first_token_seconds"], 3),
            "hit_rate": round(totals["cached_tokens"] / max(1, totals["prompt_tokens"]), 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }

    def metrics(self, report: dict[str, Any]) -> bytes:
        """Return all figures in Prometheus's format.

        Args:
            report: what ``/v1/cache/stats`` answers.
        """
        both = SimpleNamespace(collect=lambda: chain(_families(report), self._registry.collect()))
        return bytes(generate_latest(both))  # type: ignore[arg-type]


def _families(stats: dict[str, Any]) -> Iterator[Any]:
    server, running, pool, tree = (stats[name] for name in ("server", "running", "pool", "prefix_cache"))
    for name, text in _SERVER_COUNTERS.items():
        yield CounterMetricFamily(f"mlx_paged_{name}", text, value=server[name])
    requests = CounterMetricFamily("mlx_paged_requests", "Requests answered", labels=["outcome"])
    for outcome, number in server["requests"].items():
        requests.add_metric([outcome], number)
    yield requests
    for name, text in _CLIENT_COUNTERS.items():
        by_client = CounterMetricFamily(f"mlx_paged_client_{name}", f"{text}, by client", labels=["client"])
        for each in stats.get("clients", ()):
            by_client.add_metric([each["client"]], each[name])
        yield by_client
    yield GaugeMetricFamily("mlx_paged_running_requests", "Running requests", value=running["running"])
    yield GaugeMetricFamily("mlx_paged_waiting_requests", "Waiting requests", value=running["waiting"])
    yield GaugeMetricFamily("mlx_paged_prefix_hit_rate", "Share of prompt tokens cached", value=server["hit_rate"])
    if (health := stats.get("health")) is not None:
        yield GaugeMetricFamily("mlx_paged_draining", "1 while the server is draining", health["status"] == "draining")
        if (memory := health["memory"]) is not None:
            yield GaugeMetricFamily("mlx_paged_memory_used_bytes", "Memory in use", memory["used_bytes"])
            yield GaugeMetricFamily("mlx_paged_memory_limit_bytes", "Memory limit", memory["limit_bytes"])
    if pool is not None:
        for family, texts in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            yield from (family(f"mlx_paged_pool_{name}", text, value=pool[name]) for name, text in texts.items())
    if tree is not None:
        yield GaugeMetricFamily("mlx_paged_prefix_cache_entries", "Prefixes in the prefix cache", value=tree["entries"])
        yield GaugeMetricFamily(
            "mlx_paged_prefix_cache_bytes", "Bytes of prefixes in the prefix cache", value=tree["bytes"]
        )
    paths = CounterMetricFamily("mlx_paged_attention_dispatches", "Attention calls by path", labels=["path", "reason"])
    for choice in stats["dispatch"]:
        paths.add_metric([choice["path"], choice["reason"]], choice["count"])
    yield paths


# The page -----------------------------------------------------------------------------------------------------------


@functools.cache
def cache_page() -> bytes:
    """Return the ``/cache`` page: one HTML file that polls ``/v1/cache/stats``."""
    return (resources.files(__package__) / "cache_page.html").read_bytes()


def _hash_of(tag: str) -> str:
    """Return the CSP hash of the page's only ``tag`` element, so that the browser runs no other."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), cache_page(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


CACHE_PAGE_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; connect-src 'self'; script-src {_hash_of('script')}; "
    f"style-src {_hash_of('style')}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

# What the page asks for ---------------------------------------------------------------------------------------------


def blocks_of(pool: BlockPool) -> list[dict[str, Any]]:
    """Return the state of every block, by group: runs of blocks in the same state, ``[("l", 12), ("f", 3), ...]``, in
    order of their ids.

    ``f``: free; ``l``: live, one sequence holds it; ``s``: shared, several do, or a sequence and a prefix cache; ``c``:
    cached, a prefix cache alone holds it.
    """
    runs = pool.lock.glance(lambda _: [_runs(pool, index) for index in range(len(pool.groups))])
    return [
        {"group": group.spec.name, "bytes_per_block": group.bytes_per_block, "runs": each}
        for group, each in zip(pool.groups, runs, strict=True)
    ]


def _runs(pool: BlockPool, index: int) -> list[tuple[str, int]]:
    allocator = pool.groups[index].allocator
    held = pool.memory.cached_references(index)

    def state(block_id: int) -> str:
        references = allocator.refcount(block_id)
        if not references:
            return "f"
        if held[block_id] == references:
            return "c"
        return "s" if references > 1 else "l"

    states = (state(block_id) for block_id in range(NULL_BLOCK + 1, allocator.num_blocks))
    return [(name, sum(1 for _ in run)) for name, run in groupby(states)]


def dispatches() -> list[dict[str, Any]]:
    """Return the attention calls by path."""
    found = dispatch_counts().items()
    return [{"path": choice.path, "reason": choice.reason, "count": count} for choice, count in found]


def pages_of(group: Group) -> dict[str, Any]:
    """Return the format of a group's pages; if it is not what was configured, also why."""
    geometry = group.geometry
    return {
        "group": group.spec.name,
        "layers": len(group.spec.layers),
        "format": None if geometry is None else str(geometry.format or geometry.dtype),
        "bytes_per_token": group.bytes_per_block // group.block_size,
        "reason": group.dense_reason,
    }
