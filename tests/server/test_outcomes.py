"""What every API that generates does, whole and streamed: prefixes, stops, constraints, ends, and clients that go."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.cases import crossed
from tests.support.processes.server_process import BLOCK_SIZE, ServerProcess
from tests.support.server.answers import CHAT, COMPLETIONS, MESSAGES, PATHS, RESPONSES, ask, body_of
from tests.support.server.samples import SCHEMA, WHITE

pytestmark = pytest.mark.demo_model

STORY = "How far is the moon, and who has been there before the two of us? " * 4
SEVEN, LESS, END = {"39": 1000}, {"44": 1000}, {"2": 1000}  # force "7", "<" (begins "<tool_call>"), or the end
ENDS = {CHAT: ("length", "stop"), COMPLETIONS: ("length", "stop"), MESSAGES: ("max_tokens", "end_turn")}
SCORED = {
    CHAT: {"logprobs": True, "top_logprobs": 1},
    COMPLETIONS: {"logprobs": 1},
    RESPONSES: {"include": ["message.output_text.logprobs"]},
}
CONSTRAINED = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    COMPLETIONS: {"structured_outputs": {"json": SCHEMA}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
}
every = pytest.mark.parametrize(("path", "stream"), crossed(PATHS, (False, True)))


def ends_of(path: str) -> tuple[str, str]:
    """Return how an answer says that it was cut, and that it is complete."""
    return ENDS.get(path, ("incomplete", "completed"))


@every
def test_repeated_prompt_is_cached_and_gives_the_same_answer(path: str, stream: bool, server: ServerProcess) -> None:
    first = ask(server, path, body_of(path, STORY, 10))
    again = ask(server, path, body_of(path, STORY, 10), stream=stream)
    assert again._replace(cached_tokens=0) == first._replace(cached_tokens=0)
    assert again.cached_tokens == (again.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    assert again.finish == ends_of(path)[0] and again.num_tokens == 10


@every
def test_answer_ends_before_a_stop_string(path: str, stream: bool, server: ServerProcess) -> None:
    if path == RESPONSES:
        pytest.skip("it has no stop strings")
    whole = ask(server, path, body_of(path, STORY, 12)).text
    stop = whole[4:7]
    stops = {"stop_sequences": ["#never#", stop]} if path == MESSAGES else {"stop": ["#never#", stop]}
    cut = ask(server, path, body_of(path, STORY, 12, **stops), stream=stream)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish == ("stop_sequence" if path == MESSAGES else "stop")


@every
def test_answer_matches_its_constraint(path: str, stream: bool, server: ServerProcess) -> None:
    for seed in (1, 2):
        options: Any = {**CONSTRAINED[path], "temperature": 1.2, "seed": seed, "logit_bias": WHITE}
        told = ask(server, path, body_of(path, "Well?", 90, **options), stream=stream)
        assert isinstance(json.loads(told.text)["ok"], bool) and told.finish == ends_of(path)[1]
    choices = {"structured_outputs": {"regex": "[ab]{3}"}}
    assert re.fullmatch("[ab]{3}", ask(server, path, body_of(path, "Well?", 9, **choices), stream=stream).text)


@every
def test_partial_marker_is_text_and_the_end_token_is_none(path: str, stream: bool, server: ServerProcess) -> None:
    scored = SCORED.get(path, {})
    for bias, text, finish in ((LESS, "<<<", 0), (END, "", 1)):
        told = ask(server, path, body_of(path, **scored, logit_bias=bias), stream=stream)
        assert (told.text, told.num_scored) == (text, len(text) if scored else 0)
        assert told.finish == ends_of(path)[finish]


@pytest.mark.parametrize(
    ("path", "options"),
    [
        *((path, {"stream": stream}) for path, stream in crossed(PATHS, (False, True))),
        (CHAT, {"structured_outputs": {"regex": "[a-z]{15000}"}}),
        (COMPLETIONS, {"prompt": [[5 + n] * 700 for n in range(250)], "max_tokens": 0, "echo": True, "logprobs": 0}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_client_that_goes_cancels_its_request(path: str, options: dict[str, Any], server: ServerProcess) -> None:
    server.wait_until(lambda: server.is_idle)
    before = server.stats()["server"]
    length = {} if "structured_outputs" in options else {"logit_bias": SEVEN}
    client = server.send_and_leave_open(path, {**body_of(path, STORY, 10_000, **length), **options})
    server.wait_until(lambda: any(server.stats()["running"].values()))
    if options.get("stream"):
        assert client.recv(10)
    client.close()
    cancelled = before["requests"]["cancelled"] + 1
    server.wait_until(lambda: server.is_idle and server.stats()["server"]["requests"]["cancelled"] == cancelled)
    assert server.stats()["server"]["generated_tokens"] < before["generated_tokens"] + 9000
