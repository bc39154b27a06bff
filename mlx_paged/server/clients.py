"""Clients: who asks the server: under which name, how urgently, and how much in a minute."""

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


# Who asks, and how much ---------------------------------------------------------------------------------------------

MAX_NAMES = 64  # of clients that are told apart; further ones are OTHER
MAX_OPEN = 256  # requests of one of several keys at a time
OTHER = "other"
_PRODUCT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")


class Allowance:
    """Units that may be taken in a minute, all at once or one after another. What is taken beyond them is waited for.

    Args:
        per_minute: None: any number.
        clock: seconds.
    """

    def __init__(self, per_minute: float | None, clock: Callable[[], float]) -> None:
        self._most, self._clock = math.inf if per_minute is None else per_minute, clock
        self._left, self._at = self._most, clock()

    def seconds(self) -> float:
        """Return after how many seconds one unit may be taken."""
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
    """The clients of one server: holders of keys where there are several, else programs by their User-Agent. For the
    event loop; :meth:`figures` for any thread.

    Args:
        keys: of the server, with their rules.
        clock: seconds.
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
        """Take a request, and return its client's name.

        Raises:
            RequestRefused: 429, the key's limits are reached, with the seconds to wait.
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
                words = f"the API key {name!r} has used its {what} of this minute"
                raise RequestRefused(429, words, code="rate_limit_exceeded", retry_after=math.ceil(waits[what]))
            if self._open[name] >= MAX_OPEN:
                words = f"{MAX_OPEN} requests with the API key {name!r} are open"
                raise RequestRefused(429, words, code="rate_limit_exceeded", retry_after=1)
            self._requests[name].take(1)
        if name not in self._figures:
            name = name if len(self._figures) < MAX_NAMES else OTHER
            self._figures.setdefault(name, Counter())
        self._open[name] += 1
        return name

    def leave(self, log: RequestLog) -> None:
        """Count what a request that has entered has used: tokens that were computed."""
        name = log.client
        self._open[name] -= 1
        self._figures[name].update(
            requests=1, prompt_tokens=log.prompt, cached_tokens=log.cached, generated_tokens=log.generated
        )
        if (tokens := self._tokens.get(name)) is not None:
            tokens.take(log.prompt - log.cached + log.generated)

    def priority(self, key: str | None, asked: int | None) -> int:
        """Return a request's priority: what it asks for, but no more urgent than its key's."""
        rule = self._keys.rules.get(key or "")
        if rule is None or rule.priority is None:
            return asked or 0
        return rule.priority if asked is None else max(asked, rule.priority)

    def figures(self) -> list[dict[str, Any]]:
        """Return what each client has asked for and how much of its prompts was cached, the busiest first."""
        rows: list[dict[str, Any]] = [
            {"client": name, **{figure: counts[figure] for figure in FIGURES}}
            for name, counts in list(self._figures.items())
        ]
        return sorted(rows, key=lambda row: -row["prompt_tokens"])


class Turns:
    """Lets one at a time go on: the clients that wait take turns, whoever has more to do."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
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
