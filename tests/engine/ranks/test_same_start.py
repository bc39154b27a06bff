"""What ranks compare at their start; in one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.cli.server import check_ranks
from mlx_paged.engine.ranks.world import SAMPLE_BYTES, check_same, model_files, versions
from mlx_paged.errors import ConfigError


class Others:
    """Ranks of which the others say what is given; keeps what this one says."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others, self.said = others, ""

    def exchange(self, value: Any) -> list[Any]:
        self.said += repr(value)
        return [value, *(self.others or [value])]


def test_a_difference_is_named() -> None:
    with pytest.raises(ConfigError, match="the versions of rank 0 and rank 1 differ: mlx: 1 and 2; other: missing and"):
        check_same(Others({"mlx": "2", "other": "3"}), "the versions", {"mlx": "1"})  # type: ignore[arg-type]
    check_same(Others({"mlx": "1", "other": "3"}), "", {"mlx": "1"}, are_optional=True)  # type: ignore[arg-type]


def test_versions_include_the_source() -> None:
    assert {"mlx", "mlx-lm", "mlx-paged", "source of mlx-paged"} <= set(versions())


@pytest.mark.parametrize("at", [0, 500, 9_999])
def test_sampled_bytes_of_each_tensor_count(at: int, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.md").write_text(name)  # nobody loads it
        large = mx.zeros((10 * SAMPLE_BYTES,), mx.uint8)
        small = mx.zeros((10_000,), mx.uint8)
        small[at] = name == "two"
        mx.save_safetensors(str(tmp_path / name / "model.safetensors"), {"large": large, "small": small})
    one, two = model_files(tmp_path / "one"), model_files(tmp_path / "two")
    assert set(one) == set(two) == {"model.safetensors"}
    assert one != two


def test_keys_of_clients_are_not_sent() -> None:
    ranks = Others()
    args = argparse.Namespace(model="model", api_key=["sekrit"], port=8080)
    check_ranks(args, ranks)  # type: ignore[arg-type]
    assert "sekrit" not in ranks.said
    assert "8080" in ranks.said
    other = Others({"model": repr("model"), "port": "8081"})
    with pytest.raises(ConfigError, match="the arguments of rank 0 and rank 1 differ: port: 8080 and 8081"):
        check_ranks(args, other)  # type: ignore[arg-type]
