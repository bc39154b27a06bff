"""Clients of a server: names, limits of their keys, turns, API keys and salts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.errors import ConfigError
from mlx_paged.server.clients import MAX_CONCURRENT_PER_KEY, MAX_NAMES, OTHER, ApiKeys, Clients, FairLock
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.http import RequestLog


def keys_of(folder: Path, **told: Any) -> ApiKeys:
    path = folder / "keys.json"
    path.write_text(json.dumps(told))
    return ApiKeys.from_options([f"@{path}"], None)


def used(client: str, prompt: int, cached: int, generated: int) -> RequestLog:
    return RequestLog("x", client=client, prompt=prompt, cached=cached, generated=generated)


def test_key_may_have_a_name_a_priority_and_limits(tmp_path: Path) -> None:
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


def test_open_requests_are_limited_for_each_of_several_keys() -> None:
    clients = Clients(ApiKeys(["a", "b"]))
    for _ in range(MAX_CONCURRENT_PER_KEY):
        assert clients.enter("a", "") == "key 1"
    with pytest.raises(RequestRefused, match="too many concurrent requests") as caught:
        clients.enter("a", "")
    assert caught.value.retry_after and clients.enter("b", "") == "key 2"
    clients.leave(used("key 1", 0, 0, 0))
    assert clients.enter("a", "") == "key 1"


def test_clients_with_one_key_are_named_by_user_agent() -> None:
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
def test_malformed_keys_file_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.json"):
        keys_of(tmp_path, **told)
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        ApiKeys.from_options(["@nothing.json"], None)


def test_waiting_clients_take_turns() -> None:
    order = []

    async def work(lock: FairLock, client: str) -> None:
        async with lock.hold(client):
            order.append(client)
            await asyncio.sleep(0)

    async def run() -> None:
        lock = FairLock()
        tasks = [asyncio.ensure_future(work(lock, client)) for client in "aaaaabbc"]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await work(lock, "d")

    asyncio.run(run())
    assert "".join(order) == "aabcabad"


def bearer(key: str) -> str:
    return f"Bearer {key}".encode().decode("latin-1")  # as headers are read


def test_an_empty_key_is_refused() -> None:
    for given, variable in (([""], None), ([" \n"], None), (None, ""), (None, "\n"), (None, "a,"), (["a", ""], "b")):
        with pytest.raises(ConfigError, match="empty API key"):
            ApiKeys.from_options(given, variable)
    with pytest.raises(ConfigError, match="non-printable character"):
        ApiKeys(["a\x00b"])
    assert not ApiKeys.from_options(None, None)


def test_white_space_around_a_key_is_ignored() -> None:
    keys = ApiKeys.from_options(None, "abc\n")
    assert keys and keys.find("Bearer abc") == "abc" and keys.find("bearer  abc ") == "abc"
    assert ApiKeys.from_options(None, " a , b\n").keys == ("a", "b")
    assert ApiKeys.from_options(["a,b"], "c").keys == ("a,b",)  # the flag wins, and takes one key


def test_only_known_keys_are_accepted() -> None:
    keys = ApiKeys(["one", "söcret"])
    assert keys.find(bearer("söcret")) == "söcret" and keys.find(bearer("one")) == "one"
    for header in ("", "Bearer", "Bearer ", "Bearer two", "Basic one", "one", "Bearer ONE", "é", bearer("söcre")):
        assert keys.find(header) is None
    assert ApiKeys().find("Bearer ") is None
    assert "one" not in repr(keys)


def test_different_keys_have_different_salts() -> None:
    assert ApiKeys().salt(None, None) is None and ApiKeys(["a"]).salt("a", None) is None
    two = ApiKeys(["a", "b"])
    salts = [two.salt("a", None), two.salt("b", None), two.salt("a", "x"), two.salt("b", "x"), two.salt("a", "y")]
    assert None not in salts and len(set(salts)) == 5
    assert two.salt("a", "x") == ApiKeys(["c", "a"]).salt("a", "x")  # also after a restart with other keys
    assert ApiKeys().salt(None, "x") == ApiKeys(["a"]).salt("a", "x") not in salts
    assert all(salt != "a" and "x" not in (salt or "") for salt in salts)  # salts go to disk, so they reveal neither
