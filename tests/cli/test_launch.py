"""mlx_paged launch: start a server and a client that uses it."""

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

# Fake client: sends one request to the server named in its environment and exits with status 7.
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
    """Return a PATH with the fake client in it."""
    client = tmp_path / "bin" / "claude"
    client.parent.mkdir()
    client.write_text(CLIENT.format(python=sys.executable))
    client.chmod(0o755)
    return f"{client.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.demo_model
def test_server_ends_with_its_client(demo_model_folder: Path, tmp_path: Path, path: str) -> None:
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
def test_signal_to_launch_ends_its_server(
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


def test_bad_arguments_or_a_missing_client_are_refused(tmp_path: Path, path: str) -> None:
    for wrong, said in (
        (("claude",), "give a model"),
        (("claude", "--url", "http://127.0.0.1:9", "--model", "x"), "--model cannot be combined with --url"),
        (("claude", "--url", "http://127.0.0.1:9"), "no valid answer from http://127.0.0.1:9"),
        (("claude", "--model", str(tmp_path / "nothing")), "the server exited"),
        (("nobody",), "invalid choice"),
    ):
        done = commands.run("mlx_paged", "launch", *wrong, PATH=path)
        assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = commands.run("mlx_paged", "launch", "codex", "--model", "x", PATH=str(tmp_path))
    assert done.returncode != 0 and "npm install -g @openai/codex" in done.stderr


def test_every_client_gets_url_model_and_key() -> None:
    assert _key(["--api-key", "given", "--model", "x"]) == _key(["--api-key=given"]) == "given"
    access = Access("http://127.0.0.1:5", "mine", "secret")
    for name, client in CLIENTS.items():
        told = " ".join([*client.environment(access).values(), *client.arguments(access)])
        assert "127.0.0.1:5" in told and "mine" in told and "secret" in told, name


def test_idle_timeouts_of_clients_are_raised_for_long_prompts() -> None:
    access = Access("http://127.0.0.1:5", "mine", "secret")
    claude = CLIENTS["claude"].environment(access)
    assert {claude[name] for name in ("CLAUDE_STREAM_IDLE_TIMEOUT_MS", "API_TIMEOUT_MS")} == {str(IDLE_MILLISECONDS)}
    assert f"stream_idle_timeout_ms = {IDLE_MILLISECONDS}" in " ".join(CLIENTS["codex"].arguments(access))
    config = json.loads(CLIENTS["opencode"].environment(access)["OPENCODE_CONFIG_CONTENT"])
    options = config["provider"]["mlx_paged"]["options"]
    assert {options[name] for name in ("timeout", "headerTimeout", "chunkTimeout")} == {IDLE_MILLISECONDS}
    assert int(CLIENTS["aider"].environment(access)["AIDER_TIMEOUT"]) * 1000 == IDLE_MILLISECONDS
