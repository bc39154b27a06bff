"""What coding agents send that models cannot be given as it is: lines that change from turn to turn, tools that a
server of the client's own vendor runs, and parts of results that are no text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Text at the beginning of a block that changes with each request and means nothing to a model: behind it no prefix
# would be found again.
VOLATILE = (
    re.compile(r"x-anthropic-billing-header:[^\n]*\n?"),  # Claude Code: a version and a checksum
)


def without_volatile(blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return system blocks without what changes from turn to turn, and without those that hold nothing else."""
    kept = []
    for block in blocks:
        text = block.get("text")
        for pattern in VOLATILE:
            if isinstance(text, str) and (found := pattern.match(text)):
                text = text[found.end() :]
        if text == block.get("text"):
            kept.append(block)
        elif text:
            kept.append({**block, "text": text})
    return kept


def without_volatile_lines(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat, its system messages as :func:`without_volatile` has them."""
    kept = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and content:
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            rest = without_volatile(blocks)
            if not rest:
                continue
            if rest != blocks:
                message = {**message, "content": rest[0]["text"] if isinstance(content, str) else rest}
        kept.append(message)
    return kept


def result_text(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return the parts of a tool's result as text; a part that is none is named, so that the model knows of it."""
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


# Tools of Responses -----------------------------------------------------------------------------------------------

INPUT = "input"  # the one argument of a custom tool's function


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools that a model can call, as functions: those of namespaces by themselves, and custom ones, whose
    input is free text, with one argument."""
    functions: list[dict[str, Any]] = []
    for tool in tools:
        kind = tool.get("type")
        if kind == "function":
            named = {
                key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None
            }
            functions.append({"type": "function", "function": named})
        elif kind == "custom":
            functions.append({"type": "function", "function": _custom(tool)})
        elif kind == "namespace":
            functions += functions_of([each for each in tool.get("tools") or () if isinstance(each, Mapping)])
    return functions


def _custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    form = tool.get("format")
    text = str(tool.get("description") or "")
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        text += f"\nThe input follows this {form.get('syntax', '')} grammar:\n{form['definition']}"
    argument = {"type": "string", "description": "the tool's input, as it is"}
    parameters = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT], "additionalProperties": False}
    return {"name": tool.get("name"), "description": text.strip(), "parameters": parameters}


def custom_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of custom tools, whose calls are told as such."""
    names = {str(tool.get("name")) for tool in tools if tool.get("type") == "custom"}
    for tool in tools:
        if tool.get("type") == "namespace":
            names |= custom_names([each for each in tool.get("tools") or () if isinstance(each, Mapping)])
    return frozenset(names)


def left_out(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the types of tools that nobody here can run."""
    kinds = [str(tool.get("type"))[:80] for tool in tools]
    return sorted({kind for kind in kinds if kind not in ("function", "custom", "namespace")})
