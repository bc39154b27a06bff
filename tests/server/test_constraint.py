"""constraint_of(): the constraint that a request puts on its answer, and invalid requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_paged.server.errors import RequestRefused
from tests.support.constraints import constraint_of

SCHEMA = {"type": "object"}


def tool(name: str = "f", **options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **options}}


@pytest.mark.parametrize(
    "body, kind, text",
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type": "object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "json", '{"type": "object"}'),
        ({"structured_outputs": {"json": {"enum": [1]}}}, "json", '{"enum": [1]}'),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, "choice", 'start: ANSWER\nANSWER: "a" | "b\\""'),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, "lark", 'start: "x"'),
    ],
)
def test_each_form_of_request_gives_its_constraint(body: dict[str, Any], kind: str, text: str) -> None:
    for chat in (False, True):
        found = constraint_of(body, chat=chat)
        assert found is not None and found.answer == (kind, text) and found.tools is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [tool()]},
        {"tools": [tool()], "tool_choice": "auto"},
        {"tools": [tool(strict=True)], "tool_choice": "none"},
        {"tools": [tool(strict=False)]},
        {"tool_choice": "none"},
    ],
)
def test_requests_without_a_constraint_give_none(body: dict[str, Any]) -> None:
    assert constraint_of(body) is None


SCHEMA_OF = "response_format.json_schema"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "a valid dictionary"),
    ({"response_format": {"type": "xml"}}, "response_format", "'text', 'json_object', 'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", f"{SCHEMA_OF} is required"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        f"{SCHEMA_OF}.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        "response_format",
        f"{SCHEMA_OF}.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"strict": "yes", "schema": {}}}},
        "response_format",
        f"{SCHEMA_OF}.strict",
    ),
    ({"structured_outputs": []}, "structured_outputs", "a valid dictionary"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "one of json"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "one of json"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice: .*at least 1 item"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "choice.1: .*at least 1 char"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs", "regex: .*at least 1 char"),
    ({"structured_outputs": {"json": "{}"}}, "structured_outputs", "json: .*a valid dictionary"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "json_object: .*True"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "cannot both",
    ),
    ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tool_choice": "required"}, "tool_choice", "requires a call, but tools is empty"),
    ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice", "tool_choice.function is required"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]},
        "tool_choice",
        "not in tools: 'g'",
    ),
    ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools", r"tools\[0\].function must be"),
    ({"tool_choice": "required", "tools": [tool(parameters=[1])]}, "tools", r"tools\[0\].function.parameters"),
]


@pytest.mark.parametrize("body, param, message", WRONG)
def test_invalid_constraint_is_refused_by_parameter(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as caught:
        constraint_of(body)
    assert caught.value.status == 400 and caught.value.param == param


def test_tools_are_ignored_in_completions() -> None:
    assert constraint_of({"tools": [tool()], "tool_choice": "required"}, chat=False) is None


def tools_of(body: dict[str, Any]) -> Any:
    found = constraint_of(body)
    return None if found is None else found.tools


def test_tools_of_returns_the_callable_tools() -> None:
    both = [tool("f", parameters={"enum": [1]}), tool("g", parameters={"enum": [2]}, strict=True)]
    required = tools_of({"tools": both, "tool_choice": "required"})
    assert required is not None and required.required and required.parallel
    assert [each.schema for each in required.callable] == [{"enum": [1]}, {"enum": [2]}]
    named = tools_of({"tools": both, "tool_choice": {"type": "function", "function": {"name": "f"}}})
    assert named is not None and [each.name for each in named.callable] == ["f"] and not named.parallel
    strict = tools_of({"tools": both, "parallel_tool_calls": False})
    assert strict is not None and not strict.required and not strict.parallel
    assert [each.schema for each in strict.callable] == [SCHEMA, {"enum": [2]}], "the other tool takes any object"


def test_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(RequestRefused, match="nested too deeply"):
        constraint_of({"structured_outputs": {"json": schema}})
    assert json.loads("{}") == {}
