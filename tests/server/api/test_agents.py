"""Requests in the shape of coding agents', and how much of them is cached from turn to turn."""

from __future__ import annotations

import copy
import itertools
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx_lm.utils
import pytest

from mlx_paged.server.agents import steady_messages
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.request import ChatInput, ServerRequest
from mlx_paged.server.requests.chat import ChatBody, chat_request
from mlx_paged.server.requests.responses import KeptResponses, ResponseBody
from mlx_paged.server.texts import LoadedTexts
from tests.support.processes.server_process import Answer, ServerProcess
from tests.support.server.samples import HI, SCHEMA, WHITE

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.demo_model

RULES = "You are a coding agent. " + "Read a file before you edit it, and say what you have changed. " * 12


def turn(number: int, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a request in the shape of Claude Code's."""
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


def test_each_turn_hits_earlier_turns_despite_a_changing_first_line(server: ServerProcess) -> None:
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


def test_unreadable_parts_of_a_tool_result_are_mentioned_in_the_prompt(server: ServerProcess) -> None:
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
QUOTES = {"18": 30}  # a token that ends a string
# A request in the shape of Codex's.
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


def test_codex_request_is_answered(server: ServerProcess) -> None:
    answer = ask(server, CODEX, "/v1/responses")
    assert {"tools.web_search", "client_metadata"} <= set(answer.headers["x-ignored-parameters"].split(", "))
    for tools in ([{"type": "function", "parameters": {}}], [SHELL, {**SHELL, "strict": True}]):
        assert server.post("/v1/responses", {**CODEX, "tools": tools}).status == 400
    for name, words in (("input", [{"type": "nothing"}]), ("include", ["nothing"])):
        refused = server.post("/v1/responses", {**CODEX, name: words})
        assert refused.status == 400 and refused.json["error"]["param"] == name
        assert "local_shell_call" in str(refused.json) or "message.output_text.logprobs" in str(refused.json)


def test_call_of_a_custom_tool_is_a_custom_tool_call(client: openai.OpenAI) -> None:
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


def test_input_of_a_custom_tool_matches_its_regular_expression(server: ServerProcess) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}
    body = {**CODEX, "input": "Hi.", "max_output_tokens": 90, "tools": [{**PATCH, "format": form}]}
    answer = ask(server, {**body, "tool_choice": "required", "logit_bias": WHITE}, "/v1/responses")
    (call,) = answer.json["output"]
    assert call["type"] == "custom_tool_call" and len(call["input"]) == 3 and set(call["input"]) <= {"a", "b"}
    assert "format" not in answer.headers["x-ignored-parameters"]
    body["tools"] = [{**PATCH, "format": {**form, "syntax": "lark", "definition": "start: /[ab]+/"}}]
    answer = ask(server, {**body, "max_output_tokens": 2}, "/v1/responses")
    assert "tools.format.grammar" in answer.headers["x-ignored-parameters"].split(", ")


def test_two_namespaces_may_have_tools_of_the_same_name(server: ServerProcess) -> None:
    spaces = [
        {"type": "namespace", "name": name, "tools": [{**SHELL, "name": "look", "parameters": SCHEMA}]}
        for name in ("mcp__here__", "there")
    ]
    for space, called in zip(spaces, ("mcp__here__look", "there__look"), strict=True):
        chosen = {"type": "function", "name": "look", "namespace": space["name"]}
        body = {**CODEX, "max_output_tokens": 90, "tools": spaces, "tool_choice": chosen, "logit_bias": WHITE}
        answer = ask(server, body, "/v1/responses")
        (call,) = answer.json["output"]
        assert (call["name"], call["namespace"]) == ("look", space["name"])
        again = {**body, "input": [*CODEX["input"], call], "tool_choice": "none", "max_output_tokens": 2}
        spelt = {**call, "name": called, "namespace": None}
        counts = [
            ask(server, {**again, "input": [*CODEX["input"], each]}, "/v1/responses").json["usage"]["input_tokens"]
            for each in (call, spelt)
        ]
        assert counts[0] == counts[1]
    assert server.post("/v1/responses", {**CODEX, "tools": [spaces[1], spaces[1]]}).status == 400


# Kept responses -----------------------------------------------------------------------------------------------------


