"""Sessions over the chat templates of eight families: a turn's tokens begin with those of the turn before."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.server.agents import Refusals, fitted
from mlx_paged.server.request import ChatInput
from mlx_paged.server.requests.chat import ChatBody, chat_request
from mlx_paged.server.requests.messages import CountBody, message_request
from mlx_paged.server.requests.responses import ResponseBody, response_request
from mlx_paged.server.texts import LoadedTexts
from tests.support.cases import crossed, quick
from tests.support.models.chat_templates import FAMILIES, family_tokenizer

pytestmark = pytest.mark.demo_model

SESSIONS = 4
TAIL = 4  # tokens that begin an answer and that the template writes differently in the history
MOVES_TOOLS = {"mistral-small-3.2"}  # the template puts the tools at the latest question
# Keeps the thinking after the latest answer without a call; others: after the latest question.
UP_TO_AN_ANSWER = {"gpt-oss"}
# Least share of tokens found again. It is lower if the template drops the thinking before the latest question.
# The second value is for clients that send only the latest answer's thinking.
LEAST_FOUND = {
    **dict.fromkeys(("deepseek-v3.1", "llama-3.1", "gemma-3"), (0.995, 0.995)),
    **dict.fromkeys(("glm-4.6", "qwen3"), (0.96, 0.92)),
    "qwen3.5": (0.94, 0.89),
    "gpt-oss": (0.94, 0.87),
    "mistral-small-3.2": (0.86, 0.86),
}

TEXT = "the test of a file fails since its value is not what we read there\n and `x = {1: 'é'}` ... </div>"
WORDS = TEXT.split(" ")
NAMES = ("read_file", "edit_file", "run")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": n, "description": f"{n}.", "parameters": SCHEMA}} for n in NAMES]


def said(dice: random.Random, most: int = 40) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(1, most)))


def session(dice: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of each turn of an agent: questions, thinking, single or parallel calls, results."""
    messages = [{"role": "system", "content": said(dice, 200)}, {"role": "user", "content": said(dice)}]
    for number in range(dice.randint(2, 12)):
        yield list(messages)
        calls = [
            {
                "id": f"call_{number}_{index}_{dice.getrandbits(64):x}",
                "type": "function",
                "function": {
                    "name": dice.choice(NAMES),
                    "arguments": json.dumps({"path": said(dice, 3), "line": dice.randint(0, 99)}),
                },
            }
            for index in range(dice.choice((0, 1, 1, 1, 2)))
        ]
        text = said(dice) if dice.random() < 0.5 or not calls else None
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if dice.random() < 0.7:
            answer["reasoning_content"] = said(dice)
        if calls:
            answer["tool_calls"] = calls
        messages.append(answer)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": said(dice, 80)} for call in calls]
        if not calls or dice.random() < 0.1:
            messages.append({"role": "user", "content": said(dice)})


def shared(first: list[int], second: list[int]) -> int:
    different = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(different, min(len(first), len(second)))


def texts_of(family: str) -> LoadedTexts:
    return LoadedTexts(SimpleNamespace(key=None, tokenizer=family_tokenizer(family), model=None, config={}), {}, None)


def without_old_thoughts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat as sent by clients that keep only the latest answer's thinking."""
    last = max((i for i, each in enumerate(messages) if each["role"] == "assistant"), default=0)
    return [{k: v for k, v in each.items() if k != "reasoning_content" or i == last} for i, each in enumerate(messages)]


def kept_of(family: str, before: list[dict[str, Any]], now: list[dict[str, Any]]) -> int:
    """Return how many messages at the front neither the client nor a new question changes."""
    pairs = enumerate(zip(before, now, strict=False))
    kept = next((i for i, (old, new) in pairs if old != new), len(before))
    if now[-1]["role"] != "user":
        return kept
    if family in UP_TO_AN_ANSWER:
        answers = [i for i, each in enumerate(before) if each["role"] == "assistant" and "tool_calls" not in each]
        return min(kept, answers[-1] + 1 if answers else 2)
    *_, question, _ = (i for i, each in enumerate(now) if each["role"] == "user")
    return min(kept, question if family in MOVES_TOOLS else question + 1)


