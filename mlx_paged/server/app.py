"""The routes of the server."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route, Router

from .answers import AnswerResponse, Answers, Client
from .engine_loop import Work
from .errors import RequestRefused, invalid, not_found
from .http import Gate, RequestLog, body_of, json_response
from .prompting import SMALL_BYTES, size_of
from .report import CACHE_PAGE_HEADERS, CONTENT_TYPE, cache_page
from .request import ModelKey, ServerRequest
from .requests.endpoints import ENDPOINTS, RESPONSES, Endpoint, Page, description
from .requests.fields import MAX_PRIORITY, Body, parsed
from .requests.pieces import Form, Head
from .requests.responses import ResponseForm

if TYPE_CHECKING:
    from .backend import ModelTexts
    from .service import Service

HEALTHY = ("ok", "degraded")  # "ok" is mlx-lm's word


def make_app(service: Service) -> Any:
    """Return the ASGI application of a server."""
    app = App(service)
    routes = [
        Route(path, app.post_handler(endpoint), methods=["POST"])
        for endpoint in ENDPOINTS.values()
        for path in (endpoint.path, *endpoint.aliases)
    ]
    routes += [Route(path, app.page_handler(page), methods=["GET"]) for path, page in app.pages().items()]
    routes.append(Route("/v1/responses/{name}", app.response, methods=["GET", "DELETE"]))
    return Gate(Router(routes, redirect_slashes=False, default=_nothing_here), service)


async def _nothing_here(scope: Any, receive: Any, send: Any) -> None:
    raise not_found(f"no such endpoint: {scope['path'][:200]}")


@dataclass
class Asked:
    """What a POST asks for, as read from its body.

    Attributes:
        body: the checked body.
        model: the model that it is for.
        headers: headers of the answer.
        request, form: the request and the form of its answers; None: nothing is generated.
        texts: texts of the model, if the request has its prompts.
    """

    body: Body
    model: ModelKey
    headers: dict[str, str]
    request: ServerRequest | None = None
    form: Form | None = None
    texts: ModelTexts | None = None


class App:
    """The handlers of one server's routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # POST -----------------------------------------------------------------------------------------------------

    def post_handler(self, endpoint: Endpoint) -> Any:
        """Return the handler of a POST endpoint. What grows with the body is done in a worker thread."""

        async def answer(http: Request) -> Response:
            service = self._service
            run = service.prompts.run
            key = self.check_key(http)
            service.check_open()
            _log(http).client = service.clients.name_of(key, http.headers.get("user-agent", ""))
            async with body_of(http, service.bodies) as raw:
                size = len(raw)
                asked = await run(lambda: self._read(endpoint, raw, key, http), size=size)
                if (request := asked.request) is None or asked.form is None:
                    texts = await service.engine.texts_for(asked.model)
                    return await run(lambda: self._computed(endpoint, asked, texts), size=size)
                client = Client(http.receive)
                try:
                    if (found := asked.texts) is None:
                        found = await service.engine.texts_for(asked.model)
                        size = max(size, sum(map(size_of, request.inputs)))
                        await run(lambda: service.prompts.complete(request, found), size=size)
                    await service.prompts.compile(request, found)
                    streams = bool(getattr(asked.body, "stream", False))
                    answers = Answers(request, found, asked.form, streams=streams)
                    work = service.engine.submit(Work(client.stream, request, found.key))
                except BaseException:
                    client.close()
                    raise
            return AnswerResponse(client, answers, asked.form, _log(http), asked.headers, work, streams=streams)

        return answer

    def _read(self, endpoint: Endpoint, raw: bytes | bytearray, key: str | None, http: Request) -> Asked:
        """Return what a body asks for; with its prompts if they are small and the model's texts are known. Call it in
        a worker thread."""
        service, log = self._service, _log(http)
        body, ignored = parsed(raw, endpoint.body, strict=service.config.strict_parameters)
        log.model = body.model or service.names.default
        headers = {"x-ignored-parameters": _header(ignored)} if ignored else {}
        keep = service.responses.open(body, key) if endpoint is RESPONSES else None
        if endpoint.request is None or endpoint.form is None:
            return Asked(body, service.names.resolve(body.model), headers)
        request = endpoint.request(body, service.defaults)
        request.salt = service.config.api_keys.salt(key, body.cache_salt)
        request.id, request.client = log.id, log.client
        request.priority = _asked_priority(body, http) or 0
        request.model = service.names.resolve(body.model, body.adapters, body.draft_model)
        if body.num_draft_tokens is not None and request.model.draft is None and not service.config.mtp:
            raise invalid("num_draft_tokens requires a draft model or --mtp", "num_draft_tokens")
        service.check_for_ranks(request)
        form = endpoint.form(_head(body, service.fingerprint), body)
        if isinstance(form, ResponseForm):
            form.keep = keep
        asked = Asked(body, request.model, headers, request, form)
        texts = service.engine.models.texts_of(request.model)
        if texts is not None and sum(map(size_of, request.inputs)) <= SMALL_BYTES:
            service.prompts.complete(request, texts)
            asked.texts = texts
        return asked

    def _computed(self, endpoint: Endpoint, asked: Asked, texts: ModelTexts) -> Response:
        """Return the answer of an endpoint that generates nothing. Call it in a worker thread."""
        assert endpoint.answer is not None
        return json_response(endpoint.answer(asked.body, self._service.prompts, texts), headers=asked.headers)

    def check_key(self, http: Request) -> str | None:
        """Return the request's API key; None if the server has none. Raises RequestRefused (401) for a wrong key."""
        keys = self._service.config.api_keys
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
        health = self._service.health()
        return json_response(health, 200 if health["status"] in HEALTHY else 503, {"cache-control": "no-store"})

    async def openapi(self, http: Request) -> Response:
        has_keys = bool(self._service.config.api_keys)
        return json_response(description(version("mlx_paged"), self.pages(), has_keys=has_keys))

    async def stats(self, http: Request) -> Response:
        with_blocks = "blocks" in http.query_params
        report = await run_in_threadpool(lambda: self._service.report(with_blocks=with_blocks))
        return json_response(report, headers={"cache-control": "no-store"})

    async def metrics(self, http: Request) -> Response:
        return Response(
            await run_in_threadpool(lambda: self._service.stats.metrics(self._service.report())),
            200,
            None,
            CONTENT_TYPE,
        )

    async def version(self, http: Request) -> Response:
        names = {name: version(name) for name in ("mlx_paged", "mlx", "mlx-lm")}
        return json_response({**names, "version": version("mlx_paged")})

    async def models(self, http: Request) -> Response:
        listed = await run_in_threadpool(lambda: self._service.names.listed(int(time.time()), **self._figures()))
        return json_response({"object": "list", "data": listed})

    async def model(self, http: Request) -> Response:
        name = unquote(http.path_params["name"])
        found = await run_in_threadpool(lambda: self._service.names.find(name, int(time.time()), **self._figures()))
        if found is None:
            raise self._service.names.unknown(name)
        return json_response(found)

    async def response(self, http: Request) -> Response:
        key, name = self.check_key(http), http.path_params["name"]
        kept = self._service.responses
        if http.method == "DELETE":
            return json_response(kept.delete(key, name))
        return Response(kept.get(key, name), media_type="application/json")

    def _figures(self) -> dict[str, Any]:
        texts = self._service.engine.models.texts
        return {} if texts is None or texts.context_length is None else {"max_model_len": texts.context_length}


def _head(body: Any, fingerprint: str) -> Head:
    return Head(uuid.uuid4().hex, body.model or "default_model", int(time.time()), fingerprint)


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
