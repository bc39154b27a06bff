"""mlx_paged.generate --prompts-file: whole runs on a small model."""

import importlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
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
from mlx_paged.cli.prompts_file import Prompt, Results
from tests.cli.test_command_line import save_model
from tests.support.processes import commands
from tests.support.processes.terminal import on_a_terminal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


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


def test_an_unknown_batch_generator_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mlx_lm.generate")
    monkeypatch.setattr(module, "BatchGenerator", type("BatchGenerator", (module.BatchGenerator,), {}))
    for flags in ((), ("--no-paged",)):
        monkeypatch.setattr(sys, "argv", ["mlx_paged.generate"])
        with pytest.raises(SystemExit, match=r"--prompts-file does not run with this version of mlx-lm: .* installed"):
            main(arguments(folder, "--prompts-file", "-", *flags)[1:])


@pytest.mark.parametrize("flags", [(), ("--no-paged",)])
def test_the_summary_counts_what_the_results_hold(folder: Path, expected: list[str], flags: tuple[str, ...]) -> None:
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
    """The model with a template that refuses chats, and puts contents into text as they are."""
    strict = tmp_path_factory.mktemp("strict") / "model"
    shutil.copytree(folder, strict)
    (strict / "chat_template.jinja").write_text(STRICT)
    return strict


@pytest.mark.parametrize("flags", [(), ("--no-paged",)])
def test_every_line_has_its_own_outcome(strict_folder: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
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
    assert "token ids go from 0 to 319" in errors[5]
    assert errors[8].startswith("line 9: it is not valid JSON")
    assert results[0]["text"] == results[2]["text"] != ""
    lines[1] = {"messages": chat("w1")}
    source.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"prompt": "cut\n')
    again = run(strict_folder, "--prompts-file", source, "--output", out, "--resume", *flags)
    assert "4 prompt(s) failed" in again.stderr, "the mended line was done, the others were tried again"
    assert [record["index"] for record in records(out.read_text())] == list(range(9))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("flags", [(), ("--no-paged",)])
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
    if not flags:  # a seed gives the same in any batch, but not what mlx-lm draws with it
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


def test_each_line_has_its_own_stop_strings(folder: Path, expected: list[str]) -> None:
    words = expected[0].split()
    stop = f"{words[4][1:]} {words[5][:2]}"  # from inside a word into the next one
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


def test_a_step_that_fails_ends_the_prompts_in_it_and_no_others() -> None:
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
def test_the_bar_moves_during_the_first_prefill(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text(words(2000, 1))
    options = ("--prompts-file", source, "--prefill-step-size", 16, "--max-tokens", 1)
    shown = on_a_terminal("mlx_paged", *arguments(folder, *options))
    counted = [int(each.replace(b",", b"")) for each in re.findall(rb"0/1 prompts, ([\d,]+) prompt tokens", shown)]
    assert len(set(counted)) > 1 and counted == sorted(counted) and 0 < counted[0] < 2000


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
    errors = tmp_path / "errors.txt"
    with errors.open("w") as log:
        process = commands.start("mlx_paged", *arguments(folder, *options), stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not out.exists() or out.read_text().count("\n") < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code = process.wait(300)
    kept = out.read_text().splitlines()
    if code != 0:  # it may have been too quick for us
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
        (("--prompts-file", "-", "--kv-bits", "3"), "pages are of 8 or 4 bits"),
        (("--prompts-file", "-", "--kv-bits", "8", "--quantized-kv-start", "9"), "from the first token on"),
        (("--prompts-file", "-", "--batch-size", "0"), "at least 1"),
        (("--prompts-file", "-", "--chat-template-config", "{x"), "--chat-template-config is not valid JSON"),
        (("--prompts-file", "-"), "stdin holds no prompt"),
    ],
)
def test_errors_are_one_line_each(folder: Path, args: tuple[str, ...], message: str) -> None:
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
