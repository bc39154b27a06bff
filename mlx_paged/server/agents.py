"""Adapts what clients send: lines that change from turn to turn, system messages within a chat, tools that only their
vendor's server runs, tool results that are not text; and rewrites chats so that the model's chat template accepts them,
in the same way in each turn."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

DROP, TO_THE_SYSTEMS_END, TO_THE_LAST_MESSAGE = "drop", "to the end of the system message", "to the last message"
_DATE = r"(?im)^[ \t]*(?:today's date|(?:the )?current (?:date|time|datetime|date (?:and|&) time))(?: is)?:?[ \t]"
# Lines of the system message that change with each turn or day, and where they go: a cached prefix ends at such a line.
# The first rule that matches a line counts.
VOLATILE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?m)^x-anthropic-billing-header:[^\n]*\n?"), DROP),  # Claude Code: a version and a checksum
    (re.compile(_DATE + r"[^\n]{0,60}\d:\d\d[^\n]{0,40}(?:\n|\Z)"), TO_THE_LAST_MESSAGE),  # Goose: the time
    (re.compile(_DATE + r"[^\n]{0,60}\d[^\n]{0,40}(?:\n|\Z)"), TO_THE_SYSTEMS_END),  # Claude Code, OpenCode: the day
)


def steady_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat with the :data:`VOLATILE` lines of its leading system messages moved or dropped."""
    steady: list[dict[str, Any]] = []
    lines: dict[str, list[str]] = {DROP: [], TO_THE_SYSTEMS_END: [], TO_THE_LAST_MESSAGE: []}
    system: dict[str, Any] | None = None  # the last one
    chat = [dict(message) for message in messages]
    num_leading = next((i for i, message in enumerate(chat) if message.get("role") != "system"), len(chat))
    leading, rest = chat[:num_leading], chat[num_leading:]
    for message in leading:
        if message.get("content") != (content := _without_lines(message.get("content"), lines)):
            message["content"] = content
            if not content:
                continue
        steady.append(message)
        system = message
    if not steady and not rest:
        return [dict(message) for message in messages]
    can_end = bool(rest) and rest[-1].get("role") != "assistant"  # an assistant's message may be continued
    ends = lines[TO_THE_SYSTEMS_END] + ([] if can_end else lines[TO_THE_LAST_MESSAGE])
    if ends and system is None:
        steady.append({"role": "system", "content": "\n".join(ends)})
    elif ends and system is not None:
        system["content"] = joined(system["content"], "\n\n" + "\n".join(ends))
    if can_end and lines[TO_THE_LAST_MESSAGE]:
        _put_behind(rest, "<system>\n" + "\n".join(lines[TO_THE_LAST_MESSAGE]) + "\n</system>")
    return [*steady, *rest]


def _without_lines(content: Any, lines: Mapping[str, list[str]]) -> Any:
    """Return the content without volatile lines, which are added to ``lines`` by where they go."""
    if isinstance(content, list):
        parts = [
            {**p, "text": _without_lines(p["text"], lines)} if isinstance(p.get("text"), str) else p for p in content
        ]
        return [part for part in parts if part.get("text") != ""]
    if not isinstance(content, str):
        return content
    for pattern, place in VOLATILE:
        lines[place].extend(found.group().strip() for found in pattern.finditer(content))
        content = pattern.sub("", content)
    return content


