"""One server for each test module, over a tiny model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import ServerProcess


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of a tiny llama, or of a tiny model of the module's ``FAMILY``."""
    family = getattr(request.module, "FAMILY", "llama")
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder, family)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with the module's ``FLAGS``; it must exit with status 0 and log no traceback."""
    process = ServerProcess(folder, tmp_path_factory.mktemp("server"), *request.module.FLAGS)
    yield process
    assert process.stop() == 0, process.log
    assert "Traceback" not in process.log, process.log


@pytest.fixture
def client(server: ServerProcess) -> Any:
    import openai  # takes a second

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
