"""Clients: who asks the server: under which name, how urgently, and how much in a minute."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .api_keys import ApiKeys
from .errors import RequestRefused

if TYPE_CHECKING:
    from .http import RequestLog

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
