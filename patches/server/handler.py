"""PagedAPIHandler: mlx-lm's HTTP handler, and the server that listens for its clients."""

from __future__ import annotations

import functools
import json
import logging
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from mlx_lm import server as upstream

from ...serve.api.forms import form_of, translated
from ...serve.api.messages import error_of
from ...serve.api.openapi import description
from ...serve.api.parameters import COMPLETIONS, COUNT_TOKENS, DETOKENIZE, TOKENIZE, Endpoint, endpoint_of
from ...serve.api.pieces import Head
from ...serve.http.body import has_body, read_body
from ...serve.http.connection import Connection
from ...serve.http.event_stream import EventStream
from ...serve.model_names import ModelNames
from ...serve.refusal import RequestRefused, invalid, refusal_of
from ...serve.report import cache_page, metrics
from ...serve.request_body import parse_body
from .answers.answering import Answering, takes_text_only
from .answers.order import Order, order_of
from .answers.tokens import Tokens
from .response_generator import PagedResponseGenerator

SOCKET_SECONDS = 60  # without a byte from or to a client, after which it is taken to be gone
POLLED = ("/v1/cache/stats", "/health", "/metrics")  # asked for again and again, by the page and by monitors
HEALTHY = ("ok", "degraded")  # "ok" is mlx-lm's word


