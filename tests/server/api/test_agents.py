"""What coding agents send: bodies in the shape of theirs, and what is found again from turn to turn."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.api.samples import WHITE
from tests.support.processes.server_process import Answer, ServerProcess

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.demo_model

RULES = "You are a coding agent. " + "Read a file before you edit it, and say what you have changed. " * 12


def turn(number: int, history: list[dict[str, Any]]) -> dict[str, Any]:
    """A request in the shape of Claude Code's."""
    header = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cc_entrypoint=cli; cch={number * 7919:05x};"
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {
        "model": "default_model",
        "max_tokens": 4,
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
        ],
        "messages": history,
        "tools": [
            {"name": "Read", "description": "Read a file.", "input_schema": schema, "eager_input_streaming": True},
            {"name": "Later", "input_schema": schema, "defer_loading": True, "cache_control": {"type": "ephemeral"}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": ["interleaved-thinking-2025-05-14"],
        "mcp_servers": [],
        "speed": "standard",
    }


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "What is in main.py?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I should look.", "signature": "x"},
            {"type": "redacted_thinking", "data": "abc"},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "main.py"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [
                    {"type": "text", "text": "print(1)"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                    {"type": "tool_reference", "tool_name": "Later"},
                ],
            },
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"role": "system", "content": "Plan mode is on."},
    {"role": "user", "content": "And now?"},
]


def ask(server: ServerProcess, body: dict[str, Any], path: str = "/v1/messages") -> Answer:
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    return answer


def test_each_turn_finds_the_ones_before_whatever_the_first_line_says(server: ServerProcess) -> None:
    seen = 0
    for number, length in enumerate((1, 3, 5), 1):
        answer = ask(server, turn(number, HISTORY[:length]))
        usage = answer.json["usage"]
        assert usage["cache_read_input_tokens"] >= 0.95 * seen
        seen = usage["cache_read_input_tokens"] + usage["input_tokens"]
        ignored = answer.headers["x-ignored-parameters"].split(", ")
        assert {"tools.web_search_20250305", "tools.eager_input_streaming", "tools.defer_loading"} <= set(ignored)
    counted = {key: value for key, value in turn(9, HISTORY).items() if key != "max_tokens"}
    assert ask(server, counted, "/v1/messages/count_tokens").json["input_tokens"] == seen


def test_a_chat_loses_the_line_that_changes_too(server: ServerProcess) -> None:
    """Proxies send Claude Code's system prompt as a chat's."""
    found = []
    for number in (1, 2):
        header = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};\n"
        history = [{"role": "system", "content": header + RULES}, {"role": "user", "content": "Hi."}]
        usage = ask(server, {"messages": history, "max_tokens": 2}, "/v1/chat/completions").json["usage"]
        found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    (total, _), (again, cached) = found
    assert total == again and cached >= total - 1


def test_what_a_model_cannot_read_of_a_result_is_said(server: ServerProcess) -> None:
    shown = ask(server, turn(1, HISTORY)).json["usage"]
    hidden = copy.deepcopy(HISTORY)
    del hidden[2]["content"][0]["content"][1:]
    bare = ask(server, turn(1, hidden)).json["usage"]
    total = [usage["cache_read_input_tokens"] + usage["input_tokens"] for usage in (shown, bare)]
    assert total[0] > total[1]
    without_schema = turn(1, HISTORY[:1]) | {"tools": [{"name": "Read"}]}
    refused = server.post("/v1/messages", without_schema)
    assert refused.status == 400 and "input_schema" in refused.json["error"]["message"]


PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": {"type": "text"}}
SHELL = {
    "type": "function",
    "name": "shell",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
QUOTES = {"18": 30}  # which ends a string
# In the shape of Codex's.
CODEX: dict[str, Any] = {
    "model": "default_model",
    "instructions": RULES,
    "max_output_tokens": 4,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {
            "type": "local_shell_call",
            "call_id": "c2",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "call_id": "c2", "output": [{"type": "input_image", "image_url": "x"}]},
        {"type": "function_call", "call_id": "c3", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "main.py"}]},
    ],
    "tools": [
        SHELL,
        PATCH,
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp", "tools": [{**SHELL, "name": "look"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "none"},
    "text": {"verbosity": "low"},
    "store": False,
    "stream": False,
    "truncation": "auto",
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
    "client_metadata": {"x-codex-installation-id": "1"},
}


def test_codex_is_served(server: ServerProcess) -> None:
    answer = ask(server, CODEX, "/v1/responses")
    assert {"tools.web_search", "client_metadata"} <= set(answer.headers["x-ignored-parameters"].split(", "))
    unnamed = {**CODEX, "tools": [{"type": "function", "parameters": {}}]}
    assert server.post("/v1/responses", unnamed).status == 400


def test_a_custom_tools_call_is_told_as_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "default_model",
        "max_output_tokens": 90,
        "tools": [SHELL, PATCH],
        "input": "Hi.",
    }
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}
    options |= {"tool_choice": allowed, "parallel_tool_calls": False, "extra_body": {"logit_bias": WHITE | QUOTES}}
    (call,) = client.responses.create(**options).output
    assert call.type == "custom_tool_call" and call.name == "apply_patch" and isinstance(call.input, str)
    events = list(client.responses.create(**options, stream=True))
    deltas = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    (item,) = events[-1].response.output
    assert deltas == done.input == item.input == call.input
    assert json.loads(events[-1].response.to_json())["status"] == "completed"
