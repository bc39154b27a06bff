"""Scheduler: decides in each step which requests run, wait or are preempted. It knows lengths and an order, no model
and no tensor.

Running requests are ordered by priority, then by first admission. The first one is served first, and only later ones
are preempted for it; so it always advances, and every request finishes unless more urgent ones never end. Decoding
requests take a token in every step, beside up to ``token_budget`` prompt tokens: those of running requests first, then
of waiting ones. Clients of one priority take turns at them. If there is no room, requests of a client are preempted for
another client that runs fewer. The same calls give the same decisions on every rank.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # only a request's attributes are used here
    from .request import Request


Growth = Sequence[tuple["Request", int]]


class Memory(Protocol):
    """The memory of requests' tokens, as the scheduler sees it."""

    def fits(self, growth: Growth) -> bool:
        """Return whether all these requests can grow by their numbers of tokens, after evicting unused prefixes."""

    def admit(self, request: Request) -> bool:
        """Start the request, and set its length to the tokens it finds cached. False: it should start later, when a
        running one has computed their common prefix."""

    def release(self, request: Request) -> None:
        """Release what the request holds beyond its ``kept`` tokens, and remember what it needs to resume."""


class Chunk(NamedTuple):
    """Tokens of one request to compute in this step."""

    request: Request
    num_tokens: int


