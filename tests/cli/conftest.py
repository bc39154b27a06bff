"""The model folder of the commands' tests."""

from pathlib import Path

import pytest

from tests.support.processes.small_model import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))
