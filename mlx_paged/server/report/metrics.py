"""Metrics: a server's figures in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .server_stats import ServerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


_GAUGES = {
    "total_blocks": "Blocks that exist",
    "live_blocks": "Blocks with at least one reference",
    "free_blocks": "Blocks without a reference",
    "shared_blocks": "Blocks with more than one reference",
    "cached_blocks": "Blocks that only the prefix cache holds",
    "bytes_reserved": "Bytes of the pool's tensors",
    "bytes_in_use": "Bytes of the live blocks",
    "budget_bytes": "The most that tensors and states may take",
    "state_bytes": "Bytes of states beside keys and values, of checkpoints and of requests",
    "checkpoint_bytes": "Bytes of states that the prefix cache holds",
    "bytes_per_token": "Bytes of the keys and values of one token in all layers",
    "quantized_layers": "Layers whose pages hold quantised keys and values",
    "dense_layers": "Layers whose pages hold keys and values as they are",
}
_COUNTERS = {
    "cow_forks": "Blocks copied because a sequence wrote to a shared one",
    "evictions": "Blocks that the prefix cache has freed",
    "prefix_hit_tokens": "Tokens that sequences took from the prefix cache",
    "preemptions": "Requests that made room for others",
    "shrinks": "Times a layer group's tensors were made smaller",
    "quantized_tokens": "Tokens quantised when they were written",
    "drafted_tokens": "Tokens that were proposed because a prompt or an answer had them before",
    "accepted_tokens": "Those of them that the model would have chosen",
}
_SERVER_COUNTERS = {
    "prompt_tokens": "Tokens of prompts",
    "cached_tokens": "Tokens of prompts found in the prefix cache",
    "computed_prompt_tokens": "Tokens of prompts computed",
    "generated_tokens": "Tokens generated",
    "first_tokens": "Requests whose first token has come",
}


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_HISTOGRAMS = {
    "first_token_seconds": ("Seconds from a request to its first token", _SECONDS),
    "between_tokens_seconds": ("Seconds between tokens of an answer", _BETWEEN),
    "queue_seconds": ("Seconds from a request until the first part of it was computed", _SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt", _TOKENS),
    "request_generated_tokens": ("Tokens of an answer", _TOKENS),
}


class Metrics:
    """What ``/metrics`` answers.

    Args:
        stats: of the server; what has a distribution is observed here.
    """

    def __init__(self, stats: ServerStats) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._histograms = {
            name: Histogram(f"mlx_paged_{name}", text, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        stats.observe = self._observe

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def text(self, report: dict[str, Any]) -> bytes:
        """Return all figures.

        Args:
            report: what ``/v1/cache/stats`` answers.
        """

        class Collector:
            def collect(self) -> Iterator[Any]:
                return _families(report)

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Collector())  # type: ignore[arg-type]
        return bytes(generate_latest(registry)) + bytes(generate_latest(self._registry))


def _families(stats: dict[str, Any]) -> Iterator[Any]:
    server, running = stats["server"], stats["running"]
    for name, text in _SERVER_COUNTERS.items():
        yield CounterMetricFamily(f"mlx_paged_{name}", text, value=server[name])
    requests = CounterMetricFamily("mlx_paged_requests", "Requests answered", labels=["outcome"])
    for outcome, number in server["requests"].items():
        requests.add_metric([outcome], number)
    yield requests
    yield GaugeMetricFamily("mlx_paged_running_requests", "Requests that run", value=running["running"])
    yield GaugeMetricFamily("mlx_paged_waiting_requests", "Requests that wait", value=running["waiting"])
    yield GaugeMetricFamily("mlx_paged_prefix_hit_rate", "Share of prompt tokens cached", value=server["hit_rate"])
    if (health := stats.get("health")) is not None:
        yield CounterMetricFamily("mlx_paged_restarts", "Times the computing thread was replaced", health["restarts"])
        yield GaugeMetricFamily("mlx_paged_draining", "Whether the server ends", health["status"] == "draining")
        if (memory := health["memory"]) is not None:
            yield GaugeMetricFamily("mlx_paged_memory_used_bytes", "Memory in use", memory["used_bytes"])
            yield GaugeMetricFamily("mlx_paged_memory_limit_bytes", "Its limit", memory["limit_bytes"])
    pool = stats["pool"]
    if pool is not None:
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"mlx_paged_pool_{name}", text, value=pool[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"mlx_paged_pool_{name}", text, value=pool[name])
    tree = stats["prefix_cache"]
    if tree is not None:
        yield GaugeMetricFamily("mlx_paged_prefix_cache_entries", "Prefixes held", value=tree["entries"])
        yield GaugeMetricFamily("mlx_paged_prefix_cache_bytes", "Bytes of prefixes held", value=tree["bytes"])
    paths = CounterMetricFamily("mlx_paged_attention_dispatches", "Attention calls by path", labels=["path", "reason"])
    for choice in stats["dispatch"]:
        paths.add_metric([choice["path"], choice["reason"]], choice["count"])
    yield paths
