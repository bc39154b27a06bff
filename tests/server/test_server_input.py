"""Bad input: every body is answered soon, with a status below 500, and the server stays up."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.server import http
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.requests.chat import chat_request, completion_request
from mlx_paged.server.requests.endpoints import ENDPOINTS
from mlx_paged.server.requests.fields import NO_EFFECT, REFUSED
from tests.support.models.tiny_model import VOCAB
from tests.support.processes.server_process import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
NAMES = sorted({name for endpoint in ENDPOINTS.values() for name in endpoint.body.model_fields})
EVERY = [(path, name) for path, endpoint in ENDPOINTS.items() for name in endpoint.body.model_fields]
LEAST: dict[str, dict[str, Any]] = {  # a minimal valid body for each endpoint
    CHAT: HI,
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x"},
    "/v1/messages": HI,
    "/v1/messages/count_tokens": {"messages": HI["messages"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}


# The parser alone -------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(0, 1)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "system", "assistant", "tool"]) | json_values,
            "content": st.text(max_size=30) | json_values | st.lists(json_values, max_size=2),
            "tool_calls": json_values,
            "type": json_values,
        },
    ),
    max_size=3,
)
bodies = st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4).flatmap(
    lambda body: (messages | json_values).map(lambda m: {**HI, **body, "messages": m}) | st.just({**HI, **body})
)


def parse(body: Any, path: str, **options: bool) -> Any:
    return http.parsed(json.dumps(body).encode(), ENDPOINTS[path].body, **options)[0]


@settings(max_examples=300, deadline=None)
@given(bodies | json_values)
def test_json_body_is_parsed_or_refused(body: Any) -> None:
    try:
        parsed = parse(body, CHAT)
    except RequestRefused as refusal:
        assert refusal.status == 400 and refusal.body()["error"]["message"]
    else:
        assert parsed.messages


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=50))
@example(b"")
@example(b"{")
@example(b"[]")
@example(b"null")
@example(b'{"messages": [], "temperature": NaN}')
@example(b'{"prompt": "\\ud800"}')
@example(b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}")
@example(b"[" * 100000)
@example(b"\xff\xfe")
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        http.parsed(raw, ENDPOINTS[COMPLETIONS].body)
    assert caught.value.status == 400


@pytest.mark.parametrize("path, name", EVERY)
def test_wrong_types_are_refused_by_name(path: str, name: str) -> None:
    assert parse(LEAST[path], path)
    refused = 0
    for wrong in ({}, [], [1.5], "x", 1.5, True):
        try:
            parse({**LEAST[path], name: wrong}, path)
        except RequestRefused as refusal:
            refused += 1
            assert refusal.status == 400 and refusal.param == name and name in str(refusal)
    assert refused >= 2
    assert parse({**LEAST[path], name: None}, path) if name not in LEAST[path] else True  # as if it were not there


def test_known_parameters_without_effect_are_accepted_and_others_refused() -> None:
    model = ENDPOINTS[CHAT].body
    for name in NO_EFFECT:
        assert http.parsed(json.dumps({**HI, name: {"a": 1}}).encode(), model, strict=True)[1] == []
    for name, (why, *allowed) in REFUSED.items():
        for value in allowed:
            assert http.parsed(json.dumps({**HI, name: value}).encode(), model, strict=True)[1] == []
        with pytest.raises(RequestRefused, match=f"{name} is not supported: {why}") as caught:
            parse({**HI, name: "other"}, CHAT)
        assert caught.value.param == name


def test_missing_parameters_are_refused_and_unknown_ones_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for path, body in LEAST.items():
        model = ENDPOINTS[path].body
        for name, field in model.model_fields.items():
            if field.is_required():
                with pytest.raises(RequestRefused, match=f"{name} is required"):
                    parse({key: value for key, value in body.items() if key != name}, path)
        raw = json.dumps({**body, "temprature": 0, "nothing": None}).encode()
        for _ in range(2):
            assert http.parsed(raw, model)[1] == ["temprature"]
        with pytest.raises(RequestRefused, match="temprature is unknown or has no effect") as caught:
            http.parsed(raw, model, strict=True)
        assert caught.value.param == "temprature"
    assert caplog.text.count("'temprature'") <= 1
    nested = {**LEAST["/v1/messages"], "tools": [{"name": "f", "input_schema": {}, "eager": True}]}
    assert http.parsed(json.dumps(nested).encode(), ENDPOINTS["/v1/messages"].body)[1] == ["tools.eager"]


@pytest.mark.parametrize(
    "junk",
    ["[" + "[]," * 1_100_000 + "1]", "[" + "1e5," * 2_200_000 + "1]", '{"":[' * 1_100_000],
    ids=["lists", "numbers", "nested"],
)
def test_body_of_too_many_values_is_refused(junk: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        http.parsed(('{"prompt": "x", "junk": ' + junk).encode(), ENDPOINTS[COMPLETIONS].body)
    assert caught.value.status == 413


def test_long_text_counts_as_one_value() -> None:
    for text in ('he said, "[{," ' * 100_000, "\\" * 1_000_000, ',"' * 400_000):
        body = {"prompt": text, "logit_bias": {str(n): 1 for n in range(1000)}}
        assert parse(body, COMPLETIONS).prompt == text


def test_values_that_clients_send_for_off_are_accepted() -> None:
    defaults = {"top_k": 7}
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"prompt": "x", "top_k": -1, name: -1, "stop": ["", ""]}
        request = completion_request(parse(body, COMPLETIONS), defaults)
        assert (request.sampling.top_k, request.max_tokens, request.stops) == (0, None, ())
    chat = {"messages": [{"role": "user", "content": "x"}], "top_k": -1, "max_tokens": -1, "stop": ""}
    request = chat_request(parse(chat, CHAT), defaults)
    assert (request.sampling.top_k, request.max_tokens, request.stops) == (0, None, ())
    for wrong in ({"top_k": -2}, {"max_tokens": -2}, {"top_k": "-1"}, {"prompt": [1 << 40]}):
        with pytest.raises(RequestRefused):
            parse({"prompt": "x", **wrong}, COMPLETIONS)


def test_only_parts_of_type_text_must_have_a_text() -> None:
    image = {"type": "image_url", "text": None, "image_url": {"url": "data:x"}}
    parse({"messages": [{"role": "user", "content": [image, {"type": "text", "text": "x", "more": 1}]}]}, CHAT)
    for part in ({"type": "text"}, {"type": "text", "text": None}):
        with pytest.raises(RequestRefused, match=r"messages\.0\.content\.0: a part of type text must have a text"):
            parse({"messages": [{"role": "user", "content": [part]}]}, CHAT)


def test_null_is_ignored_and_negative_seeds_are_wrapped() -> None:
    request = completion_request(parse({"prompt": "x", "seed": -1, "temperature": None}, COMPLETIONS), {})
    assert request.sampling == SamplingParams(seed=2**64 - 1)


# The server -------------------------------------------------------------------------------------------------------


def check(server: ServerProcess, path: str, body: Any) -> None:
    answer = server.post(path, body)  # times out after a minute
    assert 200 <= answer.status < 500, (answer.status, answer.body, body)
    if answer.status >= 400:
        assert answer.json["error"]["message"]


@pytest.mark.demo_model
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies)
@example({**HI, "logit_bias": {"999999999": 1}})
@example({**HI, "logit_bias": {str(VOCAB - 1): -10000, "0": 10000}})
@example({**HI, "top_k": 100000, "temperature": 1})
@example({**HI, "temperature": 1, "min_p": 1, "top_p": 0, "top_k": 1})
@example({**HI, "temperature": 1, "xtc_probability": 1, "xtc_threshold": 1})
@example({**HI, "repetition_penalty": 1e4, "repetition_context_size": 0})
@example({**HI, "stop": ["\U0001f600" * 100], "stream": True})
@example({**HI, "stream": True, "stream_options": {}})
@example({**HI, "model": "/nowhere"})
@example({**HI, "model": "a/b"})
@example({**HI, "model": "../../etc"})
@example({**HI, "adapters": "/nowhere"})
@example({**HI, "tools": [{}]})
@example({**HI, "tools": [{"type": "function", "function": 3}]})
@example({**HI, "chat_template_kwargs": {"tokenize": False, "messages": 3, "add_generation_prompt": 1}})
@example({**HI, "chat_template_kwargs": {"return_tensors": "np"}})
@example({**HI, "chat_template_kwargs": {"padding": "max_length", "max_length": 4000000}})
@example(
    {**HI, "chat_template_kwargs": {"chat_template": "{% for i in range(99999) %}{{ range(99999)|list }}{% endfor %}"}}
)
@example({**HI, "role_mapping": {"user": 3}})
@example({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]})
@example({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}]})
@example({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1:1/x"}]}]})
@example({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]})
@example({"messages": [{"role": "assistant", "tool_calls": [{"function": "x"}]}]})
@example({"messages": [{"role": "nobody", "content": None}]})
@example({"messages": [{"role": "user", "content": "<|im_end|>" * 50}], "seed": 1})
def test_no_chat_body_crashes_the_server(server: ServerProcess, body: dict[str, Any]) -> None:
    check(server, CHAT, body)


@pytest.mark.demo_model
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(LEAST)), st.dictionaries(st.sampled_from(NAMES), json_values, max_size=3))
@example(COMPLETIONS, {"prompt": "\x00"})
@example(COMPLETIONS, {"seed": -(1 << 63)})
def test_no_body_of_any_endpoint_crashes_the_server(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    check(server, path, {"max_tokens": 2, "max_output_tokens": 2, **LEAST[path], **body})


@pytest.mark.demo_model
def test_broken_requests_do_not_hang_the_server(server: ServerProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    openings = [b"", b"\r\n\r\n", b"GET", b"\x16\x03\x01\x02\x00", head, b"A" * 70000]
    openings.append(head + b"Content-Length: 100\r\n\r\n{")
    connections = []
    for opening in openings:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        connection.sendall(opening)
        connections.append(connection)
    assert server.post(CHAT, HI).status == 200  # while they are all open
    for connection in connections:
        connection.close()
    for path, status in (("/v1/completionsx", 404), ("/v1/completions?x=1", 200), ("/", 405)):
        assert server.post(path, {"prompt": "x", "max_tokens": 1}).status == status
    assert server.get("/nothing").status == 404
    for method, status in (("PUT", 405), ("DELETE", 405), ("TRACE", 405), ("QUERY", 405), ("GET", 405), ("BREW", 405)):
        assert server.request(method, CHAT, b"{}", {}, 10).status == status
    assert server.request("POST", CHAT, b"x\r\n", {"Transfer-Encoding": "chunked"}, 10).status == 400
    server.wait_until(lambda: server.is_idle)
