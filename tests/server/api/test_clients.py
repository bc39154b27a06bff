"""Every parameter and what it does, through the official openai and anthropic clients."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import mlx.core as mx
import mlx_lm
import pytest

from mlx_paged.server.requests.endpoints import ENDPOINTS
from mlx_paged.server.requests.fields import NO_EFFECT, REFUSED
from tests.support.models.tiny_model import VOCAB
from tests.support.processes.server_process import ServerProcess
from tests.support.server.samples import HI, OF_CHAT, OF_MESSAGE, WHITE

if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = pytest.mark.demo_model

# Every parameter ----------------------------------------------------------------------------------------------------

SAMPLING: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    **{"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_context_size": 5},
    **{"presence_context_size": 5, "frequency_context_size": 5, "logit_bias": {"39": 1}, "seed": 7, "prompt_lookup": 2},
    **{"cache_salt": "mine", "priority": 1, "structured_outputs": {"regex": "[ab]"}, "model": "default_model"},
    "stream": False,
}
RECORDS: dict[str, Any] = {
    **{"user": "me", "metadata": {"a": "b"}, "safety_identifier": "me", "store": False, "prompt_cache_key": "k"},
    **{"prompt_cache_retention": "24h", "prompt_cache_options": {}, "service_tier": "auto"},
}
KWARGS = {"chat_template_kwargs": {"enable_thinking": False}}
USED: dict[str, dict[str, Any]] = {  # values of parameters that are supported or have no effect
    "/v1/chat/completions": {
        **SAMPLING,
        **RECORDS,
        **KWARGS,
        **{"max_tokens": 2, "max_completion_tokens": 2, "n": 2, "stop": ["x"], "logprobs": True, "top_logprobs": 20},
        **{"response_format": {"type": "text"}, "tools": [OF_CHAT], "tool_choice": "none", "role_mapping": {"a": "b"}},
        **{"continue_final_message": False, "add_generation_prompt": True, "enable_thinking": False},
        **{"parallel_tool_calls": False, "reasoning_effort": "low", "modalities": ["text"], "verbosity": "medium"},
        **{"prediction": {"type": "content", "content": "x"}, "stream_options": {"include_usage": True}},
        **{"messages": HI, "thinking": {"type": "adaptive"}, "max_thinking_tokens": 9},
    },
    "/v1/completions": {
        **SAMPLING,
        **{"max_tokens": 2, "max_completion_tokens": 2, "n": 2, "echo": True, "stop": "x", "logprobs": 3},
        **{"top_logprobs": 2, "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}},
        **{"stream_options": {"include_usage": True}, "prompt": ["Hello", [1, 2]]},
    },
    "/v1/responses": {
        **SAMPLING,
        **RECORDS,
        **KWARGS,
        **{"instructions": "Rhyme.", "max_output_tokens": 2, "text": {"format": {"type": "text"}}, "tools": []},
        **{"tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0, "reasoning": {"effort": "low"}},
        **{"include": ["message.output_text.logprobs"], "background": False, "truncation": "disabled", "input": "Hi."},
        **{"stream_options": {"include_obfuscation": False}, "thinking": {"type": "disabled"}, "max_tool_calls": 3},
        "max_thinking_tokens": 9,
    },
    "/v1/messages": {
        **SAMPLING,
        **KWARGS,
        **{"system": "Rhyme.", "stop_sequences": ["x"], "tools": [OF_MESSAGE], "tool_choice": {"type": "none"}},
        **{"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}, "max_tokens": 2},
        **{"metadata": {"user_id": "me"}, "cache_control": {"type": "ephemeral"}, "service_tier": "auto"},
        **{"betas": ["a-2026"], "context_management": {"edits": []}, "max_thinking_tokens": 9},
        "messages": HI,
    },
}
OF_HEADERS = {"user_profile_id", "workspace_id"}  # parameters that the client sends as headers
# They need a folder or an earlier answer; see test_server_access, test_server_stops and test_agents.
TESTED_ELSEWHERE = {"adapters", "draft", "draft_model", "num_draft_tokens", "previous_response_id"}


def ask(client: openai.OpenAI, claude: anthropic.Anthropic, path: str, **options: Any) -> Any:
    """Send parameters as the client's own arguments, and those it does not know as ``extra_body``."""
    make: Any = {
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/completions": client.completions.create,
        "/v1/responses": client.responses.create,
        "/v1/messages": claude.messages.create,
    }[path]
    least = {name: USED[path][name] for name, field in ENDPOINTS[path].body.model_fields.items() if field.is_required()}
    known = official(path)
    given = {"model": "default_model", **least, **options}
    own = {name: value for name, value in given.items() if name in known - OF_HEADERS}
    return make(**own, extra_body={name: value for name, value in given.items() if name not in own})


