"""WaitingQueue: the requests that wait for the scheduler, and which of them is next."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request


class WaitingQueue:
    """Requests that wait. The next one has the lowest ``priority``; of these, one that was preempted comes before those
    that never ran, and otherwise the client comes first whose last request was admitted longest ago.

    A client that asks a thousand times delays another client's request by one of its own, not by a thousand.
    """

    def __init__(self) -> None:
        self._preempted: dict[Request, None] = {}
        self._fresh: dict[tuple[int, Hashable], dict[Request, None]] = {}  # by priority and client, oldest first
        self._turns: dict[Hashable, int] = {}  # number of the last admission, by client
        self._num_admitted = 0
        self._next: Request | None = None  # None: not known

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._fresh.values()))

    def __iter__(self) -> Iterator[Request]:
        fresh = [request for group in self._fresh.values() for request in group]
        return iter(sorted([*self._preempted, *fresh], key=self._rank))

    def add(self, request: Request) -> None:
        options = request.options
        if request.admitted is not None:
            self._preempted[request] = None
        else:
            self._fresh.setdefault((options.priority, options.client), {})[request] = None
        self._next = None

    def remove(self, requests: Collection[Request]) -> None:
        """Forget requests that may be here."""
        for request in requests:
            self._preempted.pop(request, None)
            name = request.options.priority, request.options.client
            if (group := self._fresh.get(name)) is not None:
                group.pop(request, None)
                if not group:
                    del self._fresh[name]
        self._next = None

    def next(self) -> Request | None:
        """Return the request to admit next. Asked in every step: it is searched only after a change."""
        if self._next is None:
            firsts = [next(iter(group)) for group in self._fresh.values()]
            self._next = min([*self._preempted, *firsts], key=self._rank, default=None)
        return self._next

    def admit(self, request: Request) -> None:
        """Remove a request that starts, and number it if it has not run before."""
        self.remove([request])
        if request.admitted is None:
            self._num_admitted += 1
            request.admitted = self._turns[request.options.client] = self._num_admitted

    def _rank(self, request: Request) -> tuple[int, bool, int, int]:
        options, admitted = request.options, request.admitted
        if admitted is not None:
            return options.priority, False, admitted, request.uid
        return options.priority, True, self._turns.get(options.client, 0), request.uid
