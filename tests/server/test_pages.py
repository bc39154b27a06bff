"""Pages for GET: one list makes the routes and their lines in the description."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mlx_paged.server import app
from mlx_paged.server.requests.endpoints import ENDPOINTS, Page

SERVICE: Any = SimpleNamespace(
    batches=SimpleNamespace(routes=lambda salt: [], resume=lambda: None), config=SimpleNamespace(api_keys=())
)
NOT_DESCRIBED = {"/", "/v1/models/", "/v1/models/{name:path}"}


class NewerApp(app.App):
    """An app with a page more."""

    def pages(self) -> dict[str, Page]:
        return super().pages() | {"/new": Page(self.new, "A new page", "text/plain")}

    async def new(self, http: Request) -> Response:
        return PlainTextResponse("new")


def ask(router: Any, path: str) -> bytes:
    """Return the body of the answer to GET."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "root_path": "", "headers": []}
    asyncio.run(router(scope, receive, send))
    assert sent[0]["status"] == 200
    return b"".join(message.get("body", b"") for message in sent)


def test_a_new_page_is_answered_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
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
