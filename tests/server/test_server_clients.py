"""Clients of a server: names, figures, API keys and salts."""

from __future__ import annotations

import pytest

from mlx_paged.errors import ConfigError
from mlx_paged.server.clients import MAX_NAMES, OTHER, ApiKeys, Clients


def test_figures_of_several_keys_are_apart() -> None:
    clients = Clients(ApiKeys(["ka", "kb"]))
    assert clients.name_of("ka", "x/1") == "key 1" and clients.name_of("kb", "x/1") == "key 2"
    for _ in range(2):
        clients.count("key 1", 1000, 400, 100)
    (first, second) = clients.figures()
    counted = {"requests": 2, "prompt_tokens": 2000, "cached_tokens": 800, "generated_tokens": 200}
    assert first == {"client": "key 1", **counted}
    assert second["client"] == "key 2" and second["requests"] == 0


def test_clients_with_one_key_are_named_by_user_agent() -> None:
    clients = Clients(ApiKeys(["a"]))
    agents = {"claude-cli/2.1 (external)": "claude-cli", "": "unknown", "OpenAI/Python 1.2": "OpenAI", "\n": "unknown"}
    assert [clients.name_of("a", agent) for agent in agents] == list(agents.values())
    names = {clients.name_of(None, f"agent{number}/1") for number in range(2 * MAX_NAMES)}
    assert OTHER in names and len(names) <= MAX_NAMES + 1


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
        assert keys.find(header, "two") is None and keys.find(header, " one") == "one"
    assert keys.find("Bearer one", "söcret") == "one"
    assert ApiKeys().find("Bearer ", "") is None
    assert "one" not in repr(keys)


def test_different_keys_have_different_salts() -> None:
    assert ApiKeys().salt(None, None) is None and ApiKeys(["a"]).salt("a", None) is None
    two = ApiKeys(["a", "b"])
    salts = [two.salt("a", None), two.salt("b", None), two.salt("a", "x"), two.salt("b", "x"), two.salt("a", "y")]
    assert None not in salts and len(set(salts)) == 5
    assert two.salt("a", "x") == ApiKeys(["c", "a"]).salt("a", "x")  # also after a restart with other keys
    assert ApiKeys().salt(None, "x") == ApiKeys(["a"]).salt("a", "x") not in salts
    assert all(salt != "a" and "x" not in (salt or "") for salt in salts)  # salts go to disk, so they reveal neither