def test_previous_response_id_continues_a_stored_response(client: openai.OpenAI, server: ServerProcess) -> None:
    first = client.responses.create(model="default_model", input="Hi.", max_output_tokens=4, instructions="Rhyme.")
    assert first.store is True and client.responses.retrieve(first.id) == first
    with client.responses.stream(model="default_model", input="And?", previous_response_id=first.id) as stream:
        second = list(stream)[-1].response
    third = client.responses.create(model="default_model", input="So?", previous_response_id=second.id, store=False)
    said: list[Any] = [{"role": "user", "content": "Hi."}, *(item.to_dict() for item in first.output)]
    said += [{"role": "user", "content": "And?"}, *(item.to_dict() for item in second.output)]
    whole = client.responses.create(model="default_model", input=[*said, {"role": "user", "content": "So?"}])
    assert (third.usage.input_tokens, third.output_text) == (whole.usage.input_tokens, whole.output_text)
    assert third.previous_response_id == second.id and third.store is False
    named = [*said[:1], {"type": "item_reference", "id": first.output[0].id}, *said[2:]]
    named.append({"role": "user", "content": "So?"})
    assert client.responses.create(model="default_model", input=named).usage.input_tokens == whole.usage.input_tokens
    client.responses.delete(first.id)
    assert client.responses.create(model="default_model", input="So?", previous_response_id=second.id).output_text
    unknown = {"input": "Hi.", "previous_response_id": first.id}
    refused = server.post("/v1/responses", unknown)
    assert refused.status == 404 and refused.json["error"]["param"] == "previous_response_id"
    for name in (first.id, third.id, "resp_x"):
        assert server.get(f"/v1/responses/{name}").status == 404


def response(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"msg_{name}", "type": "message", "role": "assistant", "content": text}]}


def opened(kept: KeptResponses, key: str | None = None, **values: Any) -> Any:
    return kept.open(ResponseBody.model_validate({"input": "Hi.", **values}), key)


def test_stored_responses_are_bounded_and_only_their_owner_sees_them() -> None:
    kept = KeptResponses(4000)
    for number in range(5):
        opened(kept, "a")(response(f"r{number}", "x" * 700))
    assert kept.get("a", "r4") and kept.get("a", "r3")
    for key, name in (("a", "r0"), ("b", "r4"), (None, "r4")):
        with pytest.raises(RequestRefused) as caught:
            kept.get(key, name)
        assert caught.value.status == 404
    opened(kept, "a")(response("large", "x" * 4000))
    with pytest.raises(RequestRefused):
        kept.get("a", "large")
    item: list[Any] = [{"type": "item_reference", "id": "msg_r0"}]
    with pytest.raises(RequestRefused, match="no such item"):
        opened(kept, "a", input=item)
    off = KeptResponses(0)
    assert opened(off) is None
    with pytest.raises(RequestRefused, match="--no-response-store"):
        opened(off, store=True)


def test_stored_responses_take_the_memory_that_they_count() -> None:
    """``[]`` is 3 bytes of JSON, and 64 as an object."""
    number = 100_000
    body = ResponseBody.model_validate({"input": [{"role": "user", "content": "a", "x": [[] for _ in range(number)]}]})
    kept = KeptResponses(10 * number)
    tracemalloc.start()
    try:
        keep = kept.open(body, None)
        del body
        assert keep is not None
        keep(response("r", "Yes."))
        del keep
        assert tracemalloc.get_traced_memory()[0] < 4 * number
    finally:
        tracemalloc.stop()
    later = ResponseBody.model_validate({"input": "So?", "previous_response_id": "r"})
    kept.open(later, None)
    assert len(later.input) == 3 and later.input[0]["x"] == [[]] * number  # type: ignore[index]


# Thinking, tools and system messages --------------------------------------------------------------------------------


def test_request_options_turn_thinking_on_and_off(server: ServerProcess) -> None:
    """The server's own flag turns thinking off."""

    def count(path: str = "/v1/chat/completions", **values: Any) -> int:
        body = {"messages": HI, "input": "Hi.", "max_tokens": 1, **values}
        usage = ask(server, {k: v for k, v in body.items() if path[4:6] == "re" or k != "input"}, path).json["usage"]
        return int(usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0))

    off, on = count(), count(enable_thinking=True)
    assert off < on
    assert count(thinking={"type": "enabled"}) == on
    for values in (
        {"reasoning_effort": "none"},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "disabled"}},
    ):
        assert count(**values) == off
    assert count("/v1/messages", thinking={"type": "adaptive"}) == off
    assert count("/v1/messages", thinking={"type": "enabled"}) == on
    assert count("/v1/responses", reasoning={"effort": "none"}) == off


def test_thinking_ends_at_its_budget(server: ServerProcess) -> None:
    base = {"messages": HI, "max_tokens": 12, "logit_bias": {"3": -100}, "enable_thinking": True}

    def thought(path: str = "/v1/chat/completions", **values: Any) -> dict[str, Any]:
        answer: dict[str, Any] = ask(server, {**base, **values}, path).json
        return answer

    budgets = ({"max_thinking_tokens": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}})
    free = thought()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert free == 12
    for values in budgets:
        answer = thought(**values)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
        message = answer["choices"][0]["message"]
        assert message["reasoning"] and message["content"] and "think>" not in str(message)
    body = {k: v for k, v in base.items() if k != "enable_thinking"}
    told = ask(server, {**body, "thinking": {"type": "enabled", "budget_tokens": 5}}, "/v1/messages").json
    assert [block["type"] for block in told["content"]] == ["thinking", "text"]
    form = {"structured_outputs": {"regex": "[ab]{3}"}}
    answer = thought(**budgets[0], **form)
    assert len(answer["choices"][0]["message"]["content"]) == 3
    text = ask(server, {**base, "stream": True, **budgets[0]}, "/v1/chat/completions").body.decode()
    assert '"content"' in text and '"reasoning"' in text


