"""Ranks: messages between the processes that compute one model together, and what its engine asks of them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import mlx.core as mx

from ..engine.interfaces import Peers
from ..errors import PagedCacheError, RankError, RequestFailedError
from ..kv.pool import BlockPool
from .connection import Connection, meet

if TYPE_CHECKING:
    from ..engine.interfaces import TokenResponse
    from ..engine.scheduler import ScheduledStep

EXIT_STATUS = 70  # of a process that ends because of another rank
GRACE_SECONDS = 2.0  # before the process ends, for answers to clients

T = TypeVar("T")


class Ranks(Peers):
    """The processes that compute a model together, and messages between them besides its reductions (docs/adr/0035).

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

    is_alone = False

    def __init__(self, group: Any, timeout: float) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.checksum = 0
        self.now = 0.0
        self._on_fault: Callable[[str], None] | None = None
        self._ending = threading.Lock()
        self._is_closed = False
        self._others = meet(group, timeout)
        for other in self._others:
            other.start(self._end)
        atexit.register(self.close)

    # Agreeing -------------------------------------------------------------------------------------------------------

    def broadcast(self, value: T | None = None) -> T:
        """Return rank 0's value on every rank. Rank 0 does not wait for the others.

        Args:
            value: JSON-serialisable; ignored on the other ranks.

        Raises:
            RankError: another rank has ended.
        """
        self.note("broadcast")
        if self.rank > 0:
            return self._received(self._others[0])  # type: ignore[no-any-return]
        self._send(value)
        return value  # type: ignore[return-value]

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. Waits for all of them.

        Raises:
            RankError: a rank has ended.
        """
        self.note("exchange")
        if self.rank > 0:
            self._send(value)
            return self._received(self._others[0])  # type: ignore[no-any-return]
        values = [value, *map(self._received, self._others)]
        self._send(values)
        return values

    def _send(self, value: Any) -> None:
        for other in self._others:
            other.send([self.checksum, value])

    def _received(self, other: Connection) -> Any:
        checksum, value = other.receive()
        if checksum != self.checksum:
            self.fail(RankError(f"the decisions of rank {other.rank} and rank {self.rank} differ"))
        return value

    def note(self, what: str, *values: Iterable[int]) -> None:
        """Add a decision to the checksum: its kind, and lists of integers."""
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        for each in values:
            listed = array("q", each)
            self.checksum = zlib.crc32(array("q", [len(listed)]).tobytes() + listed.tobytes(), self.checksum)

    # The engine's -----------------------------------------------------------------------------------------------------

    def guarded(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """See :meth:`.Peers.guarded`: the other ranks would wait in the model's reductions."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return model(*args, **kwargs)
            except Exception as error:
                self.fail(error)

        return call

    def agreed(self, tokens: mx.array) -> mx.array:
        """Return rank 0's tokens on every rank, as part of the graph being built. Ranks whose logits differ in the last
        bits, e.g. on different machines, would choose differently between two equally likely tokens."""
        # Not zeros: a result that does not depend on this rank's step would leave that uncomputed.
        mine = tokens if self.rank == 0 else tokens * 0
        return mx.distributed.all_sum(mine, group=self.group)

    def begin_step(self) -> None:
        """Compare all decisions so far with rank 0's. Raises RankError: another rank has ended."""
        self.broadcast()

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
                self.fail(cause)
        self.note(
            "step",
            [request.uid for request in plan.decode],
            [each for chunk in plan.chunks for each in (chunk.request.uid, chunk.num_tokens)],
            [each for response in generated for each in (response.uid, response.token)],
            [failure.uid for failure in failures],
            [] if pool is None else [group.allocator.num_live for group in pool.groups],
        )

    # Ending ---------------------------------------------------------------------------------------------------------

    def on_fault(self, callback: Callable[[str], None]) -> None:
        """Register a callback for the end of this process because of a rank: it has 2 s."""
        self._on_fault = callback

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks because of an error in this one."""
        if isinstance(error, RuntimeError):  # perhaps of another rank's end, whose connection tells it by name
            time.sleep(GRACE_SECONDS / 2)
        text = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        left = [f"; rank {other.rank} has ended" for other in self._others if other.has_left]
        self._end(f"rank {self.rank} has failed: {text}{''.join(left)}")
        raise error  # not reached, unless the connections are closed

    def _end(self, why: str) -> None:
        """End this process, and tell clients and the other ranks why. Any thread may call it; it does not return."""
        if self._is_closed:
            return
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread already ends the process
        limit = threading.Timer(GRACE_SECONDS, os._exit, [EXIT_STATUS])
        limit.daemon = True
        limit.start()
        with suppress(Exception):
            print(f"mlx_paged: rank {self.rank} of {self.size} ends: {why}", file=sys.stderr, flush=True)
        with suppress(Exception):  # also if nobody reads stderr any more
            for other in self._others:
                with suppress(RankError):
                    other.send(why)
            if self._on_fault is not None:
                self._on_fault(why)
        os._exit(EXIT_STATUS)

    def close(self) -> None:
        """Tell the other ranks that this one ends, and close the connections. May be called again."""
        atexit.unregister(self.close)
        raised = getattr(sys, "last_value", None)
        if raised is not None and not hasattr(sys, "ps1") and not isinstance(raised, KeyboardInterrupt):
            self.fail(raised)  # the interpreter exits with this error, and the other ranks must not wait
        self._is_closed = True
        for other in self._others:
            other.close()
