"""Scheduler: decides in each step which requests run, wait or are preempted. It knows lengths and an order, no model
and no tensor.

Running requests are ordered by priority, then by first admission. The first one is served first, and only later ones
are preempted for it; so it always advances, and every request finishes unless more urgent ones never end. Decoding
requests take a token in every step, beside up to ``token_budget`` prompt tokens: prompts delay them by no more than
that, and on a CPU by the wait for another client's first token (:meth:`Scheduler._held`). Clients of one priority take
turns at the prompt tokens of a step. If there is no room, requests of a client are preempted for another client that
runs fewer. The same calls give the same decisions on every rank.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ..errors import RequestTooLargeError

if TYPE_CHECKING:  # only a request's attributes are used here
    from .request import Request


Growth = Sequence[tuple["Request", int]]
T = TypeVar("T", bound=tuple["Request", int])
MOST_HELD = 3  # most steps in a row that rows wait for another client's first token, which takes as many
# Least prompt tokens of a step for each decoding row that delays another client's first token. On a CPU a row takes as
# long as 1 to 2 prompt tokens, so that prompts get at least half of the time.
TOKENS_PER_ROW = 2


class Memory(Protocol):
    """The memory of requests' tokens, as the scheduler sees it. Nothing may raise while a plan is made: the memory
    notes errors, and calls :meth:`Scheduler.remove` for failed requests after the plan."""

    def holds(self, num_tokens: int) -> bool:
        """Return whether a sequence of ``num_tokens`` tokens fits if nothing else is held."""

    def fits(self, growth: Growth) -> bool:
        """Return whether all these requests can grow by their numbers of tokens, after evicting unused prefixes."""

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks of each group that a request takes to grow by ``num_tokens`` tokens."""

    def has_blocks(self, num_blocks: int) -> bool:
        """Return whether ``num_blocks`` blocks of each group can be had, after evicting unused prefixes."""

    def must_wait(self, request: Request) -> bool:
        """Return whether a request should start later, when a running one has computed their common prefix."""

    def admit(self, request: Request) -> None:
        """Start the request, and set its length to the tokens it finds cached."""

    def release(self, request: Request) -> None:
        """Release what the request holds beyond its ``kept`` tokens, and remember what it needs to resume."""

    def exhausted(self, request: Request, num_tokens: int) -> Exception:
        """Return the error to report for a request that cannot grow by ``num_tokens`` tokens."""


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
        held: decoding requests that wait for another client's first token instead.
        chunks: parts of prompts, at most one per request.
        failed: requests that cannot go on, with their errors; the scheduler has removed them.
    """

    decode: list[Request]
    held: list[Request]
    chunks: list[Chunk]
    failed: list[tuple[Request, Exception]]


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
        self._firsts: dict[tuple[int, Hashable], Request] = {}  # next request of a group, where known

    def __len__(self) -> int:
        count = 0
        for preempted, fresh in self._groups.values():
            count += len(preempted) + len(fresh)
        return count

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted((r for group in self._groups.values() for part in group for r in part), key=self._rank))

    def add(self, request: Request) -> None:
        """Queue a request behind those of its priority and client."""
        name = request.options.priority, request.options.client
        preempted, fresh = self._groups.setdefault(name, ({}, {}))
        (fresh if request.admitted is None else preempted)[request] = None
        self._firsts.pop(name, None)

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
            self._firsts.pop(name, None)

    def next(self, num_running: Mapping[Hashable, int]) -> Request | None:
        """Return the request to admit next. Called in every step, so only groups that have changed are searched.

        Args:
            num_running: number of running requests by client; clients without any may be left out.
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
        token_budget: most prompt tokens of the next step; the engine may lower it. See also :meth:`_least_budget`.
        most_tokens: the token budget that was given.
        yields: set where prompts take long: chunks of a client wait for another client's first token, see
            :meth:`_must_yield`.
        holds_rows: set where rows take long: rows of a client wait, too, while another client's first token is
            computed, see :meth:`_held`.
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
        self.running: list[Request] = []  # in order of _rank
        self.preemptions = 0
        self.yields = self.holds_rows = False
        self.admits = True  # whether requests may start beside those that run
        self._preempted: set[Request] = set()  # since planning began; they start in the next step at the earliest
        self._blocks_ahead: int | None = None  # that running requests may take, for admissions; None: not counted
        self._num_running: Counter[Hashable] = Counter()  # running requests by client, while a plan is made
        self._awaited: set[tuple[int, Hashable]] = set()  # priorities and clients of running requests without a token
        self._num_held = 0  # number of last steps in a row that held rows
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
        """Forget a request that finished, failed or was cancelled. The caller releases its memory."""
        self.remove_all([request])

    def remove_all(self, requests: Collection[Request]) -> None:
        """Forget several requests like :meth:`remove`, in one pass over the running ones."""
        self._blocks_ahead = None
        gone = set(requests)
        self.running = [request for request in self.running if request not in gone]
        self.waiting.remove(gone)
        self._preempted -= gone

    def preempt(self, request: Request) -> None:
        """Release a running request's memory and queue it again. What it had computed will be prefilled again."""
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
        """Decide the next step. On return, preempted requests have been released and queued."""
        failed: list[tuple[Request, Exception]] = []
        self._blocks_ahead = None
        self._preempted.clear()
        self._awaited = {_group(each) for each in self.running if not each.num_generated} if self.yields else set()
        # Not needed if none waits: requests preempted meanwhile do not start in this step.
        num_waiting = len(self.waiting)
        is_counted = num_waiting or self._awaited
        self._num_running = Counter(each.options.client for each in self.running) if is_counted else Counter()
        while True:
            decode = [(request, 1) for request in self.running if request.length >= request.prefill_end]
            if not decode or self.memory.fits(decode):
                break
            if not self.preempt_for(self.running[0]):
                self._fail(self.running[0], 1, failed)
        held = self._held(decode, ()) if self._num_held else []
        # A failed request's memory is released after the plan, and available to the next plan.
        has_prompts = num_waiting or len(decode) < len(self.running)
        chunks = self._plan_chunks(decode, failed) if has_prompts and not failed and not held else []
        if not self._num_held:
            held = self._held(decode, chunks)
        self._num_held = self._num_held + 1 if held else 0
        self._num_plans += 1
        self._served.update((chunk.request.options.client, self._num_plans) for chunk in chunks)
        waits = set(held)
        if self._preempted or failed:
            decode, chunks = self._alive(decode), self._alive(chunks)
        alive = [request for request, _ in decode]
        return ScheduledStep(
            [request for request in alive if request not in waits] if held else alive,
            [request for request in alive if request in waits] if held else [],
            [Chunk(*chunk) for chunk in chunks],
            failed,
        )

    def _alive(self, growth: Sequence[T]) -> list[T]:
        """Return the part of the growth whose requests still run."""
        running = set(self.running)
        return [each for each in growth if each[0] in running]

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
            # Usually there is plenty, and no table is looked at.
            if not self.memory.has_blocks(num_blocks) and not self._fits_chunk(planned, request, num_tokens, failed):
                admits, queue = False, deque(each for each in queue if _rank(each) < _rank(request))
                continue  # older requests go on, and will finish
            used += num_tokens
            planned.append((request, num_tokens))
            chunks.append(Chunk(request, num_tokens))
        return chunks

    def _least_budget(self, decode: Growth) -> int:
        """Return the least prompt tokens of a step with these rows: :data:`TOKENS_PER_ROW` for each row that delays
        another client's first token."""
        if not self._awaited:
            return 0
        return min(self.most_tokens, TOKENS_PER_ROW * sum(self._must_yield(row, self._awaited) for row, _ in decode))

    def _must_yield(self, request: Request, awaited: Collection[tuple[int, Hashable]]) -> bool:
        """Return whether a request must wait, to keep steps short until another request has its first token: a more
        urgent one, or one of a client that runs at least two fewer requests. A client that runs at most one request
        more than the others waits for none of its priority, so every client advances.

        Args:
            request: a running request, or one that may start.
            awaited: priorities and clients of requests whose first token is awaited.
        """
        priority, client = _group(request)
        number = self._num_running[client]
        return any(
            other < priority or (other == priority and each != client and self._num_running[each] + 2 <= number)
            for other, each in awaited
        )

    def _held(self, decode: Growth, chunks: Sequence[Chunk]) -> list[Request]:
        """Return the decoding requests that take no token in this step, so that another client's first token comes
        sooner. They wait from the step that computes the last chunk of its prompt until that token is delivered, at
        most :data:`MOST_HELD` steps. Then they take a token before they wait again.

        Args:
            decode: the requests that would take a token.
            chunks: the chunks of this step.
        """
        if not self.holds_rows or self._num_held == MOST_HELD:
            return []
        lengths = {request: request.length + num_tokens for request, num_tokens in chunks} if chunks else {}
        awaited = {
            _group(request)
            for request in self.running
            if not request.num_generated and lengths.get(request, request.length) >= request.prefill_end
        }
        return [request for request, _ in decode if self._must_yield(request, awaited)] if awaited else []

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

    def _fits_chunk(
        self, planned: Growth, request: Request, num_tokens: int, failed: list[tuple[Request, Exception]]
    ) -> bool:
        """Return whether the chunk fits in this step, after preempting other requests for it if necessary."""
        while not self.memory.fits([*self._alive(planned), (request, num_tokens)]):
            if self._make_room(request, self.running) or self.preempt_for(request):
                continue
            if self.running == [request]:
                self._fail(request, num_tokens, failed)
            return False
        return True

    def _admit(self, request: Request, failed: list[tuple[Request, Exception]]) -> bool:
        """Start a waiting request if others make room for it (:meth:`_make_room`). Returns whether it started."""
        prefilling = [each for each in self.running if not each.is_prefilled]
        if request in self._preempted:
            return False
        if len(prefilling) >= self.max_prefilling and not self._make_room(request, prefilling):
            return False
        if len(self.running) >= self.max_running and not self._make_room(request, self.running):
            return False
        if self.running and not self.admits:
            return False
        # Room for its whole prompt and one more token, beyond what running requests will need.
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
                self.preempt(request)  # it has taken cached blocks that others were counted to evict
                return False
        return True

    def _make_room(self, request: Request, running: Sequence[Request]) -> bool:
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

    def _has_plenty_for(self, num_tokens: int) -> bool:
        """Return whether a request can start by an upper bound of the blocks that it and running requests take, with
        those of its prefix and a copy of the last of these. The running requests' bound is summed up once per plan."""
        blocks = self.memory.most_blocks
        if self._blocks_ahead is None:
            prompts = [request for request in self.running if not request.is_prefilled]
            self._blocks_ahead = (len(self.running) - len(prompts)) * blocks(self.headroom)
            self._blocks_ahead += sum(blocks(self._tokens_ahead(request)) for request in prompts)
        return self.memory.has_blocks(self._blocks_ahead + blocks(num_tokens) + 1)

    def _tokens_ahead(self, request: Request) -> int:
        """Return the tokens that a running request must be able to grow by when another one is admitted."""
        return max(request.prefill_end - request.length + 1, self.headroom)

    def _growth_ahead(self) -> list[tuple[Request, int]]:
        return [(request, self._tokens_ahead(request)) for request in self.running]


def _rank(request: Request) -> tuple[int, int]:
    """Return the sort key of admitted requests."""
    assert request.admitted is not None
    return request.options.priority, request.admitted


def _group(request: Request) -> tuple[int, Hashable]:
    return request.options.priority, request.options.client


def _last_of_largest(running: Sequence[Request], priority: int, among: Sequence[Request]) -> Request:
    """Return the last of ``among`` with this priority whose client runs the most requests of it."""
    number = Counter(each.options.client for each in running if each.options.priority == priority)
    peers = [each for each in among if each.options.priority == priority]
    return max(reversed(peers), key=lambda each: number[each.options.client])
