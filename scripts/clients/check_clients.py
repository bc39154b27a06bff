"""Run LangChain and LiteLLM against a server: chats, streams, tools, completions, Messages, Responses.

    python scripts/clients/check_clients.py --url http://127.0.0.1:8080 [--tools]

They are not dependencies of this package: pip install langchain-openai litellm mcp, in an environment of its
own. What is not installed is skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it asks the network otherwise

MODEL = "default_model"
PARAMETERS = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
CLOCK = {"name": "clock", "description": "Tells the time", "parameters": {**PARAMETERS, "additionalProperties": False}}
Check = tuple[str, Callable[[], Any]]


def langchain(url: str, with_tools: bool) -> Iterator[Check]:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI, OpenAI

    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL, "max_retries": 0}
    chat = ChatOpenAI(**options, max_tokens=8, temperature=0.5, seed=1)
    yield "invoke", lambda: chat.invoke("Hi.").content
    yield "stream", lambda: "".join(str(chunk.content) for chunk in chat.stream("Hi."))
    yield "batch", lambda: len(chat.batch(["Hi.", "Ho."])) == 2
    yield (
        "n",
        lambda: len(ChatOpenAI(**options, max_tokens=4, n=3).generate([[HumanMessage("Hi.")]]).generations[0]) == 3,
    )
    yield "logprobs", lambda: chat.bind(logprobs=True, top_logprobs=2).invoke("Hi.").response_metadata["logprobs"]
    yield "completion", lambda: OpenAI(**options, max_tokens=8, n=2, best_of=2).generate(["Hi.", "Ho."]).generations[1]
    responses = ChatOpenAI(**options, max_tokens=8, use_responses_api=True)
    yield "responses", lambda: responses.invoke("Hi.").content
    yield "responses, stream", lambda: list(responses.stream("Hi."))
    if with_tools:
        bound = ChatOpenAI(**options, max_tokens=200).bind_tools(
            [{"type": "function", "function": CLOCK}], tool_choice="required", parallel_tool_calls=False
        )
        yield "tools", lambda: bound.invoke("Hi.").tool_calls[0]["args"]["ok"] in (True, False)
        form = ChatOpenAI(**options, max_tokens=200).with_structured_output(
            {"title": "Clock", **CLOCK["parameters"]},  # type: ignore[dict-item]
            method="json_schema",
        )
        yield "structured output", lambda: form.invoke("Hi.")["ok"] in (True, False)  # type: ignore[index]


def litellm(url: str, with_tools: bool) -> Iterator[Check]:
    import litellm as lite

    messages = [{"role": "user", "content": "Hi."}]
    openai: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 8}
    yield "chat", lambda: lite.completion(**openai, messages=messages, temperature=0.5).choices[0].message.content
    yield "stream", lambda: list(lite.completion(**openai, messages=messages, stream=True))
    yield "n", lambda: len(lite.completion(**openai, messages=messages, n=2).choices) == 2
    text = {**openai, "model": f"text-completion-openai/{MODEL}"}
    yield "completion", lambda: lite.text_completion(**text, prompt="Hi.").choices[0].text
    anthropic = {**openai, "model": f"anthropic/{MODEL}", "api_base": url}
    yield "messages", lambda: lite.completion(**anthropic, messages=messages).choices[0].message.content
    yield "messages, stream", lambda: list(lite.completion(**anthropic, messages=messages, stream=True))
    given = {name: value for name, value in openai.items() if name != "max_tokens"}
    yield "responses", lambda: lite.responses(**given, input="Hi.", max_output_tokens=8).output
    if with_tools:
        tools = [{"type": "function", "function": CLOCK}]
        many = {**openai, "max_tokens": 200}
        yield (
            "tools",
            lambda: (
                lite.completion(**many, messages=messages, tools=tools, tool_choice="required")
                .choices[0]
                .message.tool_calls[0]
                .function.name
                == "clock"
            ),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--tools", action="store_true", help="the model can call tools, and llguidance is there")
    args = parser.parse_args()
    failed = 0
    for make in (langchain, litellm):
        try:
            checks = list(make(args.url, args.tools))
        except ImportError as error:
            print(f"{make.__name__}: skipped: {error}")
            continue
        for name, check in checks:
            try:
                result = check()
                print(f"{make.__name__}: {name}: {'passed' if result else 'FAILED: nothing was said'}")
                failed += not result
            except Exception:
                failed += 1
                print(f"{make.__name__}: {name}: FAILED\n{traceback.format_exc(limit=-2)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
