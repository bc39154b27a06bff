"""Serve a model whose answers follow a script: a shell call in each of the first turns, then a text.

python scripts/clients/scripted_server.py MODEL PORT [TURNS] [FLAGS OF THE SERVER]

MODEL needs a chat template with tools, such as make_tools_model of tests/support/models/tiny_model.py writes. The
script chooses only the tokens, by a grammar that allows one text. Server, HTTP, tokenizer, chat template, engine and
prefix cache are the real ones. Use it to try coding agents: an untrained model would never call their tools.
The log has the length of each request's longest prefix that an earlier one had: the most that a cache can find.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mlx_paged.cli import server
from mlx_paged.engine.sharing import common_length
from mlx_paged.grammar.compiler import GrammarSource
from mlx_paged.server.request import ChatInput, Constraint
from mlx_paged.server.texts import LoadedTexts

SHELLS = ("bash", "shell", "exec_command", "shell_command", "local_shell")
DESCRIPTION = "Read the next file"
THOUGHTS = 8  # thinking budget in tokens


def next_text(chat: ChatInput, num_turns: int) -> str:
    """Return the model's next text, by the number of tool results in the chat."""
    number = sum(message.get("role") == "tool" for message in chat.messages)
    functions = [tool["function"] for tool in chat.tools or ()]
    shell = next((each for each in functions if each["name"].lower() in SHELLS), None)
    if shell is None or number >= num_turns - 1:
        return f"All {number} files have been read."
    return f"<tool_call>\n{json.dumps({'name': shell['name'], 'arguments': arguments_of(shell, number)})}\n</tool_call>"


def arguments_of(shell: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the arguments of a command that reads a file, to fit the tool's schema."""
    properties = shell["parameters"].get("properties", {})
    command: Any = f"cat file{number}.txt"
    name = "cmd" if "cmd" in properties else "command"
    if properties.get(name, {}).get("type") == "array":
        command = ["bash", "-lc", command]
    described = {"description": DESCRIPTION} if "description" in properties else {}
    return {name: command, **described}


def main() -> None:
    model, port, *flags = sys.argv[1:]
    num_turns = int(flags.pop(0)) if flags and flags[0].isdigit() else 12
    complete = LoadedTexts.complete
    earlier: list[list[int]] = []  # prompts

    def scripted(texts: LoadedTexts, request: Any, default_tokens: int | None = None) -> None:
        complete(texts, request, default_tokens)
        (given,) = request.inputs
        (tokens,) = (prompt.tokens for prompt in request.prompts)
        unchanged = max((common_length(tokens, each) for each in earlier), default=0)
        earlier.append(tokens)
        logging.info("id=%s prompt=%d unchanged=%d", request.id, len(tokens), unchanged)
        request.thinking_budget = THOUGHTS
        asked = request.constraint
        if asked is not None and (asked.answer is not None or (asked.tools is not None and asked.tools.required)):
            # An untrained model would write white space for ever where JSON allows it.
            white = {token: -100.0 for token in range(texts.vocab_size) if texts.decode([token]).isspace()}
            request.sampling = replace(request.sampling, logit_bias=white)
        elif isinstance(given, ChatInput):
            source = GrammarSource.choice([next_text(given, num_turns)])
            request.grammar, request.constraint = texts.compile(Constraint(source, "script")), None

    LoadedTexts.complete = scripted  # type: ignore[method-assign]
    server.main(["--model", model, "--port", port, *flags])


if __name__ == "__main__":
    main()
