"""Replay a coding agent's session of 12 turns against a server, and print the share of earlier tokens that is cached.

python scripts/clients/session_share.py http://127.0.0.1:8080

The bodies have the shape of Claude Code's Messages: a billing line that changes at the front, the time in the system
prompt, a tool's result in each turn, and a system message in the middle.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

NUM_TURNS = 12
RULES = "You are a coding agent. " + "Read a file before you edit it, and say what you have changed. " * 12
TOOLS = ("Read", "Edit", "Bash", "Grep")


def turns() -> Iterator[dict[str, Any]]:
    """Yield the bodies of the session, with parts that change for no reason."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = [{"name": name, "description": f"{name} a file of the project.", "input_schema": schema} for name in TOOLS]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find out why the tests fail, and mend it."}]
    for number in range(NUM_TURNS):
        header = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cch={number * 7919:05x};"
        clock = f"<env>\nThe current time is 2026-11-23 22:{number:02}:07\nPlatform: darwin\n</env>"
        rules = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}
        system = [{"type": "text", "text": header}, {"type": "text", "text": clock}, rules]
        yield {"model": "default_model", "max_tokens": 4, "system": system, "messages": list(messages), "tools": tools}
        call = {
            "type": "tool_use",
            "id": f"toolu_{number}",
            "name": TOOLS[number % 4],
            "input": {"path": f"{number}.py"},
        }
        thought = {"type": "thinking", "thinking": f"File {number} may be at fault.", "signature": "x"}
        result = f"def test_{number}():\n    assert value({number}) == {number * 31}\n" * 3
        messages.append({"role": "assistant", "content": [thought, call]})
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": result}]}
        )
        if number == NUM_TURNS // 2:
            messages.append({"role": "system", "content": "Plan mode is off."})


def shares(url: str) -> Iterator[tuple[int, int, int]]:
    """Yield the number of tokens of each turn's prompt, of the prompt before it, and of cached ones."""
    before = 0
    for body in turns():
        request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode())
        with urllib.request.urlopen(request) as answer:
            usage = json.load(answer)["usage"]
        cached = usage["cache_read_input_tokens"]
        yield usage["input_tokens"] + cached, before, cached
        before = usage["input_tokens"] + cached


if __name__ == "__main__":
    print("| Turn | Prompt | Of the turn before | Cached | Share of the turn before |\n|---|---|---|---|---|")
    for number, (tokens, before, cached) in enumerate(shares(sys.argv[1]), 1):
        print(f"| {number} | {tokens} | {before} | {cached} | {f'{min(1, cached / before):.1%}' if before else ''} |")
