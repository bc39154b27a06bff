"""RequestRefused: an error response, in the format of each API; exit statuses of a server that cannot start."""

from __future__ import annotations

import logging
import os
import sys
from http import HTTPStatus
from typing import Any

from ..errors import (
    ConfigError,
    GrammarError,
    PagedCacheError,
    PoolExhaustedError,
    RankError,
    RequestFailedError,
    RequestTooLargeError,
)

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_SECONDS = 5
REFUSED_STATUS = 78  # EX_CONFIG of sysexits.h: started again, the server would fail again


def start_status(error: Exception) -> int:
    """Return the exit status for an error at the start: 78, or 0 under launchd, if options, model or machine are at
    fault, so that a service manager does not start the server again; else 1."""
    if not isinstance(error, PagedCacheError) or isinstance(error, RankError):
        return 1
    return 0 if is_launchd_job() else REFUSED_STATUS


def is_launchd_job() -> bool:
    """Return whether launchd, which is process 1 on macOS, has started this process. It can be told to restart a job
    after any status but 0, but not after some."""
    return sys.platform == "darwin" and os.getppid() == 1


class RequestRefused(Exception):
    """A request is refused or has failed.

    Attributes:
        status: HTTP status.
        kind: OpenAI's ``error.type``.
        param: the parameter at fault, or None.
        code: OpenAI's ``error.code``, or None.
        retry_after: seconds after which the client may retry, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = HTTPStatus(status)
        self.kind = kind or OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error in Anthropic's format."""
        status = int(self.status)
        kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": str(self), "param": self.param}
        if self.param == "thread":  # Anthropic's clients send the whole history instead if the error has this code
            error["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": error}


def invalid(message: str, param: str | None = None, *, code: str | None = None) -> RequestRefused:
    return RequestRefused(400, message, param=param, code=code)


def prompt_too_long(reason: str) -> RequestRefused:
    """Return a 400 by whose first words LangChain and LiteLLM recognise it, in either API."""
    return invalid(f"prompt is too long: {reason}", code="context_length_exceeded")


def unavailable(message: str) -> RequestRefused:
    return RequestRefused(503, message, retry_after=RETRY_SECONDS)


def not_found(message: str, *, param: str | None = None, code: str | None = None) -> RequestRefused:
    return RequestRefused(404, message, param=param, code=code)


def refusal_of(error: BaseException) -> RequestRefused:
    """Return the response to an error; an unexpected error is logged and becomes a 500."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, RequestTooLargeError):
        return prompt_too_long(str(error))
    if isinstance(error, PoolExhaustedError):
        return RequestRefused(429, str(error), kind="insufficient_memory", retry_after=1)
    if isinstance(error, ConfigError | GrammarError):
        return invalid(str(error))
    if isinstance(error, RequestFailedError) and error.__cause__ is not None:
        return refusal_of(error.__cause__)
    if isinstance(error, ValueError) and str(error).startswith("Speculative decoding requires"):
        return invalid(str(error), "draft_model")
    logging.error("request failed", exc_info=error)
    return RequestRefused(500, f"{type(error).__name__}: {error}")
