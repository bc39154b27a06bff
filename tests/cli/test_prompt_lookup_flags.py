"""--prompt-lookup of mlx_paged.generate and mlx_paged.server, and prompt_lookup of a line and of a request."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.generate import setup_arg_parser

from mlx_paged import ConfigError
from mlx_paged.cli.answer_grammars import AnswerGrammars
from mlx_paged.cli.batch_run import QUEUED_PER_ROW, BatchRun
from mlx_paged.cli.generate import extend_parser
from mlx_paged.cli.prompts_file import Prompt, Results, read_prompts
from mlx_paged.cli.sampling import Sampling
from mlx_paged.config import PagedConfig
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.requests.completions import CompletionBody
from mlx_paged.server.requests.fields import parsed as parsed_body
from tests.cli.test_command_line import PROMPT, generate, save_model
from tests.cli.test_kv_bits_flags import parsed
from tests.support.processes import commands


def test_the_flag_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(*argv: str) -> int:
        return PagedConfig.from_env().with_arguments(parsed(*argv)).prompt_lookup

    assert (tokens(), tokens("--prompt-lookup", "5"), tokens("--prompt-lookup", "64")) == (0, 5, 64)
    monkeypatch.setenv("MLX_PAGED_PROMPT_LOOKUP", "7")
    assert (tokens(), tokens("--prompt-lookup", "0")) == (7, 0)
    monkeypatch.setenv("MLX_PAGED_PROMPT_LOOKUP", "many")
    with pytest.raises(ConfigError, match=r"MLX_PAGED_.*0 to 64, not 'many'"):
        PagedConfig.from_env()


@pytest.mark.parametrize("value", [-1, 65, "1.5", "", "-0", True, 2.0])
def test_what_is_no_such_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="whole number from 0 to 64"):
        PagedConfig(prompt_lookup=value)


def test_requests_and_lines_say_it_by_name() -> None:
    body, _ = parsed_body(json.dumps({"prompt": "x", "prompt_lookup": 9}).encode(), CompletionBody)
    assert body.prompt_lookup == 9
    lines = [{"prompt": "x", "prompt_lookup": 9}, {"prompt": "x", "prompt_lookup": 65}, {"prompt": "x"}]
    said, wrong, silent = read_prompts([json.dumps(line).encode() for line in lines], "f.jsonl")
    assert said.sampling == {"prompt_lookup": 9} and silent.sampling == {}
    assert wrong.error is not None and "prompt_lookup must be from 0 to 64" in wrong.error
    for value in (-1, 65, 1.0, "4", True):
        with pytest.raises(RequestRefused, match="prompt_lookup"):
            parsed_body(json.dumps({"prompt": "x", "prompt_lookup": value}).encode(), CompletionBody)


class Tokenizer:
    has_chat_template, eos_token_ids = False, ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    @property
    def detokenizer(self) -> Any:
        streamed = SimpleNamespace(last_segment="")
        streamed.add_token = lambda token: setattr(streamed, "last_segment", chr(token))
        return streamed


class Generator:
    """All of an answer in one step."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.removed: list[int] = []

    def insert_segments(self, segments: Any, most: Any, *, options: Any = None, **_: Any) -> list[int]:
        self.options.append(options)
        return [len(self.options)]

    def next(self) -> Any:
        uid = len(self.options)
        reasons = [None, None, None, "length"]
        return [], [SimpleNamespace(uid=uid, token=97 + i, finish_reason=r) for i, r in enumerate(reasons)]

    def remove(self, uids: list[int]) -> None:
        self.removed += uids


def run(prompts: list[Prompt], *flags: str) -> tuple[list[dict[str, Any]], Generator]:
    args = extend_parser(setup_arg_parser()).parse_args(flags)
    args.batch_size = 1 / (1 + QUEUED_PER_ROW)  # one at a time
    out, generator = io.StringIO(), Generator()
    sampling = Sampling(args, Tokenizer(), 10)
    results = Results(prompts, None, out)
    BatchRun(generator, Tokenizer(), args, results, sampling, AnswerGrammars(args), io.StringIO()).run(object())
    return [json.loads(line) for line in out.getvalue().splitlines()], generator


def test_a_stop_string_ends_an_answer_among_the_tokens_of_one_step() -> None:
    prompts = [Prompt(0, "x", sampling={"stop": "b"}), Prompt(1, "x", sampling={"prompt_lookup": 3})]
    records, generator = run(prompts)
    assert [(r["text"], r["finish_reason"]) for r in records] == [("a", "stop"), ("abcd", "length")]
    assert generator.removed == [1]
    assert [options[0].prompt_lookup for options in generator.options] == [None, 3]


def test_a_line_cannot_look_up_without_pages() -> None:
    records, _ = run([Prompt(0, "x", sampling={"prompt_lookup": 3})], "--no-paged")
    assert "--no-paged does without" in records[0]["error"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def test_a_file_has_the_same_texts(folder: Path) -> None:
    def results(*flags: object) -> tuple[list[Any], str]:
        fixed = ("generate", "--model", folder, "--max-tokens", 120, "--ignore-chat-template", "--prompts-file", "-")
        done = commands.run("mlx_paged", *map(str, (*fixed, *flags)), input=text)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["text"] for line in done.stdout.splitlines()], done.stderr

    text = " ".join(f"w{n % 7}" for n in range(40))  # the answer ends in a circle
    plain, _ = results()
    found, said = results("--prompt-lookup", 6, "--cache-stats")
    assert found == plain and "draft(s) accepted" in said


@pytest.mark.parametrize("flags", [("--prompt", PROMPT), ("--prompts-file", "-", "--no-paged")])
def test_where_there_is_no_batch_of_pages_it_is_refused(folder: Path, flags: tuple[str, ...]) -> None:
    refused = generate(folder, *flags, "--prompt-lookup", "4")
    assert refused.returncode == 1 and "--prompt-lookup is for the batch" in refused.stderr
    assert "Traceback" not in refused.stderr
