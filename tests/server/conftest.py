"""Servers of these tests: one for most of them in a session, over a tiny model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import ServerProcess

FLAGS = ("--max-tokens", "4", "--kv-cache-memory", "8MB")  # about 16,000 tokens of the tiny model


@pytest.fixture(scope="session")
def tiny(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny llama."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", demo_model_folder)


@pytest.fixture(scope="session")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tiny, tmp_path_factory.mktemp("shared"), *FLAGS)
    yield process
    process.check_end()


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama, or a tiny model of the module's ``FAMILY``."""
    family = getattr(request.module, "FAMILY", None)
    if family is None:
        return tiny
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), request.getfixturevalue("demo_model_folder"), family)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server that modules share, or one with the module's ``FLAGS``."""
    flags = getattr(request.module, "FLAGS", None)
    if flags is None:
        yield request.getfixturevalue("shared")
        return
    process = ServerProcess(request.getfixturevalue("folder"), tmp_path_factory.mktemp("server"), *flags)
    yield process
    process.check_end()


@pytest.fixture
def serve(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that starts a server for a test alone. Those that still run at its end must end in order."""
    started = []

    def start(*flags: object, model: Path = folder, kind: type[ServerProcess] = ServerProcess, **options: Any) -> Any:
        process = kind(model, tmp_path, *map(str, flags), **options)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.process.poll() is None:
            process.check_end()


@pytest.fixture
def client(server: ServerProcess) -> Any:
    import openai  # takes a second

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
