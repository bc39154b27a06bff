"""Which models clients may ask for."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.model_names import ModelNames
from mlx_paged.server.options import ServerConfig
from mlx_paged.server.request import ModelKey

NOTHING = ModelKey(None)


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a hub cache that holds one model, org/here."""
    repo = tmp_path / "hub" / "models--org--here"
    snapshot = repo / "snapshots" / "0123"
    for folder in (snapshot, repo / "refs", repo / "blobs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def refused(names: ModelNames, name: str | None) -> str:
    with pytest.raises(RequestRefused) as caught:
        names.resolve(name)
    assert caught.value.status == 404 and caught.value.code == "model_not_found"
    return str(caught.value)


def test_without_a_model_those_in_the_hub_cache_are_served(tmp_path: Path) -> None:
    names = ModelNames(NOTHING, ServerConfig())
    assert names.resolve("org/here").model == "org/here"
    assert names.listed(0) == []
    for name in ("org/elsewhere", str(tmp_path), "../here", "default_model", None):
        assert "without --model" in refused(names, name)


def test_with_a_model_only_that_one_is_served(tmp_path: Path) -> None:
    names = ModelNames(ModelKey("org/mine"), ServerConfig(served_model_names=("mine",)))
    assert names.resolve("mine") == names.resolve(None) == names.resolve("org/mine") == ModelKey("org/mine")
    assert "'mine'" in refused(names, "org/here")


def test_allow_any_model_accepts_any_name() -> None:
    names = ModelNames(ModelKey("org/mine"), ServerConfig(allow_any_model=True))
    assert names.resolve("org/elsewhere").model == "org/elsewhere"
    assert names.resolve("org/elsewhere", adapter="a", draft="d") == ModelKey("org/elsewhere", "a", "d")