@functools.cache
def official(path: str) -> set[str]:
    """Return the parameters of the official client."""
    from anthropic.types import message_create_params
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    makers: dict[str, Any] = {
        "/v1/chat/completions": chat_create_params.CompletionCreateParamsNonStreaming,
        "/v1/completions": completion_create_params.CompletionCreateParamsNonStreaming,
        "/v1/responses": response_create_params.ResponseCreateParamsNonStreaming,
        "/v1/messages": message_create_params.MessageCreateParamsNonStreaming,
    }
    return set(get_type_hints(makers[path]))


@pytest.mark.parametrize("path", USED)
def test_every_parameter_is_accepted_or_refused_by_name(
    path: str, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    import anthropic
    import openai

    table = ENDPOINTS[path].body.model_fields
    known, refused = {*NO_EFFECT, *REFUSED} - set(table), set(REFUSED) - set(table)
    assert official(path) - {"stream"} <= known | set(table)
    assert set(USED[path]) - known == set(table) - TESTED_ELSEWHERE

    def used(name: str) -> Any:
        if name not in USED[path]:
            return ask(client, claude, path, **{name: 0})
        least = {"max_tokens": 2} if path == "/v1/messages" else {}
        if name == "stream_options":
            return list(ask(client, claude, path, **least, **given(name), stream=True))
        return ask(client, claude, path, **least, **given(name))

    def given(name: str) -> dict[str, Any]:
        return {} if name == "max_tokens" and path == "/v1/messages" else {name: USED[path][name]}

    def refuse(name: str, value: Any = "x") -> str:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            ask(client, claude, path, **{name: value})
        error: Any = caught.value.body
        assert name in str(caught.value)
        return str((error.get("error") or error)["param"])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(used, USED[path]))
        assert list(pool.map(refuse, sorted(refused))) == sorted(refused)
    assert refuse("num_draft_tokens", 2) == "num_draft_tokens" and used("temprature")


# Chats and completions ----------------------------------------------------------------------------------------------


