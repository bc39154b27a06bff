"""mlx_paged launch: a client over a server of its own."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from mlx_paged.cli.launch import CLIENTS, IDLE_MILLISECONDS, Access, _key
from tests.support.cases import slow
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands

# Stands in for a client: asks the server that it is pointed at, and ends with a status of its own.
CLIENT = """#!{python}
import json, os, sys, urllib.request
url, name = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_MODEL"]
key = {{"Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}}
body = {{"model": name, "max_tokens": 3, "messages": [{{"role": "user", "content": "Hi"}}]}}
request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), key)
if "wait" in sys.argv:
    print(url, flush=True)
    import time
    time.sleep(600)
print(json.dumps([url, sys.argv[1:], json.load(urllib.request.urlopen(request))["usage"]["output_tokens"]]))
sys.exit(7)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """With a client in it."""
    client = tmp_path / "bin" / "claude"
    client.parent.mkdir()
    client.write_text(CLIENT.format(python=sys.executable))
    client.chmod(0o755)
    return f"{client.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.demo_model
def test_a_client_has_a_server_that_ends_with_it(demo_model_folder: Path, tmp_path: Path, path: str) -> None:
    model = make_tiny_model(tmp_path / "tiny", demo_model_folder)
    flags = ("--model", model, "--kv-cache-memory", "16MB", "--", "-p", "Hi")
    done = commands.run("mlx_paged", "launch", "claude", *flags, PATH=path, MLX_PAGED_API_KEY="one,two")
    assert done.returncode == 7, done.stdout + done.stderr
    url, given, num_tokens = json.loads(done.stdout)
    assert given == ["-p", "Hi"] and num_tokens == 3
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health")


@pytest.mark.demo_model
@pytest.mark.parametrize("number", slow(signal.SIGTERM, signal.SIGHUP))
def test_a_launch_that_is_ended_takes_its_server_with_it(
    number: signal.Signals, demo_model_folder: Path, tmp_path: Path, path: str
) -> None:
    model = make_tiny_model(tmp_path / "tiny", demo_model_folder)
    command = (sys.executable, "-m", "mlx_paged", "launch", "claude", "--model", str(model), "--", "wait")
    environment = {**os.environ, "PATH": path}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=commands.ROOT, env=environment)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert urllib.request.urlopen(f"{url}/health").status == 200
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health")


def test_what_is_missing_is_said_before_anything_starts(tmp_path: Path, path: str) -> None:
    for wrong, said in (
        (("claude",), "name a model"),
        (("claude", "--url", "http://127.0.0.1:9", "--model", "x"), "takes no --model"),
        (("claude", "--url", "http://127.0.0.1:9"), "no server answers"),
        (("claude", "--model", str(tmp_path / "nothing")), "the server has ended"),
        (("nobody",), "invalid choice"),
    ):
        done = commands.run("mlx_paged", "launch", *wrong, PATH=path)
        assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = commands.run("mlx_paged", "launch", "codex", "--model", "x", PATH=str(tmp_path))
    assert done.returncode != 0 and "npm install -g @openai/codex" in done.stderr


def test_every_client_is_told_where_and_which(tmp_path: Path) -> None:
    assert _key(["--api-key", "given", "--model", "x"]) == _key(["--api-key=given"]) == "given"
    (tmp_path / "keys.json").write_text('{"me": {"key": "mine"}, "you": {"key": "yours"}}')
    assert _key(["--api-key", f"@{tmp_path}/keys.json"]) == "mine"
    access = Access("http://127.0.0.1:5", "mine", "secret")
    for name, client in CLIENTS.items():
        told = " ".join([*client.environment(access).values(), *client.arguments(access)])
        assert "127.0.0.1:5" in told and "mine" in told and "secret" in told, name


def test_clients_that_give_silent_streams_up_wait_for_long_prompts() -> None:
    access = Access("http://127.0.0.1:5", "mine", "secret")
    claude = CLIENTS["claude"].environment(access)
    assert {claude[name] for name in ("CLAUDE_STREAM_IDLE_TIMEOUT_MS", "API_TIMEOUT_MS")} == {str(IDLE_MILLISECONDS)}
    assert f"stream_idle_timeout_ms = {IDLE_MILLISECONDS}" in " ".join(CLIENTS["codex"].arguments(access))
    config = json.loads(CLIENTS["opencode"].environment(access)["OPENCODE_CONFIG_CONTENT"])
    options = config["provider"]["mlx_paged"]["options"]
    assert {options[name] for name in ("timeout", "headerTimeout", "chunkTimeout")} == {IDLE_MILLISECONDS}
    assert int(CLIENTS["aider"].environment(access)["AIDER_TIMEOUT"]) * 1000 == IDLE_MILLISECONDS
