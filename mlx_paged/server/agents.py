"""Adapts what coding agents send: lines that change from turn to turn, system messages within a chat, tools that only
their vendor's server runs, and tool results that are not text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
