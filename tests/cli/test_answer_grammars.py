"""--json-schema, and what lines of prompts files say of their answers."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from mlx_paged.cli.answer_grammars import AnswerGrammars
from mlx_paged.errors import ConfigError
from tests.support.models.tiny_model import make_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["x", "yy"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    return file


def test_a_file_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in (("[1]", "must be a JSON object"), ("{", "not valid JSON")):
        file = tmp_path / "schema.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            AnswerGrammars(Namespace(json_schema=str(file)))
    with pytest.raises(ConfigError, match="cannot be used"):
        AnswerGrammars(Namespace(json_schema=str(tmp_path / "none.json")))
    assert not AnswerGrammars(Namespace(json_schema=None)).has_default
