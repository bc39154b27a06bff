"""Figures of a server: rates and metrics; and the server's options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged import BlockPool, LayerGroup
from mlx_paged.cli.server import parse as parse_arguments
from mlx_paged.errors import ConfigError
from mlx_paged.server.options import ServerConfig
from mlx_paged.server.report import ServerStats

NOT_ALIVE = [("--memory-watermark", "101"), ("--watchdog-timeout", "-1"), ("--drain-timeout", "inf")]


def report(stats: ServerStats) -> dict[str, Any]:
    return {
        "server": stats.as_dict(),
        "running": {"running": 1, "waiting": 2},
        "pool": None,
        "prefix_cache": None,
        "dispatch": [{"path": "gather", "reason": 'a "reason"', "count": 3}],
    }


def test_rates_cover_the_last_ten_seconds() -> None:
    now = [0.0]
    stats = ServerStats(clock=lambda: now[0])
    assert stats.tokens_per_second == 0 == stats.as_dict()["hit_rate"]
    for second in range(30):
        now[0] = float(second)
        stats.count(generated_tokens=5)
    assert 4.5 <= stats.tokens_per_second <= 6
    now[0] = 100.0
    assert stats.tokens_per_second == 0 and stats.as_dict()["generated_tokens"] == 150
    stats.count(prompt_tokens=40, cached_tokens=10, computed_prompt_tokens=30)
    stats.requests["ok"] += 1
    told = stats.as_dict()
    assert (told["hit_rate"], told["computed_prompt_tokens"], told["requests"]["ok"]) == (0.25, 30, 1)
    stats.count(first_tokens=1, first_token_seconds=0.5)
    stats.count(first_tokens=1, first_token_seconds=1.5)
    assert (stats.as_dict()["first_tokens"], stats.as_dict()["first_token_seconds"]) == (2, 2.0)


def test_dashboard_uses_only_existing_metrics() -> None:
    health = {"status": "ok", "memory": {"used_bytes": 1, "limit_bytes": 2}}
    pool = BlockPool([LayerGroup((0,))], block_size=4).stats().as_dict()
    prefix_cache = {"entries": 1, "bytes": 2}
    told = (
        ServerStats()
        .metrics({**report(ServerStats()), "health": health, "pool": pool, "prefix_cache": prefix_cache})
        .decode()
    )
    there = {sample.name for family in text_string_to_metric_families(told) for sample in family.samples}
    dashboard = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for expr in asked for name in re.findall(r"\bmlx_paged_\w+", expr)}
    assert len(named) > 15 and named <= there
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for panel in dashboard["panels"])


def test_metrics_can_be_parsed_by_prometheus() -> None:
    stats = ServerStats()
    stats.requests["ok"] += 1
    stats.count(prompt_tokens=8, cached_tokens=2)
    memory = {"used_bytes": 5, "limit_bytes": 10, "source": "system", "watermark": 0.95, "pressure": "none"}
    pool = BlockPool([LayerGroup((0,))], block_size=4).stats().as_dict() | {"checkpoint_bytes": 64}
    told = {**report(stats), "health": {"status": "draining", "memory": memory}, "pool": pool}
    families = {f.name: f for f in text_string_to_metric_families(ServerStats().metrics(told).decode())}
    expected = {"draining": 1, "memory_used_bytes": 5, "memory_limit_bytes": 10}
    expected |= {"pool_checkpoint_bytes": 64}
    assert {name: families[f"mlx_paged_{name}"].samples[0].value for name in expected} == expected
    assert families["mlx_paged_prefix_hit_rate"].samples[0].value == 0.25
    assert {s.labels["outcome"]: s.value for s in families["mlx_paged_requests"].samples}["ok"] == 1
    assert families["mlx_paged_attention_dispatches"].samples[0].labels["reason"] == 'a "reason"'
    assert families["mlx_paged_waiting_requests"].samples[0].value == 2


def test_histograms_count_values_in_the_right_buckets() -> None:
    stats = ServerStats()
    stats.count(first_token_seconds=0.2, between_tokens_seconds=0.004, queue_seconds=0.1)
    stats.count(request_prompt_tokens=700, request_generated_tokens=40)
    families = {f.name: f for f in text_string_to_metric_families(stats.metrics(report(stats)).decode())}
    for name, most in (
        ("first_token_seconds", 0.25),
        ("between_tokens_seconds", 0.005),
        ("queue_seconds", 0.1),
        ("request_prompt_tokens", 1024),
        ("request_generated_tokens", 128),
    ):
        counts = {s.labels["le"]: s.value for s in families[f"mlx_paged_{name}"].samples if "le" in s.labels}
        assert next(float(le) for le, value in counts.items() if value) == most, name


def test_every_option_is_in_the_reference() -> None:
    rows = (Path(__file__).parents[3] / "docs" / "reference.md").read_text().splitlines()
    begin = next(number for number, row in enumerate(rows) if row.startswith("| `--no-prefix-cache`"))
    for each, row in zip(ServerConfig.options(), rows[begin:], strict=False):
        value = "" if each.metavar is None else f" {each.metavar}"
        assert row.startswith(f"| `{each.flag}{value}` | {each.default_text} | {each.text}")


def test_server_options_are_parsed_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLX_PAGED_API_KEY", raising=False)

    def parse(*argv: str) -> ServerConfig:
        return ServerConfig.from_arguments(parse_arguments(argv))

    assert parse() == ServerConfig()
    config = parse(
        "--prefix-cache-ttl", "60", "--prefix-cache-dir", "x", "--prefix-cache-dir-size", "2GB", "--api-key=k"
    )
    assert (config.prefix_cache_ttl, config.prefix_cache_dir_size, config.api_keys.keys) == (60.0, 2 * 10**9, ("k",))
    assert not parse("--no-prefix-cache").prefix_cache
    alive = parse("--memory-watermark", "90%", "--watchdog-timeout", "0", "--drain-timeout=7.5")
    assert (alive.memory_watermark, alive.watchdog_timeout, alive.drain_timeout) == (0.9, 0.0, 7.5)
    assert (config.memory_watermark, config.watchdog_timeout, config.drain_timeout) == (0.95, None, 30.0)
    with pytest.raises(ConfigError, match="no-prefix-cache"):
        parse("--no-prefix-cache", "--prefix-cache-ttl", "1")
    for wrong in (
        ("--prefix-cache-ttl", "0"),
        ("--prefix-cache-ttl", "x"),
        ("--prefix-cache-dir-size", "auto"),
        *NOT_ALIVE,
    ):
        with pytest.raises(SystemExit):
            parse(*wrong)
    assert "must be" in capsys.readouterr().err
    monkeypatch.setenv("MLX_PAGED_API_KEY", "from-env")
    assert parse().api_keys.keys == ("from-env",) and parse("--api-key=a", "--api-key=b").api_keys.keys == ("a", "b")
    with pytest.raises(ConfigError, match="served-model-name"):
        parse("--served-model-name", "alias")  # without a model