def result_text(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return the parts of a tool's result as text; a part of another type is named, so that the model knows of it."""
    texts = []
    for part in parts:
        kind = str(part.get("type"))[:80]
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "tool_reference":
            texts.append(f"[tool {str(part.get('tool_name'))[:200]}]")
        else:
            texts.append(f"[{kind}: not shown, since only text can be read here]")
    return "\n".join(texts)


def folded_systems(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat with one system message, the first, for templates that refuse others.

    Leading system messages are joined. A later one becomes part of the next message if that is a user's, else of the
    message before it.
    """
    num_leading = next((i for i, each in enumerate(messages) if each.get("role") != "system"), len(messages))
    leading = messages[:num_leading]
    folded = [dict(message) for message in leading[:1]]
    if num_leading > 1:
        folded[0]["content"] = "\n\n".join(_text_of(message.get("content")) for message in leading)
    held: list[str] = []  # texts for the next user message
    for message in messages[num_leading:]:
        message, role = dict(message), message.get("role")
        if role == "system":
            held.append(f"<system>\n{_text_of(message.get('content'))}\n</system>\n\n")
            continue
        if held and role == "user":
            message["content"] = joined("".join(held), message.get("content"))
        elif held:
            _put_behind(folded, "".join(held))
        held = []
        folded.append(message)
    if held:
        _put_behind(folded, "".join(held))
    return folded


def _put_behind(messages: list[dict[str, Any]], text: str) -> None:
    """Append text to the last message if it is a user's or a tool's, else as a new user message."""
    last = messages[-1]
    if last.get("role") in ("user", "tool"):
        last["content"] = joined(last.get("content"), "\n\n" + text.rstrip())
    else:
        messages.append({"role": "user", "content": text.rstrip()})


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def joined(*contents: Any) -> Any:
    """Return contents of messages, strings or lists of parts, as one."""
    if any(isinstance(each, list) for each in contents):
        both = ([{"type": "text", "text": each}] if isinstance(each, str) else list(each or ()) for each in contents)
        return [part for parts in both for part in parts]
    return "".join(str(each or "") for each in contents)


# What chat templates accept -------------------------------------------------------------------------------------------

Messages = list[dict[str, Any]]
TEXT = "arguments"  # the member that holds arguments which are no object
ID_LETTERS = 9  # length of call ids that Mistral's templates require
_USER = {"role": "user", "content": "a"}
_ANSWER = {"role": "assistant", "content": "b"}
_BARE_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


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
        bare_tools: tools without a description, or without parameters.
    """

    systems: bool = False
    tools: bool = False
    several: bool = False
    ids: bool = False
    thinking_with_text: bool = False
    user_after_tool: bool = False
    consecutive_users: bool = False
    bare_tools: bool = False


def refusals_of(render: Callable[..., str]) -> Refusals:
    """Return what a chat template refuses.

    Args:
        render: renders a chat with the template, and the tools that it is given by name; may raise anything.
    """

    def refuses(*messages: dict[str, Any], shows: str = "", **options: Any) -> bool:
        try:
            return shows not in render([dict(message) for message in messages], **options)
        except Exception:  # templates raise what they like
            return True

    systems = _moves_systems(render)
    consecutive_users = refuses(_USER, _USER)
    bare_tools = refuses(_USER, tools=[_BARE_TOOL]) and not refuses(_USER, tools=[_with_fields(_BARE_TOOL)])
    if refuses(_USER, _call("123456789"), _result("123456789"), _ANSWER, _USER):
        return Refusals(systems=systems, tools=True, consecutive_users=consecutive_users, bare_tools=bare_tools)
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
        bare_tools=bare_tools,
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
    chat = [_as_text(message) if refused.tools else _with_objects(message) for message in chat]
    if refused.several:
        chat = _one_by_one(chat)
    if refused.ids:
        chat = [_with_short_ids(message) for message in chat]
    if refused.thinking_with_text:
        chat = [_with_one_text(message) for message in chat]
    if refused.user_after_tool:
        chat = _with_answers(chat)
    return _merged(chat) if refused.consecutive_users else chat


def fitted_tools(tools: list[dict[str, Any]] | None, refused: Refusals) -> list[dict[str, Any]] | None:
    """Return the tools in a form that the template accepts."""
    return [_with_fields(tool) for tool in tools] if tools and refused.bare_tools else tools


def _with_fields(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with a description and parameters, which OpenAI's API lets clients leave out."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    given = {name: value for name, value in function.items() if value is not None}
    return {**tool, "function": {"description": "", "parameters": {"type": "object", "properties": {}}, **given}}


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with objects as arguments of its calls, and without an empty list of calls.

    Many templates take nothing else.
    """
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_with_object(call) for call in calls]
    return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _object_of(function.get("arguments"))}}


def _object_of(given: Any) -> dict[str, Any]:
    """Return arguments as an object. Clients keep calls that were cut off or that have none; empty ones are ``{}``, and
    others that are no object become its only member, as text."""
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        value = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return {TEXT: text}
    return value if isinstance(value, dict) else {} if value is None else {TEXT: text}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its calls, or its tool result, as text between tags."""
    if message.get("role") == "tool":
        return {
            "role": "user",
            "content": joined(joined("<tool_response>\n", message.get("content")), "\n</tool_response>"),
        }
    content, calls = message.get("content"), []
    for call in message.pop("tool_calls", None) or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        said = arguments.strip() if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        said = "{}" if said in ("", "null") else said
        name = json.dumps(function.get("name"), ensure_ascii=False)
        calls.append(f'<tool_call>\n{{"name": {name}, "arguments": {said}}}\n</tool_call>')
    if calls:
        content = joined(content, ("\n" if content else "") + "\n".join(calls))
    return {**message, "content": content}


def _one_by_one(chat: Messages) -> Messages:
    """Return the chat with one call per message, each followed by its result."""
    result: Messages = []
    index = 0
    while index < len(chat):
        message = chat[index]
        index += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        begin = index
        while index < len(chat) and chat[index].get("role") == "tool":
            index += 1
        results: dict[str, Messages] = {}
        for each in chat[begin:index]:
            results.setdefault(str(each.get("tool_call_id")), []).append(each)
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            result.append({**first, "tool_calls": [call]})
            result += results.pop(str(call.get("id")), [])
        result += [each for several in results.values() for each in several]
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
    runs: list[Messages] = []
    for message in chat:
        role, last = message.get("role"), runs[-1][-1] if runs else {}
        if role in ("user", "assistant") and last.get("role") == role and not last.get("tool_calls"):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _as_one(run: Messages) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    contents: list[Any] = []
    for message in run:
        whole |= message
        if content := message.get("content"):
            contents += ["\n\n", content] if contents else [content]
    return {**whole, "content": joined(*contents)}


# Tools -------------------------------------------------------------------------------------------------------------


INPUT = "input"  # the one argument of a custom tool's function


class CallableTool(NamedTuple):
    """A tool that a model can call as a function.

    Attributes:
        function: its definition in the format of chats, with a unique name.
        name, namespace: as the client sent them.
        is_custom: its input is free text, the only argument of the function.
    """

    function: dict[str, Any]
    name: str
    namespace: str | None = None
    is_custom: bool = False


def function_name(name: Any, namespace: Any) -> str:
    """Return a tool's name for the model, which is unique: tools of two namespaces may share a name."""
    if not namespace:
        return str(name)
    return f"{namespace}{'' if str(namespace).endswith('__') else '__'}{name}"


def callable_tools(tools: Sequence[Mapping[str, Any]], namespace: str | None = None) -> list[CallableTool]:
    """Return the tools that a model can call, including those of namespaces.

    Raises:
        ValueError: a tool has no name, or two have the same.
    """
    found: list[CallableTool] = []
    for tool in tools:
        kind, name = tool.get("type"), tool.get("name")
        if kind not in ("function", "custom", "namespace"):
            continue
        if not isinstance(name, str) or not name:
            raise ValueError(f"a tool of type {kind} requires a name")
        if kind == "namespace":
            found += callable_tools([each for each in tool.get("tools") or () if isinstance(each, Mapping)], name)
            continue
        function = (
            _custom(tool) if kind == "custom" else {k: tool[k] for k in _FUNCTION_FIELDS if tool.get(k) is not None}
        )
        function = {"name": function_name(name, namespace), **function}
        found.append(CallableTool({"type": "function", "function": function}, name, namespace, kind == "custom"))
    names: set[str] = set()
    for each in found:
        called = each.function["function"]["name"]
        if called in names:
            raise ValueError(f"two tools have the name {called!r}")
        names.add(called)
    return found


_FUNCTION_FIELDS = ("description", "parameters", "strict")


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool as a function. Its regular expression constrains the argument; a Lark grammar cannot, since
    the argument is written as a JSON string, and is only described."""
    form = tool.get("format")
    text = str(tool.get("description") or "")
    argument: dict[str, Any] = {"type": "string", "description": "the tool's input, as it is"}
    strict = {}
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        text += f"\nThe input follows this {form.get('syntax', '')} grammar:\n{form['definition']}"
        if form.get("syntax") == "regex":
            argument["pattern"], strict = f"^(?:{form['definition']})$", {"strict": True}
    parameters = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT], "additionalProperties": False}
    return {"description": text.strip(), "parameters": parameters, **strict}


def ignored_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the types of tools that are not supported, and ``format.grammar`` if a Lark grammar is only described."""
    names = set()
    for tool in tools:
        kind, form = str(tool.get("type"))[:80], tool.get("format")
        if kind not in ("function", "custom", "namespace"):
            names.add(kind)
        elif kind == "custom" and isinstance(form, Mapping) and form.get("syntax") == "lark":
            names.add("format.grammar")
    return sorted(names)
