"""ApiKeys: the keys that clients of the server may send, and what sets the prefixes of their holders apart."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

VARIABLE = "MLX_PAGED_API_KEY"


@dataclass(frozen=True)
class KeyRule:
    """What the holder of a key may do.

    Attributes:
        name: of the holder, in the log and in figures.
        priority: the most urgent of its requests; None: any.
        requests_per_minute, tokens_per_minute: the most of them; of tokens, those that are computed. None: any number.
    """

    name: str
    priority: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


LIMITS = ("priority", "requests_per_minute", "tokens_per_minute")


class ApiKeys:
    """Bearer tokens. Without any, everybody is let in.

    Args:
        keys: white space around them does not belong to them: a key read from a file ends in a newline.
        source: where they are from, for errors.
        rules: of keys; others have none but their number for a name.

    Attributes:
        rules: by key; empty if there is one key without a rule: nobody is to be told apart.

    Raises:
        ConfigError: a key is empty, which would let nobody in or everybody, or cannot be sent in a header.
    """

    def __init__(
        self, keys: Sequence[str] = (), source: str = "--api-key", rules: dict[str, KeyRule] | None = None
    ) -> None:
        self.keys = tuple(dict.fromkeys(key.strip() for key in keys))
        if not all(self.keys):
            raise ConfigError(f"{source} holds an empty API key: give one, or none at all to let everybody in")
        if any(not character.isprintable() for key in self.keys for character in key):
            raise ConfigError(f"{source} holds an API key with a control character, which no client can send")
        self.rules = dict(rules or {})
        if self.rules or len(self.keys) > 1:
            for number, key in enumerate(self.keys, 1):
                self.rules.setdefault(key, KeyRule(f"key {number}"))

    @classmethod
    def from_options(cls, given: Sequence[str] | None, variable: str | None) -> ApiKeys:
        """Make it from the command line's keys, or else from the variable's, which are separated by commas. One that
        begins with ``@`` names a file of keys, see :func:`read_keys`."""
        if given is None and variable is None:
            return cls()
        rules: dict[str, KeyRule] = {}
        keys: list[str] = []
        for each in variable.split(",") if given is None and variable is not None else given or ():
            if each.strip().startswith("@"):
                rules |= (read := read_keys(Path(each.strip()[1:])))
                keys += read
            else:
                keys.append(each)
        return cls(keys, "--api-key" if given is not None else VARIABLE, rules)

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

    def key_of(self, owner: str | None) -> str | None:
        """Return the key whose holder has this salt."""
        return next((key for key in self.keys if self.salt(key, None) == owner), None)

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


def read_keys(path: Path) -> dict[str, KeyRule]:
    """Return the keys of a file and their rules: ``{"NAME": {"key": "KEY", "priority": 1, ...}, ...}``.

    Raises:
        ConfigError: it cannot be read, or says something else.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key @{path}: {error}") from None
    if not isinstance(told, dict) or not told:
        raise ConfigError(f"--api-key @{path} must hold an object of names, each with an object that has a key")
    rules: dict[str, KeyRule] = {}
    for name, values in told.items():
        key = values.get("key") if isinstance(values, dict) else None
        if not isinstance(key, str) or key.strip() in rules or unknown(values):
            raise ConfigError(
                f"--api-key @{path}: {name!r} must have a key of its own, and may have {', '.join(LIMITS)}, numbers, "
                "those of a minute at least 1"
            )
        rules[key.strip()] = KeyRule(name, **{limit: values[limit] for limit in LIMITS if limit in values})
    return rules


def unknown(values: dict[str, Any]) -> bool:
    """Return whether a key's values are not those of a rule."""
    limits = {name: value for name, value in values.items() if name != "key"}
    numbers = all(type(value) in (int, float) and value == value for value in limits.values())
    return not (
        set(limits) <= set(LIMITS)
        and numbers
        and type(limits.get("priority", 0)) is int
        and all(value >= 1 for name, value in limits.items() if name != "priority")
    )
