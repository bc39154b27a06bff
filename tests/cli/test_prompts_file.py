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
from typing import Any

import pytest
from mlx_lm import generate, load

from mlx_paged.cli.generate import main
from mlx_paged.cli.prompts_file import Line, Results, parse_lines
from mlx_paged.errors import PromptsFileError
from tests.support.processes import commands
from tests.support.processes.small_model import records
from tests.support.processes.terminal import on_a_terminal


def words(count: int, seed: int) -> str:
    return " ".join(f"w{(7 * i + 13 * seed) % 300}" for i in range(count))


TEXTS = [words(n, n) for n in (5, 90, 1, 33, 17, 60)]
NUM_TOKENS = 12
BLOCK_BYTES = 8 * 3 * 2 * 2 * 32 * 4  # of 8 tokens


def arguments(folder: Path, *args: object) -> list[str]:
    fixed = ("generate", "--model", folder, "--max-tokens", NUM_TOKENS, "--ignore-chat-template")
    return [*map(str, fixed), *map(str, args)]


def run(folder: Path, *args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return commands.run("mlx_paged", *arguments(folder, *args), input=stdin)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Stock mlx-lm's texts."""
    model, tokenizer = load(str(folder))
    return [generate(model, tokenizer, text, max_tokens=NUM_TOKENS) for text in TEXTS]


def test_results_equal_stock_even_in_a_small_pool(folder: Path, expected: list[str], tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("\n".join(TEXTS))
    tight = ("--kv-block-size", 8, "--kv-cache-memory", 17 * BLOCK_BYTES, "--cache-stats", "--prefill-step-size", 20)
    for options in ((), tight):
        done = run(folder, "--prompts-file", source, *options)
        assert done.returncode == 0, done.stderr
        assert [record["text"] for record in records(done.stdout)] == expected
        assert [record["index"] for record in records(done.stdout)] == list(range(6))
        assert [record["prompt_tokens"] for record in records(done.stdout)] == [5, 90, 1, 33, 17, 60]
        prompts, answers = (
            sum(record[name] for record in records(done.stdout)) for name in ("prompt_tokens", "generation_tokens")
        )
        assert f"6 prompts: {prompts} prompt tokens, {answers} generated" in done.stderr
    assert "KV cache: " in done.stderr and "memory of the process" in done.stderr


def test_unknown_batch_generator_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(module, "BatchGenerator", type("BatchGenerator", (module.BatchGenerator,), {}))
    monkeypatch.setattr(sys, "argv", ["mlx_paged.generate"])
    with pytest.raises(SystemExit):
        main(arguments(folder, "--prompts-file", "-")[1:])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--prompts-file does not support this version of mlx-lm: " in line and line.endswith("installed)")


def test_extra_eos_token_ends_an_answer(folder: Path, expected: list[str]) -> None:
    done = run(folder, "--prompts-file", "-", "--extra-eos-token", expected[0].split()[5], stdin=TEXTS[0])
    assert [record["finish_reason"] for record in records(done.stdout)] == ["stop"]


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


def test_failing_lines_do_not_affect_others_and_are_retried(strict_folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    parts = [{"type": "text", "text": "w5 "}, {"type": "text", "text": "w6 w7"}]
    lines: list[dict[str, Any]] = [
        {"messages": chat("w5 w6 w7")},
        {"messages": chat()},
        {"messages": chat(parts)},
        {"messages": chat([{"type": "image_url", "image_url": "x"}])},
        {"prompt": "w5 w6", "temprature": 1},
        {"prompt": "w5 w6", "logit_bias": {"99999": 1}},
        {"prompt": "w5 w6", "top_k": 100000, "temperature": 1},
        {"prompt": "w5 w6", "model": "gpt-5", "user": "me", "stream_options": {"more": 1}},
        {"prompt": "w5 w6", "max_tokens": 0},
        {"prompt": "w5 w6", "n": 2},
        {"prompt": words(400, 1)},
    ]
    tight = ("--kv-block-size", 8, "--kv-cache-memory", 30 * BLOCK_BYTES)
    source.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"prompt": "cut\n')
    done = run(strict_folder, "--prompts-file", source, "--output", out, *tight)
    assert done.returncode == 1 and "8 prompts failed" in done.stderr and "Traceback" not in done.stderr
    results = records(out.read_text())
    errors = {record["index"]: record["error"] for record in results if "error" in record}
    assert sorted(errors) == [1, 3, 4, 5, 8, 9, 10, 11]
    assert "messages: List should have at least 1 item" in errors[1]
    assert "accepts only text" in errors[3]
    assert errors[4] == "'temprature': unknown parameter"
    assert "token ids must be from 0 to 319" in errors[5]
    assert "max_tokens must be at least 1" in errors[8]
    assert "the KV cache budget holds no more" in errors[10]
    assert errors[11].startswith("line 12: it is not valid JSON")
    assert results[0]["text"] == results[2]["text"] != ""
    lines[1] = {"messages": chat("w1")}
    source.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"prompt": "cut\n')
    again = run(strict_folder, "--prompts-file", source, "--output", out, "--resume", *tight)
    assert "7 prompts failed" in again.stderr, "the corrected line succeeded, the others were retried"
    assert [record["index"] for record in records(out.read_text())] == list(range(12))


def test_flags_are_the_defaults_and_a_seed_gives_each_line_one(folder: Path) -> None:
    flags = ("--temp", "0.9", "--top-k", "50", "--seed", "3")
    first, again = (run(folder, "--prompts-file", "-", *flags, stdin="\n".join(TEXTS[:3] * 2)) for _ in range(2))
    texts = [record["text"] for record in records(first.stdout)]
    assert texts == [record["text"] for record in records(again.stdout)]
    assert texts[:3] != texts[3:], "the same prompt in two lines has two seeds"


def test_results_have_the_line_s_id_and_what_its_body_asks_for(folder: Path, expected: list[str]) -> None:
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": TEXTS[0], "logprobs": 2}},
        {"id": 7, "prompt": TEXTS[1], "max_tokens": 3},
    ]
    done = run(folder, "--prompts-file", "-", stdin="\n".join(map(json.dumps, lines)))
    first, second = records(done.stdout)
    assert (first["id"], second["id"], second["generation_tokens"]) == ("a", 7, 3)
    assert first["text"] == expected[0] and len(first["logprobs"]["token_logprobs"]) == NUM_TOKENS
    assert "logprobs" not in second


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


def test_the_output_is_checked_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    done = run(broken, "--prompts-file", "-", "--output", tmp_path / "nowhere" / "out.jsonl", stdin="w1")
    assert done.returncode == 1
    assert "nowhere" in done.stderr and "cannot be loaded" not in done.stderr and "Traceback" not in done.stderr


# Reading -----------------------------------------------------------------------------------------------------------


def read(lines: list[str], name: str = "file") -> list[Line]:
    return parse_lines([line.encode() for line in lines], name)


def test_plain_text_file_has_one_message_per_line() -> None:
    lines = read(["\ufefffirst line\n", "\n", '  "quoted" {x}\r\n', "[1, 2]\n", '{"prompt": 1}\n'])
    assert [line.text for line in lines] == ["first line", '  "quoted" {x}', "[1, 2]", '{"prompt": 1}']
    assert [line.index for line in lines] == [0, 1, 2, 3]


def test_json_lines_are_bodies_with_an_id() -> None:
    body = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}
    given = [{"prompt": "a", "id": 7}, body | {"custom_id": "x"}, {"custom_id": "y", "body": body}]
    assert read([json.dumps(each) + "\n\n" for each in given]) == [
        Line(0, None, {"prompt": "a"}, 7),
        Line(1, None, body, "x"),
        Line(2, None, body, "y"),
    ]


