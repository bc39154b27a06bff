"""Calls of every format, with all kinds of arguments, cut everywhere, in three APIs, whole and streamed: a call
is delivered exactly as it was written, or not at all."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from mlx_paged.server.answer_reader import AnswerReader
from mlx_paged.server.answers import Answer, Event, Head, Piece, Usage
from mlx_paged.server.request import ChatInput, Generated, Prompt, ServerRequest
from mlx_paged.server.requests.chat import ChatBody, ChatForm
from mlx_paged.server.requests.messages import CountBody, MessageForm, MessageParam
from mlx_paged.server.requests.responses import ResponseBody, ResponseForm
from tests.support.call_texts import WRITERS, marks_of

HEAD = Head("x", "m", 0, "")
SIZES = (1, 3, 7, 1_000_000)
APIS = ("chat", "messages", "responses")
SAID = "I look. "


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("note", title="string", body="string"),
    tool("ping"),
    tool("run", n="integer", share="number", flag="boolean", options="object", items="array"),
]
RUN = {"n": 9007199254740993, "share": 0.5, "flag": True, "options": {"a": [1, {"b": None}]}, "items": ["</x>]})", -2]}


def strings_of(name: str) -> dict[str, str]:
    """Return strings that are hard for a format."""
    marks = marks_of(name)
    start, end = marks.call_start or "<|channel|>", marks.call_end or "<|call|>"
    return {
        "plain": "b",
        "closing mark": f"see {end} there",
        "opening mark": f"see {start} there",
        "both": f"{start}x{end}",
        "a whole call": "" if name == "gemma4" else WRITERS["json_tools"]([("ping", {})]),
        "marks of arguments": "</function> </parameter> </arg_value> </invoke> <think> x",
        "white space": "\n\n    if x:\n\treturn 1\n ",
        "quotes and backslashes": "q\"uo'te \\ \\n {brace [x) ,]})",
        "empty": "",
        "JSON": '{"name": "ping", "arguments": {}}',
        "a number": "12",
        "null": "null",
        "other letters": "naïve 日本 😀",
    }


class Delivered(NamedTuple):
    """What a client has.

    Attributes:
        text: the text beside the calls.
        calls: names and arguments; in streams, those that a client runs.
        open: arguments of a call that is not whole.
        wants_results: whether the answer says that it ends with calls.
    """

    text: str
    calls: list[tuple[str, Any]]
    open: list[str]
    wants_results: bool


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def of_chat(answers: list[Any], streams: bool) -> Delivered:
    text, calls, finish = "", {}, None
    for answer in answers:
        for choice in answer["choices"] if isinstance(answer, dict) else ():
            said = choice["delta" if streams else "message"]
            text, finish = text + (said.get("content") or ""), choice["finish_reason"] or finish
            for number, call in enumerate(said.get("tool_calls", ())):
                made = calls.setdefault(call.get("index", number), ["", ""])
                made[0] += call["function"].get("name", "")
                made[1] += call["function"]["arguments"]
    whole = [(name, json.loads(given)) for name, given in calls.values() if is_json(given)]
    return Delivered(text, whole, [g for _, g in calls.values() if not is_json(g)], finish == "tool_calls")


def of_messages(answers: list[Any], streams: bool) -> Delivered:
    if not streams:
        (message,) = answers
        calls = [(each["name"], each["input"]) for each in message["content"] if each["type"] == "tool_use"]
        text = "".join(each.get("text", "") for each in message["content"])
        return Delivered(text, calls, [], message["stop_reason"] == "tool_use")
    blocks: list[list[Any]] = []
    reason = None
    for event in answers:
        if event["type"] == "content_block_start":
            blocks.append([event["content_block"], ""])
        elif event["type"] == "content_block_delta":
            blocks[event["index"]][1] += event["delta"].get("text", event["delta"].get("partial_json", ""))
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    uses = [(block["name"], given) for block, given in blocks if block["type"] == "tool_use"]
    text = "".join(said for block, said in blocks if block["type"] == "text")
    whole = [(name, json.loads(given)) for name, given in uses if is_json(given)]
    return Delivered(text, whole, [given for _, given in uses if not is_json(given)], reason == "tool_use")


def of_responses(answers: list[Any], streams: bool) -> Delivered:
    response = answers[-1]["response"] if streams else answers[-1]
    calls = [each for each in response["output"] if each["type"] == "function_call"]
    if streams:
        done = [each["item"] for each in answers if each["type"] == "response.output_item.done"]
        assert [each for each in response["output"] if each["status"] == "completed" or not each.get("name")] == done
    text = "".join(part["text"] for each in response["output"] for part in each.get("content", ()))
    whole = [(each["name"], json.loads(each["arguments"])) for each in calls if each["status"] == "completed"]
    cut = [each["arguments"] for each in calls if each["status"] == "incomplete"]
    assert not cut or response["status"] == "incomplete"
    return Delivered(text, whole, cut, response["status"] == "completed" and bool(whole))


READERS = {"chat": of_chat, "messages": of_messages, "responses": of_responses}


def form_of(api: str) -> Any:
    if api == "chat":
        return ChatForm(HEAD, ChatBody(messages=[{"role": "user", "content": "Hi."}]))
    if api == "messages":
        return MessageForm(HEAD, CountBody(messages=[MessageParam(role="user", content="Hi.")]))
    return ResponseForm(HEAD, ResponseBody(input="Hi."))


def delivered(name: str, text: str, api: str, size: int, *, streams: bool, finish: str = "stop") -> Delivered:
    """Return what a client gets of a text that is generated in pieces; ``finish`` may also be a stop string."""
    texts: Any = SimpleNamespace(marks=marks_of(name))
    request = ServerRequest([ChatInput([], TOOLS)], prompts=[Prompt.of_tokens([1])], streams=streams)
    answer = Answer(0, request, texts)
    stop = None if finish in ("stop", "length") else finish
    said = [Generated(0, 5, text[place : place + size]) for place in range(0, len(text), size)]
    said.append(Generated(0, 2, "", "stop" if stop else finish, stop))
    pieces = [piece for each in said if (piece := answer.next(each)) is not None]
    form = form_of(api)
    if not streams:
        return READERS[api]([form.whole([Piece.joined(pieces)], Usage())], streams)
    events: list[Event] = form.begin(Usage())
    for piece in pieces:
        events += form.piece(piece)
    return READERS[api]([event.data for event in [*events, *form.end(Usage())]], streams)


@pytest.mark.parametrize("name", WRITERS)
def test_arguments_are_delivered_exactly_as_written(name: str) -> None:
    said = "" if name == "harmony" else SAID
    for kind, string in strings_of(name).items():
        calls: list[tuple[str, dict[str, Any]]] = [("note", {"title": string, "body": string}), ("ping", {})]
        calls.append(("run", RUN))
        text = said + WRITERS[name](calls)
        for api in APIS:
            for streams in (False, True):
                for size in SIZES:
                    found = delivered(name, text, api, size, streams=streams)
                    assert found == Delivered(said, calls, [], True), (kind, api, streams, size)


@pytest.mark.parametrize("finish", ["length", "stop", "Observation:"])
@pytest.mark.parametrize("name", WRITERS)
def test_call_that_is_cut_is_text_or_stays_open(name: str, finish: str) -> None:
    end = marks_of(name).call_end or "<|call|>"
    calls: list[tuple[str, dict[str, Any]]] = [("note", {"title": f"{end}\n", "body": '"{'}), ("run", RUN)]
    text = WRITERS[name](calls)
    for number, cut in enumerate(range(1, len(text), 3)):
        api, size = APIS[number % 3], SIZES[number % 4]
        whole = delivered(name, text[:cut], api, size, streams=False, finish=finish)
        assert whole.calls == calls[: len(whole.calls)] and not whole.open, (cut, api)
        if not whole.calls and name != "harmony":
            assert whole.text == text[:cut]
        stream = delivered(name, text[:cut], api, size, streams=True, finish=finish)
        assert stream.calls == whole.calls, (cut, api)
        assert len(stream.open) <= 1 and not (stream.open and stream.wants_results), (cut, api)
        assert not (finish == "length" and whole.wants_results)
        assert whole.wants_results == stream.wants_results or (api == "responses" and stream.open)


PROSE = (
    "Use `START` and `END` around it. Done.",
    "```\nSTART{}END\n```",
    "START{ here, END",
    "What does <think> mean? </think>",
    'He said {"name": "note", "arguments": {}}.',
)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "harmony"])
def test_text_that_is_no_call_is_unchanged(name: str) -> None:
    marks = marks_of(name)
    for prose in PROSE:
        text = prose.replace("START", marks.call_start).replace("END", marks.call_end)
        for api in APIS:
            for size in SIZES:
                for streams in (False, True):
                    assert delivered(name, text, api, size, streams=streams) == Delivered(text, [], [], False)


def fragments_of(name: str) -> list[str]:
    """Return what answers in a format are made of, and what disturbs it."""
    marks = marks_of(name)
    calls: Any = [("note", {"title": "a", "body": "b\n"}), ("ping", {}), ("run", {"n": 12, "items": ["x"]})]
    written = WRITERS[name](calls)
    pieces = [marks.call_start, marks.call_end, "<think>", "</think>", "<function=note>", "</function>", "<|end|>"]
    pieces += ["<|start|>assistant", "<|channel|>analysis", "<|message|>", " to=functions.note", '{"name": "note"']
    pieces += ['{"a": 1}', *'{}"\\[])<', " ", "\n", ", ", "x", "</", '"arguments": ', "ping", written]
    return [*filter(None, pieces), *(written[i : i + 9] for i in range(0, len(written), 9))]


@pytest.mark.parametrize("name", WRITERS)
def test_any_text_is_read_alike_in_pieces_and_whole(name: str) -> None:
    dice, fragments = random.Random(name), fragments_of(name)
    for _ in range(150):
        text = "".join(dice.choices(fragments, k=dice.randint(1, 12)))
        found = []
        for size in (*SIZES, 20):
            reader = AnswerReader(marks_of(name), tools=TOOLS)
            deltas = [each for i in range(0, len(text), size) for each in reader.feed(text[i : i + size])]
            whole = Piece(0, [*deltas, *reader.feed("", is_last=True)])
            made = [(each.kind, each.text, each.call and each.call.name) for each in whole.folded() if each.text]
            found.append((made, reader.num_calls))
        assert all(each == found[0] for each in found), text