class ChunkCap(NamedTuple):
    """Limits a chunk by the work of its attention.

    Attributes:
        most_pairs: most new tokens times tokens of context.
        least: new tokens that any context allows.
    """

    most_pairs: int
    least: int

    def most_tokens(self, length: int, most: int) -> int:
        """Return the most new tokens, up to ``most``, after ``length`` tokens."""
        return min(most, max(self.least, self.most_pairs // (length + most)))


class ScheduledStep(NamedTuple):
    """One step.

    Attributes:
        decode: requests that take one token each, in the order of running requests.
        chunks: parts of prompts, at most one per request.
        failed: requests that cannot go on, with the tokens that they cannot grow by; the scheduler has removed them.
    """

    decode: list[Request]
    chunks: list[Chunk]
    failed: list[tuple[Request, int]]


class WaitingQueue:
    """Waiting requests. The next one has the lowest ``priority`` number; among equals, its client runs the fewest
    requests; then preempted requests come before new ones, in the order of admission; new ones go to the client whose
    last request was admitted longest ago.

    A client with a thousand requests delays another client's request by one of its own, not by a thousand.
    """

    def __init__(self) -> None:
        # By priority and client: preempted requests, and new ones, oldest first.
        self._groups: dict[tuple[int, Hashable], tuple[dict[Request, None], dict[Request, None]]] = {}
        self._turns: dict[Hashable, int] = {}  # number of the last admission, by client
        self._num_admitted = 0

    def __len__(self) -> int:
        return sum(len(part) for group in self._groups.values() for part in group)

    def add(self, request: Request) -> None:
        """Queue a request behind those of its priority and client."""
        name = request.options.priority, request.options.client
        preempted, fresh = self._groups.setdefault(name, ({}, {}))
        (fresh if request.admitted is None else preempted)[request] = None

    def remove(self, requests: Collection[Request]) -> None:
        """Remove requests, if they are queued."""
        for request in requests:
            name = request.options.priority, request.options.client
            group = self._groups.get(name)
            if group is None:
                continue
            for part in group:
                part.pop(request, None)
            if not any(group):
                del self._groups[name]

    def next(self, num_running: Mapping[Hashable, int]) -> Request | None:
        """Return the request to admit next.

        Args:
            num_running: number of running requests by client; clients without any may be left out.
        """

        def rank(request: Request) -> tuple[int, int, bool, int, int]:
            options, admitted = request.options, request.admitted
            turn = self._turns.get(options.client, 0) if admitted is None else admitted
            return options.priority, num_running.get(options.client, 0), admitted is None, turn, request.uid

        return min(
            (r for preempted, fresh in self._groups.values() for r in preempted or [next(iter(fresh))]),
            key=rank,
            default=None,
        )

    def admit(self, request: Request) -> None:
        """Remove a request that starts, and number it if it has not run before."""
        self.remove([request])
        if request.admitted is None:
            self._num_admitted += 1
            request.admitted = self._turns[request.options.client] = self._num_admitted


class Scheduler:
    """Admits, orders and preempts requests.

    Args:
        memory: the memory of the tokens.
        token_budget: most prompt tokens to compute in a step. Decoding requests take one token each besides.
        max_running: most requests that run at a time.
        max_prefilling: most of them whose prompt is being computed.
        grid: cut prompts at multiples of this many tokens.
        chunk: most tokens of one request in a step. None: the step's budget; with a grid, up to its next multiple.
        cap: further limit of a chunk, if ``chunk`` is given.
        headroom: tokens that every running request must be able to grow by when another one is admitted, so that this
            one is not preempted again at once.

    Attributes:
        token_budget: most prompt tokens of the next step; the engine may lower it.
        most_tokens: the token budget that was given.
        admits: whether requests may start beside those that run.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        token_budget: int,
        max_running: int,
        max_prefilling: int,
        grid: int | None = None,
        chunk: int | None = None,
        cap: ChunkCap | None = None,
        headroom: int = 1,
    ) -> None:
        self.memory = memory
        self.token_budget = self.most_tokens = token_budget
        self.max_running = max_running
        self.max_prefilling = max_prefilling
        self.chunk, self.cap = chunk, cap
        self.grid = grid
        self.headroom = headroom
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of _rank; always the same list
        self.preemptions = 0
        self.admits = True
        self._preempted: set[Request] = set()  # since planning began; they start in the next step at the earliest
        self._num_running: Counter[Hashable] = Counter()  # running requests by client, while a plan is made
        self._num_plans = 0
        self._served: dict[Hashable, int] = {}  # number of the last plan with a chunk of the client

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def has_prompts(self) -> bool:
        """Return whether some request's prompt is not computed yet."""
        return bool(self.waiting) or any(not request.is_prefilled for request in self.running)

    # Requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.add(request)

    def remove(self, requests: Collection[Request]) -> None:
        """Forget requests that finished, failed or were cancelled. The caller releases their memory."""
        gone = set(requests)
        self.running[:] = [request for request in self.running if request not in gone]
        self.waiting.remove(gone)
        self._preempted -= gone

    def preempt(self, request: Request) -> None:
        """Release a running request's memory and queue it again. What it had computed will be prefilled again."""
        self.memory.release(request)  # first: if it raises, the request still runs, and fails with the others
        self.running.remove(request)
        self._num_running[request.options.client] -= 1
        request.prefill_end = max(request.prefill_end, request.length)
        request.length = request.kept
        self.waiting.add(request)
        self._preempted.add(request)
        self.preemptions += 1

    def preempt_for(self, request: Request) -> bool:
        """Preempt a running request that comes after ``request``: of the least urgent ones, the last request of the
        client that runs the most. Returns whether there is one."""
        later = [each for each in self.running if _rank(each) > _rank(request)]
        if later:
            self.preempt(_last_of_largest(self.running, later[-1].options.priority, later))
        return bool(later)

    def preempt_last(self) -> bool:
        """Preempt the last running request, between two steps, unless it runs alone. Returns whether it did."""
        if len(self.running) < 2:
            return False
        self.preempt(self.running[-1])
        return True

    # Planning -------------------------------------------------------------------------------------------------

    def plan(self) -> ScheduledStep:
        """Decide the next step. On return, preempted requests have been released and queued."""
        failed: list[tuple[Request, int]] = []
        self._preempted.clear()
        self._num_running = Counter(request.options.client for request in self.running) if self.waiting else Counter()
        while True:
            decode = [(request, 1) for request in self.running if request.is_prefilled]
            if not decode or self.memory.fits(decode):
                break
            if not self.preempt_for(self.running[0]):
                self._fail(self.running[0], 1, failed)
        # A failed request's memory is released after the plan, and available to the next plan.
        chunks = [] if failed else self._plan_chunks(decode, failed)
        self._num_plans += 1
        self._served.update((request.options.client, self._num_plans) for request, _ in chunks)
        return ScheduledStep(
            [request for request, _ in self._alive(decode)], [Chunk(*each) for each in self._alive(chunks)], failed
        )

    def _alive(self, growth: Growth) -> list[tuple[Request, int]]:
        """Return the part of the growth whose requests still run."""
        running = set(self.running)
        return [(request, num_tokens) for request, num_tokens in growth if request in running]

    def _fail(self, request: Request, num_tokens: int, failed: list[tuple[Request, int]]) -> None:
        self.remove([request])
        failed.append((request, num_tokens))

    def _plan_chunks(self, decode: Growth, failed: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Return the step's chunks: of running requests in turns, then of waiting ones, which are admitted even if no
        tokens are left for them in this step. Where one finds no room, only older ones go on, and will finish."""
        chunks: list[tuple[Request, int]] = []
        prompts = []
        if len(decode) < len(self.running):
            prompts = sorted((request for request in self.running if not request.is_prefilled), key=self._turn)
        oldest_stopped: Request | None = None
        for request in prompts:
            is_older = oldest_stopped is None or _rank(request) < _rank(oldest_stopped)
            if is_older and request not in self._preempted and not self._take(request, decode, chunks, failed):
                oldest_stopped = request
        while oldest_stopped is None and (first := self.waiting.next(self._num_running)) is not None:
            if not self._admit(first, failed):
                break
            if not first.is_prefilled and not self._take(first, decode, chunks, failed):
                break
        return chunks

    def _take(
        self,
        request: Request,
        decode: Growth,
        chunks: list[tuple[Request, int]],
        failed: list[tuple[Request, int]],
    ) -> bool:
        """Add the request's next chunk to the step if tokens are left, after preempting others for it if necessary.
        Returns False if there is no room for it."""
        left = self.token_budget - sum(num_tokens for _, num_tokens in chunks)
        if left <= 0:
            return True
        num_tokens = self._chunk_length(request, left)
        if chunks and num_tokens > left:
            return True
        while not self.memory.fits([*self._alive([*decode, *chunks]), (request, num_tokens)]):
            if self._preempt_one_of(request, self.running) or self.preempt_for(request):
                continue
            if self.running == [request]:
                self._fail(request, num_tokens, failed)
            return False
        chunks.append((request, num_tokens))
        return True

    def _turn(self, request: Request) -> tuple[int, int]:
        """Return the sort key of chunks: the priority, then the last plan that served the client."""
        return request.options.priority, self._served.get(request.options.client, 0)

    def _chunk_length(self, request: Request, budget: int) -> int:
        """Return the length of a request's next chunk; more than the budget if not even the smallest chunk fits."""
        if self.grid is None:
            return request.chunk_length(budget)
        most = None if self.chunk is None else min(budget, self.chunk)
        if most is not None and self.cap is not None:
            most = self.cap.most_tokens(request.length, most)
        return request.chunk_length(most, self.grid)

    def _admit(self, request: Request, failed: list[tuple[Request, int]]) -> bool:
        """Start a waiting request if its prompt and one more token fit beside what running ones need to go on, or if
        others make room for it (:meth:`_preempt_one_of`). Returns whether it started."""
        prefilling = [each for each in self.running if not each.is_prefilled]
        if request in self._preempted or (self.running and not self.admits):
            return False
        if len(prefilling) >= self.max_prefilling and not self._preempt_one_of(request, prefilling):
            return False
        if len(self.running) >= self.max_running and not self._preempt_one_of(request, self.running):
            return False
        num_tokens = request.prefill_end - request.length + 1
        while not self.memory.fits([*self._growth_ahead(), (request, num_tokens)]):
            if not self.running:
                self._fail(request, num_tokens, failed)
            if not self._preempt_one_of(request, self.running):
                return False
        if not self.memory.admit(request):
            return False
        self.waiting.admit(request)
        self._num_running[request.options.client] += 1
        insort(self.running, request, key=_rank)
        return True

    def _growth_ahead(self) -> list[tuple[Request, int]]:
        """Return the tokens that running requests must be able to grow by when another one is admitted."""
        return [(each, max(each.prefill_end - each.length + 1, self.headroom)) for each in self.running]

    def _preempt_one_of(self, request: Request, running: Sequence[Request]) -> bool:
        """Preempt one of ``running`` for a request: the last one if its priority number is larger; else the last one of
        the client that runs the most of the request's priority, if that is at least two more than the request's client
        runs. Returns whether one was preempted."""
        priority = request.options.priority
        if running and running[-1].options.priority > priority:
            self.preempt(running[-1])
            return True
        number = Counter(each.options.client for each in running if each.options.priority == priority)
        if max(number.values(), default=0) < number[request.options.client] + 2:
            return False
        self.preempt(_last_of_largest(running, priority, running))
        return True


def _rank(request: Request) -> tuple[int, int]:
    """Return the sort key of admitted requests."""
    assert request.admitted is not None
    return request.options.priority, request.admitted


def _last_of_largest(running: Sequence[Request], priority: int, among: Sequence[Request]) -> Request:
    """Return the last of ``among`` with this priority whose client runs the most requests of it."""
    number = Counter(each.options.client for each in running if each.options.priority == priority)
    peers = [each for each in among if each.options.priority == priority]
    return max(reversed(peers), key=lambda each: number[each.options.client])