def test_a_file_without_prompts_or_with_an_id_twice_is_refused() -> None:
    for lines in ([], ["\n", "  \n"]):
        with pytest.raises(PromptsFileError, match="f holds no prompt"):
            read(lines, "f")
    with pytest.raises(PromptsFileError, match="f: lines 2 and 3 have the same id 'a'"):
        read(['{"prompt": "x"}', '{"prompt": "x", "id": "a"}', '{"prompt": "y", "custom_id": "a"}'], "f")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plain", "not valid JSON"),
        ('{"prompt": "cut', "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"prompt": "half \\ud800"}', "not valid JSON"),
        ('{"text": "a"}', "exactly one of 'prompt' and 'messages'"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "exactly one"),
        ('{"prompt": "a", "id": [1]}', "an id must be a string or an integer"),
        ('{"custom_id": "a", "body": "b"}', "'body' must be an object"),
    ],
)
def test_unusable_line_is_an_error_of_that_line_only(line: str, message: str) -> None:
    before, broken, after = read(['{"prompt": "a"}', line, '{"prompt": "b"}'])
    assert (before, after) == (Line(0, None, {"prompt": "a"}), Line(2, None, {"prompt": "b"}))
    assert broken.error is not None and broken.error.startswith("line 2: ") and message in broken.error


