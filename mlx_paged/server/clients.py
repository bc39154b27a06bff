"""Clients of the server: API keys, names, priorities and limits per minute."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .errors import RequestRefused

if TYPE_CHECKING:
    from .http import RequestLog

# Keys ---------------------------------------------------------------------------------------------------------------

VARIABLE = "MLX_PAGED_API_KEY"


@dataclass(frozen=True)
class KeyRule:
    """Name and limits of an API key's holder.

    Attributes:
        name: the holder's name in the log and in metrics.
        priority: most urgent priority of its requests; None: any.
        requests_per_minute, tokens_per_minute: limits; cached tokens do not count. None: no limit.
    """

    name: str
    priority: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


LIMITS = ("priority", "requests_per_minute", "tokens_per_minute")


class ApiKeys:
    """The server's API keys. Without any, every request is accepted.

    Args:
        keys: the keys; surrounding white space is stripped, because a key read from a file ends in a newline.
        source: where they come from, for error messages.
        rules: rules by key; a key without one is named by its number.

    Attributes:
        rules: rules by key; empty for a single key without a rule, because there is only one client.

    Raises:
        ConfigError: a key is empty, which would admit nobody or everybody, or cannot be sent in a header.
    """

    def __init__(
        self, keys: Sequence[str] = (), source: str = "--api-key", rules: dict[str, KeyRule] | None = None
    ) -> None:
        self.keys = tuple(dict.fromkeys(key.strip() for key in keys))
        if not all(self.keys):
            raise ConfigError(f"{source} contains an empty API key; omit {source} to accept every request")
        if any(not character.isprintable() for key in self.keys for character in key):
            raise ConfigError(f"{source} contains an API key with a non-printable character, which no client can send")
        self.rules = dict(rules or {})
        if self.rules or len(self.keys) > 1:
            for number, key in enumerate(self.keys, 1):
                self.rules.setdefault(key, KeyRule(f"key {number}"))

    @classmethod
    def from_options(cls, given: Sequence[str] | None, variable: str | None) -> ApiKeys:
        """Return the command line's keys, or else those of the environment variable, separated by commas. ``@FILE``
        stands for the keys in a file, see :func:`read_keys`."""
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
        """Return the key in an ``Authorization`` header; None if it is not one of these."""
        scheme, _, given = authorization.partition(" ")
        # As bytes: headers are decoded as Latin-1, and compare_digest accepts only ASCII as str.
        raw = given.strip().encode("latin-1", "replace")
        found = None
        for key in self.keys:  # all of them, against timing attacks
            if hmac.compare_digest(raw, key.encode()) and scheme.lower() == "bearer":
                found = key
        return found

    def key_of(self, owner: str | None) -> str | None:
        """Return the key whose :meth:`salt` is ``owner``, or None."""
        return next((key for key in self.keys if self.salt(key, None) == owner), None)

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


def read_keys(path: Path) -> dict[str, KeyRule]:
    """Return the keys of a file and their rules: ``{"NAME": {"key": "KEY", "priority": 1, ...}, ...}``.

    Raises:
        ConfigError: it cannot be read, or has another format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key @{path}: {error}") from None
    if not isinstance(content, dict) or not content:
        raise ConfigError(f'--api-key @{path} must contain a JSON object such as {{"NAME": {{"key": "KEY"}}}}')
    rules: dict[str, KeyRule] = {}
    for name, values in content.items():
        key = values.get("key") if isinstance(values, dict) else None
        if not isinstance(key, str) or key.strip() in rules or is_invalid_rule(values):
            raise ConfigError(
                f"--api-key @{path}: {name!r} must have a unique key, and may have priority (an integer), "
                "requests_per_minute and tokens_per_minute (numbers of at least 1)"
            )
        rules[key.strip()] = KeyRule(name, **{limit: values[limit] for limit in LIMITS if limit in values})
    return rules


def is_invalid_rule(values: dict[str, Any]) -> bool:
    """Return whether a key's values are no valid rule."""
    limits = {name: value for name, value in values.items() if name != "key"}
    numbers = all(type(value) in (int, float) and value == value for value in limits.values())
    return not (
        set(limits) <= set(LIMITS)
        and numbers
        and type(limits.get("priority", 0)) is int
        and all(value >= 1 for name, value in limits.items() if name != "priority")
    )


# Who asks, and how much ---------------------------------------------------------------------------------------------

