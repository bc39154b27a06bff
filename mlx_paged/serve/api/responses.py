"""A request for one of OpenAI's Responses, translated to a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..refusal import invalid
from .checks import keys

TEXTS = ("input_text", "output_text", "text")
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
_TRANSLATED = {
    *("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "include", "top_logprobs"),
    *("reasoning", "metadata", "user", "safety_identifier", "store", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "service_tier", "background", "truncation"),
}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat that a request for a response means; ``body`` was checked.

    Raises:
        RequestRefused: with status 400, naming the parameter.
    """
    chat = {name: value for name, value in body.items() if name not in _TRANSLATED}
    messages = [{"role": "system", "content": body["instructions"]}] if "instructions" in body else []
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for index, item in enumerate(given):
            _add(messages, f"input[{index}]", item)
    if not messages:
        raise invalid("input holds no message", "input")
    chat["messages"] = messages
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    if "tools" in body:
        chat["tools"] = [_tool(index, tool) for index, tool in enumerate(body["tools"])]
    if "tool_choice" in body:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    _text(body.get("text") or {}, chat)
    _reasoning(body.get("reasoning") or {}, chat)
    for name in body.get("include", ()):
        if name not in INCLUDED:
            raise invalid(f"include: {name!r} is not supported", "include")
    if INCLUDED[0] in body.get("include", ()):
        chat["logprobs"], chat["top_logprobs"] = True, body.get("top_logprobs", 0)
    elif body.get("top_logprobs"):
        raise invalid(f"top_logprobs needs {INCLUDED[0]} in include", "top_logprobs")
    return chat


def _add(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add an item to the messages of a chat, where calls and reasoning are parts of the assistant's message."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise invalid(f"{where}.role must be user, assistant, system or developer", "input")
        message = {"role": "system" if role == "developer" else role, "content": _content(where, item.get("content"))}
        if role == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = message["content"]  # behind its reasoning
        else:
            messages.append(message)
    elif kind == "function_call":
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        if not all(isinstance(value, str) for value in function.values()):
            raise invalid(f"{where} must have a name and arguments, which are strings", "input")
        last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "function_call_output":
        content = _content(where, item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise invalid(f"{where}.content must be a list of objects", "input")
        text = "".join(str(part.get("text", "")) for part in parts)
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    else:
        raise invalid(f"{where}: items of type {kind!r} are not supported", "input")


def _content(where: str, given: Any) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise invalid(f"{where} must be a string or a list of parts", "input")
    parts: list[dict[str, Any]] = []
    for part in given:
        kind = part.get("type")
        if kind in TEXTS and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise invalid(f"{where}: a part of type {kind!r} is not supported", "input")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"tools[{index}]: there is no built-in tool {tool.get('type')!r}", "tools")
    keys("tools", dict(tool), {"type", "name", "description", "parameters", "strict"})
    if not isinstance(tool.get("name"), str):
        raise invalid(f"tools[{index}] must have a name", "tools")
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _tool_choice(given: Any) -> Any:
    if isinstance(given, str):
        return given
    if given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise invalid("tool_choice must be none, auto, required, or of type function, with a name", "tool_choice")
    return {"type": "function", "function": {"name": given["name"]}}


def _text(given: Mapping[str, Any], chat: dict[str, Any]) -> None:
    keys("text", dict(given), {"format", "verbosity"})
    if given.get("verbosity") not in (None, "medium"):
        raise invalid("text.verbosity must be medium", "text")
    form = given.get("format")
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise invalid("text.format.type must be text, json_object or json_schema", "text")
    described = {name: value for name, value in form.items() if name != "type"}
    if form["type"] != "json_schema":
        chat["response_format"] = {"type": form["type"]}
    else:
        chat["response_format"] = {"type": "json_schema", "json_schema": described}


def _reasoning(given: Mapping[str, Any], chat: dict[str, Any]) -> None:
    keys("reasoning", dict(given), {"effort", "summary"})
    if given.get("summary") not in (None, "auto"):
        raise invalid("reasoning.summary must be auto: reasoning is given as it is", "reasoning")
    effort = given.get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise invalid("reasoning.effort must be a string", "reasoning")
        chat["reasoning_effort"] = effort
