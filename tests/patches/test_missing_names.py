"""If mlx-lm lacks a name that an adapter imports, that adapter's patch is skipped and the others are applied."""

import json
import sys
from typing import Any

import pytest

from tests.support.models.missing_names import upstream_names
from tests.support.processes import commands

NAMES = upstream_names()
SAMPLE = NAMES[::16]


def outcomes(names: list[str]) -> dict[str, Any]:
    """Return the outcome for each missing name; see missing_names.py."""
    ended = commands.run("tests.support.models.missing_names", *names, cwd=commands.ROOT, timeout=500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_upstream_names_finds_all_names() -> None:
    """Names that are imported, used as attributes, or patched."""
    imported = {"mlx_lm.models.cache:CacheList", "mlx_lm.models.base:create_attention_mask", "mlx_lm.models.base:"}
    used = {"mlx_lm.models.cache:make_prompt_cache"}
    assert imported | used | {"mlx_lm.models.gemma2:", "mlx_lm.generate:BatchGenerator"} <= set(NAMES)
    assert len(NAMES) > 40


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["sample", "all"])
def test_missing_name_skips_only_the_patches_that_need_it(names: list[str]) -> None:
    """One test for many names, as each test starts a process."""
    found = outcomes(names)
    wrong = {}
    assert list(found) == names
    for name in names:
        try:
            check(name, found[name])
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong


def check(name: str, outcome: dict[str, Any]) -> None:
    assert "raised" not in outcome, outcome
    skipped = outcome["skipped"]
    assert outcome["strict"] == ("refused" if skipped else "applied") and outcome["untouched"]
    assert len(outcome["warnings"]) == len(skipped)
    assert all(any(target in text for text in outcome["warnings"]) for target in skipped)
    assert outcome["kept"]
    assert outcome["patched"] == outcome["stock"]
    module, _, attribute = name.partition(":")
    if module.startswith("mlx_lm.models") and not attribute and module != "mlx_lm.models.cache":
        assert len(skipped) < 15, "others are applied"


def test_server_that_cannot_be_adapted_runs_stock_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlx_lm.server as upstream

    from mlx_paged.cli import server

    ran: list[Any] = []
    monkeypatch.setattr(server.signal, "signal", lambda *args: None)
    monkeypatch.setattr(upstream, "run", lambda *args: ran.append(args))
    monkeypatch.setitem(sys.modules, "mlx_paged.server.loaded_models", None)
    monkeypatch.delattr("mlx_paged.server.loaded_models", raising=False)
    server.main(["--port", "9"])
    assert "unknown version of mlx_lm.server" in caplog.text
    ((host, port, provider),) = ran
    assert (host, port, provider.cli_args.max_tokens) == ("127.0.0.1", 9, 512)
    with pytest.raises(SystemExit):
        server.main(["--api-key", "secret"])
    assert "--api-key is not supported" in capsys.readouterr().err
