"""If mlx-lm lacks a name that an adapter imports, that adapter's patch is skipped and the others are applied."""

import json
import subprocess
import sys

import pytest

from mlx_paged.patches import registry

# An adapter imports the first, the second is replaced, the third is a module. Adapters are imported once in a process.
PROGRAM = """
import json, sys, warnings
from mlx_lm import sample_utils
from mlx_lm.models import cache
del cache.CacheList, sample_utils.make_sampler
sys.modules["mlx_lm.models.gemma2"] = None
import mlx_paged
from tests.support.models.builders import build, greedy, prompt_of
model, prompt = build("llama", num_hidden_layers=1), prompt_of(20)
stock = greedy(model, prompt, 4)[0]
try:
    mlx_paged.apply_patches(strict=True)
except mlx_paged.PatchError:
    assert not mlx_paged.is_applied()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = mlx_paged.apply_patches()
    assert greedy(model, prompt, 4)[0] == stock
    told = [str(each.message) for each in caught]
    print(json.dumps([report.skipped, list(report.applied), list(report.waiting), told]))
"""


def test_missing_names_skip_only_the_patches_that_need_them() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    skipped, applied, waiting, told = json.loads(ended.stdout.splitlines()[-1])
    assert {"mlx_lm.sample_utils.make_sampler", "mlx_paged.patches.generate.steps"} <= set(skipped)
    assert len(told) == len(skipped) and all(any(name in text for text in told) for name in skipped)
    others = {patch.target for patch in registry.all_patches() if not patch.only_cuda} - set(skipped)
    assert set(applied) | set(waiting) >= {name for name in others if name.startswith("mlx_lm.models.q")}


def test_server_ends_with_a_version_of_mlx_lm_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlx_paged.cli import server
    from mlx_paged.server import loaded_models

    monkeypatch.setitem(loaded_models.KNOWN, "ResponseGenerator._tokenize", "another")
    with pytest.raises(SystemExit) as ended:
        server.main(["--port", "9"])
    assert ended.value.code == 78 and "does not support this version of mlx-lm" in capsys.readouterr().err
    monkeypatch.delattr("mlx_lm.server.ResponseGenerator")
    with pytest.raises(SystemExit) as ended:
        server.main(["--port", "9"])
    assert ended.value.code == 78 and "has no attribute 'ResponseGenerator'" in capsys.readouterr().err
