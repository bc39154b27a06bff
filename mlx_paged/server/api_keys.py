"""ApiKeys: the keys that clients of the server may send, and what sets the prefixes of their holders apart."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence

from ..errors import ConfigError

VARIABLE = "MLX_PAGED_API_KEY"


class ApiKeys:
    """Bearer tokens. Without any, everybody is let in.

    Args:
        keys: white space around them does not belong to them: a key read from a file ends in a newline.
        source: where they are from, for errors.

    Raises:
        ConfigError: a key is empty, which would let nobody in or everybody, or cannot be sent in a header.
    """

    def __init__(self, keys: Sequence[str] = (), source: str = "--api-key") -> None:
        self.keys = tuple(dict.fromkeys(key.strip() for key in keys))
        if not all(self.keys):
            raise ConfigError(f"{source} holds an empty API key: give one, or none at all to let everybody in")
        if any(not character.isprintable() for key in self.keys for character in key):
            raise ConfigError(f"{source} holds an API key with a control character, which no client can send")

    @classmethod
    def from_options(cls, given: Sequence[str] | None, variable: str | None) -> ApiKeys:
        """Make it from the command line's keys, or else from the variable's, which are separated by commas."""
        if given is not None:
            return cls(given)
        return cls() if variable is None else cls(variable.split(","), VARIABLE)

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKeys) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.keys)})"  # never the keys: configurations are logged

    def find(self, authorization: str) -> str | None:
        """Return the key that an ``Authorization`` header carries, or None if it is none of these."""
        scheme, _, given = authorization.partition(" ")
        # As bytes: headers are read as Latin-1, whatever they are, and compare_digest takes no other text than ASCII.
        raw = given.strip().encode("latin-1", "replace")
        found = None
        for key in self.keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(raw, key.encode()) and scheme.lower() == "bearer":
                found = key
        return found

    def salt(self, key: str | None, cache_salt: str | None) -> str | None:
        """Return what keeps a request's prefixes apart from those of others; None: they are everybody's.

        Args:
            key: the request's; its holder is told apart from others only if there are several keys.
            cache_salt: the request's parameter of that name.
        """
        if len(self.keys) < 2:
            key = None
        if key is None and cache_salt is None:
            return None
        return hashlib.sha256(json.dumps([key, cache_salt]).encode()).hexdigest()
