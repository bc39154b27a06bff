"""An mlx-lm that lacks a name an adapter imports: that adapter's patch is left out, and the others are applied."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patches.missing_names import upstream_names

NAMES = upstream_names()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """By missing name; see missing_names.py."""
    command = [sys.executable, "-m", "tests.patches.missing_names"]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_all_names_are_found() -> None:
    """Imported by name, used as attributes, and patched."""
    imported = {"mlx_lm.models.cache:CacheList", "mlx_lm.models.activations:swiglu", "mlx_lm.models.activations:"}
    used = {"mlx_lm.models.cache:make_prompt_cache", "mlx_lm.server:APIHandler"}
    assert imported | used | {"mlx_lm.models.gemma2:", "mlx_lm.generate:BatchGenerator"} <= set(NAMES)
    assert len(NAMES) > 40


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_costs_the_patches_that_need_it(name: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[name]
    assert "raised" not in outcome, outcome
    skipped = outcome["skipped"]
    assert outcome["strict"] == ("refused" if skipped else "applied") and outcome["untouched"]
    assert len(outcome["warnings"]) == len(skipped)
    assert all(any(target in text for text in outcome["warnings"]) for target in skipped)
    assert outcome["kept"]
    assert outcome["patched"] == outcome["stock"]
    module, _, attribute = name.partition(":")
    if module.startswith("mlx_lm.models") and not attribute and module != "mlx_lm.models.cache":
        assert len(skipped) < 10  # others are applied
