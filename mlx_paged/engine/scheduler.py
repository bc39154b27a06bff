"""Scheduler: which requests run, wait, or are preempted, step by step. Knows lengths and an order, no model and no
tensor.

Requests that run are ordered by priority, then by when they were admitted first. The first always goes first, and only
later ones are preempted for it; so it always advances, and every request finishes unless more urgent ones never end.
Requests that decode take a token in every step, beside prompts of up to ``token_budget`` tokens: no prompt delays them
by more than that, and on a CPU by the first token behind it, see :meth:`Scheduler._held`. Clients of one priority take
turns at the tokens of a step, and where no room is left, a client makes room for another that runs fewer requests. The
same calls give the same decisions on every rank.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import RequestTooLargeError

if TYPE_CHECKING:  # of a request, only lengths are read and written here
    from .request import Request


Growth = Sequence[tuple["Request", int]]
MOST_HELD = 3  # steps in a row in which rows wait for another client's first token: it takes as many
# Least prompt tokens of a step for each row of a client that another one's first token is awaited beside. On a CPU a
# row takes the time of 1 to 2 prompt tokens, so that the prompt has at least half of the time.
TOKENS_PER_ROW = 2


class Memory(Protocol):
    """What the scheduler asks of whoever holds the tokens. What fails for a request is for the holder to note, and to
    :meth:`Scheduler.remove` the request when the plan is made: nothing may be raised while it is."""

    def holds(self, num_tokens: int) -> bool:
        """Return whether one sequence of so many tokens fits when nothing else is held."""

    def fits(self, growth: Growth) -> bool:
        """Return whether all these requests can grow by so many tokens, prefixes that nobody uses being evicted for
        it."""

    def most_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of each group a request takes at most that grows by so many tokens."""

    def has_blocks(self, num_blocks: int) -> bool:
        """Return whether so many blocks of each group can be had, prefixes that nobody uses being evicted for it."""

    def must_wait(self, request: Request) -> bool:
        """Return whether a request that could start is better off later, when one that runs has computed their common
        prefix."""

    def admit(self, request: Request) -> None:
        """Start the request; sets its length to the tokens it finds cached."""

    def release(self, request: Request) -> None:
        """Give back what the request holds beyond the ``kept`` tokens; what it needs to go on later is remembered."""

    def exhausted(self, request: Request, num_tokens: int) -> Exception:
        """Return the error to report for a request that cannot grow by so many tokens."""


class Chunk(NamedTuple):
    """Tokens of one request to compute in this step."""

    request: Request
    num_tokens: int


class ScheduledStep(NamedTuple):
    """One step.

    Attributes:
        decode: requests that take one token each, in the order of those that run.
        held: requests that would, and wait for the first token of another client.
        chunks: parts of prompts, in the same order, at most one for each request.
        failed: requests that cannot go on, with the reason. The scheduler has forgotten them.
    """

    decode: list[Request]
    held: list[Request]
    chunks: list[Chunk]
    failed: list[tuple[Request, Exception]]


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