def test_file_with_a_broken_first_line_is_still_read_as_json_lines() -> None:
    for name, lines in (("f", ['{"prompt": "cut', '{"prompt": "b"}']), ("f.jsonl", ["x", '{"prompt": "b"}'])):
        broken, good = read(lines, name)
        assert broken.error is not None and good.body == {"prompt": "b"}


def test_text_that_is_not_utf8_is_an_error_of_its_line() -> None:
    first, second = parse_lines([b"caf\xe9\n", b"tea\n"], "f")
    assert first.error == "line 1: it is not UTF-8 text" and second.text == "tea"


# Writing -----------------------------------------------------------------------------------------------------------

LINES = [Line(i, f"p{i}") for i in range(5)]


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def test_results_are_written_as_they_come() -> None:
    out = io.StringIO()
    results = Results(LINES, None, out)
    for index in (1, 0, 4, 3, 2):
        results.add(LINES[index], text=str(index))
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == list("10432")
    assert (results.num_done, results.num_lines, results.num_failed) == (5, 5, 0)


def test_resume_keeps_results_of_a_killed_run_and_retries_failed_ones(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = [*LINES[:4], Line(4, "p4", id="four")]
    results = Results(lines, path, io.StringIO())
    for index in (0, 3, 1):
        results.add(lines[index], text=str(index))
    results.add(lines[4], error="no room")
    # No close(): the process was killed, in the middle of a line.
    with path.open("a") as out:
        out.write('{"index": 2, "te')
    with pytest.raises(PromptsFileError, match="--resume"):
        Results(lines, path, io.StringIO())
    again = Results(lines, path, io.StringIO(), resume=True)
    assert [line.index for line in again.missing] == [2, 4]
    assert (again.num_done, again.num_lines, again.num_failed) == (3, 5, 0)
    for index in (4, 2):
        again.add(lines[index], text=str(index))
    again.close()
    assert indices(path) == [0, 3, 1, 4, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl"]


def test_resume_ends_a_last_line_that_lacks_its_end(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"index": 0, "text": "0"}\n{"index": 1, "text": "1"}')
    again = Results(LINES[:3], path, io.StringIO(), resume=True)
    again.add(LINES[2], text="2")
    again.close()
    assert indices(path) == [0, 1, 2]


@pytest.mark.parametrize("resume", [False, True])
def test_unwritable_output_is_refused(tmp_path: Path, resume: bool) -> None:
    with pytest.raises(PromptsFileError, match="nowhere"):
        Results(LINES, tmp_path / "nowhere" / "out.jsonl", io.StringIO(), resume=resume)
    with pytest.raises(PromptsFileError, match="exists: continue it" if not resume else "cannot write results"):
        Results(LINES, tmp_path, io.StringIO(), resume=resume)


def test_run_can_be_resumed_after_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(LINES, path, io.StringIO())
    results.add(LINES[0], text="0")
    results.add(LINES[3], text="3")
    with file_size_limit(path.stat().st_size + 20), pytest.raises(PromptsFileError, match="cannot write results"):
        results.add(LINES[1], text="1" * 5000)
    results.close()
    with file_size_limit(20), pytest.raises(PromptsFileError, match="cannot write results"):
        Results(LINES, path, io.StringIO(), resume=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.jsonl"]
    again = Results(LINES, path, io.StringIO(), resume=True)
    assert indices(path) == [0, 3] and [line.index for line in again.missing] == [1, 2, 4]


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
    for written, message in (('{"index": 9}', "the index 9"), ('{"index": 0, "id": "x"}', "the id 'x'")):
        path.write_text(written + "\n")
        with pytest.raises(PromptsFileError, match=f"from another run: no prompt has {message}"):
            Results(LINES, path, io.StringIO(), resume=True)


def test_progress_bar_is_shown_only_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("w1 w2\nw3 w4\n")
    flags = arguments(folder, "--prompts-file", source)
    shown = on_a_terminal("mlx_paged", *flags).decode()
    assert re.search(r"\[[#.]{30}\] \d/2 prompts, .* left", shown)
    assert "prompts, " not in commands.run("mlx_paged", *flags).stderr
