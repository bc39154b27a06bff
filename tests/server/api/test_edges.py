"""Partial markers, end tokens and empty contents in answers of every API, whole and streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.api.samples import HI
from tests.support.processes.server_process import Answer, ServerProcess

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.demo_model

LESS, END = {"44": 1000}, {"2": 1000}  # force "<", which begins "<tool_call>" and "<think>", or the end
CHAT, MESSAGES, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 1},
    MESSAGES: {"messages": HI, "max_tokens": 3},
    RESPONSES: {"input": "Hi.", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]},
    COMPLETIONS: {"prompt": "Hi.", "max_tokens": 3, "logprobs": 1},
}


def said(answer: Answer, path: str) -> tuple[str, int]:
    """Return the text, and the number of tokens with log probabilities."""
    assert answer.status == 200, answer.body
    if path == MESSAGES:
        return answer.json["content"][0]["text"], 0
    if path == RESPONSES:
        (item,) = answer.json["output"]
        return item["content"][0]["text"], len(item["content"][0]["logprobs"])
    (choice,) = answer.json["choices"]
    if path == COMPLETIONS:
        return choice["text"], len(choice["logprobs"]["token_logprobs"])
    return choice["message"]["content"], len(choice["logprobs"]["content"])


def streamed(answer: Answer) -> tuple[str, int]:
    """Return the joined text of the deltas, and the number of tokens with log probabilities."""
    text, num_tokens = "", 0
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    for event in events:
        if event.get("type") in ("content_block_delta", "response.output_text.delta"):
            delta = event["delta"]
            text += delta if isinstance(delta, str) else delta["text"]
            num_tokens += len(event.get("logprobs", []))
        for choice in event.get("choices", []):
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            told = choice["logprobs"]
            num_tokens += len(told["content"] if "content" in told else told["tokens"])
    return text, num_tokens


@pytest.mark.parametrize("path", BODIES)
def test_answer_may_end_with_a_partial_marker(server: ServerProcess, path: str) -> None:
    body = {**BODIES[path], "logit_bias": LESS}
    expected = "<<<", 0 if path == MESSAGES else 3
    assert said(server.post(path, body), path) == expected
    assert streamed(server.post(path, {**body, "stream": True})) == expected


@pytest.mark.parametrize("path", BODIES)
def test_end_token_has_no_text_and_no_log_probability(server: ServerProcess, path: str) -> None:
    body = {**BODIES[path], "logit_bias": END}
    assert said(server.post(path, body), path) == ("", 0)
    assert streamed(server.post(path, {**body, "stream": True})) == ("", 0)


def test_joined_deltas_equal_the_message(client: openai.OpenAI) -> None:
    """Uses the official client, which joins the deltas."""
    with client.chat.completions.stream(model="default_model", messages=HI, n=2, max_tokens=3, seed=1) as stream:
        for _ in stream:
            pass
        choices = stream.current_completion_snapshot.choices
    whole = client.chat.completions.create(model="default_model", messages=HI, n=2, max_tokens=3, seed=1).choices
    assert [choice.message.role for choice in choices] == ["assistant"] * 2
    assert [choice.message.content for choice in choices] == [choice.message.content for choice in whole]


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
        refused = server.post(MESSAGES, {"messages": messages, "max_tokens": 1})
        assert refused.status == 400 and "empty" in refused.json["error"]["message"], refused.body


def test_developer_messages_are_system_messages_in_responses(server: ServerProcess) -> None:
    answers = [
        server.post(RESPONSES, {"input": [{"role": role, "content": "Rhyme."}, *HI], "max_output_tokens": 2})
        for role in ("developer", "system")
    ]
    assert said(answers[0], RESPONSES) == said(answers[1], RESPONSES)
