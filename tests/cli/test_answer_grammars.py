"""--json-schema, and grammars of single lines in prompts files."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlx_paged.cli.generate import constraint_from
from mlx_paged.errors import ConfigError
from tests.support.cases import slow
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes import commands
from tests.support.processes.small_model import records

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


def test_unusable_schema_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in (("[1]", "must be a JSON object"), ("{", "Expecting property name")):
        file = tmp_path / "schema.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            constraint_from(str(file))
    with pytest.raises(ConfigError, match="cannot be used"):
        constraint_from(str(tmp_path / "none.json"))
    assert constraint_from(None) is None


@pytest.mark.demo_model
@pytest.mark.parametrize("flags", [(), *slow(("--no-paged",), single=True)])
def test_answer_matches_the_schema(folder: Path, schema: Path, flags: tuple[str, ...]) -> None:
    prompt = ("--prompt", "Hello", "--max-tokens", "300", "--verbose", "False", "--temp", "1.0", "--seed", "4")
    done = commands.run("mlx_paged", "generate", "--model", str(folder), *prompt, "--json-schema", str(schema), *flags)
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), SCHEMA)


@pytest.mark.demo_model
def test_lines_of_a_prompts_file_have_their_own_grammars(folder: Path, schema: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "One"},
        {"prompt": "Two", "structured_outputs": {"choice": ["yes", "no"]}},
        {"prompt": "Three", "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [4, "5"]}}}},
        {"prompt": "Four", "structured_outputs": {"regex": "("}},
        {"prompt": "Five", "response_format": {"type": "xml"}},
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--prompts-file", str(source), "--json-schema", str(schema), "--max-tokens", "300")
    done = commands.run("mlx_paged", "generate", "--model", str(folder), *arguments)
    assert done.returncode == 1, done.stderr
    first, second, third, fourth, fifth = records(done.stdout)
    assert first["finish_reason"] == "stop"
    jsonschema.validate(json.loads(first["text"]), SCHEMA)
    assert second["text"] in ("yes", "no")
    assert json.loads(third["text"]) in (4, "5")
    assert "structured_outputs.regex" in fourth["error"] and "unclosed group" in fourth["error"]
    assert "response_format: Input tag 'xml'" in fifth["error"]


@pytest.mark.demo_model
def test_invalid_schema_is_refused_with_its_fault(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"properties": {"x": {"type": "objekt"}}}')
    done = commands.run("mlx_paged", "generate", "--model", str(folder), "--prompt", "x", "--json-schema", str(file))
    assert done.returncode != 0
    assert "Invalid type" in done.stderr and "--json-schema" in done.stderr
    assert "Traceback" not in done.stderr
