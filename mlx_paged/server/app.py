"""The routes of the server."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router

from .answers import AnswerResponse, Answers, Client
from .errors import RequestRefused, invalid, not_found
from .http import Gate, RequestLog, body_of, json_response
from .parts import Parts
from .prompting import size_of
from .report import CACHE_PAGE_HEADERS, CONTENT_TYPE, cache_page
from .request import ServerRequest
from .requests.endpoints import ENDPOINTS, RESPONSES, Computation, Endpoint, Page, description
from .requests.fields import MAX_PRIORITY, parsed
from .requests.pieces import Form, Head
from .requests.responses import ResponseForm
from .work import Work

HEALTHY = ("ok", "degraded")  # "ok" is mlx-lm's word


def make_app(parts: Parts) -> Any:
    """Return the ASGI application of a server."""
    app = App(parts)
    routes = [
        Route(path, app.handler(endpoint), methods=["POST"])
        for endpoint in ENDPOINTS.values()
        for path in (endpoint.path, *endpoint.aliases)
    ]
    routes += [Route(path, app.page_handler(page), methods=["GET"]) for path, page in app.pages().items()]
    routes.append(Route("/v1/responses/{name}", app.response, methods=["GET", "DELETE"]))
    return Gate(Router(routes, redirect_slashes=False, default=_nothing_here), parts)


async def _nothing_here(scope: Any, receive: Any, send: Any) -> None:
    raise not_found(f"no such endpoint: {scope['path'][:200]}")


@dataclass
class Asked:
    """What a request to generate asks for, as read from its body.

    Attributes:
        request, form: the request and the form of its answers.
        headers: headers of the answer.
        streams: whether the answers are sent while they are generated.
    """

    request: ServerRequest
    form: Form
    headers: dict[str, str]
    streams: bool


class App:
    """The handlers of one server's routes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    # POST -----------------------------------------------------------------------------------------------------

    def handler(self, endpoint: Endpoint | Computation) -> Any:
        """Return the handler of a POST endpoint. What grows with the body is done in a worker thread."""

        async def handle(http: Request) -> Response:
            key = self.check_key(http)
            self._parts.check_open()
            _log(http).client = self._parts.clients.name_of(key, http.headers.get("user-agent", ""))
            raw = await body_of(http)
            if isinstance(endpoint, Endpoint):
                return await self._generate(endpoint, http, raw, key)
            return await self._compute(endpoint, http, raw)

        return handle

    async def _generate(self, endpoint: Endpoint, http: Request, raw: bytearray, key: str | None) -> Response:
        parts, run, size = self._parts, self._parts.prompts.run, len(raw)
        asked = await run(lambda: self._read(endpoint, raw, key, http), size=size)
        request = asked.request
        client = Client(Work(request, request.model, asyncio.get_running_loop()), http.receive)
        try:
            found = await parts.engine.texts_for(request.model)
            size = max(size, sum(map(size_of, request.inputs)))  # an earlier response may have joined it
            await run(lambda: parts.prompts.complete(request, found), size=size)
            await parts.prompts.compile(request, found, lambda: client.work.is_open)
            answers = Answers(request, found, asked.form, streams=asked.streams)
            parts.engine.submit(client.work)
        except BaseException:
            client.close()
            raise
        return AnswerResponse(client, answers, asked.form, _log(http), asked.headers, streams=asked.streams)

    async def _compute(self, endpoint: Computation, http: Request, raw: bytearray) -> Response:
        parts, run, size = self._parts, self._parts.prompts.run, len(raw)
        body, headers = await run(lambda: self._parsed(endpoint, raw, http), size=size)
        texts = await parts.engine.texts_for(parts.names.resolve(body.model))
        answer = lambda: json_response(endpoint.answer(body, parts.prompts, texts), headers=headers)  # noqa: E731
        return await run(answer, size=size)

    # In a worker thread ---------------------------------------------------------------------------------------

    def _parsed(
        self, endpoint: Endpoint | Computation, raw: bytes | bytearray, http: Request
    ) -> tuple[Any, dict[str, str]]:
        """Return the checked body, and headers of the answer."""
        body, ignored = parsed(raw, endpoint.body, strict=self._parts.config.strict_parameters)
        _log(http).model = self._parts.names.shown(body.model)
        return body, {"x-ignored-parameters": _header(ignored)} if ignored else {}

    def _read(self, endpoint: Endpoint, raw: bytes | bytearray, key: str | None, http: Request) -> Asked:
        """Return what a body asks for."""
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
        parts.check_for_ranks(request)
        form = endpoint.form(_head(parts.names.shown(body.model), parts.fingerprint), body)
        if isinstance(form, ResponseForm):
            form.keep = keep
        return Asked(request, form, headers, bool(getattr(body, "stream", False)))

    def check_key(self, http: Request) -> str | None:
        """Return the request's API key; None if the server has none. Raises RequestRefused (401) for a wrong key."""
        keys = self._parts.config.api_keys
        key = keys.find(http.headers.get("authorization", ""), http.headers.get("x-api-key", ""))
        if keys and key is None:
            words = "missing or wrong API key; send the header Authorization: Bearer KEY"
            raise RequestRefused(401, words, code="invalid_api_key")
        return key

    # GET ------------------------------------------------------------------------------------------------------

    def page_handler(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a page, which checks the API key unless the page is open."""

        async def answer(http: Request) -> Response:
            if not page.is_open:
                self.check_key(http)
            response: Response = await page.answer(http)
            return response

        return answer

    def pages(self) -> dict[str, Page]:
        """Return the GET pages by path; the routes and the OpenAPI description are made from them."""
        return {
            "/health": Page(self.health, "Whether the server is ready", is_open=True),
            "/version": Page(self.version, "Versions"),
            "/v1/models": Page(self.models, "Available models"),
            "/v1/cache/stats": Page(self.stats, "Pool statistics"),
            "/metrics": Page(self.metrics, "Metrics for Prometheus", "text/plain"),
            "/cache": Page(self.cache, "HTML page that shows the pool", "text/html", is_open=True),
            "/openapi.json": Page(self.openapi, "OpenAPI description of the server", is_open=True),
            "/": Page(self.root, is_open=True),
            "/v1/models/": Page(self.models),
            "/v1/models/{name:path}": Page(self.model),
        }

    async def root(self, http: Request) -> Response:
        return RedirectResponse("/cache", 307)

    async def cache(self, http: Request) -> Response:  # open: it holds no figures, but fetches them with the key
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
        key, name = self.check_key(http), http.path_params["name"]
        kept = self._parts.responses
        if http.method == "DELETE":
            return json_response(kept.delete(key, name))
        return Response(kept.get(key, name), media_type="application/json")

    def _figures(self) -> dict[str, Any]:
        texts = self._parts.engine.models.texts
        return {} if texts is None or texts.context_length is None else {"max_model_len": texts.context_length}


def _head(model: str, fingerprint: str) -> Head:
    return Head(uuid.uuid4().hex, model, int(time.time()), fingerprint)


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
