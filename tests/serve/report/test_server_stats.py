"""What a server counts, and how it says so."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_paged.cli.server import ServerParser
from mlx_paged.errors import ConfigError
from mlx_paged.serve.report.metrics import MetricsUnavailable, metrics_text
from mlx_paged.serve.report.server_stats import ServerStats
from mlx_paged.serve.server_config import ServerConfig


def report(stats: ServerStats) -> dict[str, Any]:
    return {
        "server": stats.as_dict(),
        "running": {"running": 1, "waiting": 2},
        "pool": None,
        "prefix_cache": None,
        "dispatch": [{"path": "gather", "reason": 'a "reason"', "count": 3}],
    }


def test_rates_are_of_the_last_ten_seconds() -> None:
    now = [0.0]
    stats = ServerStats(clock=lambda: now[0])
    assert stats.tokens_per_second == 0 == stats.hit_rate
    for second in range(30):
        now[0] = float(second)
        stats.count_generated(5)
    assert 4.5 <= stats.tokens_per_second <= 6
    now[0] = 100.0
    assert stats.tokens_per_second == 0 and stats.generated_tokens == 150
    stats.count_prompt(40, 10)
    stats.count_computed(30)
    stats.count_request("ok")
    assert (stats.hit_rate, stats.computed_prompt_tokens, stats.requests["ok"]) == (0.25, 30, 1)


def test_metrics_are_read_by_prometheus() -> None:
    stats = ServerStats()
    stats.count_request("ok")
    stats.count_prompt(8, 2)
    families = {f.name: f for f in text_string_to_metric_families(metrics_text(report(stats)).decode())}
    assert families["mlx_paged_prefix_hit_rate"].samples[0].value == 0.25
    assert {s.labels["outcome"]: s.value for s in families["mlx_paged_requests"].samples}["ok"] == 1
    assert families["mlx_paged_attention_dispatches"].samples[0].labels["reason"] == 'a "reason"'
    assert families["mlx_paged_waiting_requests"].samples[0].value == 2


def test_without_the_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MetricsUnavailable, match=r"mlx_paged\[server\]"):
        metrics_text(report(ServerStats()))


def test_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MLX_PAGED_API_KEY", raising=False)

    def parse(*argv: str) -> ServerConfig:
        made = ServerParser()
        ServerConfig.add_arguments(made)
        return ServerConfig.from_arguments(super(ServerParser, made).parse_args(argv))

    assert parse() == ServerConfig()
    config = parse(
        "--prefix-cache-ttl", "60", "--prefix-cache-dir", "x", "--prefix-cache-dir-size", "2GB", "--api-key=k"
    )
    assert (config.prefix_cache_ttl, config.prefix_cache_dir_bytes, config.api_keys.keys) == (60.0, 2 * 10**9, ("k",))
    assert not parse("--no-prefix-cache").prefix_cache
    with pytest.raises(ConfigError, match="no-prefix-cache"):
        parse("--no-prefix-cache", "--prefix-cache-ttl", "1")
    for wrong in (("--prefix-cache-ttl", "0"), ("--prefix-cache-ttl", "x"), ("--prefix-cache-dir-size", "auto")):
        with pytest.raises(SystemExit):
            parse(*wrong)
    assert "must be" in capsys.readouterr().err
    monkeypatch.setenv("MLX_PAGED_API_KEY", "from-env")
    assert parse().api_keys.keys == ("from-env",) and parse("--api-key=a", "--api-key=b").api_keys.keys == ("a", "b")
    with pytest.raises(ConfigError, match="served-model-name"):
        parse("--served-model-name", "alias")  # of no model
