"""--draft-model and --num-draft-tokens with --prompts-file, and a line's own num_draft_tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.generate import setup_arg_parser

from mlx_paged.cli.batch_run import check_arguments
from mlx_paged.cli.generate import extend_parser
from mlx_paged.cli.prompts_file import read_prompts
from mlx_paged.errors import ConfigError
from mlx_paged.patches.generate.drafting import check_same_tokens
from tests.cli.test_page_flags import Prompt, run
from tests.support.processes import commands


@pytest.mark.slow  # tests/server/test_server_drafts.py covers a draft model in every run
def test_prompts_file_gives_the_same_texts_with_a_draft_model(folder: Path) -> None:
    def results(*flags: object) -> tuple[list[dict[str, Any]], str]:
        fixed = ("generate", "--model", folder, "--max-tokens", 40, "--ignore-chat-template", "--prompts-file", "-")
        done = commands.run("mlx_paged", *map(str, (*fixed, *flags)), input=lines)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr

    # Only a long answer repays a trial of drafts.
    own = [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}, {"repetition_penalty": 1.4}, {"max_tokens": 500}]
    prompts = [{"prompt": f"Once upon a time {n}", **options} for n, options in enumerate(own)]
    lines = "\n".join(map(json.dumps, prompts))
    plain, _ = results()
    found, said = results("--draft-model", folder, "--num-draft-tokens", 2, "--cache-stats")
    assert [each["text"] for each in found] == [each["text"] for each in plain]
    assert "draft(s) accepted" in said and "Warning" not in said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--no-paged",), "requires the paged cache; remove --no-paged"),
        (("--max-kv-size", "100"), "cannot be combined with --max-kv-size"),
        (("--prompt-lookup", "4"), "both propose tokens"),
    ],
)
def test_flags_incompatible_with_a_draft_model_are_refused(flags: tuple[str, ...], why: str) -> None:
    fixed = ("--prompts-file", "p", "--draft-model", "d")
    args = extend_parser(setup_arg_parser()).parse_args((*fixed, *flags))
    with pytest.raises(ConfigError, match=why):
        check_arguments(args)


def test_line_sets_its_own_num_draft_tokens() -> None:
    lines = [{"prompt": "x", "num_draft_tokens": 5}, {"prompt": "x", "num_draft_tokens": 65}, {"prompt": "x"}]
    said, wrong, silent = read_prompts([json.dumps(line).encode() for line in lines], "file")
    assert said.sampling == {"num_draft_tokens": 5} and silent.sampling == {}
    assert wrong.error is not None and "num_draft_tokens: Input should be less than or equal to 64" in wrong.error
    prompts = [Prompt(0, "x", sampling={"num_draft_tokens": 0}), Prompt(1, "x")]
    _, generator = run(prompts, "--draft-model", "d")
    assert [options[0].num_draft_tokens for options in generator.options] == [0, None]
    (record,), _ = run([Prompt(0, "x", sampling={"num_draft_tokens": 2})])
    assert "needs --draft-model" in record["error"]
    (record,), _ = run([Prompt(0, "x", sampling={"num_draft_tokens": 2})], "--no-paged")
    assert "requires the paged cache; remove --no-paged" in record["error"]


def test_draft_model_with_another_vocabulary_is_refused() -> None:
    def tokenizer(**vocab: int) -> Any:
        return SimpleNamespace(get_vocab=lambda: vocab)

    check_same_tokens(tokenizer(a=0, b=1), tokenizer(b=1, a=0))
    with pytest.raises(ConfigError, match=r"1 token\(s\), such as 'b': its id is 1 .* and 2"):
        check_same_tokens(tokenizer(a=0, b=1), tokenizer(a=0, b=2))
    with pytest.raises(ConfigError, match=r"2 token\(s\), such as 'b': its id is 1 .* and None"):
        check_same_tokens(tokenizer(a=0, b=1), tokenizer(a=0, c=1))
