"""Ranks: messages between the processes that compute one model together. ShardedModel: what its engine asks of them."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import os
import sys
import threading
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import mlx.core as mx

from ..engine.peers import Peers
from ..errors import ConfigError, KernelUnavailableError, PagedCacheError, RankError, RequestFailedError
from ..kernels.build import backend
from ..kv.attention_params import QueryHeads
from ..kv.blocks import BlocksChoice, ChooseBlocks
from ..kv.choice import blocks_choice
from ..kv.geometry import Geometry
from ..kv.pool import BlockPool
from .connection import DATA, FAULT, Connection, meet

if TYPE_CHECKING:
    from ..engine.request import Request
    from ..engine.scheduler import ScheduledStep
    from ..engine.upstream import TokenResponse

EXIT_STATUS = 70  # of a process that ends because of another rank
GRACE_SECONDS = 2.0  # before the process ends, for answers to clients

T = TypeVar("T")


class Ranks:
    """Messages between ranks, besides the model's reductions (docs/adr/0035).

    All ranks run the same program: they make the same calls here, in the same order, from one thread. Outside inputs
    (files, clients, clocks, free memory) are known only to rank 0 or differ between ranks; :meth:`broadcast` and
    :meth:`exchange` make them the same. Messages have their own connections and do not go through reductions, so that
    one from rank 0 arrives while the step before is still being computed.

    Each message carries a checksum of all decisions so far (:meth:`note`). If a rank's differs, or its connection ends,
    every process ends.

    Args:
        group: MLX's group, of more than one rank. All its ranks create this object at the same time.
        timeout: seconds to wait for the other ranks now, and for a machine that does not answer any more later.

    Raises:
        RankError: the ranks could not connect.

    Attributes:
        rank, size: this rank, and the number of ranks.
        checksum: of all decisions so far.
        now: rank 0's clock as last sent to the others, in seconds; for what must be due on all ranks at once.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.checksum = 0
        self.now = 0.0
        self._is_compared = True
        self._on_fault: Callable[[str], None] | None = None
        self._ending = threading.Lock()
        self._is_ending = threading.Event()
        self._is_closed = False
        self._others = meet(group, timeout)
        for other in self._others:
            other.start(self._ended)
        atexit.register(self.close)

    # Agreeing -------------------------------------------------------------------------------------------------------

    def broadcast(self, value: T | None = None) -> T:
        """Return rank 0's value on every rank. Rank 0 does not wait for the others.

        Args:
            value: JSON-serialisable; ignored on the other ranks.

        Raises:
            RankError: another rank has ended.
        """
        self._begin("broadcast")
        if self.rank > 0:
            return self._received(self._others[0])  # type: ignore[no-any-return]
        self._send(value)
        return value  # type: ignore[return-value]

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. Waits for all of them.

        Raises:
            RankError: a rank has ended.
        """
        self._begin("exchange")
        if self.rank > 0:
            self._send(value)
            return self._received(self._others[0])  # type: ignore[no-any-return]
        values = [value, *map(self._received, self._others)]
        self._send(values)
        return values

    def note(self, what: str, *values: Iterable[int]) -> None:
        """Add a decision to the checksum: its kind, and lists of integers."""
        self._is_compared = False
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        for each in values:
            listed = array("q", each)
            self.checksum = zlib.crc32(array("q", [len(listed)]).tobytes() + listed.tobytes(), self.checksum)

    def compare(self) -> None:
        """Compare all decisions so far with rank 0's, unless a message has done so already."""
        if not self._is_compared:
            self.broadcast()
        for other in self._others:
            other.check()

    def _begin(self, what: str) -> None:
        self.note(what)
        self._is_compared = True

    def _send(self, value: Any) -> None:
        for other in self._others:
            other.send(DATA, [self.checksum, value])

    def _received(self, other: Connection) -> Any:
        checksum, value = other.receive()
        if checksum != self.checksum:
            self.fail(RankError(f"the decisions of rank {other.rank} and rank {self.rank} differ"))
        return value

    @functools.cached_property
    def are_of_one_kind(self) -> bool:
        """Return whether all ranks compute the same bits from the same inputs: their device names and MLX versions are
        equal. A collective call."""
        kinds = self.exchange(f"{mx.device_info().get('device_name')}, MLX {importlib.metadata.version('mlx')}")
        return all(kind == kinds[0] for kind in kinds)

    def agreed(self, tokens: mx.array) -> mx.array:
        """Return rank 0's tokens on every rank, as part of the graph being built. Ranks whose logits differ in the last
        bits, e.g. on different machines, would choose differently between two equally likely tokens."""
        # Not zeros: a result that does not depend on this rank's step would leave that uncomputed.
        mine = tokens if self.rank == 0 else tokens * 0
        return mx.distributed.all_sum(mine, group=self.group)

    # Ending ---------------------------------------------------------------------------------------------------------

    def on_fault(self, callback: Callable[[str], None]) -> None:
        """Register a callback for the end of this process because of a rank: it gets its own thread, and 2 s."""
        self._on_fault = callback

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks because of an error in this one."""
        # The end of another rank may be the cause: its connection tells so at once, and by name.
        if isinstance(error, RuntimeError):
            self._is_ending.wait(GRACE_SECONDS / 2)
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        left = [f"; rank {other.rank} has ended" for other in self._others if other.has_left]
        self._ended(f"rank {self.rank} has failed: {text}{''.join(left)}")
        raise error  # not reached, unless the connections are closed

    def _ended(self, why: str) -> None:
        """End this process, and tell clients and the other ranks why. Any thread may call it; it does not return."""
        if self._is_closed:
            return
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread already ends the process
        self._is_ending.set()
        last = threading.Thread(target=self._last_words, args=(why,), daemon=True)
        last.start()
        last.join(GRACE_SECONDS)
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(EXIT_STATUS)

    def _last_words(self, why: str) -> None:
        with suppress(Exception):
            print(f"mlx_paged: rank {self.rank} of {self.size} ends: {why}", file=sys.stderr, flush=True)
        for other in self._others:
            with suppress(RankError):
                other.send(FAULT, why)
        if self._on_fault is not None:
            self._on_fault(why)

    def close(self) -> None:
        """Tell the other ranks that this one ends, and close the connections. May be called again."""
        atexit.unregister(self.close)
        raised = getattr(sys, "last_value", None)
        if raised is not None and not hasattr(sys, "ps1") and not isinstance(raised, KeyboardInterrupt):
            self.fail(raised)  # the interpreter exits with this error, and the other ranks must not wait
        self._is_closed = True
        for other in self._others:
            other.close()


class ShardedModel(Peers):
    """The ranks of a model, for its engine.

    Args:
        ranks: the processes that compute the model.
        has_same_logits: all of them have the same bits of logits if they are of one kind.
    """

    is_alone = False

    def __init__(self, ranks: Ranks, has_same_logits: bool) -> None:
        self.ranks = ranks
        self._chooses_alike = has_same_logits and ranks.are_of_one_kind

    def guarded(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """See :meth:`.Peers.guarded`: the other ranks would wait in the model's reductions."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return model(*args, **kwargs)
            except Exception as error:
                self.ranks.fail(error)

        return call

    def agreed(self, tokens: mx.array, *, only_compares: bool) -> mx.array:
        """See :meth:`.Peers.agreed`."""
        return tokens if only_compares and self._chooses_alike else self.ranks.agreed(tokens)

    def broadcast(self, value: T) -> T:
        """See :meth:`Ranks.broadcast`."""
        return self.ranks.broadcast(value)

    def begin_step(self) -> None:
        """Compare all decisions so far. Raises RankError: another rank has ended."""
        self.ranks.compare()

    def note_insertion(self, request: Request) -> None:
        """Note that a request was inserted."""
        self.ranks.note("insert", [request.uid, request.kept, request.max_tokens], request.source)

    def note_removal(self, uids: Sequence[int], finished: bool) -> None:
        """Note that requests were removed, or finished."""
        self.ranks.note("finish" if finished else "remove", uids)

    def note_step(
        self,
        plan: ScheduledStep,
        generated: Sequence[TokenResponse],
        failures: Collection[RequestFailedError],
        pool: BlockPool | None,
    ) -> None:
        """Note what a step has done. An error of MLX in it ends all ranks."""
        for failure in failures:
            cause = failure.__cause__
            if isinstance(cause, RuntimeError) and not isinstance(cause, PagedCacheError):
                self.ranks.fail(cause)
        allocators = [] if pool is None else [group.allocator for group in pool.groups]
        self.ranks.note(
            "step",
            [request.uid for request in plan.decode],
            [each for chunk in plan.chunks for each in (chunk.request.uid, chunk.num_tokens)],
            [each for response in generated for each in (response.uid, response.token)],
            [failure.uid for failure in failures],
            [allocator.num_live for allocator in allocators],
        )


