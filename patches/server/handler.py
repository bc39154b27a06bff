"""PagedAPIHandler: mlx-lm's HTTP handler, and the server that listens for its clients."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from mlx_lm import server as upstream

from ...serve.connection import Aborted, Connection
from ...serve.constraints.constraint import constraint_of
from ...serve.extras import RequestExtras
from ...serve.model_names import ModelNames
from ...serve.refusal import RequestRefused, invalid, refusal_of
from ...serve.report import cache_page, metrics
from ...serve.request_body import MAX_BODY_BYTES, parse_body
from .prepared_request import has_images
from .response_generator import PagedResponseGenerator

SOCKET_SECONDS = 60  # without a byte from or to a client, after which it is taken to be gone
COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
POLLED = ("/v1/cache/stats", "/health", "/metrics")  # asked for again and again, by the page and by monitors
STATES = {"ready": ("ok", 200), "loading": ("loading", 503), "failed": ("failed", 503)}  # "ok" is mlx-lm's word


class PagedAPIHandler(upstream.APIHandler):  # type: ignore[misc]
    """mlx-lm's handler: requests are checked first, errors are JSON, and there are pages about the cache."""

    timeout = SOCKET_SECONDS
    path: str
    rfile: Any
    headers: Any
    body: Any

    def __init__(self, response_generator: PagedResponseGenerator, *args: Any, **kwargs: Any) -> None:
        self.generator = response_generator
        self.config = response_generator.config
        self.names = ModelNames(response_generator.cli_args.model, self.config.served_model_names)
        self.has_answered = False
        self.extras = RequestExtras()
        super().__init__(Connection(response_generator, self), *args, **kwargs)

    # Requests -------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        self._guarded(self._post)

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_HEAD(self) -> None:
        self._guarded(self._get)

    def _guarded(self, answer: Callable[[], None]) -> None:
        """Run a request; what it raises becomes an answer, as long as none has begun."""
        stats = self.generator.stats
        self.has_answered = False
        counts = self.command == "POST"
        try:
            answer()
            outcome = "ok"
        except Aborted as aborted:
            outcome = self._refuse(aborted.reason)
        except Exception as error:
            outcome = self._refuse(error)
        if counts:
            stats.count_request(outcome)

    def _refuse(self, error: Exception) -> str:
        """Answer with an error. Returns the request's outcome."""
        if isinstance(error, OSError):
            logging.info("the client has gone")
            self.close_connection = True
            return "cancelled"
        refusal = refusal_of(error)
        self.close_connection = True
        self._headers_buffer: list[bytes] = []  # upstream may have begun an answer that was not sent
        try:
            if self.has_answered:
                self.wfile.write(f"data: {json.dumps(refusal.body())}\n\n".encode())
            else:
                retry = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
                self._send(refusal.status, json.dumps(refusal.body()).encode(), "application/json", **retry)
        except OSError:
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
        key = keys.find(self.headers.get("Authorization", ""))
        if keys and key is None:
            raise RequestRefused(401, "this server needs an API key: Authorization: Bearer KEY", kind="unauthorized")
        return key

    # POST -----------------------------------------------------------------------------------------------------

    def _post(self) -> None:
        key = self._check_key()
        path = self._url().path
        if path not in COMPLETIONS:
            raise RequestRefused(404, f"there is nothing at {path}", kind="not_found")
        body = parse_body(self._read_body(), path)
        self.path = path
        self.extras = RequestExtras(
            salt=self.config.api_keys.salt(key, body.get("cache_salt")),
            constraint=constraint_of(body, chat=path.endswith("/chat/completions")),
            prompt_lookup=body.get("prompt_lookup"),
        )
        if body.get("tool_choice") == "none":  # the model calls none that it does not know of
            body.pop("tools", None)
        # Upstream reads the body again: what it reads is what was checked.
        raw = json.dumps(body).encode()
        self.headers.replace_header("Content-Length", str(len(raw)))
        stream, self.rfile = self.rfile, io.BytesIO(raw)
        try:
            super().do_POST()
        finally:
            self.rfile = stream

    def handle_chat_completions(self) -> Any:
        if self.generator.model_provider.processor is None and has_images(self.body["messages"]):
            # Before mlx-lm fetches them from wherever they are said to be.
            raise Aborted(invalid("this model takes text only", "messages"))
        return self._checked(super().handle_chat_completions)

    def handle_text_completions(self) -> Any:
        return self._checked(super().handle_text_completions)

    def _checked(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            raise Aborted(invalid(f"{type(error).__name__}: {error}")) from error

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None:
            raise RequestRefused(411, "the Content-Length header is required")
        if not (length.isascii() and length.isdigit()):
            raise RequestRefused(400, "Content-Length must be a number")
        if len(length) > 18 or int(length) > MAX_BODY_BYTES:
            raise RequestRefused(413, f"a request body has at most {MAX_BODY_BYTES} bytes")
        try:
            raw: bytes = self.rfile.read(int(length))
        except TimeoutError:
            raise RequestRefused(408, "the request body did not come") from None
        if len(raw) < int(length):
            raise ConnectionAbortedError("the client closed the connection before its request was complete")
        return raw

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """mlx-lm's, with log-probabilities of the tokens that were said; mlx-lm gives any of the likeliest. Tokens that
        a stop string has cut away were not."""
        response: dict[str, Any] = super().generate_response(*args, **kwargs)
        tokens, logprobs = kwargs.get("tokens"), kwargs.get("token_logprobs")
        least = float("-inf")  # of tokens that the answer's grammar does not allow, and JSON has no word for
        if tokens and logprobs:
            tops = kwargs.get("top_tokens") or [()] * len(tokens)
            names = self.generator.model_provider.tokenizer.convert_ids_to_tokens(tokens)
            num_shown = getattr(self.response_generator.ctx, "num_shown", None)  # None: all
            response["choices"][0]["logprobs"] = {
                "content": [
                    {
                        "id": token,
                        "token": name,
                        "logprob": logprob,
                        "top_logprobs": [other for other in top if other["logprob"] > least],
                    }
                    for token, name, logprob, top in zip(tokens, names, logprobs, tops, strict=True)
                ][:num_shown]
            }
        return response

    # GET ------------------------------------------------------------------------------------------------------

    def _get(self) -> None:
        url = self._url()
        if url.path == "/health":
            self._health()
        elif url.path == "/":
            self._send(307, b"", "text/plain", Location="/cache")
        elif url.path == "/cache":  # has no figures in it; it asks for them, and for the key if need be
            self._send(200, cache_page.html(), "text/html; charset=utf-8", **cache_page.HEADERS)
        else:
            self._check_key()
            if url.path == "/v1/cache/stats":
                report = self.generator.report(with_blocks="blocks" in parse_qs(url.query))
                self._send_json(200, report, **{"Cache-Control": "no-store"})
            elif url.path == "/metrics":
                self._send(200, self._metrics(), metrics.CONTENT_TYPE)
            elif url.path in ("/v1/models", "/v1/models/"):
                self._send_json(200, {"object": "list", "data": self.names.listed(self.created)})
            elif url.path.startswith("/v1/models/"):
                self._model(unquote(url.path.removeprefix("/v1/models/")))
            else:
                raise RequestRefused(404, f"there is nothing at {url.path}", kind="not_found")

    def _health(self) -> None:
        status, code = STATES[self.generator.state]
        self._send_json(code, {"status": status}, **{"Cache-Control": "no-store"})

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


class Server(ThreadingHTTPServer):
    """Many clients may come at once: a burst is not to be refused by the system."""

    request_queue_size = 128
    daemon_threads = True

    def server_activate(self) -> None:
        super().server_activate()
        host, port = str(self.server_address[0]), int(self.server_address[1])
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logging.info("API at %s/v1, the cache's page at %s/cache", url, url)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.debug("connection of %s ended", client_address, exc_info=True)
