"""Bodies of requests, whole and in chunks."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.serve.http import body as body_module
from mlx_paged.serve.http.body import has_body, read_body
from mlx_paged.serve.refusal import RequestRefused

CHUNKED = {"Transfer-Encoding": "chunked"}


def chunked(parts: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    return b"".join(b"%X%b\r\n%b\r\n" % (len(p), extension, p) for p in parts) + b"0\r\n" + trailers + b"\r\n"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.sampled_from([b"", b";a=b", b" "]))
def test_chunks_are_put_together_and_no_more_is_read(parts: list[bytes], extension: bytes) -> None:
    stream = io.BytesIO(chunked(parts, extension, b"X: y\r\n") + b"GET /")
    assert read_body(CHUNKED, stream) == b"".join(parts)
    assert stream.read() == b"GET /"


@pytest.mark.parametrize(
    "headers, raw, status",
    [
        ({}, b"", 411),
        ({"Content-Length": "-1"}, b"", 400),
        ({"Content-Length": "x"}, b"", 400),
        ({"Content-Length": "9" * 30}, b"", 413),
        ({"Content-Length": str(65 << 20)}, b"", 413),
        ({"Content-Length": "1", **CHUNKED}, b"0\r\n\r\n", 400),
        ({"Transfer-Encoding": "gzip"}, b"", 501),
        ({"Transfer-Encoding": "gzip, chunked"}, b"", 501),
        (CHUNKED, b"x\r\n", 400),
        (CHUNKED, b"\r\n", 400),
        (CHUNKED, b"-1\r\n", 400),
        (CHUNKED, b"+1\r\na\r\n0\r\n\r\n", 400),
        (CHUNKED, b"1_0\r\n", 400),
        (CHUNKED, b"1\r\nab\r\n0\r\n\r\n", 400),
        (CHUNKED, b"1" * 5000, 400),
        (CHUNKED, b"fffffff\r\n", 413),
        (CHUNKED, b"0\r\n" + b"A: b\r\n" * 100, 400),
    ],
)
def test_what_is_no_body_is_refused(headers: dict[str, str], raw: bytes, status: int) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_body(headers, io.BytesIO(raw))
    assert caught.value.status == status


def test_chunks_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 10)
    assert len(read_body(CHUNKED, io.BytesIO(chunked([b"12345"] * 2)))) == 10
    with pytest.raises(RequestRefused) as caught:
        read_body(CHUNKED, io.BytesIO(chunked([b"12345"] * 3)))
    assert caught.value.status == 413


def test_a_client_that_goes_or_does_not_go_on() -> None:
    for headers, raw in (({"Content-Length": "5"}, b"1234"), (CHUNKED, b"5\r\n1234"), (CHUNKED, b"5\r\n12345\r\n")):
        with pytest.raises(ConnectionAbortedError):
            read_body(headers, io.BytesIO(raw))

    class Silent(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise TimeoutError

    with pytest.raises(RequestRefused) as caught:
        read_body({"Content-Length": "5"}, Silent())
    assert caught.value.status == 408


def test_whether_there_is_a_body() -> None:
    assert has_body(CHUNKED) and has_body({"Content-Length": "1"})
    assert not has_body({}) and not has_body({"Content-Length": "0"})
