"""Pages (GET) and endpoints (POST): one list of each makes the routes and the OpenAPI description."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlx_paged.server import app
from mlx_paged.server.clients import ApiKeys
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.http import RequestLog
from mlx_paged.server.prompting import PromptMaker
from mlx_paged.server.requests.endpoints import ENDPOINTS, Computation, Page
from mlx_paged.server.requests.tokenize import DetokenizeBody

SERVICE: Any = SimpleNamespace(config=SimpleNamespace(api_keys=ApiKeys([])))
NOT_DESCRIBED = {"/", "/v1/models/", "/v1/models/{name:path}"}


class NewerApp(app.App):
    """An app with one more page."""

    def pages(self) -> dict[str, Page]:
        return super().pages() | {"/new": Page(self.new, "A new page", "text/plain")}

    async def new(self, http: Request) -> Response:
        return PlainTextResponse("new")


def ask(router: Any, path: str, body: bytes = b"") -> bytes:
    """Return the body of the answer to GET, or to POST with a body."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    scope = {"type": "http", "method": "POST" if body else "GET", "path": path, "query_string": b"", "headers": []}
    scope |= {"root_path": "", "state": {"log": RequestLog("1")}}
    asyncio.run(router(scope, receive, send))
    assert sent[0]["status"] == 200
    return b"".join(message.get("body", b"") for message in sent)


def test_new_page_requires_a_key_unless_it_is_open() -> None:
    shown: list[bool] = []
    own = app.App(MagicMock(config=SimpleNamespace(api_keys=ApiKeys(["secret"]))))
    asks = Request({"type": "http", "headers": []})

    async def answer(http: Any) -> Any:
        shown.append(True)

    for is_open in (True, False):
        page = Page(answer, is_open=is_open)
        if is_open:
            asyncio.run(own.page_handler(page)(asks))
        else:
            with pytest.raises(RequestRefused, match="API key"):
                asyncio.run(own.page_handler(page)(asks))
    assert shown == [True]
    assert {path for path, page in own.pages().items() if page.is_open} == {"/", "/cache", "/health", "/openapi.json"}


def test_new_page_is_answered_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "App", NewerApp)
    monkeypatch.setattr(app, "Gate", lambda router, service: router)
    router = app.make_app(SERVICE)
    assert ask(router, "/new") == b"new"
    paths = json.loads(ask(router, "/openapi.json"))["paths"]
    assert paths["/new"]["get"]["summary"] == "A new page"
    assert "text/plain" in paths["/new"]["get"]["responses"]["200"]["content"]
    posts = {path for each in ENDPOINTS.values() for path in (each.path, *each.aliases)}
    pages = NewerApp(SERVICE).pages()
    assert set(paths) == posts | (set(pages) - NOT_DESCRIBED)
    assert all(page.summary or path in NOT_DESCRIBED for path, page in pages.items())


def test_new_endpoint_without_generation_is_answered_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(body: DetokenizeBody, prompts: Any, texts: Any) -> dict[str, Any]:
        return {"tokens": body.tokens, "texts": texts}

    monkeypatch.setitem(ENDPOINTS, "/new", Computation("/new", "A new endpoint", DetokenizeBody, answer))
    monkeypatch.setattr(app, "Gate", lambda router, service: router)
    service = MagicMock(prompts=PromptMaker())
    service.engine.texts_for = AsyncMock(return_value="those of the model")
    service.config.strict_parameters = False
    router = app.make_app(service)
    assert json.loads(ask(router, "/new", b'{"tokens": [3, 4]}')) == {"tokens": [3, 4], "texts": "those of the model"}
    assert json.loads(ask(router, "/openapi.json"))["paths"]["/new"]["post"]["summary"] == "A new endpoint"
    assert not service.engine.submit.called
