"""Answers are parted as mlx-lm's own handler does; stop strings among reasoning, tool calls and their markers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from email.message import Message
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm import server as upstream
from mlx_lm.generate import make_text_state_machine

from mlx_paged.patches.server.answer_queue import AnswerQueue
from mlx_paged.patches.server.answers.answer import Answer
from mlx_paged.serve.api.chat import ChatForm
from mlx_paged.serve.api.pieces import Head, Piece, Usage
from tests.serve.stops.test_stop_strings import cut_of

TOKENIZER = SimpleNamespace(
    has_thinking=True,
    think_start="<think>",
    think_end="</think>",
    has_tool_calling=True,
    tool_call_start="<tool_call>",
    tool_call_end="</tool_call>",
    structural_markers=(),
    response_transitions={},
)


class Script:
    """Stands in for the response generator: tokens of these texts, and then the reason."""

    cli_args = SimpleNamespace(allowed_origins="*")

    def __init__(self, pieces: list[str], reason: str, stops: list[str]) -> None:
        self.pieces, self.reason, self.stops = pieces, reason, stops
        self.num_taken = 0

    def generate(self, request: Any, args: Any, progress_callback: Any) -> tuple[Any, Iterator[Any]]:
        self.queue = AnswerQueue(self.stops)
        self.ctx = upstream.GenerationContext(
            has_tool_calling=True,
            has_thinking=True,
            tool_parser=lambda text, tools: {"name": text, "arguments": {}},
            text_sm=make_text_state_machine(TOKENIZER),
            initial_state="normal",
            prompt=[1],
        )
        self.queue.put(self.ctx)
        return self.queue.get(), self._answers()

    def _answers(self) -> Iterator[Any]:
        last = len(self.pieces) - 1
        for number, piece in enumerate(self.pieces):
            reason = self.reason if number == last else None
            self.queue.put(upstream.Response(piece, number, -1.0, reason, ()))
            self.num_taken += 1
            yield self.queue.get()
            if self.queue.is_stopped:
                break


class Handler(upstream.APIHandler):
    """mlx-lm's; writes to memory, for a request that has been read."""

    def __init__(self, script: Script, stream: bool) -> None:
        self.response_generator = script
        self.stream, self.stream_options = stream, {"include_usage": True}
        self.requested_model = self.request_id = self.system_fingerprint = ""
        self.requested_draft_model, self.adapter, self.created, self.num_draft_tokens = "", None, 0, 0
        self.object_type = "chat.completion.chunk" if stream else "chat.completion"
        for name in ("temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold", "logit_bias"):
            setattr(self, name, None)
        for name in ("repetition", "presence", "frequency"):
            setattr(self, f"{name}_penalty", 0)
            setattr(self, f"{name}_context_size", 0)
        self.max_tokens, self.logprobs, self.top_logprobs = 100, False, 0
        self.seed = self.chat_template_kwargs = None
        self.headers, self.wfile = Message(), io.BytesIO()
        self.requestline, self.request_version, self.client_address = "", "HTTP/1.1", ("", 0)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Told(dict[str, Any]):
    """What the client was told: content, reasoning, tool_calls, finish_reason."""


def tell(pieces: list[str], reason: str, stops: list[str], stream: bool) -> Told:
    """What a client is told, in pieces or at the end."""
    script = Script(pieces, reason, stops)
    ctx, said = script.generate(None, None, None)
    answer = Answer(0, ctx, None, None)
    told = [piece for each in said if (piece := answer.take(each)) is not None] + [answer.finish()]
    head = Head("", "", 0, "")
    usage = Usage(1, 0, answer.num_tokens)
    assert answer.num_tokens == script.num_taken
    if stream:
        events = [event for piece in told for event in ChatForm(head).piece(piece)]
        assert all(piece.stop is None for piece in told[:-1])
        return read([event.data for event in events], "delta")
    return read([ChatForm(head).whole([Piece.joined(told)], usage)], "message")


