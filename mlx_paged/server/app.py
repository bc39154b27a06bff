"""The parts of a server, what is checked and logged of every request, and the routes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from mlx_lm.server import get_system_fingerprint
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router

from .answers import Answers, Form, Head
from .clients import Clients
from .engine_thread import CLOSING
from .errors import RequestRefused, invalid, not_found, unavailable
from .http import AnswerResponse, RequestLog, body_of, error_response, in_worker, json_response, parsed
from .model_names import ModelNames
from .ranked_engine import check_for_ranks, make_engine
from .report import CACHE_PAGE_HEADERS, CONTENT_TYPE, ServerStats, blocks_of, cache_page, dispatches, pages_of
from .request import ClientGone, ServerRequest, Work
from .requests.endpoints import ENDPOINTS, Page, description
from .requests.fields import MAX_PRIORITY, Computation, Endpoint
from .requests.responses import MAX_KEPT_BYTES, RESPONSES, KeptResponses, ResponseForm

if TYPE_CHECKING:
    from .loaded_models import LoadedModels

QUIET = ("/v1/cache/stats", "/health", "/metrics")  # polled by the page and by monitors: logged at DEBUG only
OPEN = ("/", "/cache", "/health", "/openapi.json")  # without an API key; the page fetches its figures with the key
LOOPBACK = re.compile(r"localhost|.+\.localhost|127(\.\d+){3}|\[?::1\]?")
# Pages of this machine, browser extensions and applications; no web sites.
LOCAL_ORIGINS = r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?|(?!https?:|null)[a-z][a-z0-9+.-]*:.*"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,100}")  # of requests
HEALTHY = ("ok", "degraded")  # "ok" is mlx-lm's word


class Parts:
    """The parts of one server.

    Args:
        models: the models that it serves.

    Attributes:
        cli_args, config, ranks: those of the models.
        fingerprint: ``system_fingerprint`` of answers.
        num_answering: POST requests that are being answered.
        is_draining: no new requests are served.
    """

    def __init__(self, models: LoadedModels) -> None:
        self.cli_args, self.config, self.ranks = models.cli_args, models.config, models.ranks
        self.fingerprint = get_system_fingerprint()
        self.stats = ServerStats()
        self.names = ModelNames(models.default_key, self.config, self.cli_args.models)
        self.clients = Clients(self.config.api_keys)
        self.responses = KeptResponses(MAX_KEPT_BYTES if self.config.response_store else 0)
        self.num_answering = 0
        self.is_draining = False
        self.engine = make_engine(models, self.stats)

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling parameters of requests that give none."""
        args = self.cli_args
        return {"temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}

    def check_open(self) -> None:
        """Raise RequestRefused (503) if no new requests are served."""
        if self.is_draining:
            raise unavailable(CLOSING)
        self.engine.check()

    def check_key(self, headers: Headers) -> str | None:
        """Return a request's API key; None if the server has none. Raises RequestRefused (401) for a wrong key."""
        keys = self.config.api_keys
        key = keys.find(headers.get("authorization", ""), headers.get("x-api-key", ""))
        if keys and key is None:
            words = "missing or wrong API key; send the header Authorization: Bearer KEY"
            raise RequestRefused(401, words, code="invalid_api_key")
        return key

    # Health and figures ---------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """Return the body of ``/health``. Never blocks on the engine's thread."""
        state = self.engine.state
        status = "draining" if self.is_draining and state != "failed" else state
        return {"status": status, "memory": self.engine.memory_watch.as_dict()}

    def report(self, *, with_blocks: bool = False) -> dict[str, Any]:
        """Return what ``/v1/cache/stats`` says; with ``with_blocks`` also the state of every block and the requests.
        Never blocks on the engine's thread; figures are a snapshot."""
        models, requests = self.engine.models, self.engine.sequences()
        texts, cache, pool = models.texts, models.prompt_cache, models.pool
        path = None if texts is None else texts.key.model
        report: dict[str, Any] = {
            "model": None if path is None else os.path.basename(path.rstrip("/")),
            "health": self.health(),
            "server": self.stats.as_dict(),
            "clients": self.clients.figures(),
            "running": {"running": sum(not each["waiting"] for each in requests), "waiting": self.engine.num_waiting},
            "pool": None if pool is None else pool.stats().as_dict(),
            "pages": [] if pool is None else [pages_of(group) for group in pool.groups],
            "prefix_cache": cache.figures() if self.config.prefix_cache else None,
            "dispatch": dispatches(),
        }
        if with_blocks:
            report |= {"sequences": requests, "blocks": [] if pool is None else blocks_of(pool)}
        return report


# Every request ------------------------------------------------------------------------------------------------------


class Gate(CORSMiddleware):
    """The outermost ASGI application: checks origin and host, turns exceptions into responses, counts and logs.

    A web page that attacks a server on the loopback interface sends its own origin, or, with DNS rebinding, its own
    name as the host. If the server has API keys, which pages do not know, any host is allowed.

    Args:
        app: the application that answers.
        parts: the parts of the server.
    """

    def __init__(self, app: Callable[..., Any], parts: Parts) -> None:
        self._app, self._parts = app, parts
        host, origins = parts.cli_args.host, parts.cli_args.allowed_origins
        self._host, self._checks_host = host, LOOPBACK.fullmatch(host) is not None and not parts.config.api_keys
        super().__init__(
            self._answer,
            allow_origins=origins or (),
            allow_origin_regex=LOCAL_ORIGINS if origins is None else None,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-ignored-parameters"],
        )

    def check(self, headers: Headers) -> None:
        """Raise RequestRefused: 403 for a forbidden origin or host, 400 for an invalid host."""
        origin = headers.get("origin")
        if origin is not None and not self.is_allowed_origin(origin):
            raise RequestRefused(403, f"the origin {origin[:200]!r} is not allowed (--allowed-origins)")
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        except ValueError:
            raise invalid("invalid Host header") from None
        if self._checks_host and "." in name and not (name == self._host or LOOPBACK.fullmatch(name)):
            try:
                ipaddress.ip_address(name)
            except ValueError:
                raise RequestRefused(403, f"the Host header {name[:200]!r} is not this server's name") from None

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        headers, begin = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        log = RequestLog(given if _ID.fullmatch(given) else uuid.uuid4().hex)
        scope["app"] = self  # makes starlette raise HTTPException instead of answering
        scope.setdefault("state", {})["log"] = log
        is_post = scope["method"] == "POST"

        async def noted_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = log.id
            await send(message)

        self._parts.num_answering += is_post
        try:
            self.check(headers)
            if scope["method"] == "OPTIONS":
                await Response(status_code=204)(scope, receive, noted_send)
                return
            if scope["path"] not in OPEN:
                scope["state"]["key"] = self._parts.check_key(headers)
            await self._app(scope, receive, noted_send)
        except (ClientGone, ClientDisconnect, ConnectionAbortedError):
            log.outcome = "cancelled"
        except Exception as error:
            if log.status:
                raise
            await error_response(error, scope, log)(scope, receive, noted_send)
        finally:
            self._parts.num_answering -= is_post
            log.num_seconds = time.monotonic() - begin
            if is_post:
                self._parts.stats.requests[log.outcome] += 1
            if log.client:
                self._parts.clients.count(log.client, log.prompt, log.cached, log.generated)
            path = scope["raw_path"].decode("ascii", "backslashreplace")  # percent-encoded: no line breaks
            quiet = path in QUIET and log.status in (200, 503)
            logging.log(logging.DEBUG if quiet else logging.INFO, "%s", log.line(scope["method"], path))


# Routes -------------------------------------------------------------------------------------------------------------


def make_app(parts: Parts) -> Any:
    """Return the ASGI application of a server."""
    app = App(parts)
    routes = [
        Route(path, app.handler(endpoint), methods=["POST"])
        for endpoint in ENDPOINTS.values()
        for path in (endpoint.path, *endpoint.aliases)
    ]
    routes += [Route(path, page.answer, methods=["GET"]) for path, page in app.pages().items()]
    routes.append(Route("/v1/responses/{name}", app.response, methods=["GET", "DELETE"]))
    return Gate(Router(routes, redirect_slashes=False, default=_nothing_here), parts)


async def _nothing_here(scope: Any, receive: Any, send: Any) -> None:
    raise not_found(f"no such endpoint: {scope['path'][:200]}")


class App:
    """The handlers of one server's routes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # POST -----------------------------------------------------------------------------------------------------

    def handler(self, endpoint: Endpoint | Computation) -> Any:
        """Return the handler of a POST endpoint. What grows with the body is done in a worker thread."""

        async def handle(http: Request) -> Response:
            key = http.state.key
            self._parts.check_open()
            _log(http).client = self._parts.clients.name_of(key, http.headers.get("user-agent", ""))
            raw = await body_of(http)
            if isinstance(endpoint, Endpoint):
                return await self._generate(endpoint, http, raw, key)
            return await self._compute(endpoint, http, raw)

        return handle

    async def _generate(self, endpoint: Endpoint, http: Request, raw: bytearray, key: str | None) -> Response:
        parts = self._parts
        request, form, headers = await in_worker(lambda: self._read(endpoint, raw, key, http))
        work = Work(request, request.model, asyncio.get_running_loop())
        work.watch(http.receive)
        try:
            found = await parts.engine.texts_for(request.model)
            await in_worker(lambda: found.complete(request, parts.cli_args.max_tokens))
            if request.constraint is not None:
                await asyncio.to_thread(found.constrain, request, lambda: work.is_open)  # it mostly waits
            answers = Answers(request, found, form)
            parts.engine.submit(work)
        except BaseException:
            work.close()
            raise
        return AnswerResponse(work, answers, form, _log(http), headers)

    async def _compute(self, endpoint: Computation, http: Request, raw: bytearray) -> Response:
        parts = self._parts
        body, headers = await in_worker(lambda: self._parsed(endpoint, raw, http))
        texts = await parts.engine.texts_for(parts.names.resolve(body.model))
        answer = lambda: json_response(endpoint.answer(body, texts), headers=headers)  # noqa: E731
        return await in_worker(answer)

    # In a worker thread ---------------------------------------------------------------------------------------

    def _parsed(
        self, endpoint: Endpoint | Computation, raw: bytes | bytearray, http: Request
    ) -> tuple[Any, dict[str, str]]:
        """Return the checked body, and headers of the answer."""
        body, ignored = parsed(raw, endpoint.body, strict=self._parts.config.strict_parameters)
        _log(http).model = self._parts.names.shown(body.model)
        return body, {"x-ignored-parameters": _header(ignored)} if ignored else {}

    def _read(
        self, endpoint: Endpoint, raw: bytes | bytearray, key: str | None, http: Request
    ) -> tuple[ServerRequest, Form, dict[str, str]]:
        """Return the request of a body, the form of its answers, and headers."""
        parts, log = self._parts, _log(http)
        body, headers = self._parsed(endpoint, raw, http)
        keep = parts.responses.open(body, key) if endpoint is RESPONSES else None
        request = endpoint.request(body, parts.defaults)
        request.salt = parts.config.api_keys.salt(key, body.cache_salt)
        request.id, request.client = log.id, log.client
        request.priority = _asked_priority(body, http) or 0
        request.model = parts.names.resolve(body.model, body.adapters, body.draft_model)
        if body.num_draft_tokens is not None and request.model.draft is None and not parts.config.mtp:
            raise invalid("num_draft_tokens requires a draft model or --mtp", "num_draft_tokens")
        if parts.ranks is not None:
            check_for_ranks(request, is_default=request.model == parts.names.resolve(None))
        head = Head(uuid.uuid4().hex, parts.names.shown(body.model), int(time.time()), parts.fingerprint)
        form = endpoint.form(head, body)
        if isinstance(form, ResponseForm):
            form.keep = keep
        request.streams = bool(getattr(body, "stream", False))
        return request, form, headers

    # GET ------------------------------------------------------------------------------------------------------

    def pages(self) -> dict[str, Page]:
        """Return the GET pages by path; the routes and the OpenAPI description are made from them."""
        return {
            "/health": Page(self.health, "Whether the server is ready"),
            "/version": Page(self.version, "Versions"),
            "/v1/models": Page(self.models, "Available models"),
            "/v1/cache/stats": Page(self.stats, "Pool statistics"),
            "/metrics": Page(self.metrics, "Metrics for Prometheus", "text/plain"),
            "/cache": Page(self.cache, "HTML page that shows the pool", "text/html"),
            "/openapi.json": Page(self.openapi, "OpenAPI description of the server"),
            "/": Page(self.root),
            "/v1/models/": Page(self.models),
            "/v1/models/{name:path}": Page(self.model),
        }

    async def root(self, http: Request) -> Response:
        return RedirectResponse("/cache", 307)

    async def cache(self, http: Request) -> Response:
        return Response(cache_page(), 200, CACHE_PAGE_HEADERS, "text/html")

    async def health(self, http: Request) -> Response:
        health = self._parts.health()
        return json_response(health, 200 if health["status"] in HEALTHY else 503, {"cache-control": "no-store"})

    async def openapi(self, http: Request) -> Response:
        has_keys = bool(self._parts.config.api_keys)
        return json_response(description(version("mlx_paged"), self.pages(), has_keys=has_keys))

    async def stats(self, http: Request) -> Response:
        with_blocks = "blocks" in http.query_params
        report = await run_in_threadpool(lambda: self._parts.report(with_blocks=with_blocks))
        return json_response(report, headers={"cache-control": "no-store"})

    async def metrics(self, http: Request) -> Response:
        return Response(
            await run_in_threadpool(lambda: self._parts.stats.metrics(self._parts.report())),
            200,
            None,
            CONTENT_TYPE,
        )

    async def version(self, http: Request) -> Response:
        names = {name: version(name) for name in ("mlx_paged", "mlx", "mlx-lm")}
        return json_response({**names, "version": version("mlx_paged")})

    async def models(self, http: Request) -> Response:
        listed = await run_in_threadpool(lambda: self._parts.names.listed(int(time.time()), **self._figures()))
        return json_response({"object": "list", "data": listed})

    async def model(self, http: Request) -> Response:
        name = unquote(http.path_params["name"])
        found = await run_in_threadpool(lambda: self._parts.names.find(name, int(time.time()), **self._figures()))
        if found is None:
            raise self._parts.names.unknown(name)
        return json_response(found)

    async def response(self, http: Request) -> Response:
        key, name = http.state.key, http.path_params["name"]
        kept = self._parts.responses
        if http.method == "DELETE":
            return json_response(kept.delete(key, name))
        return Response(kept.get(key, name), media_type="application/json")

    def _figures(self) -> dict[str, Any]:
        texts = self._parts.engine.models.texts
        return {} if texts is None or texts.context_length is None else {"max_model_len": texts.context_length}


def _asked_priority(body: Any, http: Request) -> int | None:
    """Return the priority in the body, or else in the header. Raises RequestRefused if the header is no number."""
    asked = http.headers.get("x-priority")
    if body.priority is not None or asked is None:
        priority: int | None = body.priority
        return priority
    if re.fullmatch(r"[+-]?[0-9]{1,7}", asked.strip()) is None or abs(int(asked)) > MAX_PRIORITY:
        raise invalid(
            f"x-priority must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {asked[:80]!r}", "priority"
        )
    return int(asked)


def _log(http: Request) -> RequestLog:
    log: RequestLog = http.scope["state"]["log"]
    return log


def _header(names: list[str]) -> str:
    """Return names as a header's value: printable ASCII, at most 1000 characters."""
    return ", ".join(name.encode("unicode_escape").decode() for name in names)[:1000].strip()
