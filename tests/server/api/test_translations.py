"""OpenAI's Responses and Anthropic's Messages give the answers of chats; through the official clients."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.processes.server_process import ServerProcess
from tests.support.server.answers import CHAT, RESPONSES, ask
from tests.support.server.samples import HI, OF_MESSAGE, OF_RESPONSE, WHITE

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = pytest.mark.demo_model


# Responses ----------------------------------------------------------------------------------------------------------


def test_responses_give_the_answer_of_a_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="default_model", messages=[{"role": "system", "content": "Rhyme."}, *HI], max_tokens=6
    )
    options: dict[str, Any] = {"model": "default_model", "instructions": "Rhyme.", "max_output_tokens": 6}
    whole = client.responses.create(**options, input="Hi.", metadata={"a": "b"})
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 6)
    assert whole.metadata == {"a": "b"} and whole.instructions == "Rhyme."
    with client.responses.stream(**options, input=[{"role": "user", "content": "Hi."}]) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert events[-1].response.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    assert "response.output_text.delta" in kinds and "response.output_item.done" in kinds
    told = client.responses.create(**options, input="Hi.", include=["message.output_text.logprobs"], top_logprobs=2)
    assert all(len(token.top_logprobs) == 2 for token in told.output[0].content[0].logprobs)


def test_responses_call_tools_and_reason(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default_model", "max_output_tokens": 90, "tools": [OF_RESPONSE]}
    options |= {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"logit_bias": WHITE}}
    whole = client.responses.create(**options, input="Hi.")
    (call,) = whole.output
    assert call.type == "function_call" and call.name == "clock" and json.loads(call.arguments)
    with client.responses.stream(**options, input="Hi.") as stream:
        kinds = [event.type for event in stream]
    assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    history: list[Any] = [{"role": "user", "content": "Hi."}, call.to_dict(), result]
    assert client.responses.create(model="default_model", input=history).output_text
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"3": -100}}
    thought = client.responses.create(model="default_model", input="Hi.", max_output_tokens=4, extra_body=thinks)
    assert thought.output[0].type == "reasoning" and thought.output[0].content[0].text
    assert thought.usage.output_tokens_details.reasoning_tokens == 4
    assert client.responses.create(model="default_model", input=[*history[:1], thought.output[0].to_dict(), history[0]])
    from openai import BadRequestError

    for wrong in ([{"type": "image_generation_call"}], [{"type": "message", "role": "x", "content": "y"}]):
        with pytest.raises(BadRequestError, match="input"):
            client.responses.create(model="default_model", input=wrong)
    for name, value in (
        ("conversation", "c"),
        ("background", True),
        ("include", ["x"]),
        ("tools", [{"type": "function"}]),
    ):
        with pytest.raises(BadRequestError, match=name):
            client.responses.create(**{"model": "default_model", "input": "Hi.", name: value})


# Messages -----------------------------------------------------------------------------------------------------------


def test_messages_give_the_answer_of_a_chat(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat = client.chat.completions.create(
        model="default_model", messages=[{"role": "system", "content": "Rhyme."}, *HI], max_tokens=6
    )
    options: dict[str, Any] = {"model": "default_model", "max_tokens": 6, "system": "Rhyme."}
    whole = claude.messages.create(**options, messages=HI)
    assert whole.content[0].text == chat.choices[0].message.content and whole.stop_reason == "max_tokens"
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens and usage.output_tokens == 6
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]
    with claude.messages.stream(**options, messages=parts) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model="default_model", system="Rhyme.", messages=HI)
    assert counted.input_tokens == chat.usage.prompt_tokens
    stop = whole.content[0].text[3:6]
    cut = claude.messages.create(**options, messages=HI, stop_sequences=["#never#", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == whole.content[0].text[: whole.content[0].text.index(stop)]


def test_messages_use_tools_and_think(claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": "default_model", "max_tokens": 90, "tools": [OF_MESSAGE], "messages": HI}
    options["extra_body"] = {"logit_bias": WHITE}
    for kind in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "clock"}):
        whole = claude.messages.create(**options, tool_choice=kind)
        (use,) = whole.content
        assert whole.stop_reason == "tool_use" and use.name == "clock" and isinstance(use.input["ok"], bool)
    with claude.messages.stream(**options, tool_choice=kind) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == use.input and final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "noon"}
    history: list[Any] = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(model="default_model", max_tokens=3, messages=history, tools=[OF_MESSAGE]).content
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    no_end = {"logit_bias": {"3": -100}}
    with claude.messages.stream(
        model="default_model", max_tokens=4, messages=HI, thinking=thinking, extra_body=no_end
    ) as stream:
        thought = stream.get_final_message()
    assert thought.content[0].type == "thinking" and thought.content[0].thinking
    from anthropic import BadRequestError, NotFoundError

    for name, value in (
        ("tool_choice", {"type": "x"}),
        ("tools", [{"type": "bash_20250124", "name": "bash"}]),
        ("thinking", {"type": "much"}),
        ("output_config", {"format": {"type": "xml"}}),
        ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
    ):
        with pytest.raises(BadRequestError, match=name):
            claude.messages.create(**{"model": "default_model", "max_tokens": 2, "messages": HI, name: value})
    with pytest.raises(NotFoundError):
        claude.messages.create(model="nobody", max_tokens=2, messages=HI)


def test_assistant_message_at_the_end_is_continued(
    server: ServerProcess, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    begun: list[Any] = [*HI, {"role": "assistant", "content": "Once upon"}]
    whole = claude.messages.create(model="default_model", max_tokens=3, messages=begun)
    extra = {"continue_final_message": True}
    chat = client.chat.completions.create(model="default_model", max_tokens=3, messages=begun, extra_body=extra)
    assert whole.content[0].text == chat.choices[0].message.content
    num_tokens = server.post("/tokenize", {"messages": begun}).json["count"]
    assert chat.usage.prompt_tokens < num_tokens  # no end of turn and no new turn is added
    refused = server.post("/v1/chat/completions", {"messages": HI, **extra})
    assert refused.status == 400 and refused.json["error"]["param"] == "continue_final_message"


def test_empty_assistant_message_at_the_end_is_ignored(server: ServerProcess) -> None:
    def tokens(*more: dict[str, Any]) -> int:
        answer = server.post("/v1/messages/count_tokens", {"messages": [*HI, *more]})
        assert answer.status == 200, answer.body
        return int(answer.json["input_tokens"])

    plain = tokens()
    for content in ("", []):
        assert tokens({"role": "assistant", "content": content}) == plain
    assert tokens({"role": "assistant", "content": "One"}) == plain + 1
    for messages in ([{"role": "user", "content": []}], [{"role": "assistant", "content": []}]):
        refused = server.post("/v1/messages", {"messages": messages, "max_tokens": 1})
        assert refused.status == 400 and "empty" in refused.json["error"]["message"], refused.body


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_developer_messages_are_system_messages(path: str, server: ServerProcess) -> None:
    name = "input" if path == RESPONSES else "messages"
    bodies = [{name: [{"role": role, "content": "Rhyme."}, *HI], "max_tokens": 2} for role in ("developer", "system")]
    first, second = (ask(server, path, body) for body in bodies)
    assert first.text == second.text


def test_threads_of_messages_are_refused_by_the_code_that_sdks_know(server: ServerProcess) -> None:
    threaded = server.post("/v1/messages", {"messages": HI, "thread": {"type": "create"}, "max_tokens": 1})
    assert threaded.status == 400
    assert threaded.json["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_unknown_parameters_are_named_in_a_header(server: ServerProcess) -> None:
    body = {"messages": HI, "max_tokens": 1, "temprature": 1, "stream_options": {"x": 1}}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200 and answer.headers["x-ignored-parameters"] == "stream_options.x, temprature"
    streamed = server.post("/v1/chat/completions", {**body, "stream": True}, **{"X-Request-Id": "mine-1"})
    assert streamed.headers["x-ignored-parameters"] and streamed.headers["x-request-id"] == "mine-1"


def test_usage_is_the_same_in_all_events(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hello " * 80}]  # longer than a block, so that the second finds the first
    body = {"messages": messages, "max_tokens": 2, "stream": True}
    server.post("/v1/messages", body)
    lines = server.post("/v1/messages", body).body.decode().split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    usages = [event.get("message", event).get("usage") for event in events]
    told = [(usage["input_tokens"], usage["cache_read_input_tokens"]) for usage in usages if usage]
    assert len(told) == 2 and told[0] == told[1] and told[0][1] > 0
