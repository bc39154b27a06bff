"""The names of clients, what their keys allow, and their turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.errors import ConfigError
from mlx_paged.server.clients import MAX_NAMES, MAX_OPEN, OTHER, ApiKeys, Clients, Turns
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.http import RequestLog


def keys_of(folder: Path, **told: Any) -> ApiKeys:
    path = folder / "keys.json"
    path.write_text(json.dumps(told))
    return ApiKeys.from_options([f"@{path}"], None)


def used(client: str, prompt: int, cached: int, generated: int) -> RequestLog:
    return RequestLog("x", client=client, prompt=prompt, cached=cached, generated=generated)


def test_a_key_may_have_a_name_a_priority_and_limits(tmp_path: Path) -> None:
    now = [0.0]
    keys = keys_of(tmp_path, a={"key": "ka", "tokens_per_minute": 600}, b={"key": " kb", "priority": 5})
    assert keys.keys == ("ka", "kb")
    clients = Clients(keys, lambda: now[0])
    assert clients.enter("ka", "x/1") == "a" and clients.enter("kb", "x/1") == "b"
    assert [clients.priority("ka", n) for n in (None, -2)] == [0, -2]
    assert [clients.priority("kb", n) for n in (None, -2, 9)] == [5, 5, 9]
    clients.leave(used("a", 1000, 400, 100))  # 700 of 600
    with pytest.raises(RequestRefused, match="tokens") as caught:
        clients.enter("ka", "")
    assert caught.value.status == 429 and caught.value.retry_after == 11
    assert clients.enter("kb", "") == "b"
    now[0] = 11
    clients.leave(used(clients.enter("ka", ""), 0, 0, 0))
    (first, second) = clients.figures()
    assert first == {"client": "a", "requests": 2, "prompt_tokens": 1000, "cached_tokens": 400, "generated_tokens": 100}
    assert second["client"] == "b"


def test_one_of_several_keys_has_a_bound_of_open_requests() -> None:
    clients = Clients(ApiKeys(["a", "b"]))
    for _ in range(MAX_OPEN):
        assert clients.enter("a", "") == "key 1"
    with pytest.raises(RequestRefused, match="are open") as caught:
        clients.enter("a", "")
    assert caught.value.retry_after and clients.enter("b", "") == "key 2"
    clients.leave(used("key 1", 0, 0, 0))
    assert clients.enter("a", "") == "key 1"


def test_without_several_keys_programs_are_told_apart() -> None:
    clients = Clients(ApiKeys(["a"]))
    agents = {"claude-cli/2.1 (external)": "claude-cli", "": "unknown", "OpenAI/Python 1.2": "OpenAI", "\n": "unknown"}
    assert [clients.enter("a", agent) for agent in agents] == list(agents.values())
    names = {clients.enter(None, f"agent{number}/1") for number in range(2 * MAX_NAMES)}
    assert OTHER in names and len(names) <= MAX_NAMES + 1


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"a": "k"},
        {"a": {}},
        {"a": {"key": "k", "tokens_per_minute": 0}},
        {"a": {"key": "k", "priority": True}},
        {"a": {"key": "k", "requests_per_minute": "9"}},
        {"a": {"key": "k", "limit": 9}},
        {"a": {"key": "k"}, "b": {"key": "k"}},
    ],
)
def test_a_file_of_keys_that_says_something_else_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.json"):
        keys_of(tmp_path, **told)
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        ApiKeys.from_options(["@nothing.json"], None)


def test_who_waits_takes_turns_whoever_has_more_to_do() -> None:
    order = []

    async def work(turns: Turns, client: str) -> None:
        async with turns.of(client):
            order.append(client)
            await asyncio.sleep(0)

    async def run() -> None:
        turns = Turns()
        tasks = [asyncio.ensure_future(work(turns, client)) for client in "aaaaabbc"]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await work(turns, "d")

    asyncio.run(run())
    assert "".join(order) == "aabcabad"
