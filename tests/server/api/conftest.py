"""One server for all tests of the APIs, and its clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.models.tiny_model import make_tools_model
from tests.support.processes.server_process import ServerProcess

if TYPE_CHECKING:  # importing them takes two seconds in each process that runs tests
    import anthropic
    import openai


@pytest.fixture(scope="package")
def folder(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tools_model(tmp_path_factory.mktemp("tools"), demo_model_folder)


@pytest.fixture(scope="package")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--max-tokens", "4", "--log-level", "WARNING", "--chat-template-args", '{"enable_thinking": false}')
    process = ServerProcess(folder, tmp_path_factory.mktemp("server"), *flags)
    yield process
    process.wait_until(lambda: process.is_idle)
    process.check_end()


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def claude(server: ServerProcess) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)
