"""Clients of the server: API keys, salts, names and figures."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError

VARIABLE = "MLX_PAGED_API_KEY"
MAX_NAMES = 64  # clients with figures of their own; further ones count as OTHER
OTHER = "other"
_PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")


@dataclass(frozen=True, repr=False)  # never shows the keys: configurations are logged
class ApiKeys:
    """The server's API keys. Without any, every request is accepted.

    Args:
        keys: the keys; surrounding white space is stripped, because a key read from a file ends in a newline.
        source: where they come from, for error messages.

    Raises:
        ConfigError: a key is empty, which would admit nobody or everybody, or cannot be sent in a header.
    """

    keys: Sequence[str] = ()
    source: str = field(default="--api-key", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(dict.fromkeys(key.strip() for key in self.keys)))
        source = self.source
        if not all(self.keys):
            raise ConfigError(f"{source} contains an empty API key; omit {source} to accept every request")
        if any(not character.isprintable() for key in self.keys for character in key):
            raise ConfigError(f"{source} contains an API key with a non-printable character, which no client can send")

    @classmethod
    def from_options(cls, given: Sequence[str] | None, variable: str | None) -> ApiKeys:
        """Return the command line's keys, or else those of the environment variable, separated by commas."""
        if given is not None:
            return cls(given)
        return cls() if variable is None else cls(variable.split(","), VARIABLE)

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, authorization: str, x_api_key: str = "") -> str | None:
        """Return the key in an ``Authorization`` header, or else in ``x-api-key``; None if neither holds one."""
        scheme, _, bearer = authorization.partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        found = None
        for each in (*given, x_api_key):
            # As bytes: headers are decoded as Latin-1, and compare_digest accepts only ASCII as str.
            raw = each.strip().encode("latin-1", "replace")
            for key in self.keys:  # all of them, against timing attacks
                if hmac.compare_digest(raw, key.encode()) and found is None:
                    found = key
        return found

    def salt(self, key: str | None, cache_salt: str | None) -> str | None:
        """Return the salt that keeps a request's prefixes apart from other clients'; None: everybody shares them.

        Args:
            key: the request's API key; ignored unless the server has several.
            cache_salt: the request's parameter ``cache_salt``.
        """
        if len(self.keys) < 2:
            key = None
        if key is None and cache_salt is None:
            return None
        return hashlib.sha256(json.dumps([key, cache_salt]).encode()).hexdigest()


class Clients:
    """The clients of one server: holders of its keys if there are several, else programs by their User-Agent. For the
    event loop; :meth:`figures` for any thread."""

    def __init__(self, keys: ApiKeys) -> None:
        several = keys.keys if len(keys.keys) > 1 else ()
        self._names = {key: f"key {number}" for number, key in enumerate(several, 1)}
        self._figures: dict[str, Counter[str]] = {name: Counter() for name in self._names.values()}

    def name_of(self, key: str | None, user_agent: str) -> str:
        """Return the name of a request's client."""
        name = self._names.get(key or "")
        if name is None:
            product = _PRODUCT.match(user_agent)
            name = "unknown" if product is None else product[0]
        if name not in self._figures:
            name = name if len(self._figures) < MAX_NAMES else OTHER
            self._figures.setdefault(name, Counter())
        return name

    def count(self, client: str, prompt: int, cached: int, generated: int) -> None:
        """Add a finished request and its tokens to its client's figures."""
        self._figures[client].update(requests=1, prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated)

    def figures(self) -> list[dict[str, Any]]:
        """Return the requests and tokens of each client, those with the most prompt tokens first."""
        rows: list[dict[str, Any]] = [
            {"client": name, **{figure: counts[figure] for figure in FIGURES}}
            for name, counts in list(self._figures.items())
        ]
        return sorted(rows, key=lambda row: -row["prompt_tokens"])