MAX_NAMES = 64  # clients with figures of their own; further ones count as OTHER
MAX_CONCURRENT_PER_KEY = 256  # concurrent requests of one key that has a rule
OTHER = "other"
_PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")


class Allowance:
    """A token bucket, refilled within a minute. It may be overdrawn; the next unit then waits longer.

    Args:
        per_minute: size of the bucket, and units refilled per minute; None: no limit.
        clock: returns seconds.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float]) -> None:
        self._most, self._clock = math.inf if per_minute is None else per_minute, clock
        self._left, self._at = self._most, clock()

    def seconds(self) -> float:
        """Return the seconds until one unit may be taken."""
        if self._most == math.inf:
            return 0.0
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
        return max(0.0, (1 - self._left) * 60 / self._most)

    def take(self, number: float) -> None:
        if self._most != math.inf:
            self._left -= number


class Clients:
    """The clients of one server: holders of API keys with rules, else programs by their User-Agent. For the event
    loop; :meth:`figures` for any thread.

    Args:
        keys: the server's keys and their rules.
        clock: returns seconds.
    """

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._figures: dict[str, Counter[str]] = {rule.name: Counter() for rule in keys.rules.values()}
        self._open: Counter[str] = Counter()
        self._requests, self._tokens = (
            {rule.name: Allowance(getattr(rule, limit), clock) for rule in keys.rules.values()}
            for limit in ("requests_per_minute", "tokens_per_minute")
        )

    def enter(self, key: str | None, user_agent: str) -> str:
        """Admit a request, and return its client's name.

        Raises:
            RequestRefused: 429, a limit of the key is reached; with the seconds to wait.
        """
        rule = self._keys.rules.get(key or "")
        if rule is None:
            product = _PRODUCT.match(user_agent)
            name = "unknown" if product is None else product[0]
        else:
            name = rule.name
            waits = {"requests": self._requests[name].seconds(), "tokens": self._tokens[name].seconds()}
            what = max(waits, key=waits.__getitem__)
            if waits[what] > 0:
                limit = getattr(rule, f"{what}_per_minute")
                words = f"the API key {name!r} has reached its limit of {limit:,} {what} per minute"
                raise RequestRefused(429, words, code="rate_limit_exceeded", retry_after=math.ceil(waits[what]))
            if self._open[name] >= MAX_CONCURRENT_PER_KEY:
                words = f"too many concurrent requests with the API key {name!r} (limit {MAX_CONCURRENT_PER_KEY})"
                raise RequestRefused(429, words, code="rate_limit_exceeded", retry_after=1)
            self._requests[name].take(1)
        if name not in self._figures:
            name = name if len(self._figures) < MAX_NAMES else OTHER
            self._figures.setdefault(name, Counter())
        self._open[name] += 1
        return name

    def leave(self, log: RequestLog) -> None:
        """Count an admitted request and its tokens when it ends; only computed tokens count against the limit."""
        name = log.client
        self._open[name] -= 1
        self._figures[name].update(
            requests=1, prompt_tokens=log.prompt, cached_tokens=log.cached, generated_tokens=log.generated
        )
        if (tokens := self._tokens.get(name)) is not None:
            tokens.take(log.prompt - log.cached + log.generated)

    def priority(self, key: str | None, asked: int | None) -> int:
        """Return a request's priority: what it asks for, but no more urgent than its key allows."""
        rule = self._keys.rules.get(key or "")
        if rule is None or rule.priority is None:
            return asked or 0
        return rule.priority if asked is None else max(asked, rule.priority)

    def figures(self) -> list[dict[str, Any]]:
        """Return the requests and tokens of each client, those with the most prompt tokens first."""
        rows: list[dict[str, Any]] = [
            {"client": name, **{figure: counts[figure] for figure in FIGURES}}
            for name, counts in list(self._figures.items())
        ]
        return sorted(rows, key=lambda row: -row["prompt_tokens"])


class FairLock:
    """A lock that waiting clients get in turn, however many requests each has."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        if self._is_taken:
            given = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(given)
            try:
                await given
            except asyncio.CancelledError:
                if given.done() and not given.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            client, line = next(iter(self._waiting.items()))
            given = line.popleft()
            if not line:
                del self._waiting[client]
            if given.done():
                continue
            if line:
                self._waiting.move_to_end(client)
            given.set_result(None)
            return
        self._is_taken = False
