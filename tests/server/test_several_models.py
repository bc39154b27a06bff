"""Several models in one server, and the unloading of idle models."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import mlx_paged
from mlx_paged import machine
from mlx_paged.cli.server import main, parse, shared_budget
from mlx_paged.config import PagedConfig
from mlx_paged.errors import RequestTooLargeError
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.server import loaded_models as models_of_server
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.model_names import ModelNames
from mlx_paged.server.options import ServerConfig
from mlx_paged.server.request import ModelKey
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import ServerProcess

pytestmark = pytest.mark.demo_model

IDLE = 2.0
PROMPT = [{"role": "user", "content": "What is to be said of two models that live in one house? " * 4}]


@pytest.fixture(scope="module")
def folders(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    top = tmp_path_factory.mktemp("models")
    return [make_tiny_model(top / name, demo_model_folder, seed=seed) for seed, name in enumerate(("one", "two"))]


@pytest.fixture(scope="module")
def server(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--model", str(folders[1]), "--kv-cache-memory", "8MB", "--idle-unload", str(IDLE), "--max-tokens", "3")
    process = ServerProcess(folders[0], tmp_path_factory.mktemp("server"), *flags)
    yield process
    process.check_end()


def test_models_take_turns_and_keep_their_prefixes(server: ServerProcess) -> None:
    assert {"one", "two"} <= {model["id"] for model in server.get("/v1/models").json["data"]}
    said = {name: server.chat(PROMPT, model=name)["choices"] for name in ("one", "two")}
    assert said["one"] != said["two"]
    for name in ("one", "two", "one"):
        answer = server.chat(PROMPT, model=name)
        usage = answer["usage"]
        assert answer["choices"] == said[name]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= (usage["prompt_tokens"] - 1) // 32 * 32
    assert server.log.count("is ready") <= 2 + server.log.count("are unloaded")
    assert server.stats()["pool"]["budget_bytes"] == 4_000_000


def test_idle_model_is_unloaded_and_loaded_again(server: ServerProcess) -> None:
    said = server.chat(PROMPT)["choices"]
    server.wait_until(lambda: "are unloaded until" in server.log)
    server.wait_until(lambda: server.stats()["pool"] is None)
    assert server.get("/health").json["status"] == "ok"
    assert server.chat(PROMPT)["choices"] == said and server.stats()["pool"] is not None
    with_budget = server.post("/tokenize", {"prompt": "Hi."})
    assert with_budget.status == 200 and with_budget.json["count"] > 0


def test_models_of_the_command_line_have_names_and_share_the_budget(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = map(str, folders)
    args = parse(["--model", one, "--model", two])
    assert (args.model, args.models) == (one, [one, two]) and parse([]).models == []
    names = ModelNames(ModelKey(one), ServerConfig(), args.models)
    assert names.resolve("two") == names.resolve(two) == ModelKey(two) and names.resolve(None) == ModelKey(one)
    assert shared_budget(args, PagedConfig(kv_cache_memory=1000)) == 500
    monkeypatch.setattr(machine, "usable_memory", lambda: 1 << 30)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--our--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(bytes(1000))
    weights = sum(file.stat().st_size for file in Path(one).glob("*.safetensors"))
    args = parse(["--model", one, "--model", "our/model", "--model", "not/there", "--draft-model", one])
    assert shared_budget(args, PagedConfig()) == int(0.8 * ((1 << 30) - 2 * weights - 1000)) // 3
    with pytest.raises(SystemExit) as ended:
        main(["--model", one, "--model", str(tmp_path / "nowhere")])
    assert ended.value.code == 78 and re.search(r"model folder .*nowhere does not exist", capsys.readouterr().err)


@pytest.mark.parametrize("is_short", [True, False], ids=["memory is short", "more than are named"])
def test_least_recently_used_model_is_unloaded(
    folders: list[Path],
    demo_model_folder: Path,
    tmp_path: Path,
    is_short: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Models one and two are loaded, and one is used again: a third takes the place of two."""
    third = make_tiny_model(tmp_path / "three", demo_model_folder, seed=3)
    mlx_paged.apply_patches(PagedConfig(kv_cache_memory=1 << 20))
    named = [*folders, third] if is_short else folders
    args = parse([part for path in named for part in ("--model", str(path))])
    models = models_of_server.LoadedModels(args, ServerConfig())
    one, two, three = (ModelKey(str(path)) for path in (*folders, third))
    ways: list[None] = []

    def load(key: ModelKey) -> models_of_server.Weights:
        models.load(key, lambda: ways.append(None))
        assert models.weights is not None and models.weights.key == key
        return models.weights

    models.load_default()
    first, second = load(one), load(two)
    assert load(one) is first and load(two) is second and load(one) is first, "both stay loaded"
    room = [0] if is_short else []
    monkeypatch.setattr(models_of_server, "usable_memory", lambda: room.pop() if room else 1 << 40)
    load(three)
    assert len(models._loaded) == 2
    assert load(one) is first and load(two) is not second
    assert (f"unloading {two.model}" in caplog.text) is is_short
    assert len(ways) == 8, "the callback is called at each change of model"
    models.close()
    mlx_paged.remove_patches()


def test_kernels_are_compiled_and_checked_before_the_first_request(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mlx_paged.apply_patches(PagedConfig(kv_cache_memory=1 << 22))
    args = parse(["--model", str(folders[0])])
    with fake_kernels() as fake:
        models = models_of_server.LoadedModels(args, ServerConfig())
        models.load_default()
        assert fake.calls["paged_decode"] and fake.calls["write_slots"], fake.calls
        assert "attention kernels checked in" in caplog.text
        assert models.pool is not None and models.pool.stats().live_blocks == 0
        assert models.prompt_cache.figures()["entries"] == 0
        monkeypatch.setattr(PagedBatchGenerator, "insert", mock.Mock(side_effect=RequestTooLargeError(41)))
        models.load_default()
        assert "kernels are tried by the first request" in caplog.text, "a small budget does not stop the server"
        models.close()
    mlx_paged.remove_patches()


@pytest.mark.parametrize("step", ["pool", "texts"])
def test_model_that_cannot_be_served_leaves_the_present_one_as_it_was(
    step: str, folders: list[Path], demo_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = ModelKey(str(make_tiny_model(tmp_path / "wide", demo_model_folder, "llama of wide heads")))
    mlx_paged.apply_patches(PagedConfig(block_size=32, kv_cache_memory=80_000 if step == "pool" else 1 << 20))
    models = models_of_server.LoadedModels(parse(["--model", str(folders[0])]), ServerConfig())
    models.load_default()
    one, present, pool = models.default_key, (models.weights, models.texts), models.pool
    if step == "texts":
        monkeypatch.setattr(models_of_server, "LoadedTexts", lambda *_: 1 / 0)
    with pytest.raises(RequestRefused, match="the model cannot be loaded") as refused:
        models.load(wide, lambda: None)
    assert refused.value.status == 404 and refused.value.__context__ is None  # which would keep the weights
    assert (models.weights, models.texts) == present and models.is_present(one) and models.pool is pool
    assert models.texts_of(wide) is None and not models.is_present(wide)
    models.load(one, lambda: None)
    assert (models.weights, models.texts) == present
    models.close()
    mlx_paged.remove_patches()