class Scheduler:
    """Admits, orders and preempts requests.

    Args:
        memory: holds the tokens.
        token_budget: most tokens of prompts to compute in a step. Requests that decode take one each besides.
        max_running: most requests that run at a time.
        max_prefilling: most of them whose prompt is being computed.
        grid: cut prompts at multiples of so many tokens.
        chunk: most tokens of one request in a step. None: all that the step may take; with a grid, no further than to
            the next of its multiples.
        headroom: tokens a running request must be able to grow by when another one is admitted, so that what is
            admitted is not preempted again at once.

    Attributes:
        token_budget: of the next step, where fewer tokens are better; see :meth:`_least_budget`.
        yields: where prompts take long, chunks of a client wait while another one's first token is awaited, see
            :meth:`_must_yield`.
        holds: where rows take long, those of a client wait, too, while another one's first token is computed, see
            :meth:`_held`.
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
        headroom: int = 1,
    ) -> None:
        self.memory = memory
        self.token_budget = self.most_tokens = token_budget
        self.max_running = max_running
        self.max_prefilling = max_prefilling
        self.chunk = chunk
        self.grid = grid
        self.headroom = headroom
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of _rank
        self.preemptions = 0
        self.yields = self.holds = False
        self.admits = True  # whether requests may start beside those that run
        self._preempted: set[Request] = set()  # since planning began: they start in the next step at the earliest
        self._blocks_ahead: int | None = None  # that those running may take before another may start; None: not counted
        self._num_running: Counter[Hashable] = Counter()  # requests by client, while a plan is made
        self._awaited: set[tuple[int, Hashable]] = set()  # priorities and clients of running ones without a token yet
        self._num_held = 0  # last steps in a row that held rows
        self._num_plans = 0
        self._served: dict[Hashable, int] = {}  # number of the last plan with a chunk of the client

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def has_prompts(self) -> bool:
        """Return whether some request's prompt is not computed yet."""
        return bool(self.waiting) or any(not request.is_prefilled for request in self.running)

    # Requests -------------------------------------------------------------------------------------------------

    def check(self, num_tokens: int) -> None:
        """Raise RequestTooLargeError if a request of ``num_tokens`` tokens could not even begin to decode."""
        if not self.memory.holds(num_tokens + 1):
            raise RequestTooLargeError(num_tokens)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request that finished, failed or was cancelled. Its memory is the caller's to release."""
        self.remove_all([request])

    def remove_all(self, requests: Collection[Request]) -> None:
        """:meth:`remove` many, in one go through those that wait."""
        self._blocks_ahead = None
        gone = set(requests)
        self.running = [request for request in self.running if request not in gone]
        self.waiting.remove(gone)
        self._preempted -= gone

    def preempt(self, request: Request) -> None:
        """Take a running request's memory and queue it again. What it had computed becomes prefilled again."""
        self.running.remove(request)
        self._blocks_ahead = None
        self._num_running[request.options.client] -= 1
        self.memory.release(request)
        request.prefill_end = max(request.prefill_end, request.length)
        request.length = request.kept
        self.waiting.add(request)
        self._preempted.add(request)
        self.preemptions += 1

    # Planning -------------------------------------------------------------------------------------------------

    def plan(self) -> ScheduledStep:
        """Decide the next step. Requests that are preempted have been released and queued when this returns."""
        failed: list[tuple[Request, Exception]] = []
        self._blocks_ahead = None
        self._preempted.clear()
        self._awaited = {_group(each) for each in self.running if not each.num_generated} if self.yields else set()
        # Nobody waits: what is preempted meanwhile does not start in this step.
        is_counted = self.waiting or self._awaited
        self._num_running = Counter(each.options.client for each in self.running) if is_counted else Counter()
        while True:
            decode = [(request, 1) for request in self.running if request.length >= request.prefill_end]
            if not decode or self.memory.fits(decode):
                break
            if not self.preempt_for(self.running[0]):
                self._fail(self.running[0], 1, failed)
        held = self._held(decode, ()) if self._num_held else []
        # What a failed request held is released after the plan: the next one counts with it.
        chunks = [] if failed or held else self._plan_chunks(decode, failed)
        if not self._num_held:
            held = self._held(decode, chunks)
        self._num_held = self._num_held + 1 if held else 0
        self._num_plans += 1
        self._served.update((chunk.request.options.client, self._num_plans) for chunk in chunks)
        waits = set(held)
        alive = [request for request, _ in self._alive(decode, failed)]
        return ScheduledStep(
            [request for request in alive if request not in waits] if held else alive,
            [request for request in alive if request in waits] if held else [],
            [Chunk(request, num_tokens) for request, num_tokens in self._alive(chunks, failed)],
            failed,
        )

    def _alive(self, growth: Growth, failed: Sequence[tuple[Request, Exception]]) -> list[tuple[Request, int]]:
        """Return the part of the growth whose requests have not been preempted and have not failed meanwhile."""
        if not self._preempted and not failed:
            return list(growth)
        running = set(self.running)
        return [(request, num_tokens) for request, num_tokens in growth if request in running]

    def preempt_for(self, request: Request) -> bool:
        """Preempt a running request that comes after ``request``: the last one of the client with most of the last
        priority. Returns whether there is one."""
        later = [each for each in self.running if _rank(each) > _rank(request)]
        if later:
            self.preempt(_last_of_largest(self.running, later[-1].options.priority, later))
        return bool(later)

    def preempt_youngest(self) -> bool:
        """Preempt the last running request, between two steps, unless it runs alone. Returns whether one was."""
        if len(self.running) < 2:
            return False
        self.preempt(self.running[-1])
        return True

    def _fail(self, request: Request, num_tokens: int, failed: list[tuple[Request, Exception]]) -> None:
        error = self.memory.exhausted(request, num_tokens)
        self.remove(request)
        failed.append((request, error))

    def _plan_chunks(self, decode: Growth, failed: list[tuple[Request, Exception]]) -> list[Chunk]:
        budget = max(self.token_budget, self._least_budget(decode))
        used = 0
        planned = list(decode)
        num_blocks = len(planned) * self.memory.most_blocks(1)
        chunks: list[Chunk] = []
        queue: deque[Request] = deque()
        if len(decode) < len(self.running):
            queue.extend(sorted((request for request in self.running if not request.is_prefilled), key=self._turn))
        admits = True
        while used < budget:
            while queue and queue[0] in self._preempted:
                queue.popleft()
            first = self.waiting.next(self._num_running) if admits else None
            if first is not None and (not queue or self._turn(first) < self._turn(queue[0])):
                admits = not self._must_yield(first, self._awaited) and self._admit(first, failed)
                if admits and self.yields and not first.num_generated:
                    self._awaited.add(_group(first))
                    budget = max(budget, self._least_budget(decode))
                if not admits or first.is_prefilled:
                    continue  # decodes from the next step on
                request = first
            elif queue:
                request = queue.popleft()
                if self._must_yield(request, self._awaited):
                    continue
            else:
                break
            num_tokens = self._chunk_length(request, budget - used)
            if chunks and num_tokens > budget - used:
                break
            num_blocks += self.memory.most_blocks(num_tokens)
            # Mostly there is plenty: no table is looked at.
            if not self.memory.has_blocks(num_blocks) and not self._fits_chunk(planned, request, num_tokens, failed):
                admits, queue = False, deque(each for each in queue if _rank(each) < _rank(request))
                continue  # older ones go on, and will finish
            used += num_tokens
            planned.append((request, num_tokens))
            chunks.append(Chunk(request, num_tokens))
        return chunks

    def _least_budget(self, decode: Growth) -> int:
        """Return the least prompt tokens of a step with these rows: enough that most of its time is not that of rows
        beside which another client's first token is awaited."""
        if not self._awaited:
            return 0
        return min(self.most_tokens, TOKENS_PER_ROW * sum(self._must_yield(row, self._awaited) for row, _ in decode))

    def _must_yield(self, request: Request, awaited: Collection[tuple[int, Hashable]]) -> bool:
        """Return whether a request waits, so that steps are short until somebody else has a first token: a more urgent
        request, or one of a client that runs at least two fewer. A client that runs no more than one request more than
        others never waits, so each goes on.

        Args:
            request: that runs or may start.
            awaited: priorities and clients of those whose first token is awaited.
        """
        priority, client = _group(request)
        number = self._num_running[client]
        return any(
            other < priority or (other == priority and each != client and self._num_running[each] + 2 <= number)
            for other, each in awaited
        )

    def _held(self, decode: Growth, chunks: Sequence[Chunk]) -> list[Request]:
        """Return the requests that take no token in this step for the sake of a first token: from the step on that
        computes the last of its prompt, until it is there, and that is the only chunk they wait for. Then they take a
        token before they wait again.

        Args:
            decode: those that would take one.
            chunks: of this step.
        """
        if not self.holds or self._num_held == MOST_HELD:
            return []
        lengths = {request: request.length + num_tokens for request, num_tokens in chunks}
        awaited = {
            _group(request)
            for request in self.running
            if not request.num_generated and lengths.get(request, request.length) >= request.prefill_end
        }
        return [request for request, _ in decode if self._must_yield(request, awaited)] if awaited else []

    def _turn(self, request: Request) -> tuple[int, int]:
        """Return what decides whose chunk is next: the priority, then which client was served longest ago."""
        return request.options.priority, self._served.get(request.options.client, 0)

    def _chunk_length(self, request: Request, budget: int) -> int:
        """Return the length of a request's next chunk; more than the budget if not even the least of it fits."""
        if self.grid is None:
            return request.chunk_length(budget)
        return request.chunk_length(None if self.chunk is None else min(budget, self.chunk), self.grid)

    def _fits_chunk(
        self, planned: Growth, request: Request, num_tokens: int, failed: list[tuple[Request, Exception]]
    ) -> bool:
        """Return whether the chunk can be computed in this step, after younger ones have been preempted for it."""
        while not self.memory.fits([*self._alive(planned, failed), (request, num_tokens)]):
            if self._make_room(request, self.running) or self.preempt_for(request):
                continue
            if self.running == [request]:
                self._fail(request, num_tokens, failed)
            return False
        return True

    def _admit(self, request: Request, failed: list[tuple[Request, Exception]]) -> bool:
        """Start a request that waits, if it may. Others make room for it, see :meth:`_make_room`."""
        prefilling = [each for each in self.running if not each.is_prefilled]
        if request in self._preempted:
            return False
        if len(prefilling) >= self.max_prefilling and not self._make_room(request, prefilling):
            return False
        if len(self.running) >= self.max_running and not self._make_room(request, self.running):
            return False
        if self.running and not self.admits:
            return False
        # Room for all of its prompt and a token more, beyond what those running are going to need.
        num_tokens = request.prefill_end - request.length + 1
        while not (has_plenty := self._has_plenty_for(num_tokens)):
            if self.memory.fits([*self._growth_ahead(), (request, num_tokens)]):
                break
            if not self.running:
                self._fail(request, num_tokens, failed)
            if not self._make_room(request, self.running):
                return False
        if self.memory.must_wait(request):
            return False
        self.waiting.admit(request)
        self._num_running[request.options.client] += 1
        insort(self.running, request, key=_rank)
        self.memory.admit(request)
        if self._blocks_ahead is not None:
            self._blocks_ahead += self.memory.most_blocks(self._tokens_ahead(request))
        if not has_plenty and len(self.running) > 1:
            growth = [(r, n) for r, n in self._growth_ahead() if r is not request]
            if not self.memory.fits([*growth, (request, request.prefill_end - request.length + 1)]):
                self.preempt(request)  # what it has found cached is no longer there for those it was counted for
                return False
        return True

    def _make_room(self, request: Request, running: Sequence[Request]) -> bool:
        """Preempt the last of these if its priority is a larger number; else, of the client with most of the same
        priority, the last one, if its client then still has more than the request's. Returns whether one was."""
        priority = request.options.priority
        if running and running[-1].options.priority > priority:
            self.preempt(running[-1])
            return True
        number = Counter(each.options.client for each in running if each.options.priority == priority)
        if max(number.values(), default=0) < number[request.options.client] + 2:
            return False
        self.preempt(_last_of_largest(running, priority, running))
        return True

    def _has_plenty_for(self, num_tokens: int) -> bool:
        """Return whether a request may start by the blocks that everybody takes at most, its prefix's and a copy of the
        last of them included. They are summed up once in a plan."""
        blocks = self.memory.most_blocks
        if self._blocks_ahead is None:
            prompts = [request for request in self.running if not request.is_prefilled]
            self._blocks_ahead = (len(self.running) - len(prompts)) * blocks(self.headroom)
            self._blocks_ahead += sum(blocks(self._tokens_ahead(request)) for request in prompts)
        return self.memory.has_blocks(self._blocks_ahead + blocks(num_tokens) + 1)

    def _tokens_ahead(self, request: Request) -> int:
        """Tokens by which a running request must be able to grow when another one is admitted."""
        return max(request.prefill_end - request.length + 1, self.headroom)

    def _growth_ahead(self) -> list[tuple[Request, int]]:
        return [(request, self._tokens_ahead(request)) for request in self.running]


def _rank(request: Request) -> tuple[int, int]:
    """Return what requests that have been admitted are ordered by."""
    assert request.admitted is not None
    return request.options.priority, request.admitted


def _group(request: Request) -> tuple[int, Hashable]:
    return request.options.priority, request.options.client


def _last_of_largest(running: Sequence[Request], priority: int, among: Sequence[Request]) -> Request:
    """Return the last one of these with a priority that is of the client that runs most of it, of several the last."""
    number = Counter(each.options.client for each in running if each.options.priority == priority)
    peers = [each for each in among if each.options.priority == priority]
    return max(reversed(peers), key=lambda each: number[each.options.client])
