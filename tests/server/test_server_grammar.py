"""Constrained answers over HTTP, through the openai client. A tiny random model stresses grammars most."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.cases import quick
from tests.support.processes.server_process import ServerProcess

pytestmark = pytest.mark.demo_model

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "x"}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["x", "yy"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}


def ask(client: openai.OpenAI, question: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    options = {"max_tokens": 160, **options}
    return client.chat.completions.create(model="default_model", messages=messages, **options)


def checked(choice: Any, schema: Any = SCHEMA) -> Any:
    assert choice.finish_reason == "stop", choice
    value = json.loads(choice.message.content)
    jsonschema.validate(value, schema)
    return value


def test_log_probabilities_cover_only_allowed_tokens(client: openai.OpenAI) -> None:
    options = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = ask(client, "Well?", extra_body=options, logprobs=True, top_logprobs=8)
    content = answer.choices[0].logprobs.content
    assert all(other.logprob > float("-inf") for token in content for other in token.top_logprobs)
    assert 1 <= len(content[0].top_logprobs) <= 8
    raw = ask(client, "Well?", extra_body={"structured_outputs": {"regex": "q"}}, logprobs=True, top_logprobs=8)
    assert abs(raw.choices[0].logprobs.content[0].logprob) < 1e-4, "only one token is allowed"


def schema_body(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


REFUSED: list[tuple[Any, str, str]] = [
    (schema_body({"properties": {"a": {"items": {"pattern": "("}}}}), "response_format", "regex"),
    (schema_body({"type": "objekt"}), "response_format", "Invalid type"),
    (
        schema_body({"properties": {f"k{i}": {"type": "string"} for i in range(40_000)}}),
        "response_format",
        "characters",
    ),
    (schema_body({"enum": [f"{i:0100}" for i in range(10_000)]}), "response_format", "characters"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs", "unknown name"),
    ({"tool_choice": "sometimes"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice", "cannot"),
]


@pytest.mark.parametrize("body, param, message", REFUSED)
def test_unusable_constraint_is_refused_by_parameter(
    server: ServerProcess, body: Any, param: str, message: str
) -> None:
    answer = server.post(CHAT, {**QUESTION, "max_tokens": 2, **body})
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert error["param"] == param and message in error["message"]


MANY = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1000)}, "required": ["k999"]}
CHAIN = {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1999)} | {"a1999": {}}, "$ref": "#/$defs/a0"}
RULES = "start: r0\n" + "\n".join(f'r{i}: "k{i}" r{i + 1}?' for i in range(3990)) + '\nr3990: "z"'
AMBIGUOUS = {"structured_outputs": {"grammar": 'start: a\na: a a a | a a | "x" | "y" | a "z"'}, "max_tokens": 2000}
HOSTILE: list[tuple[dict[str, Any], str | None]] = [  # words of the error, if it is refused for certain
    (schema_body({"type": "integer", "multipleOf": 16777216}), None),
    (schema_body({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}), None),
    ({"structured_outputs": {"json": CHAIN}}, None),
    ({"structured_outputs": {"grammar": RULES}}, None),
    ({"structured_outputs": {"regex": "a?" * 60_000}}, None),
    (schema_body(MANY) | {"max_tokens": 160}, "items"),
    (AMBIGUOUS | {"logit_bias": {"0": -100, "2": -100}}, "too much work: "),
]


@pytest.mark.parametrize(
    ("body", "words"), quick(HOSTILE, *HOSTILE[2:4], *HOSTILE[5:]), ids=lambda each: str(each)[:60]
)
def test_hostile_grammar_fails_only_its_request(
    server: ServerProcess, client: openai.OpenAI, body: dict[str, Any], words: str | None
) -> None:
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(server.post, CHAT, QUESTION | {"max_tokens": 2} | body)
        checked(ask(client, "Who?", response_format=FORMAT).choices[0])
        answer = hostile.result()
    assert answer.status == 400 and words in answer.json["error"]["message"] if words else answer.status in (200, 400)
    assert server.get("/health").status == 200


def test_disconnects_while_grammars_are_compiled_do_not_block_others(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    for number in range(6):
        slow = {"type": "integer", "multipleOf": 9973, "title": str(number)}
        body = QUESTION | {"structured_outputs": {"json": slow}}
        server.send_and_leave_open(CHAT, body).close()
    answer = ask(client, "Which?", extra_body={"structured_outputs": {"choice": ["one", "two"]}})
    assert answer.choices[0].message.content in ("one", "two")
    server.wait_until(lambda: server.is_idle)


def test_tool_choice_none_hides_the_tools(server: ServerProcess) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    plain = server.chat([{"role": "user", "content": "Hello"}], max_tokens=4)
    answer = server.chat([{"role": "user", "content": "Hello"}], max_tokens=4, tools=tools, tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert server.chat([{"role": "user", "content": "Hello"}], max_tokens=4, tools=tools), "strict is not enforced"


@pytest.mark.slow
def test_request_without_llguidance_is_refused_with_the_install_command(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "llguidance.py").write_text("raise ImportError('not here')")
    server = serve("--max-tokens", "2", cold=True, PYTHONPATH=str(tmp_path))
    answer = server.post(CHAT, QUESTION | {"response_format": {"type": "json_object"}})
    assert answer.status == 400 and "pip install llguidance" in answer.json["error"]["message"]
    server.chat([{"role": "user", "content": "x"}])
