"""Pages (GET) and endpoints (POST): one list of each makes the routes and the OpenAPI description."""

from __future__ import annotations

import pytest

from mlx_paged.server.app import App
from mlx_paged.server.requests.endpoints import ENDPOINTS
from tests.support.processes.server_process import ServerProcess

pytestmark = pytest.mark.demo_model

NOT_DESCRIBED = {"/", "/v1/models/", "/v1/models/{name:path}"}


def test_every_page_and_endpoint_is_described_and_answered(server: ServerProcess) -> None:
    described = server.get("/openapi.json").json["paths"]
    posts = {path for each in ENDPOINTS.values() for path in (each.path, *each.aliases)}
    pages = App(None).pages()  # type: ignore[arg-type]
    assert set(described) == posts | (set(pages) - NOT_DESCRIBED)
    assert all(page.summary or path in NOT_DESCRIBED for path, page in pages.items())
    for path, told in described.items():
        if path in pages and "{" not in path:
            answer = server.get(path)
            assert answer.status == 200 and told["get"]["summary"] == pages[path].summary
            assert answer.headers["content-type"].partition(";")[0] in told["get"]["responses"]["200"]["content"]
        elif path in posts:
            assert server.post(path, {"nothing": 1}).status == 400 and told["post"]["summary"]
