"""Try a tool loop of 12 turns, and an answer with a JSON schema, through Python clients.

python scripts/clients/try_sdks.py http://127.0.0.1:8080

The server is scripts/clients/scripted_server.py. Needs langchain-openai, langchain-anthropic, litellm, pydantic-ai and
openai-agents. The last one requires a newer openai than LiteLLM does, but the newest LiteLLM runs with it.
Exits with 1 if a client failed; clients that are not installed are skipped.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL, KEY, NUM_CALLS = "default_model", "none", 11
QUESTION = "Which city?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "rainy": {"type": "boolean"}},
    "required": ["city", "rainy"],
    "additionalProperties": False,
}


def city_model() -> Any:
    from pydantic import BaseModel, Field

    class City(BaseModel, extra="forbid"):
        city: str = Field(max_length=12)
        rainy: bool

    return City


def langchain(url: str, api: str) -> Any:
    from langchain_core.messages import HumanMessage, ToolMessage

    if api == "chat":
        from langchain_openai import ChatOpenAI

        chat: Any = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=MODEL, max_retries=0)
    else:
        from langchain_anthropic import ChatAnthropic

        chat = ChatAnthropic(base_url=url, api_key=KEY, model=MODEL, max_retries=0, max_tokens=300)

    def bash(command: str) -> str:
        """Run a command."""
        return f"read: {command}"

    messages: list[Any] = [HumanMessage("Read the files.")]
    for number in range(NUM_CALLS + 1):
        answer = chat.bind_tools([bash]).invoke(messages)
        messages.append(answer)
        messages += [ToolMessage(bash(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
        assert bool(answer.tool_calls) == (number < NUM_CALLS)
    method = {"method": "json_schema"} if api == "chat" else {}
    return chat.with_structured_output(city_model(), **method).invoke(QUESTION)


def litellm(url: str, api: str) -> Any:
    from litellm import completion

    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY, "num_retries": 0}
    if api == "messages":
        options |= {"model": f"anthropic/{MODEL}", "api_base": url, "max_tokens": 300}
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    function = {"name": "bash", "description": "Run a command.", "parameters": parameters}
    messages: list[Any] = [{"role": "user", "content": "Read the files."}]
    for number in range(NUM_CALLS + 1):
        tools = [{"type": "function", "function": function}]
        message = completion(messages=messages, tools=tools, **options).choices[0].message
        calls = message.tool_calls or ()
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "read"} for call in calls]
        assert bool(calls) == (number < NUM_CALLS)
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    answer = completion(messages=[{"role": "user", "content": QUESTION}], response_format=form, **options)
    return json.loads(answer.choices[0].message.content)


def pydantic_ai(url: str, api: str) -> Any:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if api == "messages":
        model: Any = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key=KEY))
    else:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    agent, calls = Agent(model, retries=0, model_settings={"max_tokens": 300}), []

    @agent.tool_plain
    def bash(command: str) -> str:
        """Run a command."""
        calls.append(command)
        return f"read: {command}"

    agent.run_sync("Read the files.")
    assert len(calls) == NUM_CALLS
    form = city_model() if api == "messages" else NativeOutput(city_model())
    return Agent(model, output_type=form, retries=0, model_settings={"max_tokens": 300}).run_sync(QUESTION).output


def openai_agents(url: str, api: str) -> Any:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    calls = []

    @agents.function_tool
    def bash(command: str) -> str:
        """Run a command."""
        calls.append(command)
        return f"read: {command}"

    kind: Any = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0))
    agents.Runner.run_sync(agents.Agent(name="a", model=model, tools=[bash]), "Read the files.", max_turns=20)
    assert len(calls) == NUM_CALLS
    agent = agents.Agent(name="b", model=model, output_type=city_model())
    return agents.Runner.run_sync(agent, QUESTION).final_output


CLIENTS = {
    langchain: ("chat", "messages"),
    litellm: ("chat", "messages"),
    pydantic_ai: ("chat", "responses", "messages"),
    openai_agents: ("chat", "responses"),
}


def main(url: str) -> int:
    has_failed = False
    for client, apis in CLIENTS.items():
        for api in apis:
            try:
                print(f"ok    {client.__name__}, {api}: {client(url, api)!r}", flush=True)
            except ImportError as error:
                print(f"none  {client.__name__}: {error}")
            except Exception as error:
                has_failed = True
                print(f"FAIL  {client.__name__}, {api}: {type(error).__name__}: {error}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
