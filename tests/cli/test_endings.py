"""Output and exit status of commands: --version, bad flags, closed stdout, full disk, interrupts, bad variables."""

import argparse
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.__main__ import UPSTREAM
from mlx_paged.cli.terminal import orderly_end, restrict
from mlx_paged.config import number
from tests.support.processes import commands
from tests.support.processes.small_model import PROMPT, command, generate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [(), ("generate",), ("server",), ("doctor",), ("chat",)])
def test_every_command_prints_its_version(arguments: tuple[str, ...]) -> None:
    assert "chat" in UPSTREAM
    run = command(*arguments, "--version")
    assert re.fullmatch(r"mlx_paged 0\.1\.0 \(mlx-lm [\d.]+, mlx [\d.]+\)\n", run.stdout), run.stderr
    assert run.returncode == 0


@pytest.mark.parametrize("name", ["generate", "server", "chat"])
def test_help_has_the_flags_of_mlx_lm_and_of_this_package(name: str) -> None:
    said = command(name, "--help").stdout
    assert said.startswith(f"usage: mlx_paged {name} ") and "--kv-cache-memory" in said and "--adapter-path" in said


def test_prompt_beyond_the_context_is_refused(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "model"
    shutil.copytree(folder, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 5}))
    run = generate(short, "--prompt", "w1 w2 w3 w4 w5 w6 w7", "--ignore-chat-template")
    assert run.returncode == 1
    assert run.stderr == "mlx_paged generate: the prompt has 7 tokens, the model's context 5\n"


def test_restrict_skips_a_flag_that_mlx_lm_lacks() -> None:
    parser = argparse.ArgumentParser()
    restrict(parser, "--port", number("port", 0))
    parser.add_argument("--number")
    restrict(parser, "--number", number("number", 2))
    with pytest.raises(SystemExit):
        parser.parse_args(["--number", "x"])
    assert parser.parse_args(["--number", "2"]).number == 2


def test_port_in_use_is_named_in_the_error(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = command("server", "--model", folder, "--port", port)
    assert run.returncode == 1
    error = run.stderr.splitlines()[-1]
    assert error.startswith(f"mlx_paged server: the server cannot start: 127.0.0.1 port {port}: Address already in use")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_disk_is_reported_in_one_line(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text(PROMPT)
    for prompt in (("--prompt", PROMPT), ("--prompts-file", source)):
        arguments = ("generate", "--model", folder, "--max-tokens", 4, "--ignore-chat-template", *prompt)
        with open("/dev/full", "w") as full, open(tmp_path / "errors", "w+") as errors:
            status = commands.start("mlx_paged", *arguments, stdout=full, stderr=errors).wait(300)
            errors.seek(0)
            said = errors.read()
        assert status == 1
        assert re.fullmatch(r"mlx_paged generate: .*stdout.*No space left on device\n", said), said


@pytest.mark.parametrize("flag", ["--help", "--prompt", "--prompts-file"])
def test_closed_stdout_exits_with_141_and_no_message(folder: Path, flag: str, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text(PROMPT)
    value = source if flag == "--prompts-file" else PROMPT
    arguments = (flag,) if flag == "--help" else ("generate", flag, value, "--model", folder, "--ignore-chat-template")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody, open(tmp_path / "errors", "w+") as errors:
        status = commands.start("mlx_paged", *arguments, stdout=nobody, stderr=errors).wait(300)
        errors.seek(0)
        assert (status, errors.read()) == (141, "")


def test_broken_pipe_of_another_file_is_an_error() -> None:
    with pytest.raises(BrokenPipeError), orderly_end("mlx_paged"):
        raise BrokenPipeError(errno.EPIPE, "a socket's")


def test_users_program_keeps_its_interrupt_handler() -> None:
    program = "import mlx_paged, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of shells ignore SIGINT
    )
    assert run.stdout == "True\n", run.stderr
