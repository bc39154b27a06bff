"""Answers of the four APIs that generate, whole or streamed, read alike."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.support.processes.server_process import Answer, ServerProcess

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)


def body_of(path: str, text: str = "Hi.", max_tokens: int = 3, /, **options: Any) -> dict[str, Any]:
    """Return the body of a request for an answer to a text."""
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    asked = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}}
    return {**asked.get(path, {"messages": [{"role": "user", "content": text}]}), length: max_tokens, **options}


class Said(NamedTuple):
    """What an answer says.

    Attributes:
        text: its text.
        finish: why it ended, in the API's words.
        num_scored: tokens with log-probabilities.
        prompt_tokens, cached_tokens, num_tokens: of its usage.
    """

    text: str
    finish: str
    num_scored: int
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int


def ask(server: ServerProcess, path: str, body: dict[str, Any], *, stream: bool = False, **headers: str) -> Said:
    """Return the only answer to a request, and fail if it is refused."""
    if stream:
        body = {**body, "stream": True}
        if path in (CHAT, COMPLETIONS):
            body["stream_options"] = {"include_usage": True}
    answer = server.post(path, body, **headers)
    assert answer.status == 200, answer.body
    return said(answer, path)


def said(answer: Answer, path: str) -> Said:
    """Read an answer; a stream is one whose body consists of events."""
    events = events_of(answer.body)
    whole = answer.json if not events else events[-1].get("response", events[-1])
    if path == MESSAGES:
        told = events[-2] if events else whole
        parts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
        text = "".join(parts) if events else whole["content"][0]["text"]
        return _said(text, (told["delta"] if events else told)["stop_reason"], 0, told["usage"])
    if path == RESPONSES:
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        parts = [part for item in whole["output"] for part in item["content"]]
        text = "".join(part["text"] for part in parts)
        assert not events or "".join(event["delta"] for event in deltas) == text
        scored = [token for each in (deltas if events else parts) for token in each.get("logprobs", ())]
        return _said(text, whole["status"], len(scored), whole["usage"])
    choices = [choice for each in events or [whole] for choice in each["choices"]]
    *begun, last = [choice["finish_reason"] for choice in choices]
    assert set(begun) <= {None}
    contents = [choice if path == COMPLETIONS else choice["delta" if events else "message"] for choice in choices]
    text = "".join(content.get("text" if path == COMPLETIONS else "content") or "" for content in contents)
    scored = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    num_scored = sum(len(each["content"] if "content" in each else each["tokens"]) for each in scored)
    return _said(text, last, num_scored, whole["usage"])


def _said(text: str, finish: str, num_scored: int, usage: dict[str, Any]) -> Said:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0)
    return Said(text, finish, num_scored, prompt, cached, usage.get("completion_tokens", usage.get("output_tokens")))


def events_of(body: bytes) -> list[Any]:
    """Return the JSON values of a stream's events; empty if the body is no stream."""
    return [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: {")]


def cut_of(text: str, stops: list[str]) -> str:
    """Return a text up to the first of its stop strings."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