def agreed_budget(ranks: Ranks, num_bytes: int, options: str) -> int:
    """Return the smallest of the ranks' pool budgets, in bytes. Each rank's pool holds its part of the heads.

    Args:
        num_bytes: this rank's budget.
        options: text of the options, which must be the same on all ranks.

    Raises:
        ConfigError: the options differ.
    """
    found = ranks.exchange(f"{options} on {backend() or 'the CPU'}")
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            raise ConfigError(
                f"ranks must have the same configuration: rank 0 has {found[0]}, rank {rank} has {theirs}"
            )
    return min(ranks.exchange(num_bytes))


def agreed_blocks(ranks: Ranks, choose: ChooseBlocks) -> ChooseBlocks:
    """Return a choice of blocks that is the same on all ranks: with a kernel only if that works on each of them.

    Args:
        choose: this rank's own choice.
    """

    def choose_alike(geometry: Geometry, block_size: int, heads: QueryHeads | None) -> BlocksChoice:
        mine: BlocksChoice | None = None
        failure = ""
        try:
            mine = choose(geometry, block_size, heads)
        except KernelUnavailableError as error:
            failure = str(error)
        for rank, theirs in enumerate(ranks.exchange(failure)):
            if theirs:
                raise KernelUnavailableError(f"rank {rank}: {theirs}")
        assert mine is not None
        for rank, why_not in enumerate(ranks.exchange(None if mine.has_kernel else mine.reason)):
            if mine.has_kernel and why_not is not None:
                return blocks_choice(False)(geometry, block_size, heads)._replace(reason=f"rank {rank}: {why_not}")
        return mine

    return choose_alike
