"""WaitingQueue: the requests that wait for the scheduler, and which of them is next."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request


class WaitingQueue:
    """Requests that wait. The next one has the lowest ``priority``; of these, the client that runs the fewest requests
    comes first; then one that was preempted before those that never ran; then the client whose last request was
    admitted longest ago.

    A client that asks a thousand times delays another client's request by one of its own, not by a thousand.
    """

    def __init__(self) -> None:
        # By priority and client: those that were preempted, and those that never ran, oldest first.
        self._groups: dict[tuple[int, Hashable], tuple[dict[Request, None], dict[Request, None]]] = {}
        self._turns: dict[Hashable, int] = {}  # number of the last admission, by client
        self._num_admitted = 0
        self._firsts: dict[tuple[int, Hashable], Request] = {}  # of groups; those that are known

    def __len__(self) -> int:
        return sum(len(part) for group in self._groups.values() for part in group)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted((r for group in self._groups.values() for part in group for r in part), key=self._rank))

    def add(self, request: Request) -> None:
        """Queue a request behind those of its priority and client."""
        name = request.options.priority, request.options.client
        preempted, fresh = self._groups.setdefault(name, ({}, {}))
        (fresh if request.admitted is None else preempted)[request] = None
        self._firsts.pop(name, None)

    def remove(self, requests: Collection[Request]) -> None:
        """Forget requests that may be here."""
        for request in requests:
            name = request.options.priority, request.options.client
            group = self._groups.get(name)
            if group is None:
                continue
            for part in group:
                part.pop(request, None)
            if not any(group):
                del self._groups[name]
            self._firsts.pop(name, None)

    def next(self, num_running: Mapping[Hashable, int]) -> Request | None:
        """Return the request to admit next. Asked in every step: only groups that have changed are searched.

        Args:
            num_running: requests that run, by client; clients without any may be left out.
        """
        for name, (preempted, fresh) in self._groups.items():
            if name not in self._firsts:
                self._firsts[name] = min(preempted, key=self._rank) if preempted else next(iter(fresh))
        rank = lambda r: (r.options.priority, num_running.get(r.options.client, 0), *self._rank(r)[1:])  # noqa: E731
        return min(self._firsts.values(), key=rank, default=None)

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
