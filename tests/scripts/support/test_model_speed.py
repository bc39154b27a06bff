"""scripts/support/model_speed.py: figures of both sides, and the page's section that is made of them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scripts import model_matrix
from scripts.support import model_speed
from scripts.support.model_speed import SHAPES, main, section_of, short

TINY = {
    "vocab_size": 30000, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "moe_intermediate_size": 32, "head_dim": 32, "query_pre_attn_scalar": 32, "kv_lora_rank": 64,
}  # fmt: skip
SIDE = {
    "first_s": 1.234, "decode_tokens_per_s": 1234.5, "peak_bytes": 2_000_000_000, "alone_first_s": 0.5,
    "alone_tokens_per_s": 99.7,
}  # fmt: skip
CLASS = {
    "module": "qwen2",
    "shape": "16 heads",
    "prompts": "8 x 2,048",
    "stock": SIDE,
    "paged": {**SIDE, "first_s": 0.5},
}
KNOWN = {"device": "a GPU", "mlx": "1.0", "tokens": 64, "classes": {"seam": CLASS}}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that a CPU computes in a second, in the dtype that it multiplies experts in."""
    for key, value in TINY.items():
        monkeypatch.setitem(model_speed.COMMON, key, value)
    shapes = {
        name: shape._replace(
            prompts=(2, 20), fields={**shape.fields, **{key: TINY[key] for key in TINY.keys() & shape.fields.keys()}}
        )
        for name, shape in SHAPES.items()
    }
    monkeypatch.setattr(model_speed, "SHAPES", shapes)
    monkeypatch.setattr(mx, "bfloat16", mx.float32)


@pytest.mark.sample(every=2)
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["latents, 20 heads", "windows"])
def test_both_sides_are_measured_and_kept(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    assert main(["--out", str(out), "--classes", short(name), "--tokens", "6"]) == 0
    known = json.loads(out.read_text())
    figures: dict[str, Any] = known["classes"][name]
    assert list(known["classes"]) == [name] and figures["prompts"] == "2 x 20"
    for side in ("stock", "paged"):
        assert set(figures[side]) == set(SIDE)
        assert all(value > 0 for key, value in figures[side].items() if key != "peak_bytes")
    assert f"{name}: first_s" in capsys.readouterr().out
    assert f"| {name} | {figures['module']} |" in section_of(known)


@pytest.mark.usefixtures("tiny")
def test_a_class_for_which_there_is_no_time_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "speed.json"
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a GPU"})
    monkeypatch.setattr(model_speed.mx, "__version__", "1.0", raising=False)
    out.write_text(json.dumps(KNOWN))
    assert main(["--out", str(out), "--classes", "seam", "--seconds", "-1"]) == 0
    assert "no time left for seam" in capsys.readouterr().err
    assert json.loads(out.read_text()) == KNOWN


@pytest.mark.usefixtures("tiny")
def test_what_stock_cannot_compute_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stock_fails(model: Any, lengths: Any, *_: Any) -> model_speed.Burst:
        is_stock = importlib.import_module("mlx_lm.generate").BatchGenerator.__module__.startswith("mlx_lm")
        if len(lengths) > 1 and is_stock:
            raise ValueError("Shapes cannot be broadcast")
        return model_speed.Burst(0.5, 100.0, 7)

    monkeypatch.setattr(model_speed, "burst", stock_fails)
    out = tmp_path / "speed.json"
    assert main(["--out", str(out), "--classes", "seam"]) == 0
    known = json.loads(out.read_text())
    stock = known["classes"]["seam"]["stock"]
    assert stock["first_s"] is None and stock["fails"] == "Shapes cannot be broadcast" and stock["alone_first_s"] == 0.5
    assert "| fails / 0.50 | fails / 100 |" in section_of(known)


def test_an_unknown_class_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--classes", "seam,nothing"])
    assert "no class nothing; there are latents-20-heads" in capsys.readouterr().err


def test_each_class_is_a_module_of_the_page() -> None:
    assert {shape.module for shape in SHAPES.values()} <= set(model_matrix.lines_of_page())


def test_the_page_has_the_figures_behind_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = model_matrix.lines_of_page()
    file, page = tmp_path / "speed.json", tmp_path / "models.md"
    file.write_text(json.dumps(KNOWN))
    monkeypatch.setattr(model_speed, "FILE", file)
    monkeypatch.setattr(model_matrix, "PAGE", page)
    page.write_text(model_matrix.page_of(lines))
    assert model_matrix.lines_of_page() == lines
    text = (
        "| seam | qwen2 | 16 heads | 8 x 2,048 | 1.23 / 0.50 | 1,234 / 1,234 | 2.0 / 2.0 | 0.500 / 0.500 | 100 / 100 |"
    )
    assert page.read_text().endswith(text + "\n")
    assert model_matrix.main(["--speed"]) == 0
    assert page.read_text().count(text) == 1
    file.unlink()
    page.write_text(model_matrix.page_of(lines))
    assert model_speed.TITLE not in page.read_text()
