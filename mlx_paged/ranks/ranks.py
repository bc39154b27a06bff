"""Ranks: messages between the processes that compute one model together. Agreement: the decisions they compare."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import sys
import threading
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import mlx.core as mx

from ..cache.composites import leaves
from ..errors import ConfigError, KernelUnavailableError, RankError, RequestFailedError
from ..kernels.build import backend
from ..kv.attention_params import QueryHeads
from ..kv.block_table import BlockTable
from ..kv.blocks import BlocksChoice, ChooseBlocks
from ..kv.choice import blocks_choice
from ..kv.geometry import Geometry
from ..kv.pool import BlockPool
from .peers import DATA, FAULT, GRACE_SECONDS, LEAVE, Peer, Watch, meet

if TYPE_CHECKING:
    from ..engine.request import Request
    from ..engine.scheduler import ScheduledStep
    from ..engine.upstream import TokenResponse


def undo_point(pool: BlockPool) -> Callable[[], None]:
    """Return a function that undoes writes built after this call; none of it may have been computed on a device. The
    caller restores tables and lengths, so that what is on the host already is written again."""
    states = [(blocks, blocks.snapshot()) for group in pool.groups for blocks in group.blocks]

    def undo() -> None:
        with pool.lock:
            for blocks, snapshot in states:
                blocks.restore(snapshot)

    return undo


ENTRIES_REPORTED = 4  # latest entries in a report; several, as another rank may be a step ahead


class StepRecord:
    """A running checksum of integers.

    Attributes:
        count: entries so far.
        checksum: of all of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.checksum = 0
        self._last: deque[tuple[int, str, dict[str, list[int]]]] = deque(maxlen=ENTRIES_REPORTED)

    def note(self, what: str, values: Mapping[str, Iterable[int]], remark: str = "") -> None:
        """Add an entry: its kind, integers by name, and a remark, which is in reports but not compared."""
        listed = {name: list(each) for name, each in values.items()}
        self.count += 1
        flat = [each for name in listed for each in (len(listed[name]), *listed[name])]
        self.checksum = zlib.crc32(array("q", flat).tobytes(), zlib.crc32(what.encode(), self.checksum))
        self._last.append((self.count, f"{what}{remark and f' ({remark})'}", listed))

    def describe(self) -> str:
        """Return the last entries."""
        return " | ".join(
            f"{count}. {what}: " + ", ".join(f"{name} {_short(each)}" for name, each in listed.items())
            for count, what, listed in self._last
        )


def _short(values: list[int]) -> str:
    most = 24
    return str(values) if len(values) <= most else f"{values[:most]} and {len(values) - most} more"


T = TypeVar("T")


