"""mlx_paged.generate on two ranks, as mlx.launch starts it: the output of one process, from the first rank alone."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from mlx_paged.engine.ranks.peers import EXIT_STATUS
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands
from tests.support.ranks.launch import Launch

LINES = [
    {"prompt": "one two three", "id": "a"},
    {"prompt": "seven", "temperature": 0.9, "seed": 5, "max_tokens": 9},
    {"prompt": "stops", "stop": ["a"], "repetition_penalty": 1.2},
    {"prompt": "", "max_tokens": -1},
    {"prompt": "who", "structured_outputs": {"regex": "[a-c]{5}-[0-9]"}},
    {"prompt": "who", "structured_outputs": {"regex": "("}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_model_folder: Path) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder)


def _both(folder: Path, *args: object, size: int = 2) -> tuple[str, list[str]]:
    """Standard output of one process, and that of each rank."""
    alone = commands.run("mlx_paged.generate", *args, cwd=folder, timeout=200)
    found = Launch(size, "mlx_paged.generate", args, folder, MLX_PAGED_RANK_TIMEOUT="30").ended()
    for ended in found:
        assert ended.status == alone.returncode, ended.stderr
    return alone.stdout, [ended.stdout for ended in found]


def test_a_prompt(model: Path, tmp_path: Path) -> None:
    args = ["--model", model, "--prompt", "one two three", "--max-tokens", 12, "--verbose", "False"]
    alone, (first, second) = _both(tmp_path, *args)
    assert first == alone
    assert second == ""


def test_a_file_of_prompts(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    args = ["--model", model, "--prompts-file", prompts, "--max-tokens", 16, "--kv-cache-memory", "64M"]
    alone, (first, second) = _both(tmp_path, *args)
    assert [json.loads(line) for line in first.splitlines()] == [json.loads(line) for line in alone.splitlines()]
    assert len(first.splitlines()) == len(LINES)
    assert second == ""


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("kind", "size", "flags", "reason"),
    [
        ("llama", 4, [], "do not divide by 4 ranks"),
        ("mamba", 2, [], "does not support tensor parallelism"),
        ("llama", 2, ["--draft-model", "."], "--draft-model does not go with several ranks"),
    ],
)
def test_what_is_refused(
    kind: str, size: int, flags: list[str], reason: str, model: Path, demo_model_folder: Path, tmp_path: Path
) -> None:
    folder = model if kind == "llama" else make_tiny_model(tmp_path / kind, demo_model_folder, kind)
    args = ["--model", folder, "--prompt", "one", "--max-tokens", 2, *flags]
    for ended in Launch(size, "mlx_paged.generate", args, tmp_path).ended():
        assert ended.status in (1, EXIT_STATUS)
        assert ended.stdout in ("", "==========\n")  # the line with which mlx-lm begins an answer
        assert reason in ended.stderr


@pytest.mark.parametrize("what", ["weights", "config", "tokenizer"])
def test_ranks_with_other_model_files_end(what: str, model: Path, demo_model_folder: Path, tmp_path: Path) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    for place in places:
        shutil.copytree(model, place / "model")
    other = places[1] / "model"
    if what == "weights":
        make_tiny_model(other, demo_model_folder, seed=1)
        name = "model.safetensors"
    elif what == "config":
        name = "config.json"
        (other / name).write_text(json.dumps({**json.loads((other / name).read_text()), "rms_norm_eps": 1e-3}))
    else:
        name = "tokenizer_config.json"
        (other / name).write_text((other / name).read_text() + " ")
    args = ["--model", "model", "--prompt", "one", "--max-tokens", 2]
    for ended in Launch(2, "mlx_paged.generate", args, tmp_path, places).ended():
        assert ended.status == EXIT_STATUS
        assert f"the model's files of rank 0 and rank 1 differ: {name}" in ended.stderr
        assert "2 ranks (ring)" in ended.stderr or "rank 1 of 2" in ended.stderr


def test_a_rank_that_dies_before_it_has_come_ends_the_others(model: Path, tmp_path: Path) -> None:
    args = ["--model", model, "--prompt", "one", "--rank-timeout", 1]
    launch = Launch(2, "mlx_paged.generate", args, tmp_path, cold=True)
    launch.processes[1].kill()
    first, second = launch.ended(120)
    assert second.status == -signal.SIGKILL
    assert first.status == 1
    assert "rank 0 waits for the other ranks; ends if one has not come in 4 s" in first.stderr
    assert "Timeout" in first.stderr


def test_a_pipeline_needs_several_ranks(model: Path, tmp_path: Path) -> None:
    found = commands.run("mlx_paged.generate", "--model", model, "--prompt", "one", "--pipeline", cwd=tmp_path)
    assert found.returncode == 1
    assert "--pipeline needs several ranks" in found.stderr
