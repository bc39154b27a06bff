"""Anthropic's Messages: translated to a chat, and the chat's answer back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..refusal import RequestRefused, invalid
from .checks import keys
from .form import Event
from .pieces import Head, Piece, Usage

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat that a request for a message means; ``body`` was checked.

    Raises:
        RequestRefused: with status 400, naming the parameter.
    """
    chat = {name: value for name, value in body.items() if name not in _TRANSLATED}
    chat["messages"] = [*_system(body.get("system")), *(m for given in body["messages"] for m in _messages(given))]
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = [_tool(index, tool) for index, tool in enumerate(body["tools"])]
    if "tool_choice" in body:
        chat.update(_tool_choice(body["tool_choice"]))
    _output_config(body.get("output_config") or {}, chat)
    if "thinking" in body:
        chat["chat_template_kwargs"] = {**_thinking(body["thinking"]), **body.get("chat_template_kwargs", {})}
    return chat


_TRANSLATED = {
    *("messages", "system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config"),
    *("metadata", "cache_control", "service_tier"),
}


def error_of(refusal: RequestRefused) -> dict[str, Any]:
    """An error as Anthropic's API words it."""
    kind = KINDS.get(int(refusal.status), "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal), "param": refusal.param}}


# The request ------------------------------------------------------------------------------------------------------


def _blocks(where: str, given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if not isinstance(given, list) or not all(isinstance(block, dict) for block in given):
        raise invalid(f"{where} must be a string or a list of blocks", where.partition("[")[0].partition(".")[0])
    return given


def _text(where: str, blocks: Sequence[Mapping[str, Any]]) -> str:
    for block in blocks:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise invalid(f"{where}: blocks must be of type text, with a text", where.partition("[")[0])
    return "\n".join(block["text"] for block in blocks)


def _system(given: Any) -> list[dict[str, Any]]:
    return [] if given is None else [{"role": "system", "content": _text("system", _blocks("system", given))}]


_KEYS = {  # of blocks of each type
    "text": {"text"},
    "image": {"source"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "thinking": {"thinking", "signature"},
}


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat that one of Anthropic's is: results of tools are messages of their own there."""
    role = given["role"]
    if role not in ("user", "assistant", "system"):
        raise invalid("messages: a role must be user, assistant or system", "messages")
    keys("messages", dict(given), {"role", "content"})
    parts: list[dict[str, Any]] = []
    calls, results, thoughts = [], [], []
    for block in _blocks("messages", given.get("content")):
        kind = block.get("type")
        keys("messages", block, _KEYS.get(str(kind), set(block)) | {"type", "cache_control"})
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and role == "user":
            parts.append({"type": "image_url", "image_url": {"url": _image(block.get("source"))}})
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("input"), dict):
            function = {"name": block.get("name"), "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text("messages", _blocks("messages", block.get("content") or ""))
            text = f"Error: {text}" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "thinking" and role == "assistant" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        else:
            raise invalid(f"messages: a block of type {kind!r} is not supported in a message of {role!r}", "messages")
    if not (parts or calls):
        return results
    message: dict[str, Any] = {"role": role, "content": parts}
    if all(part["type"] == "text" for part in parts):
        message["content"] = "\n".join(part["text"] for part in parts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message]


def _image(source: Any) -> str:
    if isinstance(source, dict) and source.get("type") == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    if isinstance(source, dict) and source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', 'image/png')};base64,{source['data']}"
    raise invalid("messages: an image must have a source of type base64 or url", "messages")


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise invalid(f"tools[{index}]: there is no built-in tool {tool['type']!r}", "tools")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"tools[{index}] must have a name and an input_schema", "tools")
    keys("tools", dict(tool), {"type", "name", "description", "input_schema", "strict", "cache_control"})
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _tool_choice(given: Mapping[str, Any]) -> dict[str, Any]:
    keys("tool_choice", dict(given), {"type", "name", "disable_parallel_tool_use"})
    kind = given.get("type")
    if kind == "tool" and isinstance(given.get("name"), str):
        choice: Any = {"type": "function", "function": {"name": given["name"]}}
    elif kind in ("auto", "any", "none"):
        choice = {"auto": "auto", "any": "required", "none": "none"}[kind]
    else:
        raise invalid("tool_choice.type must be auto, any, none, or tool with a name", "tool_choice")
    parallel = given.get("disable_parallel_tool_use")
    return {"tool_choice": choice, **({} if parallel is None else {"parallel_tool_calls": not parallel})}


def _output_config(given: Mapping[str, Any], chat: dict[str, Any]) -> None:
    keys("output_config", dict(given), {"format", "effort"})
    form, effort = given.get("format"), given.get("effort")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise invalid("output_config.format must be of type json_schema", "output_config")
        described = {"name": "answer", "schema": form.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": described}
    if effort is not None:
        if not isinstance(effort, str):
            raise invalid("output_config.effort must be a string", "output_config")
        chat["reasoning_effort"] = effort


def _thinking(given: Mapping[str, Any]) -> dict[str, Any]:
    keys("thinking", dict(given), {"type", "budget_tokens", "display"})
    if given.get("type") not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type must be enabled, adaptive or disabled", "thinking")
    if given.get("display") not in (None, "summarized"):
        raise invalid("thinking.display must be summarized: reasoning is given as it is", "thinking")
    return {"enable_thinking": given["type"] != "disabled"}


# The answer -------------------------------------------------------------------------------------------------------


class MessageForm:
    """A message.

    Args:
        head: of the answer.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._num_blocks = 0
        self._open: str | None = None  # type of the block that is being said
        self._last = Piece()

    def begin(self, usage: Usage) -> list[Event]:
        message = {**self._message([], None, None), "usage": self._usage(usage)}
        return [self._event("message_start", message=message)]

    def piece(self, piece: Piece) -> list[Event]:
        self._last = piece
        events = []
        if piece.reasoning:
            events += self._to("thinking", {"thinking": "", "signature": ""})
            events.append(self._delta("thinking_delta", thinking=piece.reasoning))
        if piece.text:
            events += self._to("text", {"text": ""})
            events.append(self._delta("text_delta", text=piece.text))
        for call in piece.calls:
            block = _tool_use(call)
            events += self._close() + self._to("tool_use", {**block, "input": {}})
            events.append(self._delta("input_json_delta", partial_json=call["function"]["arguments"]))
            events += self._close()
        return events

    def end(self, usage: Usage) -> list[Event]:
        reason, stop = _reason(self._last)
        return [
            *self._close(),
            self._event(
                "message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=self._usage(usage)
            ),
            self._event("message_stop"),
        ]

    def failed(self, refusal: RequestRefused) -> list[Event]:
        return [Event(error_of(refusal), "error")]

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        blocks: list[dict[str, Any]] = []
        if answer.reasoning:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text or not answer.calls:
            blocks.append({"type": "text", "text": answer.text})
        blocks += [{"type": "tool_use", **_tool_use(call)} for call in answer.calls]
        return {**self._message(blocks, *_reason(answer)), "usage": self._usage(usage)}

    def _message(self, content: list[Any], reason: str | None, stop: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    @staticmethod
    def _usage(usage: Usage) -> dict[str, int]:
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion,
        }

    def _event(self, kind: str, **values: Any) -> Event:
        return Event({"type": kind, **values}, kind)

    def _delta(self, kind: str, **values: Any) -> Event:
        return self._event("content_block_delta", index=self._num_blocks - 1, delta={"type": kind, **values})

    def _to(self, kind: str, block: dict[str, Any]) -> list[Event]:
        """The events that lead to a block of a type, if it is not the one that is being said."""
        if self._open == kind:
            return []
        events = self._close()
        self._open = kind
        self._num_blocks += 1
        start = self._event("content_block_start", index=self._num_blocks - 1, content_block={"type": kind, **block})
        return [*events, start]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [self._event("content_block_stop", index=self._num_blocks - 1)]


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}


def _reason(answer: Piece) -> tuple[str, str | None]:
    if answer.stop is not None:
        return "stop_sequence", answer.stop
    return REASONS.get(answer.finish or "stop", "end_turn"), None
