"""read_body(): the body of a request, of a known length or in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import BinaryIO

from ..refusal import RequestRefused, invalid

MAX_BODY_BYTES = 64 << 20
MAX_LINE = 4096  # of a chunk's size and its extensions, or of a trailer
MAX_TRAILERS = 64


def read_body(headers: Mapping[str, str], stream: BinaryIO) -> bytes:
    """The whole body. If it is refused, what is left of it has not been read: the connection cannot go on.

    Args:
        headers: of the request.
        stream: what follows them.

    Raises:
        RequestRefused: 400, 408, 411, 413 or 501.
        ConnectionAbortedError: the client has gone.
    """
    length, coding = headers.get("Content-Length"), headers.get("Transfer-Encoding")
    try:
        if coding is not None:
            if length is not None:
                raise invalid("Content-Length and Transfer-Encoding exclude each other")
            if coding.strip().lower() != "chunked":
                raise RequestRefused(501, "of transfer encodings, chunked alone is known")
            return _read_chunks(stream)
        if length is None:
            raise RequestRefused(411, "the Content-Length header is required, or Transfer-Encoding: chunked")
        if not (length.isascii() and length.isdigit()):
            raise invalid("Content-Length must be a number")
        if len(length) > 18:
            raise _too_large()
        return _read(stream, int(length))
    except TimeoutError:
        raise RequestRefused(408, "the request body did not come") from None


def has_body(headers: Mapping[str, str]) -> bool:
    """Whether something follows a request's headers."""
    return headers.get("Transfer-Encoding") is not None or headers.get("Content-Length", "0").strip() != "0"


def _read_chunks(stream: BinaryIO) -> bytes:
    parts, num_bytes = [], 0
    while size := _size(_line(stream)):
        num_bytes += size
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(_read(stream, size))
        if _line(stream):
            raise invalid("a chunk of the request body is longer than it says")
    for _ in range(MAX_TRAILERS):
        if not _line(stream):
            return b"".join(parts)
    raise invalid("the request body has too many trailers")


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not 0 < len(digits) <= 15 or digits.strip(b"0123456789abcdefABCDEF"):
        raise invalid("a chunk of the request body does not begin with its size")
    return int(digits, 16)


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline(MAX_LINE)
    if not line.endswith(b"\n"):
        if len(line) == MAX_LINE:
            raise invalid("a line between chunks of the request body is too long")
        raise _gone()
    return line.rstrip(b"\r\n")


def _read(stream: BinaryIO, length: int) -> bytes:
    if length > MAX_BODY_BYTES:
        raise _too_large()
    raw = stream.read(length)
    if len(raw) < length:
        raise _gone()
    return raw


def _too_large() -> RequestRefused:
    return RequestRefused(413, f"a request body has at most {MAX_BODY_BYTES} bytes")


def _gone() -> ConnectionAbortedError:
    return ConnectionAbortedError("the client closed the connection before its request was complete")
