"""Batches of prompts from a file: reading it, results, sampling options of a line, and progress."""

import importlib
import io
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import generate, load
from mlx_lm.generate import setup_arg_parser
from mlx_lm.sample_utils import make_sampler

from mlx_paged.cli.answer_grammars import AnswerGrammars
from mlx_paged.cli.batch_run import QUEUED_PER_ROW, BatchRun, Sampling
from mlx_paged.cli.generate import extend_parser, main
from mlx_paged.cli.prompts_file import Counts, Prompt, Results, read_prompts
from mlx_paged.cli.terminal import BatchProgress
from mlx_paged.errors import ConfigError, PromptsFileError
from mlx_paged.patches.samplers import processors_of, sampler_of
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.requests import fields
from mlx_paged.server.requests.chat import ChatBody
from mlx_paged.server.requests.fields import parsed
from tests.support.cases import slow
from tests.support.processes import commands
from tests.support.processes.terminal import on_a_terminal


def words(count: int, seed: int) -> str:
    return " ".join(f"w{(7 * i + 13 * seed) % 300}" for i in range(count))


TEXTS = [words(n, n) for n in (5, 90, 1, 33, 17, 60)]


def arguments(folder: Path, *args: object) -> list[str]:
    fixed = ("generate", "--model", folder, "--max-tokens", 12, "--ignore-chat-template")
    return [*map(str, fixed), *map(str, args)]


def run(folder: Path, *args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return commands.run("mlx_paged", *arguments(folder, *args), input=stdin)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Stock mlx-lm's texts."""
    done = run(folder, "--prompts-file", "-", "--no-paged", stdin="\n".join(TEXTS))
    assert done.returncode == 0, done.stderr
    return [record["text"] for record in records(done.stdout)]


def test_results_equal_stock_even_in_a_small_pool(folder: Path, expected: list[str], tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("\n".join(TEXTS))
    block = 8 * 3 * 2 * 2 * 32 * 4
    tight = ("--kv-block-size", 8, "--kv-cache-memory", f"{17 * block}", "--cache-stats", "--prefill-step-size", 20)
    for options in ((), tight):
        done = run(folder, "--prompts-file", source, *options)
        assert done.returncode == 0, done.stderr
        assert [record["text"] for record in records(done.stdout)] == expected
        assert [record["index"] for record in records(done.stdout)] == list(range(6))
        assert [record["prompt_tokens"] for record in records(done.stdout)] == [5, 90, 1, 33, 17, 60]
        assert "6 prompts" in done.stderr


def test_unknown_batch_generator_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(module, "BatchGenerator", type("BatchGenerator", (module.BatchGenerator,), {}))
    for flags in ((), ("--no-paged",)):
        monkeypatch.setattr(sys, "argv", ["mlx_paged.generate"])
        with pytest.raises(SystemExit):
            main(arguments(folder, "--prompts-file", "-", *flags)[1:])
        (line,) = capsys.readouterr().err.splitlines()
        assert "--prompts-file does not support this version of mlx-lm: " in line and line.endswith("installed)")


@pytest.mark.parametrize("flags", [(), *slow(("--no-paged",), single=True)])
def test_summary_counts_equal_the_sums_of_the_results(
    folder: Path, expected: list[str], flags: tuple[str, ...]
) -> None:
    ending = expected[0].split()[5]
    done = run(folder, "--prompts-file", "-", "--extra-eos-token", ending, *flags, stdin="\n".join(TEXTS))
    written = records(done.stdout)
    assert "stop" in {record["finish_reason"] for record in written}
    prompts, answers = (sum(record[name] for record in written) for name in ("prompt_tokens", "generation_tokens"))
    assert f"6 prompts: {prompts} prompt tokens, {answers} generated" in done.stderr


STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}w1 {{ m['content'] }} w2 {% endfor %}"
)


