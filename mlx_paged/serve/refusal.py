"""RequestRefused: why a request is not served, as a client is told."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from ..errors import GrammarError, PoolExhaustedError, RequestFailedError, RequestTooLargeError


class RequestRefused(Exception):
    """A request that is not served. The server answers with ``status`` and a JSON body that says why.

    Attributes:
        status: of HTTP.
        kind: for programs, as in OpenAI's ``error.type``.
        param: the parameter at fault, if one is.
        retry_after: seconds after which it may be served, if it may.
    """

    def __init__(
        self, status: int, message: str, *, kind: str = "", param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """As OpenAI's API words errors."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": int(self.status)}}


def invalid(message: str, param: str | None = None) -> RequestRefused:
    return RequestRefused(400, message, param=param)


def too_many_tokens(num_tokens: int, most: int, *, at_least: bool = False) -> RequestRefused:
    number = f"at least {num_tokens}" if at_least else str(num_tokens)
    message = (
        f"a request of {number} tokens does not fit the whole KV cache budget, which holds {most}: "
        "raise kv_cache_memory (--kv-cache-memory) or shorten the prompt"
    )
    return RequestRefused(413, message, kind="request_too_large")


def refusal_of(error: BaseException) -> RequestRefused:
    """What a client is told of an error."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, RequestTooLargeError):
        return RequestRefused(413, str(error), kind="request_too_large")
    if isinstance(error, PoolExhaustedError):
        return RequestRefused(429, str(error), kind="insufficient_memory", retry_after=1)
    if isinstance(error, GrammarError):
        return invalid(str(error))
    if isinstance(error, RequestFailedError) and error.__cause__ is not None:
        return refusal_of(error.__cause__)
    if isinstance(error, ValueError) and str(error).startswith("Speculative decoding requires"):
        return invalid(str(error), "draft_model")
    logging.error("request failed", exc_info=error)
    return RequestRefused(500, f"{type(error).__name__}: {error}")
