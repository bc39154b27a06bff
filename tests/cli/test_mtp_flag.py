"""--mtp: the model's prediction head drafts tokens, for a prompts file and in the server."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.prediction_heads import write_checkpoint
from tests.support.models.tokenizers import word_tokenizer
from tests.support.processes import commands
from tests.support.processes.server_process import ServerProcess
from tests.support.processes.small_model import records

BODIES = [{"prompt": "w1 w2 w3", "temperature": 0}, {"prompt": "w9 w4", "temperature": 1.0, "seed": 5}]
LONG = {"prompt": "w5 w6", "temperature": 0, "max_tokens": 500}  # long enough to repay a trial of drafts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with states and a head, its weights under their published names."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint("qwen3_next", folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def results(checkpoint: Path, *flags: str) -> tuple[list[str], str]:
    """Return the answers to all prompts as a prompts file, and stderr."""
    lines = "\n".join(map(json.dumps, [*BODIES, LONG]))
    fixed = ("generate", "--model", str(checkpoint), "--max-tokens", "24", "--ignore-chat-template")
    done = commands.run("mlx_paged", *fixed, "--prompts-file", "-", *flags, input=lines)
    assert done.returncode == 0, done.stderr
    return [record["text"] for record in records(done.stdout)], done.stderr


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[str]:
    """The answers without the head."""
    return results(checkpoint)[0]


@pytest.mark.slow
def test_prompts_file_gives_the_same_texts_with_mtp(checkpoint: Path, plain: list[str]) -> None:
    found, said = results(checkpoint, "--mtp", "--num-draft-tokens", "2", "--cache-stats")
    assert found == plain
    assert "draft(s) accepted" in said


@pytest.mark.slow
def test_server_gives_the_same_answers_with_mtp(checkpoint: Path, plain: list[str], tmp_path: Path) -> None:
    def answers(server: ServerProcess) -> list[str]:
        bodies: list[dict[str, Any]] = [{"max_tokens": 24, **body} for body in BODIES]
        with ThreadPoolExecutor(len(bodies)) as pool:
            found = list(pool.map(lambda body: server.post("/v1/completions", body), bodies))
        assert [answer.status for answer in found] == [200] * len(bodies), found
        return [answer.json["choices"][0]["text"] for answer in found]

    server = ServerProcess(checkpoint, tmp_path, "--mtp", "--kv-cache-memory", "64MB")
    assert answers(server) == plain[:2]
    assert server.post("/v1/completions", LONG).json["choices"][0]["text"] == plain[2]
    assert server.post("/v1/completions", {**BODIES[0], "num_draft_tokens": 1, "max_tokens": 9}).status == 200
    pool = server.stats()["pool"]
    assert pool["drafted_tokens"] > 0 and pool["draft_steps"] > 0 and pool["budget_bytes"] < 64_000_000
    assert answers(server) == plain[:2]
    assert server.stop() == 0 and "Traceback" not in server.log, server.log
