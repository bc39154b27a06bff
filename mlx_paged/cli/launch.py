"""``mlx_paged launch CLIENT``: run a coding agent with a server of its own, which ends with the agent."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import ConfigError
from ..server.clients import VARIABLE as KEY_VARIABLE
from .terminal import add_version, orderly_end

LOOK_SECONDS = 0.2
END_SECONDS = 45.0  # until the server is killed; by default it drains for 30 s
# A long prompt takes minutes. Claude Code, Codex and OpenCode give up after 300 s without an event, aider after 600 s.
IDLE_MILLISECONDS = 3_600_000


class Access(NamedTuple):
    """How a client reaches a server.

    Attributes:
        url: URL of the server, without a path.
        model: name of a model that the server lists.
        key: API key; any text if the server needs none.
    """

    url: str
    model: str
    key: str


class Client(NamedTuple):
    """How a client is installed and pointed at a server.

    Attributes:
        install: the command that installs it.
        environment: makes its environment variables.
        arguments: makes its arguments, which go before the user's own.
    """

    install: str
    environment: Callable[[Access], dict[str, str]]
    arguments: Callable[[Access], list[str]] = lambda access: []


def _claude(access: Access) -> dict[str, str]:
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")))
    return {
        "ANTHROPIC_BASE_URL": access.url,
        "ANTHROPIC_AUTH_TOKEN": access.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(IDLE_MILLISECONDS),
        "API_TIMEOUT_MS": str(IDLE_MILLISECONDS),
        **dict.fromkeys(models, access.model),
    }


def _codex(access: Access) -> list[str]:
    provider: dict[str, Any] = {
        "name": "mlx_paged",
        "base_url": f"{access.url}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
    }
    provider["stream_idle_timeout_ms"] = IDLE_MILLISECONDS
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    options = (
        f"model={json.dumps(access.model)}",
        'model_provider="mlx_paged"',
        f"model_providers.mlx_paged={{{table}}}",
    )
    return [part for option in options for part in ("-c", option)]


def _opencode(access: Access) -> dict[str, str]:
    options: dict[str, Any] = {"baseURL": f"{access.url}/v1", "apiKey": access.key}
    # Limits for the whole request, until its headers arrive, and between two chunks of its stream.
    options |= dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), IDLE_MILLISECONDS)
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {access.model: {}}}
    config = {"provider": {"mlx_paged": provider}, "model": f"mlx_paged/{access.model}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


CLIENTS = {
    "claude": Client("npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("npm install -g @openai/codex", lambda access: {KEY_VARIABLE: access.key}, _codex),
    "opencode": Client("npm install -g opencode-ai", _opencode),
    "aider": Client(
        "pip install aider-chat",
        lambda access: {
            "OPENAI_API_BASE": f"{access.url}/v1",
            "OPENAI_API_KEY": access.key,
            "AIDER_TIMEOUT": str(IDLE_MILLISECONDS // 1000),
        },
        lambda access: ["--model", f"openai/{access.model}"],
    ),
}


def main(argv: Sequence[str]) -> None:
    """Run a client with a server: a new one with the given options, or one that runs already (``--url``)."""
    with orderly_end("mlx_paged launch"):
        args, options, own = _parsed(argv)
        client = CLIENTS[args.client]
        command = shutil.which(args.client)
        if command is None:
            raise ConfigError(f"{args.client} is not installed: {client.install}")
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that _server ends the server
        key = _key(options)
        if args.url is not None:
            sys.exit(_run(command, client, _access(args.url.rstrip("/"), key), own))
        with _server(options) as url:
            sys.exit(_run(command, client, _access(url, key), own))


def _parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Split the arguments into this command's, the server's and the client's."""
    given = list(argv)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="mlx_paged launch",
        description="Start a server and a client that uses it. Options before -- go to the server (--model PATH, "
        "--kv-cache-memory 8GB, ...), options after it to the client.",
        usage="mlx_paged launch CLIENT [--url URL | SERVER OPTIONS] [-- CLIENT OPTIONS]",
        allow_abbrev=False,
    )
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--url", help="URL of a running server to use instead, such as http://localhost:8080")
    add_version(parser)
    args, options = parser.parse_known_args(given[:at])
    if args.url is not None and options:
        parser.error(f"{options[0]} cannot be combined with --url, which uses a running server")
    if args.url is None and "--model" not in options and not any(each.startswith("--model=") for each in options):
        parser.error("give a model (--model PATH) or a running server (--url URL)")
    return args, options, given[at + 1 :]


def _key(options: Sequence[str]) -> str:
    """Return the first API key in the server's options, or else in the variable; "local" if there is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", action="append", default=[])
    given = [*parser.parse_known_args(list(options))[0].api_key, *os.environ.get(KEY_VARIABLE, "").split(",")]
    return next((key.strip() for key in given if key.strip()), "local")


def _run(command: str, client: Client, access: Access, own: list[str]) -> int:
    """Run the client and return its exit status."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the client
    try:
        arguments = [command, *client.arguments(access), *own]
        return subprocess.run(arguments, env={**os.environ, **client.environment(access)}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _get_json(url: str, key: str) -> Any:
    """Return the JSON that a server answers. Raises OSError or ValueError."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def _access(url: str, key: str) -> Access:
    """Return how to reach the server's first model. Raises ConfigError if no server answers, or it lists no model."""
    try:
        models = _get_json(f"{url}/v1/models", key)["data"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"no valid answer from {url}: {error}") from None
    if not models:
        raise ConfigError(f"the server at {url} lists no model")
    return Access(url, str(models[0]["id"]), key)


@contextmanager
def _server(options: Sequence[str]) -> Iterator[str]:
    """Start a server of this package on a free port, yield its URL, and end the server afterwards.

    Raises:
        ConfigError: the server ended before it answered; the message has its last five lines.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="mlx_paged-") as folder, (Path(folder) / "server.log").open("w+") as log:
        # -P: import nothing from the current folder, which others may control.
        command = (
            sys.executable,
            "-P",
            "-m",
            "mlx_paged",
            "server",
            *options,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        )
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    while process.poll() is None:
        try:
            if _get_json(f"{url}/health", "").get("status") in ("ok", "degraded"):
                return
        except (OSError, ValueError, AttributeError):  # not there yet, or another program's answer
            pass
        time.sleep(LOOK_SECONDS)
    log.seek(0)
    said = log.read().strip().splitlines()
    raise ConfigError("the server exited: " + ("\n".join(said[-5:]) or f"status {process.returncode}"))