class PagedAPIHandler(upstream.APIHandler):  # type: ignore[misc]
    """mlx-lm's handler: requests are checked first, errors are JSON, and there are pages about the cache."""

    protocol_version = "HTTP/1.1"  # connections stay open for the next request
    disable_nagle_algorithm = True  # headers and bodies are written apart
    timeout = SOCKET_SECONDS
    path: str
    close_connection: bool
    rfile: Any
    headers: Any
    body: Any

    def __init__(self, response_generator: PagedResponseGenerator, *args: Any, **kwargs: Any) -> None:
        self.generator = response_generator
        self.config = response_generator.config
        self.names = ModelNames(response_generator.cli_args.model, self.config.served_model_names)
        self.has_answered = self.is_read = False
        self.events: EventStream | None = None
        super().__init__(response_generator, *args, **kwargs)

    # Requests -------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        with self.generator.drain.answering():
            self._guarded(self._post)

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_HEAD(self) -> None:
        self._guarded(self._get)

    def do_OPTIONS(self) -> None:
        self._guarded(super().do_OPTIONS)

    def do_PUT(self) -> None:
        self._guarded(self._refuse_method)

    do_PATCH = do_DELETE = do_TRACE = do_QUERY = do_PUT

    def _refuse_method(self) -> None:
        raise RequestRefused(405, f"there is no {self.command} here: GET, HEAD, POST and OPTIONS alone")

    def _guarded(self, answer: Callable[[], None]) -> None:
        """Run a request; what it raises becomes an answer, as long as none has begun."""
        stats = self.generator.stats
        self.has_answered, self.is_read = False, not has_body(self.headers)
        self.events = None
        self.created = int(time.time())
        counts = self.command == "POST"
        try:
            answer()
            outcome = "ok"
        except Exception as error:
            outcome = self._refuse(error)
        self.events = None
        self.close_connection = self.close_connection or not self.is_read  # what is left would be the next request
        if counts:
            stats.count_request(outcome)

    def _refuse(self, error: Exception) -> str:
        """Answer with an error. Returns the request's outcome."""
        if isinstance(error, OSError):
            logging.info("the client has gone")
            self.close_connection = True
            return "cancelled"
        refusal = refusal_of(error)
        self._headers_buffer: list[bytes] = []  # upstream may have begun an answer that was not sent
        try:
            if not self.has_answered:
                more = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
                if refusal.status == 405:
                    more["Allow"] = "GET, HEAD, POST, OPTIONS"
                of_messages = self.path.startswith("/v1/messages")
                self._send_json(refusal.status, error_of(refusal) if of_messages else refusal.body(), **more)
            else:
                self.close_connection = True
                if self.events is not None:
                    self.events.fail(refusal)
        except OSError:
            self.close_connection = True
            return "cancelled"
        return "failed" if refusal.status >= 500 else "refused"

    def log_message(self, format: str, *args: Any) -> None:
        polled = getattr(self, "path", "").partition("?")[0] in POLLED and self.command in ("GET", "HEAD")
        logging.log(logging.DEBUG if polled else logging.INFO, "%s %s", self.address_string(), format % args)

    def end_headers(self) -> None:
        super().end_headers()
        self.has_answered = True

    def _send(self, status: int, body: bytes, content_type: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection or not self.is_read:
            self.send_header("Connection", "close")
        self._set_cors_headers()
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_json(self, status: int, value: Any, **headers: str) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", **headers)

    def _url(self) -> SplitResult:
        try:
            return urlsplit(self.path)
        except ValueError:
            raise RequestRefused(400, "the request's address cannot be read") from None

    def _check_key(self) -> str | None:
        """The API key that the request came with, if the server has any."""
        keys = self.config.api_keys
        key = keys.find(self.headers.get("Authorization") or f"Bearer {self.headers.get('x-api-key', '')}")
        if keys and key is None:
            raise RequestRefused(401, "this server needs an API key: Authorization: Bearer KEY", kind="unauthorized")
        return key

    # POST -----------------------------------------------------------------------------------------------------

    def _post(self) -> None:
        key = self._check_key()
        path = self._url().path
        endpoint = endpoint_of(path)
        if endpoint is None:
            raise RequestRefused(404, f"there is nothing at {path}", kind="not_found")
        raw = read_body(self.headers, self.rfile)
        self.is_read = True
        body = parse_body(raw, endpoint, ignores_unknown=self.config.ignore_unknown_parameters)
        connection = Connection(self)
        tokens = Tokens(self.generator, connection.client_is_gone)
        if endpoint is TOKENIZE:
            self._send_json(200, tokens.tokenize(body))
        elif endpoint is DETOKENIZE:
            self._send_json(200, tokens.detokenize(body))
        elif endpoint is COUNT_TOKENS:
            self._send_json(200, tokens.count(translated(endpoint, body)))
        else:
            order = self._order(endpoint, body, self.config.api_keys.salt(key, body.get("cache_salt")))
            head = Head(str(uuid.uuid4()), body.get("model", "default_model"), self.created, self.system_fingerprint)
            make_form = functools.partial(form_of, endpoint, head, body, order.num_top)
            answering = Answering(self.generator, connection, order, make_form)
            if body.get("stream"):
                answering.stream(self._begin_stream)
            else:
                self._send_json(200, answering.whole())

    def _order(self, endpoint: Endpoint, body: dict[str, Any], salt: str | None) -> Order:
        meant = translated(endpoint, body)
        if endpoint is COMPLETIONS:
            return order_of(meant, self.generator.cli_args, salt)
        if meant.get("tool_choice") == "none":  # the model calls none that it does not know of
            meant.pop("tools", None)
        if takes_text_only(self.generator, meant["messages"]):
            # Before mlx-lm fetches images from wherever they are said to be.
            raise invalid("this model takes text only", "messages")
        self.body, self.stream = meant, bool(meant.get("stream"))
        try:
            chat = self.handle_chat_completions()
        except Exception as error:
            raise invalid(f"{type(error).__name__}: {error}") from error
        return order_of(meant, self.generator.cli_args, salt, chat)

    def _begin_stream(self) -> EventStream:
        is_chunked = self.request_version != "HTTP/1.0"
        self._set_stream_headers(200)
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        self.events = EventStream(self.wfile.write, is_chunked=is_chunked)
        return self.events

    # GET ------------------------------------------------------------------------------------------------------

    def _get(self) -> None:
        url = self._url()
        if url.path == "/health":
            self._health()
        elif url.path == "/":
            self._send(307, b"", "text/plain", Location="/cache")
        elif url.path == "/cache":  # has no figures in it; it asks for them, and for the key if need be
            self._send(200, cache_page.html(), "text/html; charset=utf-8", **cache_page.HEADERS)
        elif url.path == "/openapi.json":
            self._send_json(200, description(version("mlx_paged"), has_keys=bool(self.config.api_keys)))
        else:
            self._check_key()
            if url.path == "/v1/cache/stats":
                report = self.generator.report(with_blocks="blocks" in parse_qs(url.query))
                self._send_json(200, report, **{"Cache-Control": "no-store"})
            elif url.path == "/version":
                self._send_json(
                    200,
                    {name: version(name) for name in ("mlx_paged", "mlx", "mlx-lm")}
                    | {"version": version("mlx_paged")},
                )
            elif url.path == "/metrics":
                self._send(200, self._metrics(), metrics.CONTENT_TYPE)
            elif url.path in ("/v1/models", "/v1/models/"):
                self._send_json(200, {"object": "list", "data": self.names.listed(self.created)})
            elif url.path.startswith("/v1/models/"):
                self._model(unquote(url.path.removeprefix("/v1/models/")))
            elif endpoint_of(url.path) is not None:
                raise RequestRefused(405, f"{url.path} is asked with POST")
            else:
                raise RequestRefused(404, f"there is nothing at {url.path}", kind="not_found")

    def _health(self) -> None:
        health = self.generator.health()
        code = 200 if health["status"] in HEALTHY else 503
        self._send_json(code, health, **{"Cache-Control": "no-store"})

    def _model(self, name: str) -> None:
        found = self.names.find(name, self.created)
        if found is None:
            raise RequestRefused(404, f"there is no model {name}", kind="not_found", param="model")
        self._send_json(200, found)

    def _metrics(self) -> bytes:
        try:
            return metrics.metrics_text(self.generator.report())
        except metrics.MetricsUnavailable as error:
            raise RequestRefused(501, str(error), kind="not_available") from None