LATER: list[dict[str, Any]] = [
    {"role": "system", "content": "One."},
    {"role": "system", "content": "Two."},
    {"role": "user", "content": "Three."},
    {"role": "assistant", "content": "Four."},
    {"role": "system", "content": "Five."},
    {"role": "user", "content": [{"type": "text", "text": "Six."}]},
    {"role": "assistant", "content": "Seven."},
    {"role": "tool", "content": "Eight."},
    {"role": "system", "content": "Nine."},
]
IN_PLACE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ONLY = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
FRONT = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
REFUSES = IN_PLACE.replace("{% for m in messages %}", FIRST_ONLY + "{{ raise_exception('no') }}{% endif %}")
DROPS = IN_PLACE.replace("{% for m in messages %}", FIRST_ONLY + "{% else %}").replace(
    "{% endfor", "{% endif %}{% endfor"
)


@pytest.mark.parametrize("template", [IN_PLACE, REFUSES, DROPS, FRONT])
def test_later_system_messages_keep_their_place(template: str, folder: Path) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    tokenizer._tokenizer.chat_template = template
    texts = LoadedTexts(SimpleNamespace(key=None, tokenizer=tokenizer, model=None, config={}), {}, None)
    turns = []
    for end in (3, 6, 9):
        prompt = texts.make_prompt(ChatInput(copy.deepcopy(LATER[:end])))
        turns.append(texts.decode(prompt.tokens))
    for word in ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine"):
        assert turns[-1].count(word) == 1
    places = [turns[-1].find(word) for word in ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")]
    assert places == sorted(places)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(turns))
    assert ("<system>\nFive.\n</system>" in turns[-1]) is (template is not IN_PLACE)


@pytest.mark.parametrize(("reads", "budget"), [("", 1024), ("{{ reasoning_effort }}", None)])
def test_reasoning_effort_is_a_budget_unless_the_template_reads_it(
    reads: str, budget: int | None, folder: Path
) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    tokenizer._tokenizer.chat_template = IN_PLACE + reads
    texts = LoadedTexts(SimpleNamespace(key=None, tokenizer=tokenizer, model=None, config={}), {}, None)
    request = chat_request(ChatBody(messages=HI, reasoning_effort="low"), {})
    texts.completed(request)
    assert request.thinking_budget == budget
    told = chat_request(ChatBody(messages=HI, reasoning_effort="low", max_thinking_tokens=7), {})
    texts.completed(told)
    assert told.thinking_budget == 7 and ServerRequest.from_description(told.described()).thinking_budget == 7


# Prefixes that stay the same ----------------------------------------------------------------------------------------


def test_changing_lines_of_a_system_message_are_moved_or_dropped() -> None:
    header = "x-anthropic-billing-header: cch=1;\n"
    env = "<env>\n  Today's date: Mon Nov 23 2026\nThe current time is 2026-11-23 22:01:07\n</env>\n"
    system = {"role": "system", "content": f"{header}{env}Rules. Today's date: is no line.", "name": "x"}
    (told, last) = steady_messages([system, *HI])
    assert told["content"] == "<env>\n</env>\nRules. Today's date: is no line.\n\nToday's date: Mon Nov 23 2026"
    assert last["content"] == "Hi.\n\n<system>\nThe current time is 2026-11-23 22:01:07\n</system>"
    later = [*HI, {"role": "assistant", "content": "Yes?"}, system]
    assert steady_messages(later) == later  # system messages of the history are left as they are
    (alone,) = steady_messages(
        [{**system, "content": [{"type": "text", "text": header}, {"type": "text", "text": "A"}]}]
    )
    assert alone["content"] == [{"type": "text", "text": "A"}]
    assert steady_messages([{**system, "content": header}, *HI]) == HI
    plain = [{"role": "system", "content": None}, {"role": "system", "content": "Today's date: unknown"}, *HI]
    assert steady_messages(plain) == plain


def test_reasoning_sent_back_becomes_reasoning_content() -> None:
    said = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    history = [*HI, said, {**said, "reasoning_content": "Mine."}, *HI]
    (given,) = chat_request(ChatBody(messages=history), {}).inputs
    assert isinstance(given, ChatInput)
    assert [message.get("reasoning_content") for message in given.messages] == [None, "Hm.", "Mine.", None]
