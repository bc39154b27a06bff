"""API keys, and the salts of their holders."""

from __future__ import annotations

import pytest

from mlx_paged.errors import ConfigError
from mlx_paged.server.clients import ApiKeys


def bearer(key: str) -> str:
    return f"Bearer {key}".encode().decode("latin-1")  # as headers are read


def test_an_empty_key_is_refused() -> None:
    for given, variable in (([""], None), ([" \n"], None), (None, ""), (None, "\n"), (None, "a,"), (["a", ""], "b")):
        with pytest.raises(ConfigError, match="empty API key"):
            ApiKeys.from_options(given, variable)
    with pytest.raises(ConfigError, match="control character"):
        ApiKeys(["a\x00b"])
    assert not ApiKeys.from_options(None, None)


def test_white_space_around_a_key_does_not_lock_out() -> None:
    keys = ApiKeys.from_options(None, "abc\n")
    assert keys and keys.find("Bearer abc") == "abc" and keys.find("bearer  abc ") == "abc"
    assert ApiKeys.from_options(None, " a , b\n").keys == ("a", "b")
    assert ApiKeys.from_options(["a,b"], "c").keys == ("a,b",)  # the flag wins, and takes one key


def test_only_the_keys_open() -> None:
    keys = ApiKeys(["one", "söcret"])
    assert keys.find(bearer("söcret")) == "söcret" and keys.find(bearer("one")) == "one"
    for header in ("", "Bearer", "Bearer ", "Bearer two", "Basic one", "one", "Bearer ONE", "é", bearer("söcre")):
        assert keys.find(header) is None
    assert ApiKeys().find("Bearer ") is None
    assert "one" not in repr(keys)


def test_holders_of_different_keys_have_different_salts() -> None:
    assert ApiKeys().salt(None, None) is None and ApiKeys(["a"]).salt("a", None) is None
    two = ApiKeys(["a", "b"])
    salts = [two.salt("a", None), two.salt("b", None), two.salt("a", "x"), two.salt("b", "x"), two.salt("a", "y")]
    assert None not in salts and len(set(salts)) == 5
    assert two.salt("a", "x") == ApiKeys(["c", "a"]).salt("a", "x")  # also after a restart with other keys
    assert ApiKeys().salt(None, "x") == ApiKeys(["a"]).salt("a", "x") not in salts
    assert all(salt != "a" and "x" not in (salt or "") for salt in salts)  # nothing of them goes to disk