def tell_upstream(pieces: list[str], reason: str, stream: bool) -> Told:
    """The same of mlx-lm's handler, without stop strings."""
    handler = Handler(Script(pieces, reason, []), stream)
    handler.handle_completion(upstream.CompletionRequest("chat", "", [], None, None), [])
    body = handler.wfile.getvalue().split(b"\r\n\r\n", 1)[1].decode()
    if stream:
        return read([json.loads(line[6:]) for line in body.split("\n\n")[:-2]], "delta")
    return read([json.loads(body)], "message")


def read(chunks: list[Any], key: str) -> Told:
    told = Told(content="", reasoning="", tool_calls=[], finish_reason=None)
    for chunk in chunks:
        for choice in chunk["choices"]:
            part = choice[key]
            told["content"] += part.get("content") or ""
            told["reasoning"] += part.get("reasoning", "")
            told["tool_calls"] += [call["function"]["name"] for call in part.get("tool_calls", [])]
            assert all(("index" in call) == (key == "delta") for call in part.get("tool_calls", []))
            told["finish_reason"] = choice["finish_reason"]
    return told


marked = st.lists(
    st.sampled_from(["<", "<think>", "</think>", "<tool_call>", "</tool_call>", "<t", ">", "think", "a", "b ", "é"]),
    min_size=1,
    max_size=12,
).map("".join)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """The pieces of a text, and stop strings of it."""
    text = draw(marked)
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in pairwise([0, *ends, len(text)])]
    starts = draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=3))
    return pieces, [text[at : at + draw(st.integers(1, 6))] + draw(st.sampled_from(["", "", "#"])) for at in starts]


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(["stop", "length"]), st.booleans())
@example((["a <", " b"], [" b"]), "stop", True)  # "<" may begin a marker, and has to be said all the same
@example((["a <", ""], ["<b"]), "length", False)
@example((["<think>hm, st", "op</think>yes"], ["stop"]), "stop", True)
@example((["<tool_call>f</tool_call>yes", " a"], ["s a"]), "stop", False)
@example((["<tool_call><think>"], ["th"]), "stop", False)  # "<" may begin a marker inside of a call as well
def test_an_answer_is_parted_as_if_its_text_had_ended_before_the_stop_string(
    case: tuple[list[str], list[str]], reason: str, stream: bool
) -> None:
    pieces, stops = case
    if reason == "stop":
        pieces = [*pieces, ""]  # an end token has no text
    text = "".join(pieces)
    told = tell(pieces, reason, stops, stream)
    if any(stop in text for stop in stops):
        expected = tell([cut_of(text, stops)], "length", [], stream)
        assert told["finish_reason"] == ("tool_calls" if expected["tool_calls"] else "stop")
    else:
        expected = tell_upstream(pieces, reason, stream)
        assert told["finish_reason"] == expected["finish_reason"]
    for name in ("content", "reasoning", "tool_calls"):
        assert told[name] == expected[name], name


def test_answers_without_stop_strings_are_not_touched() -> None:
    queue = AnswerQueue()
    response = upstream.Response("text", 1, -1.0, "stop", ())
    queue.put(response)
    assert queue.get() is response and not queue.is_stopped


@pytest.mark.parametrize("text", ["<tool_call>f</tool_call> <tool_call>g</tool_call>", "<tool_call>f</tool_call>"])
@pytest.mark.parametrize("end", ["", " yes", "<tool_call>h"])
@pytest.mark.parametrize("calls_once", [False, True])
def test_of_calls_that_are_not_to_be_parallel_the_first_is_told(text: str, end: str, calls_once: bool) -> None:
    every = ["f", "g"][: text.count("</")] + ["h"] * ("h" in end)
    ctx, said = Script([text, end, ""], "stop", []).generate(None, None, None)
    answer = Answer(0, ctx, None, None, calls_once=calls_once)
    told = [piece for each in said if (piece := answer.take(each)) is not None] + [answer.finish()]
    whole = Piece.joined(told)
    assert [call["function"]["name"] for call in whole.calls] == (every[:1] if calls_once else every)
    assert whole.finish == "tool_calls"