def chat(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.fixture(scope="module")
def strict_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model whose template refuses roles that do not alternate and inserts contents unchanged."""
    strict = tmp_path_factory.mktemp("strict") / "model"
    shutil.copytree(folder, strict)
    (strict / "chat_template.jinja").write_text(STRICT)
    return strict


@pytest.mark.parametrize("flags", [(), *slow(("--no-paged",), single=True)])
def test_failing_lines_do_not_affect_others_and_are_retried(
    strict_folder: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    parts = [{"type": "text", "text": "w5 "}, {"type": "text", "text": "w6 w7"}]
    lines = [
        {"messages": chat("w5 w6 w7")},
        {"messages": chat("w1", "w2")},
        {"messages": chat(parts)},
        {"messages": chat([{"type": "image_url", "image_url": "x"}])},
        {"prompt": "w5 w6", "temprature": 1},
        {"prompt": "w5 w6", "logit_bias": {"99999": 1}},
        {"prompt": "w5 w6", "top_k": 100000, "temperature": 1},
        {"prompt": "w5 w6"},
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"prompt": "cut\n')
    done = run(strict_folder, "--prompts-file", source, "--output", out, *flags)
    assert done.returncode == 1 and "5 prompt(s) failed" in done.stderr and "Traceback" not in done.stderr
    results = records(out.read_text())
    errors = {record["index"]: record["error"] for record in results if "error" in record}
    assert sorted(errors) == [1, 3, 4, 5, 8]
    assert "roles must alternate" in errors[1]
    assert "Only 'text' content type is supported" in errors[3]
    assert errors[4] == "line 5: 'temprature': not an option of a prompts file"
    assert "token ids must be from 0 to 319" in errors[5]
    assert errors[8].startswith("line 9: it is not valid JSON")
    assert results[0]["text"] == results[2]["text"] != ""
    lines[1] = {"messages": chat("w1")}
    source.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"prompt": "cut\n')
    again = run(strict_folder, "--prompts-file", source, "--output", out, "--resume", *flags)
    assert "4 prompt(s) failed" in again.stderr, "the corrected line succeeded, the others were retried"
    assert [record["index"] for record in records(out.read_text())] == list(range(9))


@pytest.mark.parametrize("flags", [(), *slow(("--no-paged",), single=True)])
def test_each_line_has_its_own_sampling_options(folder: Path, expected: list[str], flags: tuple[str, ...]) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": TEXTS[0]},
        {"prompt": TEXTS[1], "temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"prompt": TEXTS[2], "logit_bias": {"17": 1000}},
        {"prompt": TEXTS[3], "temperature": 0.9, "seed": 7, "top_k": 5},
        {"prompt": TEXTS[4], "repetition_penalty": 5, "presence_penalty": 2, "frequency_penalty": 2, "max_tokens": 4},
        {"prompt": TEXTS[1], "temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"prompt": TEXTS[5], "temperature": 0},
        {"prompt": TEXTS[1], "temperature": 0.9, "seed": 8, "top_p": 0.9},
        {"prompt": TEXTS[0], "temperature": 0.9, "min_p": 0.9999, "xtc_probability": 0},
    ]
    done = run(folder, "--prompts-file", "-", *flags, stdin="\n".join(map(json.dumps, lines)))
    assert done.returncode == 0, done.stderr
    texts = [record["text"] for record in records(done.stdout)]
    assert (texts[0], texts[6], texts[8]) == (expected[0], expected[5], expected[0])
    assert set(texts[2].split()) == {"w17"} and len(texts[2].split()) == 12
    assert len(texts[4].split()) == 4 and texts[4] != " ".join(expected[4].split()[:4])
    assert texts[1] == texts[5] != texts[7] and texts[1] != expected[1]
    if not flags:  # a seed gives the same text in any batch, but not mlx-lm's text
        part = [lines[3], lines[1]]
        others = run(folder, "--prompts-file", "-", "--batch-size", "1", stdin="\n".join(map(json.dumps, part)))
        assert [record["text"] for record in records(others.stdout)] == [texts[3], texts[1]]
        return
    model, tokenizer = load(str(folder))
    for index, options in ((1, {"top_p": 0.9}), (3, {"top_k": 5})):
        mx.random.seed(7)
        prompt = tokenizer.encode(lines[index]["prompt"])
        alone = generate(model, tokenizer, prompt, max_tokens=12, sampler=make_sampler(0.9, **options))
        assert alone == texts[index]


def test_all_sampling_options_of_a_line_reach_the_engine() -> None:
    tokenizer = SimpleNamespace(encode=lambda text: [1], eos_token_ids=())
    sampling = Sampling(extend_parser(setup_arg_parser()).parse_args([]), tokenizer, 10)
    whole = {"top_k": 4, "seed": 5, **{f"{name}_context_size": 7 for name in ("repetition", "presence", "frequency")}}
    said = dict.fromkeys(fields.Sampling.model_fields, 0.25) | whole | {"logit_bias": {"3": 1.5}}
    del said["prompt_lookup"]  # see BatchRun._options
    params = sampling.params(said)
    told = {name: getattr(params, name) for name in said}
    assert told == said | {"logit_bias": {3: 1.5}}
    assert sampling.params({"top_k": 50}).top_k == 9
    assert sampler_of(params) is sampler_of(sampling.params(said)) and len(processors_of(params)) == 4
    with pytest.raises(RequestRefused, match="logit_bias"):
        sampling.params({"logit_bias": {"10": 1.0}})
    with pytest.raises(ConfigError):
        sampling.params({"min_p": 2.0})


def test_each_line_has_its_own_stop_strings(folder: Path, expected: list[str]) -> None:
    words = expected[0].split()
    stop = f"{words[4][1:]} {words[5][:2]}"  # begins inside a word and ends inside the next
    lines: list[dict[str, Any]] = [
        {"prompt": TEXTS[0], "stop": stop},
        {"prompt": TEXTS[0], "stop": ["nowhere", words[3]]},
        {"prompt": TEXTS[1]},
        {"prompt": TEXTS[0], "stop": "nowhere"},
    ]
    done = run(folder, "--prompts-file", "-", stdin="\n".join(map(json.dumps, lines)))
    assert done.returncode == 0, done.stderr
    found = [(record["text"], record["finish_reason"]) for record in records(done.stdout)]
    assert found[0] == (expected[0][: expected[0].index(stop)], "stop")
    assert found[1] == (expected[0][: expected[0].index(words[3])], "stop")
    assert found[2:] == [(expected[1], "length"), (expected[0], "length")]


def test_failing_step_fails_only_the_prompts_in_it() -> None:
    class Generator:
        calls = 0

        def insert_segments(self, segments: list[list[list[int]]], most: list[int], **options: Any) -> list[int]:
            self.calls += 1
            return [self.calls]

        def next(self) -> Any:
            if self.calls == 1:
                raise RuntimeError("out of luck")
            return [], [SimpleNamespace(uid=self.calls, token=5, finish_reason="length")]

        def remove(self, uids: list[int]) -> None:
            assert uids == [1]

    class Tokenizer:
        has_chat_template, eos_token_ids = False, ()

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1]

        def decode(self, tokens: list[int]) -> str:
            return str(tokens)

    args = extend_parser(setup_arg_parser()).parse_args(["--batch-size", "1"])
    args.batch_size = 1 / (1 + QUEUED_PER_ROW)  # one at a time, so that the first fails alone
    out = io.StringIO()
    results = Results([Prompt(i, f"p{i}") for i in range(3)], None, out)
    BatchRun(
        Generator(), Tokenizer(), args, results, Sampling(args, Tokenizer(), 10), AnswerGrammars(args), io.StringIO()
    ).run(object())
    assert [record.get("text", record.get("error")) for record in records(out.getvalue())] == [
        "RuntimeError: out of luck",
        "[5]",
        "[5]",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_progress_bar_moves_during_the_first_prefill(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text(words(600, 1))
    options = ("--prompts-file", source, "--prefill-step-size", 16, "--max-tokens", 1)
    each_time = tmp_path / "each_time.py"  # the command, which draws after every chunk
    each_time.write_text(
        "import sys\n"
        "from mlx_paged.__main__ import main\n"
        "from mlx_paged.cli import terminal\n"
        "terminal.SHOW_EVERY_SECONDS = 0.0\n"
        "sys.exit(main())\n"
    )
    shown = on_a_terminal(each_time, *arguments(folder, *options))
    counted = [int(each.replace(b",", b"")) for each in re.findall(rb"0/1 prompts, ([\d,]+) prompt tokens", shown)]
    assert len(set(counted)) > 1 and counted == sorted(counted) and 0 < counted[0] < 600


def test_prompt_too_large_fails_alone_among_json_lines(folder: Path, expected: list[str], tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": TEXTS[0], "id": "first"},
        {"prompt": words(400, 1)},
        {"messages": [{"role": "user", "content": TEXTS[3]}], "max_tokens": 3},
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    block = 8 * 3 * 2 * 2 * 32 * 4
    done = run(folder, "--prompts-file", source, "--output", out, "--kv-block-size", 8, "--kv-cache-memory", 30 * block)
    assert done.returncode == 1
    assert "1 prompt(s) failed" in done.stderr
    first, second, third = records(out.read_text())
    assert (first["id"], first["text"], first["finish_reason"]) == ("first", expected[0], "length")
    assert "RequestTooLargeError" in second["error"]
    assert third["generation_tokens"] == 3


def test_interrupted_run_can_be_resumed(folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    texts = [words(20 + n, n) for n in range(40)]
    source.write_text("\n".join(texts))
    options = ("--prompts-file", source, "--output", out, "--batch-size", 2)
    errors = tmp_path / "errors.txt"
    with errors.open("w") as log:
        process = commands.start("mlx_paged", *arguments(folder, *options), stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not out.exists() or out.read_text().count("\n") < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code = process.wait(300)
    kept = out.read_text().splitlines()
    if code != 0:  # 0 if it ended before the signal
        assert code == 130 and "--resume" in errors.read_text()
        assert 5 <= len(kept) < 40
        refused = run(folder, *options)
        assert refused.returncode == 1 and "--resume" in refused.stderr
    done = run(folder, *options, "--resume")
    assert done.returncode == 0, done.stderr
    assert out.read_text().splitlines()[: len(kept)] == kept
    assert [record["index"] for record in records(out.read_text())] == list(range(40))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompts-file", "missing.txt"), "missing.txt cannot be read"),
        (("--output", "x"), "need --prompts-file"),
        (("--prompts-file", "-", "--resume"), "--resume needs --output"),
        (("--prompts-file", "-", "--kv-bits", "3"), "kv_bits must be 8, 4 or (8, 4), got 3"),
        (
            ("--prompts-file", "-", "--kv-bits", "8", "--quantized-kv-start", "9"),
            "quantized_kv_start must be 0 or 5000",
        ),
        (("--prompts-file", "-", "--batch-size", "0"), "at least 1"),
        (("--prompts-file", "-", "--chat-template-config", "{x"), "--chat-template-config is not valid JSON"),
        (("--prompts-file", "-"), "stdin holds no prompt"),
    ],
)
def test_errors_are_reported_without_a_traceback(folder: Path, args: tuple[str, ...], message: str) -> None:
    done = run(folder, *args, stdin="")
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


def test_the_output_is_checked_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    done = run(broken, "--prompts-file", "-", "--output", tmp_path / "nowhere" / "out.jsonl", stdin="w1")
    assert done.returncode == 1
    assert "nowhere" in done.stderr and "cannot be loaded" not in done.stderr and "Traceback" not in done.stderr


# Reading -----------------------------------------------------------------------------------------------------------


def read(lines: list[str], name: str = "file") -> list[Prompt]:
    return read_prompts([line.encode() for line in lines], name)


def test_plain_text_file_has_one_prompt_per_line() -> None:
    prompts = read(["\ufefffirst line\n", "\n", '  "quoted" {x}\r\n', "[1, 2]\n", '{"prompt": 1}\n'])
    assert [p.text for p in prompts] == ["first line", '  "quoted" {x}', "[1, 2]", '{"prompt": 1}']
    assert [p.index for p in prompts] == [0, 1, 2, 3]


def test_json_lines_are_read_with_ids_and_options() -> None:
    lines = [
        '{"prompt": "a", "id": 7}\n',
        "\n",
        '{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}\n',
        '{"prompt": "c", "messages": null, "temperature": 0.5, "logit_bias": {"3": 1}, "max_completion_tokens": 4}\n',
    ]
    first, second, third = read(lines)
    assert first == Prompt(0, "a", id=7)
    assert second == Prompt(1, None, ({"role": "user", "content": "b"},), 3)
    assert third == Prompt(2, "c", max_tokens=4, sampling={"temperature": 0.5, "logit_bias": {"3": 1}})


@pytest.mark.parametrize("lines", [[], ["\n", "  \n"]])
def test_a_file_without_prompts_is_refused(lines: list[str]) -> None:
    with pytest.raises(PromptsFileError, match="f holds no prompt"):
        read(lines, "f")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plain", "not valid JSON"),
        ('{"prompt": "cut', "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"prompt": "half \\ud800"}', "not UTF-8"),
        ('{"text": "a"}', "'text': not an option"),
        ('{"id": 3}', "exactly one of 'prompt' and 'messages'"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "exactly one"),
        ('{"prompt": 3}', "prompt: Input should be a valid string, got 3"),
        ('{"prompt": ""}', "prompt: String should have at least 1 character"),
        ('{"messages": []}', "messages: must be a non-empty list"),
        ('{"messages": [{"content": "no role"}]}', "messages: message 0 must be an object with a role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages: message 0: the content must be a string or a"),
        ('{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "messages: message 0: each part of the"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "a part of type text must have a text"),
        ('{"messages": [{"role": "user", "tool_calls": {}}]}', "messages: message 0: tool_calls must be a list of"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: Input should be greater than or equal to 1, got 0"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens: Input should be a valid integer, got True"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature: Input should be a valid number"),
        ('{"prompt": "a", "top_p": 1.5}', "top_p: Input should be less than or equal to 1, got 1.5"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: keys must be token ids, got 'x'"),
        ('{"prompt": "a", "n": 2}', "n: Input should be 1, got 2"),
        ('{"prompt": "a", "temprature": 1, "stream": true}', "'stream', 'temprature': not an option"),
        ('{"prompt": "a", "stop": 3}', "stop: Input should be a valid string"),
        ('{"prompt": "a", "tools": []}', "'tools': not an option"),
    ],
)
def test_unusable_line_is_an_error_of_that_line_only(line: str, message: str) -> None:
    before, broken, after = read(['{"prompt": "a"}', line, '{"prompt": "b"}'])
    assert (before, after) == (Prompt(0, "a"), Prompt(2, "b"))
    assert broken.error is not None and broken.error.startswith("line 2: ") and message in broken.error


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": [{"type": "text", "text": 3}]},
        {"role": 3, "content": "a"},
        {"role": "user", "content": "a", "tool_calls": [3]},
    ],
)
def test_messages_of_a_line_are_checked_as_in_the_api(message: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "b"}, message]}
    (prompt,) = read([json.dumps(body)])
    try:
        parsed(json.dumps(body).encode(), ChatBody)
    except RequestRefused as error:
        assert prompt.error == f"line 1: {error}" and "message 1" in prompt.error
    else:
        assert prompt.error is None and prompt.messages == tuple(body["messages"])


def test_file_with_a_broken_first_line_is_still_read_as_json_lines() -> None:
    for name, lines in (("f", ['{"prompt": "cut', '{"prompt": "b"}']), ("f.jsonl", ["x", '{"prompt": "b"}'])):
        broken, good = read(lines, name)
        assert broken.error is not None and good.text == "b"


def test_text_that_is_not_utf8_is_an_error_of_its_line() -> None:
    first, second = read_prompts([b"caf\xe9\n", b"tea\n"], "f")
    assert first.error == "line 1: it is not UTF-8 text" and second.text == "tea"


# Writing -----------------------------------------------------------------------------------------------------------

PROMPTS = [Prompt(i, f"p{i}") for i in range(5)]


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def test_results_are_written_in_order_of_the_prompts() -> None:
    out = io.StringIO()
    results = Results(PROMPTS, None, out)
    seen = []
    for index in (1, 0, 4, 3, 2):
        results.add(PROMPTS[index], text=str(index))
        seen.append(out.getvalue().count("\n"))
    assert seen == [0, 2, 2, 2, 5]
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == list("01234")
    assert results.counts == Counts(5, 5, 0)


def test_resume_keeps_all_results_of_a_killed_run(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS, path, io.StringIO())
    for index in (0, 3, 1):
        results.add(PROMPTS[index], text=str(index))
    # No close(): the process was killed, in the middle of a line.
    with path.open("a") as out:
        out.write('{"index": 2, "te')
    with pytest.raises(PromptsFileError, match="--resume"):
        Results(PROMPTS, path, io.StringIO())
    again = Results(PROMPTS, path, io.StringIO(), resume=True)
    assert [p.index for p in again.missing()] == [2, 4]
    assert again.counts == Counts(3, 5, 0)
    for index in (4, 2):
        again.add(PROMPTS[index], text=str(index))
    again.close()
    assert indices(path) == [0, 1, 2, 3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl"]


def test_resume_retries_failed_prompts(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS[:3], path, io.StringIO())
    results.add(PROMPTS[0], error="no room")
    results.add(PROMPTS[1], text="1")
    results.add(PROMPTS[2], text="2")
    assert results.counts == Counts(3, 3, 1)
    results.close()
    again = Results(PROMPTS[:3], path, io.StringIO(), resume=True)
    assert [p.index for p in again.missing()] == [0]
    again.add(PROMPTS[0], text="0")
    again.close()
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["0", "1", "2"]


def test_resume_runs_a_corrected_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    broken = [Prompt(0, "a"), Prompt(1, None, error="line 2: no")]
    results = Results(broken, path, io.StringIO())
    results.add(broken[0], text="0")
    results.add(broken[1], error=broken[1].error)
    results.close()
    again = Results([Prompt(0, "a"), Prompt(1, "b")], path, io.StringIO(), resume=True)
    assert [p.text for p in again.missing()] == ["b"]


def test_resume_with_other_sampling_options_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results([Prompt(0, "a", sampling={"temperature": 1})], path, io.StringIO())
    results.add(results.prompts[0], text="0")
    results.close()
    with pytest.raises(PromptsFileError, match="another prompt"):
        Results([Prompt(0, "a", sampling={"temperature": 2})], path, io.StringIO(), resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_unwritable_output_is_refused(tmp_path: Path, resume: bool) -> None:
    with pytest.raises(PromptsFileError, match="nowhere"):
        Results(PROMPTS, tmp_path / "nowhere" / "out.jsonl", io.StringIO(), resume=resume)
    with pytest.raises(PromptsFileError, match="exists: continue it" if not resume else "cannot write results"):
        Results(PROMPTS, tmp_path, io.StringIO(), resume=resume)


def test_failing_write_of_a_result_raises_prompts_file_error() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(PromptsFileError, match="No space left"):
        Results(PROMPTS, None, Full()).add(PROMPTS[0], text="0")


def test_full_disk_keeps_whole_lines_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS, path, io.StringIO())
    results.add(PROMPTS[0], text="0")
    results.add(PROMPTS[3], text="3")
    with file_size_limit(path.stat().st_size + 20), pytest.raises(PromptsFileError, match="cannot write results"):
        results.add(PROMPTS[1], text="1" * 5000)
    assert indices(path) == [0] and path.read_bytes().endswith(b"\n")
    with file_size_limit(path.stat().st_size + 20):
        results.close()  # has nothing left to write
    with file_size_limit(20), pytest.raises(PromptsFileError, match="cannot write results"):
        Results(PROMPTS, path, io.StringIO(), resume=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.partial"]
    again = Results(PROMPTS, path, io.StringIO(), resume=True)
    assert indices(path) == [0] and [prompt.index for prompt in again.missing()] == [1, 2, 4]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the size of files: a write beyond it fails or is cut short, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_resume_with_other_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS, path, io.StringIO())
    results.add(PROMPTS[0], text="0")
    results.close()
    with pytest.raises(PromptsFileError, match="result with index 0 is of another prompt"):
        Results([Prompt(0, "other")], path, io.StringIO(), resume=True)
    path.write_text('{"index": 9}\n')
    with pytest.raises(PromptsFileError, match="index 9 for 5 prompts"):
        Results(PROMPTS, path, io.StringIO(), resume=True)


def test_progress_bar_is_shown_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = BatchProgress(stream)
        progress.show(Counts(3, 12, 1), 500, 2.0, None)
        progress.show(Counts(4, 12, 1), 510, 2.01, None)  # too soon
        progress.show(Counts(0, 12, 0), 0, 3.0, None, num_prompt_tokens=2048, underway=4.0)
        progress.clear()
    assert "3/12 prompts, 1 failed, 250 tokens/s" in terminal.getvalue()
    assert "4/12" not in terminal.getvalue()
    assert f"[{10 * '#'}{20 * '.'}] 0/12 prompts, 2,048 prompt tokens" in terminal.getvalue(), "before a prompt is done"
    assert plain.getvalue() == ""