@pytest.mark.parametrize(
    ("family", "forgets"),
    quick(crossed(FAMILIES, [False, True]), *crossed(FAMILIES, [False]), ("gpt-oss", True), ("qwen3", True)),
)
def test_tokens_of_a_turn_begin_with_those_of_the_turn_before(family: str, forgets: bool) -> None:
    texts = texts_of(family)
    earlier = found = 0
    for seed in range(SESSIONS):
        turns = [without_old_thoughts(turn) if forgets else turn for turn in session(random.Random(seed))]
        prompts = [texts.make_prompt(ChatInput(turn, TOOLS)).tokens for turn in turns]
        for number in range(1, len(turns)):
            same = shared(prompts[number - 1], prompts[number])
            kept = kept_of(family, turns[number - 1], turns[number])
            moved = family in MOVES_TOOLS and turns[number][-1]["role"] == "user"
            front = prompts[number - 1]
            if moved or kept < len(turns[number - 1]):
                front = texts.make_prompt(ChatInput(turns[number][:kept], None if moved else TOOLS)).tokens
            assert same >= len(front) - TAIL, (seed, number)
            earlier, found = earlier + len(prompts[number - 1]), found + same
    assert found / earlier >= LEAST_FOUND[family][forgets]


# Histories --------------------------------------------------------------------------------------------------------

ASK = {"role": "user", "content": "mark-a."}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}


def history(arguments: Any, api: str) -> ChatInput:
    """Return the chat that an API makes of a session whose earlier call has these arguments."""
    call: dict[str, Any] = {"name": "run", "arguments": arguments}
    if api == "chat":
        calls = [{"id": "call_1", "type": "function", "function": call}]
        said = [{"role": "assistant", "content": None, "tool_calls": calls}]
        result = {"role": "tool", "tool_call_id": "call_1", "content": "mark-b."}
        request = chat_request(ChatBody(messages=[ASK, *said, result, ASK], tools=TOOLS), {})
    elif api == "responses":
        items = [{"type": "function_call", "call_id": "call_1", **call}]
        items += [{"type": "function_call_output", "call_id": "call_1", "output": "mark-b."}]
        tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        request = response_request(ResponseBody(input=[ASK, *items, ASK], tools=tools), {})
    else:
        used = {"type": "tool_use", "id": "call_1", "name": "run", "input": arguments}
        told = {"type": "tool_result", "tool_use_id": "call_1", "content": "mark-b."}
        tools = [{**tool["function"], "input_schema": SCHEMA} for tool in TOOLS]
        for tool in tools:
            del tool["parameters"]
        chat: Any = [ASK, {"role": "assistant", "content": [used]}]
        chat.append({"role": "user", "content": [told, {"type": "text", "text": "mark-a."}]})
        request = message_request(CountBody.model_validate({"messages": chat, "tools": tools}), {})
    (given,) = request.inputs
    assert isinstance(given, ChatInput)
    return given


@pytest.mark.parametrize(("family", "api"), crossed(FAMILIES, ["chat", "responses", "messages"]))
def test_session_goes_on_after_a_call_without_an_object_of_arguments(family: str, api: str) -> None:
    texts = texts_of(family)

    def prompt(arguments: Any) -> str:
        return texts.decode(texts.make_prompt(history(arguments, api)).tokens)

    empty = prompt({})
    assert empty.count("mark-b.") == 1
    assert all(prompt(none) == empty for none in ("", " ", None, "null", "{}"))
    for text in ('{"path": "mark-c', '["mark-c"]', "mark-c", '{"path": ' + "9" * 5000, "[" * 5000 + "mark-c"):
        shown = prompt(text)
        assert text.replace("\\", "").replace('"', "") in shown.replace("\\", "").replace('"', "")
        assert shown.count("mark-b.") == 1
    assert prompt('{"path": "mark-c"}') == prompt({"path": "mark-c"})


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_without_a_description_or_parameters_are_shown(family: str) -> None:
    texts = texts_of(family)

    def count(messages: list[dict[str, Any]], **more: Any) -> int:
        tools = [{"type": "function", "function": {"name": "mark-tool", **more}}]
        return texts.decode(texts.make_prompt(ChatInput(messages, tools)).tokens).count("mark-tool")

    for messages in ([ASK], [ASK, {"role": "assistant", "content": "mark-b.", "tool_calls": []}, ASK]):
        whole = count(messages, description="d", parameters=PARAMETERS)
        assert whole or family in ("gemma-3", "deepseek-v3.1")  # these templates show no tools
        for more in ({}, {"description": None}, {"parameters": PARAMETERS}, {"description": "d", "parameters": None}):
            assert count(messages, **more) == whole


def test_chats_of_very_many_messages_are_fitted_in_linear_time() -> None:
    """It takes a second; what was quadratic took half an hour."""
    number = 20_000
    refuses = Refusals(*(True for _ in Refusals._fields))
    calls = [{"id": str(n), "function": {"name": "f", "arguments": "{}"}} for n in range(number)]
    results = [{"role": "tool", "tool_call_id": str(n), "content": "x"} for n in range(number)]
    system = {"role": "system", "content": "a long text " * 30}
    called = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *reversed(results)]
    for chat in ([system] * number, [ASK, system] * number, [ASK] * number, called):
        assert fitted(chat, refuses) and fitted(chat, refuses._replace(tools=False))
    (_, first, result, second, *_) = fitted(called, refuses._replace(tools=False, ids=False))
    assert first["tool_calls"] == [{"id": "0", "function": {"name": "f", "arguments": {}}}]
    assert result["tool_call_id"] == "0" and second["tool_calls"][0]["id"] == "1"


# Two parallel calls with thinking and text, a question right after the results, and two questions in a row.
HARD: list[dict[str, Any]] = [
    {"role": "system", "content": "mark-a."},
    {"role": "user", "content": "mark-b."},
    {
        "role": "assistant",
        "reasoning_content": "mark-c.",
        "content": "mark-d.",
        "tool_calls": [
            {"id": f"call_{n}", "type": "function", "function": {"name": "run", "arguments": json.dumps({"path": n})}}
            for n in ("mark-e.", "mark-f.")
        ],
    },
    *({"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}-result"} for n in ("mark-e.", "mark-f.")),
    {"role": "user", "content": "mark-g."},
    {"role": "user", "content": [{"type": "text", "text": "mark-h."}]},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_that_a_template_refuses_are_rewritten(family: str) -> None:
    texts = texts_of(family)
    text = texts.decode(texts.make_prompt(ChatInput(HARD, TOOLS)).tokens)
    marks = ["mark-a.", "mark-b.", "mark-e.", "mark-e.-result", "mark-f.", "mark-f.-result", "mark-g.", "mark-h."]
    if not texts._refusals.several:  # otherwise each call is followed by its own result
        marks[3:5] = marks[4:2:-1]
    begin = 0
    for mark in marks:
        begin = text.index(mark, begin) + len(mark)
    if family not in ("mistral-small-3.2", "llama-3.1"):  # these have no text beside a call
        assert text.count("mark-d.") == 1
    if family == "gemma-3":
        assert '<tool_call>\n{"name": "run", "arguments": {"path": "mark-e."}}\n</tool_call>' in text
        assert "<tool_response>\nmark-e.-result\n</tool_response>" in text
    if family == "mistral-small-3.2":
        ids = re.findall(r"\[CALL_ID\](\w+)", text)
        assert len(set(ids)) == 2 and ids == re.findall(r"\[TOOL_RESULTS\](\w+)", text)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_end_of_a_prompt_begins_reasoning(family: str) -> None:
    texts = texts_of(family)
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        found = set()
        for said in ("Hi.", "What does <think> mean?", "What does <think>", "</think>"):
            messages: list[dict[str, Any]] = [{"role": "user", "content": said}]
            prompt = texts.make_prompt(ChatInput(messages, None, dict(kwargs)))
            found.add(prompt.initial_state)
            assert (prompt.initial_state == "reasoning") == texts.decode(prompt.tokens).rstrip().endswith("<think>")
        assert len(found) == 1


def test_continued_message_decides_whether_its_thought_is_open() -> None:
    texts = texts_of("qwen3")
    for begun, state in (("<think>Hm", "reasoning"), ("So", "normal")):
        messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": begun}]
        prompt = texts.make_prompt(ChatInput(messages, None, {}, continues=True))
        assert prompt.initial_state == state