class Ranks:
    """Messages between ranks, besides the model's reductions (docs/adr/0035).

    All ranks run the same program: they make the same calls here, in the same order, from one thread. Outside inputs
    (files, clients, clocks, free memory) are known only to rank 0 or differ between ranks; :meth:`broadcast` and
    :meth:`exchange` make them the same. Messages have their own connections and do not go through reductions, so that
    one from rank 0 arrives while the step before is still being computed.

    Each message carries a checksum of all earlier decisions (:attr:`record`). If a rank's checksum differs from rank
    0's, every process ends with a report of both, as it does when a rank dies, stops or hangs (:class:`Watch`).

    Args:
        group: MLX's group, of more than one rank. All its ranks create this object at the same time.
        timeout: seconds without a sign of life from a rank until the others end.

    Raises:
        RankError: the ranks could not connect.

    Attributes:
        rank, size: this rank, and the number of ranks.
        record: this rank's decisions.
        now: rank 0's clock as last sent to the others, in seconds; for what must be due on all ranks at once.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.record = StepRecord()
        self.now = 0.0
        self._compared = 0  # entries of the record that a message has covered
        self._sequence = 0
        self._peers: list[Peer] = meet(group, timeout)
        self._watch = Watch(self.rank, self.size, self._peers, timeout)
        self._watch.explain = self._explain
        self._watch.start()
        atexit.register(self.close)

    # Agreeing -------------------------------------------------------------------------------------------------------

    @property
    def is_compared(self) -> bool:
        """Whether a message has carried the checksum of all decisions so far."""
        return self._compared == self.record.count

    def broadcast(self, value: T | None = None) -> T:
        """Return rank 0's value on every rank. Rank 0 does not wait for the others.

        Args:
            value: JSON-serialisable; ignored on the other ranks.

        Raises:
            RankError: rank 0 has ended.
        """
        head = self._head("broadcast")
        if self.rank == 0:
            for peer in self._peers:
                peer.send(DATA, [*head, value])
            return value  # type: ignore[return-value]
        return self._received(head, self._peers[0])  # type: ignore[no-any-return]

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. Waits for all of them.

        Raises:
            RankError: a rank has ended.
        """
        head = self._head("exchange")
        if self.size == 2:  # both send at once, which saves a round trip
            self._peers[0].send(DATA, [*head, value])
            theirs = self._received(head, self._peers[0])
            return [value, theirs] if self.rank == 0 else [theirs, value]
        if self.rank == 0:
            values = [value]
            for peer in self._peers:
                values.append(self._received(head, peer))
            for peer in self._peers:
                peer.send(DATA, [*head, values])
            return values
        self._peers[0].send(DATA, [*head, value])
        return self._received(head, self._peers[0])  # type: ignore[no-any-return]

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

    def with_shared_failures(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of the model whose calls fail on all ranks if they fail on one.

        Over a GPU's blocks MLX is lazy: when a call returns, nothing has been computed yet, so no rank waits in a
        reduction for the one that failed, and the writes to blocks built so far can be undone. Errors raised during
        computation, on a CPU those in the middle of a call, cannot be shared; see :class:`Watch`.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            result, error = None, None
            undo = _undo_of(kwargs.get("cache"))
            try:
                result = model(*args, **kwargs)
            except Exception as raised:
                error = raised
            failures = self.exchange(None if error is None else f"{type(error).__name__}: {error}")
            failed = next((rank for rank, failure in enumerate(failures) if failure is not None), None)
            if failed is None:
                return result
            result = None
            undo()
            try:
                raise RankError(f"rank {failed}: {failures[failed]}") if error is None else error
            finally:
                error = None  # its traceback holds this frame, and so the call's arguments

        return call

    # Steps and faults -----------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark a section in which the ranks compute together; staying in it alone is a fault. Sections nest."""
        if self._watch.is_busy:
            yield
            return
        self._watch.step += 1
        self._watch.begin()
        try:
            yield
        except Exception as error:
            self.await_fault(error)
            raise
        finally:
            self._watch.end()

    def await_fault(self, *errors: BaseException) -> None:
        """Give the watch time to notice a rank whose end may have caused an error; if so, it ends this process.

        MLX's network and the watch use separate connections: a step may fail before the watch knows which rank is gone,
        and clients should be told. Returns if no rank is gone.
        """
        causes = (error.__cause__ if isinstance(error, RequestFailedError) else error for error in errors)
        if any(isinstance(cause, RuntimeError) for cause in causes):  # MLX's, or a RankError
            self._watch.await_fault()

    def on_fault(self, callback: Callable[[str], None]) -> None:
        """Register a callback for the end of this process because of another: it gets its own thread, and 2 s."""
        self._watch.fault_callbacks.append(callback)

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks because of an error in this one."""
        self.await_fault(error)
        self._watch.end_process(f"rank {self.rank} has failed: {type(error).__name__}: {error}")
        raise AssertionError  # not reached

    def close(self) -> None:
        """Tell the other ranks that this one ends, and close the connections. May be called again."""
        atexit.unregister(self.close)
        raised = getattr(sys, "last_value", None)
        if raised is not None and not hasattr(sys, "ps1") and not isinstance(raised, KeyboardInterrupt):
            self.fail(raised)  # the interpreter exits with this error, and the other ranks must not wait
        self._watch.close()
        for peer in self._peers:
            with suppress(RankError):
                peer.send(LEAVE, None)
        for peer in self._peers:
            peer.close()

    @property
    def num_sent(self) -> tuple[int, int]:
        """Messages sent so far, and their bytes."""
        return sum(peer.num_sent for peer in self._peers), sum(peer.bytes_sent for peer in self._peers)

    # Parts ----------------------------------------------------------------------------------------------------------

    def _head(self, what: str) -> list[Any]:
        self._sequence += 1
        self._compared = self.record.count
        return [self._sequence, what, self.record.checksum]

    def _wait_for(self, peer: Peer) -> Any:
        busy = self._watch.is_busy
        self._watch.end()
        try:
            return peer.receive()
        finally:
            if busy:
                self._watch.begin()

    def _received(self, head: list[Any], peer: Peer) -> Any:
        *theirs, value = self._wait_for(peer)
        # Rank 0 does not compare checksums: the other ranks do, and report theirs.
        alike = 2 if self.rank == 0 else 3
        if theirs[:alike] != head[:alike]:
            self._diverged_from(peer, theirs, head)
        return value

    def _diverged_from(self, peer: Peer, theirs: list[Any], head: list[Any]) -> NoReturn:
        """End all ranks: this one's decisions differ from those of ``peer``."""
        mine = [self._sequence, self.record.count, self.record.describe()]
        if self.rank == 0:
            called = f"rank {peer.rank} called {theirs[1]} at message {theirs[0]} where rank 0 called {head[1]}"
            self._watch.end_process(f"{called} {_in_words(mine)}")
        report = {"diverged": self.rank, "decided": mine}
        with suppress(RankError):
            peer.send(FAULT, report)
            threading.Event().wait(2 * GRACE_SECONDS)  # rank 0 answers with its own, which ends this process
        self._watch.end_process(self._explain(report))
        raise AssertionError

    def _explain(self, report: Any) -> str:
        if not isinstance(report, dict):
            return str(report)
        theirs = _in_words(report["decided"])
        text = f"the ranks' decisions differ. Rank {report['diverged']} {theirs}."
        if self.rank == 0:
            text += f" Rank 0 {_in_words([self._sequence, self.record.count, self.record.describe()])}."
        return text


def _undo_of(caches: Sequence[Any] | None) -> Callable[[], None]:
    pool = next((cache.pool for cache in leaves(caches or []) if hasattr(cache, "pool")), None)
    return (lambda: None) if pool is None else undo_point(pool)


def _in_words(decided: list[Any]) -> str:
    sequence, count, last = decided
    return f"at message {sequence}, after {count} decision(s): {last}"


class Agreement:
    """Adds each decision of an engine to the ranks' record, which is compared before every step.

    Args:
        ranks: the ranks that the engine's model is sharded over.
        pool: its requests' pool; None: no layer is paged.
    """

    def __init__(self, ranks: Ranks, pool: BlockPool | None) -> None:
        self.ranks = ranks
        self._pool = pool

    def step(self) -> AbstractContextManager[None]:
        """See :meth:`Ranks.step`."""
        return self.ranks.step()

    def begin_step(self) -> None:
        """Compare all decisions so far, unless a message has done so already."""
        if not self.ranks.is_compared:
            self.ranks.broadcast()

    def note_insertion(self, request: Request) -> None:
        """Record that a request was inserted."""
        self.ranks.record.note(
            "insert", {"request": [request.uid, request.kept, request.max_tokens], "tokens": request.source}
        )

    def note_removal(self, uids: Sequence[int], finished: bool) -> None:
        """Record that requests were removed, or finished."""
        self.ranks.record.note("finish" if finished else "remove", {"requests": uids})

    def note_step(
        self, plan: ScheduledStep, generated: Sequence[TokenResponse], failures: Collection[RequestFailedError]
    ) -> None:
        """Record a step that is done, with the blocks and lengths of the tables it wrote."""
        self.ranks.await_fault(*failures)
        chunks = [(chunk.request.uid, chunk.num_tokens) for chunk in plan.chunks]
        self.ranks.record.note(
            "step",
            {
                "decode": [request.uid for request in plan.decode],
                "chunks": [each for chunk in chunks for each in chunk],
                "tokens": [each for response in generated for each in (response.uid, response.token)],
                "failed": [failure.uid for failure in failures],
                "blocks": self._blocks(plan),
            },
            "; ".join(map(str, failures)),
        )

    def _blocks(self, plan: ScheduledStep) -> list[int]:
        if self._pool is None:
            return []
        noted = [each for group in self._pool.groups for each in (group.allocator.num_blocks, group.allocator.num_free)]
        for request in plan.decode:
            for table in request.tables or ():
                noted += [table.length, *table.block_ids[-1:]]
        for chunk in plan.chunks:
            for table in chunk.request.tables or ():
                noted += [table.length, *_blocks_of_last(table, chunk.num_tokens)]
        return noted


def _blocks_of_last(table: BlockTable, num_tokens: int) -> Sequence[int]:
    """Return the ids of a table's blocks from the first of its last ``num_tokens`` tokens on."""
    return table.block_ids[max(0, table.length - num_tokens) // table.block_size :]


def agreed_budget(ranks: Ranks, num_bytes: int, options: str) -> int:
    """Return the smallest of the ranks' pool budgets, in bytes. Each rank's pool holds its part of the heads.

    Args:
        num_bytes: this rank's budget.
        options: text of the options, which must be the same on all ranks.

    Raises:
        ConfigError: the options differ.
    """
    configured = ranks.exchange(f"{options} on {backend() or 'the CPU'}")
    for rank, theirs in enumerate(configured):
        if theirs != configured[0]:
            raise ConfigError(
                f"ranks must have the same configuration: rank 0 has {configured[0]}, rank {rank} has {theirs}"
            )
    return min(ranks.exchange(num_bytes))


def agreed_blocks(ranks: Ranks, choose: ChooseBlocks) -> ChooseBlocks:
    """Return a choice of blocks that is the same on all ranks: with a kernel only if that works on each of them.

    Args:
        choose: this rank's own choice.
    """
    without_kernel = blocks_choice(False)

    def choose_alike(geometry: Geometry, block_size: int, heads: QueryHeads | None) -> BlocksChoice:
        mine: BlocksChoice | None = None
        error: KernelUnavailableError | None = None
        try:
            mine = choose(geometry, block_size, heads)
        except KernelUnavailableError as raised:
            error = raised
        has_kernel = mine is not None and mine.has_kernel
        found = ranks.exchange([has_kernel, str(error or ""), "" if mine is None else mine.reason])
        if error is not None:
            raise error
        for rank, (theirs_has_kernel, why_error, reason) in enumerate(found):
            if why_error:
                raise KernelUnavailableError(f"rank {rank}: {why_error}")
            if has_kernel and not theirs_has_kernel:
                return without_kernel(geometry, block_size, heads)._replace(reason=f"rank {rank}: {reason}")
        assert mine is not None
        return mine

    return choose_alike
