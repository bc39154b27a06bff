"""--draft-model and --num-draft-tokens with --prompts-file, and a line's own num_draft_tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.errors import ConfigError
from mlx_paged.patches.generate.drafting import check_same_tokens
from tests.support.processes import commands
from tests.support.processes.small_model import records


@pytest.mark.slow  # tests/server/test_server_drafts.py covers a draft model in every run
def test_prompts_file_gives_the_same_texts_with_a_draft_model(folder: Path) -> None:
    def results(*flags: object) -> tuple[list[dict[str, Any]], str]:
        fixed = ("generate", "--model", folder, "--max-tokens", 40, "--ignore-chat-template", "--prompts-file", "-")
        done = commands.run("mlx_paged", *map(str, (*fixed, *flags)), input=lines)
        assert done.returncode == 0, done.stderr
        return records(done.stdout), done.stderr

    # Only a long answer repays a trial of drafts.
    own = [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"repetition_penalty": 1.4}, {"max_tokens": 500}]
    prompts = [{"prompt": f"Once upon a time {n}", **options} for n, options in enumerate(own)]
    lines = "\n".join(map(json.dumps, prompts))
    plain, _ = results()
    found, said = results("--draft-model", folder, "--num-draft-tokens", 2, "--cache-stats")
    assert [each["text"] for each in found] == [each["text"] for each in plain]
    assert "draft(s) accepted" in said and "Warning" not in said


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
