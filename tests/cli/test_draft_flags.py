"""Drafts with --prompts-file: --draft-model, --prompt-lookup and --mtp, and a line's own num_draft_tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.errors import ConfigError
from mlx_paged.patches.generate.drafting import check_same_tokens
from tests.support.models.prediction_heads import write_checkpoint
from tests.support.models.tokenizers import word_tokenizer
from tests.support.processes import commands
from tests.support.processes.server_process import ServerProcess, together
from tests.support.processes.small_model import records

LONG = {"max_tokens": 500}  # only a long answer repays a trial of drafts
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"repetition_penalty": 1.4}, LONG]
BODIES = [{"prompt": f"w1 w2 w3 w{n}", "temperature": 0, **options} for n, options in enumerate(OPTIONS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with states and a prediction head, its weights under their published names."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint("qwen3_next", folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def texts(folder: Path, *flags: object) -> tuple[list[str], str]:
    """Return the answers to all prompts as a prompts file, and stderr."""
    fixed = ("generate", "--model", folder, "--max-tokens", 24, "--ignore-chat-template", "--prompts-file", "-")
    done = commands.run("mlx_paged", *fixed, *flags, input="\n".join(map(json.dumps, BODIES)))
    assert done.returncode == 0, done.stderr
    return [record["text"] for record in records(done.stdout)], done.stderr


@pytest.mark.slow  # tests/server/test_server_drafts.py covers a draft model in every run
@pytest.mark.parametrize("flag", ["--draft-model", "--prompt-lookup", "--mtp"])
def test_prompts_file_gives_the_same_texts_with_drafts(flag: str, folder: Path, checkpoint: Path) -> None:
    model = checkpoint if flag == "--mtp" else folder
    flags = {"--draft-model": (model, "--num-draft-tokens", 2), "--prompt-lookup": (6,), "--mtp": ()}[flag]
    found, said = texts(model, flag, *flags, "--cache-stats")
    assert found == texts(model)[0] and "draft(s) accepted" in said and "Warning" not in said


@pytest.mark.slow
def test_server_gives_the_same_answers_with_mtp(checkpoint: Path, tmp_path: Path) -> None:
    server = ServerProcess(checkpoint, tmp_path, "--mtp", "--kv-cache-memory", "64MB")
    expected = texts(checkpoint)[0]
    for _ in range(2):
        answers = together(lambda body: server.complete(**{"max_tokens": 24, **body}), BODIES)
        assert [answer["choices"][0]["text"] for answer in answers] == expected
    assert server.complete("w1", num_draft_tokens=1, max_tokens=9)
    pool = server.stats()["pool"]
    assert pool["drafted_tokens"] > 0 and pool["draft_steps"] > 0 and pool["budget_bytes"] < 64_000_000
    server.check_end()


def test_num_draft_tokens_of_a_line_needs_drafts(folder: Path) -> None:
    fixed = ("generate", "--model", folder, "--max-tokens", 4, "--prompts-file", "-")
    lines = [{"prompt": "w1", "num_draft_tokens": 2}, {"prompt": "w1", "num_draft_tokens": 65}, {"prompt": "w1"}]
    done = commands.run("mlx_paged", *map(str, fixed), input="\n".join(map(json.dumps, lines)))
    needed, wrong, silent = records(done.stdout)
    assert needed["error"] == "num_draft_tokens requires --draft-model or --mtp" and silent["text"]
    assert "num_draft_tokens: Input should be less than or equal to 64" in wrong["error"]


def test_draft_model_with_another_vocabulary_is_refused() -> None:
    def tokenizer(**vocab: int) -> Any:
        return SimpleNamespace(get_vocab=lambda: vocab)

    check_same_tokens(tokenizer(a=0, b=1), tokenizer(b=1, a=0))
    with pytest.raises(ConfigError, match=r"1 token\(s\), such as 'b': its id is 1 .* and 2"):
        check_same_tokens(tokenizer(a=0, b=1), tokenizer(a=0, b=2))
    with pytest.raises(ConfigError, match=r"2 token\(s\), such as 'b': its id is 1 .* and None"):
        check_same_tokens(tokenizer(a=0, b=1), tokenizer(a=0, c=1))
