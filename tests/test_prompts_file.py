"""mlx_paged.generate --prompts-file: reading prompts, writing results in order, and whole runs on a small model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.errors import PromptsFileError
from mlx_paged.progress import BatchProgress
from mlx_paged.prompts_file import Counts, Prompt, Results, read_prompts
from tests.test_command_line import save_model

# Reading -----------------------------------------------------------------------------------------------------------


def test_one_prompt_a_line() -> None:
    prompts = read_prompts(["first line\n", "\n", '  "quoted" {x}\r\n', "[1, 2]\n"], "file")
    assert [p.text for p in prompts] == ["first line", '  "quoted" {x}', "[1, 2]"]
    assert [p.index for p in prompts] == [0, 1, 2]


def test_json_lines() -> None:
    lines = [
        '{"prompt": "a", "id": 7}\n',
        "\n",
        '{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}\n',
    ]
    first, second = read_prompts(lines, "file")
    assert first == Prompt(0, "a", id=7)
    assert second == Prompt(1, None, ({"role": "user", "content": "b"},), 3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "f holds no prompt"),
        (["\n", "  \n"], "f holds no prompt"),
        (['{"prompt": "a"}', "plain"], "f, line 2: not a JSON object"),
        (['{"text": "a"}'], 'f, line 1: exactly one of "prompt" and "messages"'),
        (['{"prompt": "a", "messages": []}'], "exactly one"),
        (['{"prompt": 3}'], '"prompt" is not a text'),
        (['{"messages": []}'], '"messages" is not a list of objects'),
        (['{"prompt": "a", "max_tokens": 0}'], '"max_tokens" is not a positive'),
        (['{"prompt": "a", "max_tokens": true}'], '"max_tokens" is not a positive'),
    ],
)
def test_unusable_files_are_named_with_their_line(lines: list[str], message: str) -> None:
    with pytest.raises(PromptsFileError, match=message):
        read_prompts(lines, "f")


# Writing -----------------------------------------------------------------------------------------------------------

PROMPTS = [Prompt(i, f"p{i}") for i in range(5)]


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def test_results_come_in_order_whatever_finishes_first() -> None:
    out = io.StringIO()
    results = Results(PROMPTS, None, out)
    seen = []
    for index in (1, 0, 4, 3, 2):
        results.add(PROMPTS[index], text=str(index))
        seen.append(out.getvalue().count("\n"))
    assert seen == [0, 2, 2, 2, 5]
    assert [json.loads(line)["text"] for line in out.getvalue().splitlines()] == list("01234")
    assert results.counts == Counts(5, 5, 0)


def test_an_interrupted_run_goes_on_with_all_it_had(tmp_path: Path) -> None:
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


def test_failed_prompts_are_tried_again(tmp_path: Path) -> None:
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


def test_results_of_other_prompts_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = Results(PROMPTS, path, io.StringIO())
    results.add(PROMPTS[0], text="0")
    results.close()
    with pytest.raises(PromptsFileError, match="another prompt at index 0"):
        Results([Prompt(0, "other")], path, io.StringIO(), resume=True)
    path.write_text('{"index": 9}\n')
    with pytest.raises(PromptsFileError, match="index 9, of 5"):
        Results(PROMPTS, path, io.StringIO(), resume=True)


def test_progress_bar_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = BatchProgress(stream)
        progress.show(Counts(3, 12, 1), 500, 2.0, None)
        progress.show(Counts(4, 12, 1), 510, 2.01, None)  # too soon
        progress.clear()
    assert "3/12 prompts, 1 failed, 250 tokens/s" in terminal.getvalue()
    assert "4/12" not in terminal.getvalue()
    assert plain.getvalue() == ""


# Whole runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def words(count: int, seed: int) -> str:
    return " ".join(f"w{(7 * i + 13 * seed) % 300}" for i in range(count))


TEXTS = [words(n, n) for n in (5, 90, 1, 33, 17, 60)]


def arguments(folder: Path, *args: object) -> list[str]:
    fixed = ("generate", "--model", folder, "--max-tokens", 12, "--ignore-chat-template")
    return [sys.executable, "-m", "mlx_paged", *map(str, fixed), *map(str, args)]


def run(folder: Path, *args: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        arguments(folder, *args), capture_output=True, text=True, env=env, timeout=300, input=stdin, check=False
    )


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Stock mlx-lm's texts."""
    done = run(folder, "--prompts-file", "-", "--no-paged", stdin="\n".join(TEXTS))
    assert done.returncode == 0, done.stderr
    return [record["text"] for record in records(done.stdout)]


def test_results_equal_stocks_also_in_a_tight_pool(folder: Path, expected: list[str], tmp_path: Path) -> None:
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


def test_json_lines_with_chats_ids_and_a_prompt_too_large(folder: Path, expected: list[str], tmp_path: Path) -> None:
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


def test_a_killed_run_can_be_resumed(folder: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    texts = [words(20 + n, n) for n in range(40)]
    source.write_text("\n".join(texts))
    options = ("--prompts-file", source, "--output", out, "--batch-size", 2)
    process = subprocess.Popen(
        arguments(folder, *options), stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not out.exists() or out.read_text().count("\n") < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    kept = out.read_text().splitlines()
    if process.returncode != 0:  # it may have been too quick for us
        assert process.returncode == 130 and "--resume" in errors
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
        (("--prompts-file", "-", "--kv-bits", "4"), "--kv-bits does not go"),
        (("--prompts-file", "-", "--batch-size", "0"), "at least 1"),
        (("--prompts-file", "-"), "stdin holds no prompt"),
    ],
)
def test_errors_are_one_line(folder: Path, args: tuple[str, ...], message: str) -> None:
    done = run(folder, *args, stdin="")
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr
