"""Answers as clients get them: text, reasoning, tool calls, log probabilities."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.server.answer_reader import AnswerReader
from mlx_paged.server.answers import Answer, Answers, Head, Piece, Usage
from mlx_paged.server.call_formats import TextMarks
from mlx_paged.server.request import ChatInput, Generated, Prompt, ServerRequest
from mlx_paged.server.requests.chat import ChatBody, ChatForm
from mlx_paged.server.requests.messages import CountBody, MessageForm, MessageParam
from mlx_paged.server.requests.responses import ResponseBody, ResponseForm
from tests.support.call_texts import WRITERS, marks_of

HEAD = Head("x", "m", 0, "")
CHAT = ChatBody(messages=[{"role": "user", "content": "Hi."}])
MESSAGE = CountBody(messages=[MessageParam(role="user", content="Hi.")])
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "go", "f", "clock")]


def texts_of(marks: TextMarks) -> Any:
    return SimpleNamespace(marks=marks, token=lambda token: (chr(token), chr(token).encode()))


JSON_TEXTS, HARMONY_TEXTS = texts_of(marks_of("json_tools")), texts_of(marks_of("harmony"))


def answer_of(text: str, texts: Any = JSON_TEXTS, **options: Any) -> Piece:
    """Return the answer to a text that comes in pieces of three characters, then an end token."""
    finish = options.pop("finish", "stop")
    request = ServerRequest(options.pop("inputs", [ChatInput([], TOOLS)]), prompts=[Prompt.of_tokens([1])], **options)
    answer = Answer(0, request, texts)
    pieces = [answer.next(Generated(0, ord(text[i]), text[i : i + 3], logprob=-0.5)) for i in range(0, len(text), 3)]
    num_tokens = len(pieces)
    pieces.append(answer.next(Generated(0, 2, "", finish, logprob=-0.1, num_shown=num_tokens)))
    return Piece.joined(piece for piece in pieces if piece is not None)


def calls_of(piece: Piece) -> list[tuple[str, Any]]:
    return [(each.call.name, json.loads(each.text)) for each in piece.folded() if each.call is not None]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"name": "f", "arguments": {"a": 1}}, {"a": 1}),
        ({"name": "f"}, {}),
        ({"name": "f", "arguments": None}, {}),
        ({"name": "f", "arguments": ""}, {}),
        ({"name": "f", "parameters": {"a": 1}}, {"a": 1}),
        ({"name": "f", "arguments": '{"a": 1}'}, {"a": 1}),
        ({"arguments": {"a": 1}, "name": "f"}, {"a": 1}),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, {"a": 1}),
    ],
)
def test_arguments_of_a_call_are_always_an_object(call: dict[str, Any], arguments: dict[str, Any]) -> None:
    told = answer_of(f"Hello <tool_call>{json.dumps(call)}</tool_call>")
    assert told.text == "Hello " and told.finish == "tool_calls"
    assert calls_of(told) == [("f", arguments)]
    whole = MessageForm(HEAD, MESSAGE).whole([told], Usage())
    assert whole["content"][1]["input"] == arguments and whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1e400}}',
        '{"name": "f", "arguments": {"a": "\\ud83d"}}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": [1]}',
        *("[1, 2]", '"f"', "null", '{"arguments": {}}', "{", '{"name": {"x": 1}}', "[" * 9000 + "]" * 9000),
    ],
)
def test_unreadable_call_is_text(text: str) -> None:
    for streams in (False, True):
        told = answer_of(f"Hello <tool_call>{text}</tool_call> bye", streams=streams)
        assert told.finish == "stop" and json.dumps(told.text).encode()
        if not streams:
            assert told.text == f"Hello <tool_call>{text}</tool_call> bye" and not calls_of(told)


def test_unclosed_call_counts_and_calls_once_keeps_only_the_first() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    assert answer_of(call).finish == "tool_calls"
    assert len(calls_of(answer_of(f"{call}</tool_call>{call}</tool_call>"))) == 2
    once = answer_of(f"{call}</tool_call>{call}</tool_call>", calls_once=True)
    assert len(calls_of(once)) == 1 and not once.text


def test_end_token_has_no_log_probability_and_others_have_bytes() -> None:
    told = answer_of("abcdé", top_logprobs=0)
    assert [(token.text, token.bytes) for token in told.tokens] == [("a", b"a"), ("d", b"d")]


THOUGHT = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|><|start|>assistant"
CALL = '<|constrain|>json<|message|>{"tz": "UTC"}<|call|>'
UTC, EMPTY = '{"tz": "UTC"}', "{}"


@pytest.mark.parametrize(
    ("text", "reasoning", "shown", "calls"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Yes < no", "Hm, 1 < 2.", "Yes < no", []),
        ("<|channel|>final <|constrain|>json<|message|>[1]<|return|>", "", "[1]", []),
        (f"{THOUGHT}<|channel|>commentary to=functions.clock {CALL}", "Hm, 1 < 2.", "", [UTC]),
        (f"{THOUGHT} to=functions.clock<|channel|>commentary {CALL}", "Hm, 1 < 2.", "", [UTC]),
        (f" to=functions.clock<|channel|>commentary {CALL}", "", "", [UTC]),
        (f"<|channel|>analysis to=functions.clock code{CALL[17:]}", "", "", [UTC]),
        (f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|>{THOUGHT}", "Hm, 1 < 2." * 2, "I look.", []),
        ("<|channel|>final<|message|>a <|end|> b <|channel|> c <|call|>", "", "a <|end|> b <|channel|> c ", []),
        ((f"<|channel|>commentary to=functions.clock {CALL}<|start|>assistant") * 2, "", "", [UTC, UTC]),
        ("<|channel|>commentary to=functions.clock<|message|><|call|>", "", "", [EMPTY]),
        ("<|channel|>commentary to=functions.clo", "", "", []),
        ('<|channel|>commentary to=clock<|message|>{"t', "", '<|channel|>commentary to=clock<|message|>{"t', []),
        ("no channels to=day", "", "no channels to=day", []),
        (" to", "", " to", []),
        ("<|channel|>final<|message|>a<|start|>user<|message|>b<|end|>", "", "ab", []),
        ("<|channel|>" + "x" * 2000, "", "<|channel|>" + "x" * 2000, []),
    ],
)
def test_channels_of_gpt_oss_become_reasoning_text_and_calls(
    text: str, reasoning: str, shown: str, calls: list[str]
) -> None:
    told = answer_of(text, HARMONY_TEXTS)
    assert (told.reasoning, told.text) == (reasoning, shown)
    assert calls_of(told) == [("clock", json.loads(each)) for each in calls]
    assert told.finish == ("tool_calls" if calls else "stop")


XML = "<function=look>\n<parameter=path>\na.py\n</parameter>\n<parameter=n>\n3\n</parameter>\n"


def call_of(text: str, *, has_tools: bool = True, finish: str = "stop") -> tuple[str, list[tuple[str, Any]]]:
    """Return the text beside the calls, and the calls."""
    inputs = [ChatInput([], TOOLS if has_tools else None)]
    piece = answer_of(text, inputs=inputs, finish=finish)
    return piece.text, calls_of(piece)


LOOK = ("look", {"path": "a.py", "n": 3})


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"I look.\n{XML}</function>", "I look.\n", [LOOK]),
        (f"{XML}</function>{XML}</function> Done.", " Done.", [LOOK, LOOK]),
        (XML, XML, []),  # it has not ended
        ("<function=go></function>", "", [("go", {})]),
        ('{"name": "look", "arguments": {"path": "a.py", "n": 3}}', "", [LOOK]),
        ('  { "name" : "go"}', "", [("go", {})]),
        ('<tool_call>{"name": "look", "arguments": {"path": "a.py", "n": 3}</tool_call>', "", [LOOK]),
        ("<tool_call>go</tool_call>", "", [("go", {})]),
        ("<tool_call>\ngo()</tool_call>", "", [("go", {})]),
        (f"<tool_call>\n{XML}</function></tool_call>", "", [LOOK]),
        (2 * '<tool_call>{"name": "go"}</tool_call>', "", [("go", {}), ("go", {})]),
        ("<tool_call>fly</tool_call>", "<tool_call>fly</tool_call>", []),
        ("a <function", "a <function", []),
        ("<function=fly></function> x", "<function=fly></function> x", []),
        ('{"name": "fly"}', '{"name": "fly"}', []),
        ('{"other": 1}', '{"other": 1}', []),
        ('He said {"name": "go"}', 'He said {"name": "go"}', []),
    ],
)
def test_calls_in_unexpected_forms_are_recognised(text: str, said: str, calls: list[tuple[str, Any]]) -> None:
    assert call_of(text) == (said, calls)


def test_request_without_tools_gets_no_calls() -> None:
    for text in (f"{XML}</function>", '{"name": "look"}', "<tool_call>go</tool_call>"):
        assert call_of(text, has_tools=False) == (text, [])


def streamed(text: str, form: Any, texts: Any = JSON_TEXTS, *, finish: str = "stop") -> list[Any]:
    """Return the events of an answer that comes in pieces of three characters."""
    request = ServerRequest([ChatInput([], TOOLS)], prompts=[Prompt.of_tokens([1])], streams=True)
    answer = Answer(0, request, texts)
    said = [Generated(0, 5, text[i : i + 3]) for i in range(0, len(text), 3)] + [Generated(0, 2, "", finish)]
    events = form.begin(Usage())
    for each in said:
        if (piece := answer.next(each)) is not None:
            events += form.piece(piece)
    return [event.data for event in [*events, *form.end(Usage())]]


GIVEN = {"path": 'a "}{" \\ b.py', "deep": [{"x": [1]}, None]}
TWICE = "Now. " + 2 * f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': GIVEN})}\n</tool_call>" + " Done."
OPEN = '<tool_call>{"name": "go", "arguments": {"a": [{"b": 1'


@pytest.mark.parametrize(("text", "given"), [(TWICE, [GIVEN, GIVEN]), (OPEN + "}]}}</tool_call>", [{"a": [{"b": 1}]}])])
def test_arguments_are_streamed_while_they_are_generated(text: str, given: list[Any]) -> None:
    deltas: dict[int, list[str]] = {}
    for event in streamed(text, ChatForm(HEAD, CHAT)):
        for call in [] if event == "[DONE]" else event["choices"][0]["delta"].get("tool_calls", []):
            assert ("id" in call) is (call["index"] not in deltas)
            deltas.setdefault(call["index"], []).append(call["function"]["arguments"])
    assert [json.loads("".join(each)) for each in deltas.values()] == given and all(len(d) > 3 for d in deltas.values())


def test_channels_stream_arguments_only_of_known_tools() -> None:
    told = streamed(f"<|channel|>commentary to=functions.go {CALL}", ChatForm(HEAD, CHAT), HARMONY_TEXTS)
    calls = [call for event in told[:-1] for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert len(calls) > 2 and "".join(call["function"]["arguments"] for call in calls) == UTC
    stranger = streamed(OPEN.replace("go", "fly"), ChatForm(HEAD, CHAT))
    assert not any("tool_calls" in event["choices"][0]["delta"] for event in stranger[:-1])


# What is cut --------------------------------------------------------------------------------------------------------


def test_items_of_a_cut_response_are_incomplete() -> None:
    call = '<tool_call>{"name": "go"}</tool_call>'
    texts: tuple[tuple[str, list[tuple[str, str]]], ...] = (
        ("Hello", [("message", "incomplete")]),
        ("<think>Hm", [("reasoning", "incomplete"), ("message", "incomplete")]),
        (f"Now. {call}", [("message", "completed"), ("function_call", "completed")]),
        (f"<think>Hm</think>{call} So", [("reasoning", "completed"), ("function_call", "completed")]),
    )
    for text, items in texts:
        form = ResponseForm(HEAD, ResponseBody(input="Hi."))
        response = form.whole([answer_of(text, finish="length")], Usage())
        found = [(each["type"], each["status"]) for each in response["output"]]
        assert found[:2] == items and response["status"] == "incomplete"
        assert found[2:] == ([("message", "incomplete")] if text.endswith("So") else [])
        assert streamed(text, ResponseForm(HEAD, ResponseBody(input="Hi.")), finish="length")[-1]["response"][
            "status"
        ] == ("incomplete")


# Order --------------------------------------------------------------------------------------------------------------

GO = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'


def test_text_reasoning_and_calls_keep_their_order() -> None:
    text = f"<think>Hm.</think>One. {GO}\n{GO} Two. {GO}\n"
    kinds = ["thinking", "text", "tool_use", "tool_use", "text", "tool_use"]
    whole = MessageForm(HEAD, MESSAGE).whole([answer_of(text)], Usage())["content"]
    assert [each["type"] for each in whole] == kinds
    assert [each["text"] for each in whole if each["type"] == "text"] == ["One. ", " Two. "]
    events = streamed(text, MessageForm(HEAD, MESSAGE))
    assert [each["content_block"]["type"] for each in events if each["type"] == "content_block_start"] == kinds
    items = streamed(text, ResponseForm(HEAD, ResponseBody(input="Hi.")))[-1]["response"]["output"]
    types = {"thinking": "reasoning", "text": "message", "tool_use": "function_call"}
    assert [each["type"] for each in items] == [types[kind] for kind in kinds]
    deltas = [event["choices"][0]["delta"] for event in streamed(text, ChatForm(HEAD, CHAT))[:-1]]
    order = [key for delta in deltas for key in delta if key != "role"]
    assert [key for key, before in zip(order, [None, *order], strict=False) if key != before] == [
        *("reasoning", "content", "tool_calls", "content", "tool_calls")
    ]


def test_thoughts_come_before_the_text() -> None:
    for text, reasoning, said in (
        ("<think>a</think>b", "a", "b"),
        ("\n<think>a <tool_call> b</think>c", "a <tool_call> b", "\nc"),
        (f"<think>a {GO} b</think>c", "a  b", "c"),
        ("What <think> means </think>", "", "What <think> means </think>"),
        (f"{GO}<think>a</think>b", "a", "b"),
    ):
        told = answer_of(text)
        assert (told.reasoning, told.text) == (reasoning, said)


MUSE_STATES = {
    "normal": {"<|eom|>": "header", "<|eot|>": "normal"},
    "reasoning": {"<|eom|>": "header"},
    "header": {"to=self<|message|>": "reasoning", "to=user<|message|>": "normal"},
}
MUSE_CALL = '<atem:invoke name="go">\n<atem:parameter name="a"> x </atem:parameter>\n</atem:invoke>'


@pytest.mark.parametrize(
    ("text", "reasoning", "said", "num_calls"),
    [
        ('to=user<|message|>{"a": 1}<|eot|>', "", '{"a": 1}', 0),
        ('to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>{"a": 1}<|eot|>', "Hm.", '{"a": 1}', 0),
        ('{"a": 1}', "", '{"a": 1}', 0),
        (
            "to=self<|message|>Hm.<|eom|><|start|>assistant to=go<|message|>"
            f"<atem:function_calls>{MUSE_CALL}</atem:function_calls>",
            *("Hm.", "", 1),
        ),
    ],
)
def test_headers_of_messages_are_dropped_and_an_answer_without_one_is_text(
    text: str, reasoning: str, said: str, num_calls: int
) -> None:
    marks = marks_of("muse_spark")._replace(states=MUSE_STATES)
    for is_free in (True, False):
        for size in (1, 3, 1000):
            reader = AnswerReader(marks, "header", tools=TOOLS, is_free=is_free)
            deltas = [each for i in range(0, len(text), size) for each in reader.feed(text[i : i + size])]
            told = Piece(0, [*deltas, *reader.feed("", is_last=True)])
            assert (told.reasoning, told.text, len(calls_of(told))) == (reasoning, said, num_calls)
            assert calls_of(told) == [("go", {"a": " x "})] * num_calls


# Log-probabilities, several answers, length ---------------------------------------------------------------------------


def test_message_of_a_response_has_its_own_log_probabilities() -> None:
    told = answer_of("<think>abcdef</think>ghijkl", top_logprobs=0)
    body = ResponseBody(input="Hi.", include=["message.output_text.logprobs"])
    (_, message) = ResponseForm(HEAD, body).whole([told], Usage())["output"]
    assert len(told.tokens) == 9 and [each["token"] for each in message["content"][0]["logprobs"]] == ["g", "j"]
    chat = ChatForm(HEAD, ChatBody(messages=CHAT.messages, logprobs=True))
    assert len(chat.whole([told], Usage())["choices"][0]["logprobs"]["content"]) == 9


def test_first_of_several_answers_is_streamed_before_the_last_begins() -> None:
    request = ServerRequest([ChatInput([])], prompts=[Prompt.of_tokens([1])], n=3, streams=True)
    answers = Answers(request, JSON_TEXTS, ChatForm(HEAD, CHAT))
    answers.add([Generated(0, 5, "Hello", num_cached=0)])
    (event,) = answers.events()
    assert event.data["choices"][0]["delta"]["content"] == "Hello"


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "kimi_k3", "pythonic", "gemma4", "harmony"])
def test_long_call_is_read_once(name: str) -> None:
    """What was read is not held for another look: the time of a step does not grow with the call."""
    value = "x = {'a': \"<b>\"}\n" * 20_000
    text = WRITERS[name]([("look", {"path": value})])
    for streams in (False, True):
        reader = AnswerReader(marks_of(name), tools=TOOLS, streams=streams)
        deltas = []
        for place in range(0, len(text), 50):
            deltas += reader.feed(text[place : place + 50])
            assert len(reader.held) < 200
        told = Piece(0, [*deltas, *reader.feed("", is_last=True)])
        assert calls_of(told) == [("look", {"path": value})]
