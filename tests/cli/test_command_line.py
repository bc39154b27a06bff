"""mlx_paged.generate and python -m mlx_paged as processes, on a small model folder."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import setup_arg_parser

from mlx_paged.cli.generate import extend_parser
from tests.support.models.builders import COMMON, HEADS, build
from tests.support.processes import commands
from tests.support.processes.small_model import PROMPT, check_error, command, generate, save_model, text_of
from tests.support.processes.terminal import on_a_terminal


def test_generate_gives_stock_text_through_the_pool(folder: Path) -> None:
    stock = generate(folder, "--prompt", PROMPT, module="mlx_lm")
    paged = generate(folder, "--prompt", PROMPT, "--cache-stats", "--kv-block-size", 16, "--kv-cache-memory", "1GB")
    assert text_of(paged) == text_of(stock) != ""
    assert "blocks of 16 tokens" in paged.stderr and "of 1000 MB" in paged.stderr
    assert "attention: gather" in paged.stderr and "attention: prefill" in paged.stderr
    peak = re.search(r"0.0 MB in use \(peak (\d+\.\d) MB\)", paged.stderr)
    assert peak is not None and float(peak[1]) > 0
    process = re.search(r"memory of the process: (\d+\.\d) MB at its peak", paged.stderr)
    assert process is not None and float(process[1]) > float(peak[1])
    assert "Generation: 24 tokens" in paged.stdout


def test_max_kv_size_gives_stock_text_alone_and_in_a_batch(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    config = {**COMMON, **HEADS, "model_type": "qwen3", "num_hidden_layers": 2, "max_position_embeddings": 4096}
    config |= {"tie_word_embeddings": True, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(build("qwen3").parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    prompts = [" ".join(f"w{i * k % 97}" for i in range(1, n)) for k, n in ((3, 5), (5, 40))]
    bounded = ("--max-kv-size", 16, "--prefill-step-size", 8)
    expected = [text_of(generate(folder, "--prompt", prompt, *bounded, module="mlx_lm")) for prompt in prompts]
    for prompt, text in zip(prompts, expected, strict=True):
        run = generate(folder, "--prompt", prompt, *bounded, "--cache-stats", "--kv-block-size", 8)
        assert text_of(run) == text
        assert run.stderr.count("keeps a sequence's first tokens") == 1


def test_no_paged_runs_stock(folder: Path) -> None:
    run = generate(folder, "--prompt", PROMPT, "--no-paged", "--cache-stats")
    assert text_of(run) == text_of(generate(folder, "--prompt", PROMPT))
    assert "stock mlx-lm (not paged)" in run.stderr


def test_every_flag_of_mlx_lm_is_accepted() -> None:
    def flags(parser) -> set[str]:
        return {flag for action in parser._actions for flag in action.option_strings}

    ours = flags(extend_parser(setup_arg_parser()))
    assert flags(setup_arg_parser()) <= ours
    assert {"--kv-block-size", "--kv-cache-memory", "--kernel", "--cache-stats", "--no-paged"} <= ours
    help_text = command("generate", "--help")
    assert help_text.returncode == 0
    assert "--kv-block-size" in help_text.stdout and "--top-p" in help_text.stdout
    options = help_text.stdout[help_text.stdout.index("common options:") :]
    assert options.index("--cache-stats") < options.index("--top-p")


def test_draft_model_gives_the_same_text(folder: Path, tmp_path: Path) -> None:
    plain = generate(folder, "--prompt", PROMPT)
    draft = generate(folder, "--prompt", PROMPT, "--draft-model", folder, "--cache-stats")
    assert text_of(draft) == text_of(plain)
    assert "KV cache of the draft model: blocks of " in draft.stderr


def test_prompt_cache_files_are_interchangeable_with_mlx_lm(folder: Path, tmp_path: Path) -> None:
    stock_file, paged_file = tmp_path / "stock.safetensors", tmp_path / "paged.safetensors"
    save = ("cache_prompt", "--model", folder, "--prompt", PROMPT, "--prompt-cache-file")
    assert command(*save, stock_file, module="mlx_lm").returncode == 0
    made = command(*save, paged_file)
    assert made.returncode == 0, made.stderr
    texts = []
    for file in (stock_file, paged_file):
        for module in ("mlx_lm", "mlx_paged"):
            use = ("generate", "--prompt-cache-file", file, "--prompt", "w5 w6", "--max-tokens", 16)
            texts.append(text_of(command(*use, module=module)))
    assert len(set(texts)) == 1 and texts[0]
    stats = command("generate", "--prompt-cache-file", stock_file, "--prompt", "w5 w6", "--cache-stats")
    assert "KV cache: blocks of " in stats.stderr and "attention: gather" in stats.stderr


def test_prompt_cache_with_3_bits_is_made_by_mlx_lm(folder: Path, tmp_path: Path) -> None:
    file, bits = tmp_path / "cache.safetensors", ("--kv-bits", 3, "--kv-group-size", 32, "--quantized-kv-start", 0)
    save = ("cache_prompt", "--model", folder, "--prompt", PROMPT, "--prompt-cache-file", file)
    made = command(*bits[:4], *save, *bits[4:])
    assert made.returncode == 0, made.stderr
    arrays, _ = mx.load(str(file), return_metadata=True)
    assert arrays["0.0.0"].dtype == mx.uint32 and arrays["0.0.0"].shape[-1] == 3, "32 values of 3 bits"
    check_error(command("chat", "--model", folder, *bits[:2]), "unrecognized arguments: --kv-bits 3", code=2)


BLOCKS = ("--kv-block-size", "32")
BLOCK = 32 * 3 * 2 * 2 * 32 * 4  # bytes: 32 tokens, 3 layers, keys and values of 2 heads of 32, f32


def test_budget_too_small_is_refused_with_the_bytes_needed(folder: Path) -> None:
    run = generate(folder, "--prompt", PROMPT, *BLOCKS, "--kv-cache-memory", "1KB")
    check_error(run, f"which needs at least {2 * BLOCK:,} bytes")
    run = generate(folder, "--prompt", PROMPT, *BLOCKS, "--kv-cache-memory", f"{2 * BLOCK + 1000}")
    check_error(run, f"61 tokens of prompt and answer need {3 * BLOCK:,} bytes")


def test_error_during_generation_starts_on_a_new_line(folder: Path, tmp_path: Path) -> None:
    """The prompt and a few tokens fit, the rest does not."""
    options = (*BLOCKS, "--ignore-chat-template", "--prompt", PROMPT, "--max-tokens", "40")
    options += ("--kv-cache-memory", str(3 * BLOCK))
    with (tmp_path / "shown").open("w") as shown:
        process = commands.start("mlx_paged", "generate", "--model", folder, *options, stdout=shown, stderr=shown)
        assert process.wait(300) == 1
    text = (tmp_path / "shown").read_text()
    assert "Traceback" not in text
    before, error = text.split("mlx_paged generate: ")
    assert re.search(r"w\d+\n$", before), "text was printed and its line ended"
    assert "65 tokens of prompt and answer need" in error


@pytest.mark.parametrize("command_name", ["generate", "chat"])
def test_interrupt_exits_with_130_and_no_traceback(folder: Path, command_name: str) -> None:
    arguments = ["--model", str(folder), "--max-tokens", "100000"]
    arguments += ["--prompt", PROMPT] if command_name == "generate" else []
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "mlx_paged", command_name, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        # Children of a shell's background job ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{PROMPT}\n".encode())
    process.stdin.flush()
    shown = b""
    while len(re.findall(rb"\bw\d+\b", shown)) < 3:  # it is generating
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, process.stderr and process.stderr.read()
        shown += piece
    process.send_signal(signal.SIGINT)
    if command_name == "chat":  # the first ends the answer, the second the chat
        shown = b""
        while "›".encode() not in shown:  # the chat's prompt
            shown += os.read(process.stdout.fileno(), 4096)
        process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors and b"KeyboardInterrupt" not in errors
    assert rest.endswith(b"\n")


def test_end_of_input_ends_a_chat(folder: Path) -> None:
    run = command("chat", "--model", folder)
    assert run.returncode == 0 and "Traceback" not in run.stderr


def test_missing_or_corrupt_model_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    check_error(generate(tmp_path / "nowhere"), "nowhere does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    check_error(generate(empty), "has no config.json")
    (empty / "config.json").write_text("{not json")
    check_error(generate(empty), "cannot be read")
    (empty / "config.json").write_text((folder / "config.json").read_text())
    check_error(generate(empty), "has no model*.safetensors")
    weights = (folder / "model.safetensors").read_bytes()
    (empty / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    check_error(generate(empty), "cannot be loaded")
    (empty / "model.safetensors").write_bytes(b"x" * 1000)
    check_error(command("server", "--model", empty, "--port", 0), "is truncated", code=78)


def test_corrupt_prompt_cache_file_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")
    check_error(generate(folder, "--prompt-cache-file", broken), "broken.safetensors cannot be read")
    check_error(generate(folder, "--prompt-cache-file", tmp_path / "none"), "cannot be read")


def test_help_lists_every_command_and_unknown_ones_are_refused() -> None:
    shown = command("--help").stdout
    assert "commands of mlx_lm" in shown
    theirs = command("--help", module="mlx_lm").stdout
    for name in ("generate", "server", "doctor", *re.findall(r"'(\w+)'", theirs)):
        assert re.search(rf"^  {name} +\w.*$", shown, re.MULTILINE), f"{name} has a line"
    flat = " ".join(shown.split())
    for text in (
        "(default: auto); also MLX_PAGED_BLOCK_SIZE",
        "80 % of the memory that the weights leave",
        "MLX_PAGED_KERNEL",
    ):
        assert text in flat and text in " ".join(command("generate", "--help").stdout.split())
    check_error(command("nonsense"), "unknown command 'nonsense'")


def test_chat_gives_the_answers_of_stock(folder: Path) -> None:
    """Two turns of mlx_lm.chat give the same answers as stock's."""
    answers = []
    for module in ("mlx_lm", "mlx_paged"):
        options = ("--model", folder, "--max-tokens", 12, "--seed", 0)
        run = command("chat", *options, module=module, input=f"{PROMPT}\nw7 w8 w9\nq\n")
        assert run.returncode == 0, run.stderr
        answers.append(re.findall(r"\bw\d+\b", run.stdout))
    assert answers[0] == answers[1]
    assert len(answers[0]) >= 24


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_long_prefill_shows_a_bar_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    long_prompt = " ".join(f"w{i % 300}" for i in range(900))
    at_once = tmp_path / "at_once.py"  # the command, which shows the bar at once
    at_once.write_text(
        "import sys\n"
        "from mlx_paged.__main__ import main\n"
        "from mlx_paged.cli import terminal\n"
        "terminal.SHOW_AFTER_SECONDS = 0.0\n"
        "sys.exit(main())\n"
    )
    args = [
        "generate",
        "--model",
        str(folder),
        "--prompt",
        long_prompt,
        "--max-tokens",
        "2",
        "--prefill-step-size",
        "16",
    ]
    shown = on_a_terminal(at_once, *args, "--ignore-chat-template")
    assert b"prefill [#" in shown and b"/900 tokens" in shown
    assert shown.decode().rstrip(" ").endswith("\r"), "the bar is cleared at the end"
    quiet = generate(folder, "--prompt", long_prompt, "--prefill-step-size", 16, "--max-tokens", 2)
    assert "prefill [" not in quiet.stderr
