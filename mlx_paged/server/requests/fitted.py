"""Rewrites chats so that the model's chat template accepts them, in the same way in each turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .agents import folded_systems, joined

Messages = list[dict[str, Any]]
ID_LETTERS = 9  # length of call ids that Mistral's templates require
_USER = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}


class Refusals(NamedTuple):
    """What a chat template refuses, drops or moves.

    Attributes:
        systems: system messages after the first, in their places.
        tools: tool calls and their results.
        several: several calls in one message (refused, or only the first is shown).
        ids: ids of calls that are not 9 letters and digits.
        thinking_with_text: a message with thinking, text and calls.
        user_after_tool: a user message directly after a tool result.
        consecutive_users: two consecutive user messages.
    """

    systems: bool = False
    tools: bool = False
    several: bool = False
    ids: bool = False
    thinking_with_text: bool = False
    user_after_tool: bool = False
    consecutive_users: bool = False


def refusals_of(render: Callable[[Messages], str]) -> Refusals:
    """Return what a chat template refuses.

    Args:
        render: renders a chat with the template; may raise anything.
    """

    def refuses(*messages: dict[str, Any], shows: str = "") -> bool:
        try:
            return shows not in render([dict(message) for message in messages])
        except Exception:  # templates raise what they like
            return True

    systems = _moves_systems(render)
    consecutive_users = refuses(_USER, _USER)
    if refuses(_USER, _call("123456789"), _result("123456789"), _ANSWER, _USER):
        return Refusals(systems=systems, tools=True, consecutive_users=consecutive_users)
    twice = {**_call("123456789"), "tool_calls": [*_call("123456789")["tool_calls"], *_call("abcdefghi")["tool_calls"]]}
    shown = "" if refuses(_USER, _call("123456789"), _result("123456789"), shows="mark-123456789") else "mark-abcdefghi"
    return Refusals(
        systems=systems,
        several=refuses(_USER, twice, _result("123456789"), _result("abcdefghi"), _ANSWER, shows=shown),
        ids=refuses(_USER, _call("call_0123"), _result("call_0123"), _ANSWER)
        or refuses(_USER, _call("call_01234567"), _result("call_01234567"), _ANSWER),
        thinking_with_text=refuses(
            _USER, {**_call("123456789"), "content": "b", "reasoning_content": "c"}, _result("123456789")
        ),
        user_after_tool=refuses(_USER, _call("123456789"), _result("123456789"), _USER),
        consecutive_users=consecutive_users,
    )


def _moves_systems(render: Callable[[Messages], str]) -> bool:
    roles = ("system", "system", "user", "assistant", "system", "user")
    probe = [{"role": role, "content": f"mark-{number}."} for number, role in enumerate(roles)]
    try:
        text = render([dict(message) for message in probe])
    except Exception:  # templates raise what they like
        return True
    places = [text.find(each["content"]) for each in probe]
    return places != sorted(places) or places[0] < 0


def _call(name: str) -> dict[str, Any]:
    call = {"id": name, "type": "function", "function": {"name": "f", "arguments": {"x": f"mark-{name}"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "name": "f", "content": "d"}


def fitted(messages: Sequence[Mapping[str, Any]], refused: Refusals) -> Messages:
    """Return the chat in a form that the template accepts. A message is rewritten as in earlier turns, so that cached
    prefixes are found."""
    chat = [dict(message) for message in messages]
    if refused.systems and any(message.get("role") == "system" for message in chat[1:]):
        chat = folded_systems(chat)
    if refused.tools:
        chat = [_as_text(message) for message in chat]
    if refused.several:
        chat = _one_by_one(chat)
    if refused.ids:
        chat = [_with_short_ids(message) for message in chat]
    if refused.thinking_with_text:
        chat = [_with_one_text(message) for message in chat]
    if refused.user_after_tool:
        chat = _with_answers(chat)
    return _merged(chat) if refused.consecutive_users else chat


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its calls, or its tool result, as text between tags."""
    if message.get("role") == "tool":
        return {
            "role": "user",
            "content": joined(joined("<tool_response>\n", message.get("content")), "\n</tool_response>"),
        }
    content = message.get("content")
    for call in message.pop("tool_calls", None) or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        begin = "\n" if content else ""
        content = joined(content, f'{begin}<tool_call>\n{{"name": {name}, "arguments": {said or "{}"}}}\n</tool_call>')
    return {**message, "content": content}


def _one_by_one(chat: Messages) -> Messages:
    """Return the chat with one call per message, each followed by its result."""
    result: Messages = []
    rest = list(chat)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        number = next((i for i, each in enumerate(rest) if each.get("role") != "tool"), len(rest))
        results, rest = rest[:number], rest[number:]
        ids = [call.get("id") for call in calls]
        for index, call in enumerate(calls):
            first = message if index == 0 else {"role": "assistant", "content": ""}
            result.append({**first, "tool_calls": [call]})
            result += [each for each in results if each.get("tool_call_id") == ids[index]]
        result += [each for each in results if each.get("tool_call_id") not in ids]
    return result


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    if message.get("role") == "tool":
        message["tool_call_id"] = _short_id(message.get("tool_call_id"))
    return message


def _short_id(name: Any) -> str:
    name = str(name)
    if len(name) == ID_LETTERS and name.isalnum() and name.isascii():
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:ID_LETTERS]


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message; if it has thinking, text and calls, the text is appended to the thinking."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if message.get("tool_calls") and thought and content:
        message |= {"reasoning_content": joined(f"{thought}\n\n", content), "content": ""}
    return message


def _with_answers(chat: Messages) -> Messages:
    """Return the chat with an empty answer between a tool result and a user message that follows it."""
    result: Messages = []
    for message in chat:
        if message.get("role") == "user" and result and result[-1].get("role") == "tool":
            result.append({"role": "assistant", "content": ""})
        result.append(message)
    return result


def _merged(chat: Messages) -> Messages:
    """Return the chat with consecutive messages of the user, or of the assistant without calls, merged."""
    result: Messages = []
    for message in chat:
        role, last = message.get("role"), result[-1] if result else {}
        if role not in ("user", "assistant") or last.get("role") != role or last.get("tool_calls"):
            result.append(message)
            continue
        between = "\n\n" if last.get("content") and message.get("content") else ""
        content = joined(joined(last.get("content"), between), message.get("content"))
        result[-1] = {**last, **message, "content": content}
    return result