def test_n_answers_compute_their_prompt_once(server: ServerProcess, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is to be said of forks, of which there are many? " * 30}]
    options: dict[str, Any] = {"model": "default_model", "messages": messages, "temperature": 1, "max_tokens": 5}
    before = server.stats()["server"]["computed_prompt_tokens"]
    answer = client.chat.completions.create(**options, n=4, seed=3)
    num_prompt = answer.usage.prompt_tokens
    assert num_prompt > 300 and answer.usage.completion_tokens == 20
    assert server.stats()["server"]["computed_prompt_tokens"] - before <= num_prompt + 3 * 32
    assert answer.usage.prompt_tokens_details.cached_tokens < 9  # the beginning that all chats share
    said = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and len(set(said)) == 4
    assert client.chat.completions.create(**options, seed=5).choices[0].message.content == said[2]
    streamed = ["", "", "", ""]
    ends: list[int] = []
    for chunk in client.chat.completions.create(
        **options, n=4, seed=3, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert streamed == said and sorted(ends) == [0, 1, 2, 3]
    assert chunk.usage.completion_tokens == 20 and chunk.usage.prompt_tokens == num_prompt


def test_lists_of_texts_and_tokens_are_answered_in_one_request(client: openai.OpenAI, folder: Path) -> None:
    import openai

    _, tokenizer = mlx_lm.load(str(folder))
    texts = ["Once upon a time", "The sea is"]
    alone = [client.completions.create(model="default_model", prompt=text).choices[0].text for text in texts]
    ids = [tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids, [texts[0], ids[1]]):
        answer = client.completions.create(model="default_model", prompt=prompt, n=2)
        assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
        assert answer.usage.prompt_tokens == sum(map(len, ids)) and answer.usage.completion_tokens == 16
    assert client.completions.create(model="default_model", prompt=ids[0]).choices[0].text == alone[0]
    for wrong, words in (([[VOCAB]], f"from 0 to {VOCAB - 1}"), (["x"] * 257, "at most 256"), ([[]], "at least 1")):
        with pytest.raises(openai.BadRequestError, match=words):
            client.completions.create(model="default_model", prompt=wrong)


def test_echoed_prompts_have_the_models_log_probabilities(client: openai.OpenAI, folder: Path) -> None:
    import openai

    model, tokenizer = mlx_lm.load(str(folder))
    text = "The quick black dog runs over the old red fish."
    tokens = tokenizer.encode(text)
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    expected = [rows[place, token].item() for place, token in enumerate(tokens[1:])]
    create: Any = client.completions.create
    choice = create(model="default_model", prompt=text, echo=True, logprobs=3, max_tokens=2).choices[0]
    told = choice.logprobs
    assert choice.text.startswith(text) and "".join(told.tokens) == choice.text
    assert len(told.tokens) == len(tokens) + 2 == len(told.top_logprobs)
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert max(abs(a - b) for a, b in zip(told.token_logprobs[1:-2], expected, strict=True)) < 1e-3
    assert all(choice.text[at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True))
    assert all(3 <= len(top) <= 4 for top in told.top_logprobs[1:])
    short: dict[str, Any] = {"model": "default_model", "prompt": "The quick black dog", "echo": True, "logprobs": 1}
    alone = create(**short, max_tokens=0)
    assert alone.choices[0].text == "The quick black dog" and alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected[:3], abs=1e-3)
    chunks = list(create(**short, n=2, max_tokens=3, stream=True))
    for index in range(2):
        told = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(each.text for each in told).startswith("The quick black dog")
        assert sum(len(each.logprobs.tokens) for each in told) == 4 + 3
    bare = create(model="default_model", prompt="Hi", echo=True).choices[0]
    assert bare.text.startswith("Hi") and len(bare.text) > 2 and bare.logprobs is None
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        create(model="default_model", prompt="Hi", max_tokens=0)


def test_required_and_named_tools_are_called(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "default_model", "messages": HI, "max_tokens": 90, "logit_bias": WHITE}
    named = {"type": "function", "function": {"name": "clock"}}
    for choice in ("required", named):
        answer = client.chat.completions.create(
            **options, tools=[OF_CHAT], tool_choice=choice, parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "clock"
        assert isinstance(json.loads(call.function.arguments)["ok"], bool)
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [OF_CHAT]}}
    assert client.chat.completions.create(**options, tools=[OF_CHAT], tool_choice=allowed).choices
    again = [*HI, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    assert client.chat.completions.create(model="default_model", messages=again).choices[0].message.content


# The rest -----------------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_round_trip(server: ServerProcess, client: openai.OpenAI) -> None:
    tokens = server.post("/tokenize", {"prompt": "Once upon a time"}).json["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json == {"prompt": "Once upon a time"}
    told = server.post("/tokenize", {"messages": HI}).json
    usage = client.chat.completions.create(model="default_model", messages=HI).usage
    assert told["count"] == len(told["tokens"]) == usage.prompt_tokens
    for path, body, name in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
    ):
        answer = server.post(path, body)
        assert answer.status == 400 and answer.json["error"]["param"] == name, answer.body
    assert set(server.get("/version").json) >= {"version", "mlx", "mlx-lm"}
