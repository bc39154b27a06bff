"""Watch: notices that a rank is gone, by a connection to each peer, and a thread that listens to it."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ...errors import RankError

_HEAD = struct.Struct(">Ic")  # bytes of the value, and the kind
MOST_BYTES = 1 << 30

DATA, BEAT, FAULT, LEAVE = b"D", b"B", b"F", b"L"


def send_frame(connection: socket.socket, kind: bytes, value: Any) -> int:
    """Send a frame. Returns its size in bytes. Raises OSError; RankError: the value is too large."""
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(body) > MOST_BYTES:
        raise RankError(f"a message of {len(body)} bytes is too large for other ranks: at most {MOST_BYTES}")
    connection.sendall(_HEAD.pack(len(body), kind) + body)
    return _HEAD.size + len(body)


def read_frame(connection: socket.socket) -> tuple[bytes, Any]:
    """Return the next frame. Raises OSError, or ValueError for what is none; EOFError at the end."""
    length, kind = _HEAD.unpack(read_bytes(connection, _HEAD.size))
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return kind, json.loads(read_bytes(connection, length).decode("utf-8", "surrogatepass"))


def read_bytes(connection: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises OSError; EOFError at the end."""
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the connection is closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Peer:
    """Another rank, as this one sees it. A thread reads what it sends.

    Args:
        rank: of the other.
        connection: to it; this object's from now on.

    Attributes:
        heard_at: when something came last, by ``time.monotonic``.
        idle_since: since when it says it is in no step; None: it is in one.
        step: the last step it has begun.
        has_left: it has said that it is done.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.heard_at = time.monotonic()
        self.idle_since: float | None = self.heard_at
        self.step = 0
        self.has_left = False
        self.num_sent = self.bytes_sent = 0
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: SimpleQueue[Any] = SimpleQueue()

    def start(self, on_fault: Callable[[Peer, Any], None]) -> None:
        """Begin to read.

        Args:
            on_fault: called by the reading thread with what the other reports; None: it has gone without a word.
        """
        threading.Thread(target=self._read_all, args=(on_fault,), name=f"rank {self.rank}", daemon=True).start()

    def _read_all(self, on_fault: Callable[[Peer, Any], None]) -> None:
        try:
            while True:
                kind, value = read_frame(self._connection)
                now = self.heard_at = time.monotonic()
                if kind == DATA:
                    self._inbox.put(value)
                elif kind == BEAT:
                    self.step, idle = value
                    self.idle_since = None if idle is None else now - idle
                elif kind == LEAVE:
                    self.has_left, self.idle_since = True, now
                    self._inbox.put(None)
                elif kind == FAULT:
                    on_fault(self, value)
        except (EOFError, OSError, ValueError):
            if not self.has_left:
                on_fault(self, None)

    def send(self, kind: bytes, value: Any) -> None:
        """Raises RankError: the other is gone."""
        try:
            with self._sending:
                size = send_frame(self._connection, kind, value)
        except OSError as error:
            # A connection that is closed at the other end says the same here as to whoever reads from it.
            closed = isinstance(error, BrokenPipeError | ConnectionResetError)
            what = "has ended" if self.has_left else "has died" if closed else f"cannot be reached: {error}"
            raise RankError(f"rank {self.rank} {what}") from None
        if kind == DATA:
            self.num_sent += 1
            self.bytes_sent += size

    def receive(self) -> Any:
        """Return the next value that the other has sent, waiting for it. Raises RankError: it has left."""
        value = self._inbox.get()
        if value is None:
            self._inbox.put(None)
            raise RankError(f"rank {self.rank} has ended")
        return value

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


EXIT_STATUS = 70  # of a process that ends because of another
STEP_FACTOR = 4  # a step in which every rank is busy may take so many timeouts: it may have to compile
GRACE_SECONDS = 2.0  # for the last words: reports to other ranks, answers to clients


class Watch:
    """Threads beside the one that computes.

    - A connection that closes without a farewell: the other has died. Noticed at once.
    - A rank that says nothing for ``timeout`` seconds: it is stopped, or its machine or network is gone.
    - This rank is in a step for ``timeout`` seconds while another has been in none: one of them is where the other
      will never come.
    - All are in a step for several times that: they hang.

    Args:
        rank, size: of this process.
        peers: that it is connected to.
        timeout: seconds.
    """

    def __init__(self, rank: int, size: int, peers: Sequence[Peer], timeout: float) -> None:
        self.rank, self.size, self.peers, self.timeout = rank, size, peers, timeout
        self.on_fault: list[Callable[[str], None]] = []
        self.explain: Callable[[Any], str] = str  # what another rank reports, in words
        self.step = 0
        self._idle_since: float | None = time.monotonic()
        self._busy_since = 0.0
        self._closed = threading.Event()
        self._ending = threading.Lock()

    def start(self) -> None:
        for peer in self.peers:
            peer.start(self._reported)
        for target in (self._beat, self._look):
            threading.Thread(target=target, name=f"ranks: {target.__name__}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    # What the computing thread says ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins, or goes on after a wait."""
        self._busy_since, self._idle_since = time.monotonic(), None

    def end(self) -> None:
        """A step has ended, or waits for what other ranks say."""
        self._idle_since = time.monotonic()

    @property
    def is_busy(self) -> bool:
        return self._idle_since is None

    # Threads --------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self.timeout / 6)):
            idle = self._idle_since
            for peer in self.peers:
                with suppress(RankError):  # the reading thread knows
                    peer.send(BEAT, [self.step, None if idle is None else time.monotonic() - idle])

    def _look(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(min(0.5, self.timeout / 6)):
            now = time.monotonic()
            if now - looked_at > self.timeout / 2:  # this process was stopped itself, and has heard nobody
                for peer in self.peers:
                    peer.heard_at = now
            looked_at = now
            found = self._fault(now)
            if found is not None:
                self.end_process(found)

    def _fault(self, now: float) -> str | None:
        for peer in self.peers:
            silent = now - peer.heard_at
            if silent > self.timeout and not peer.has_left:
                return f"rank {peer.rank} has said nothing for {silent:.0f} s: it is stopped or cannot be reached"
        if self._idle_since is not None:
            return None
        busy = now - self._busy_since
        for peer in self.peers:
            idle = peer.idle_since
            if busy > self.timeout and idle is not None and now - idle > self.timeout:
                where = "has ended" if peer.has_left else f"has been in no step since step {peer.step}"
                return f"rank {self.rank} has been in step {self.step} for {busy:.0f} s, and rank {peer.rank} {where}"
        if busy > STEP_FACTOR * self.timeout:
            return f"rank {self.rank} has been in step {self.step} for {busy:.0f} s, and so have the others"
        return None

    # Ends -----------------------------------------------------------------------------------------------------------

    def _reported(self, peer: Peer, report: Any) -> None:
        if self._closed.is_set():
            return
        text = f"rank {peer.rank} has died" if report is None else self.explain(report)
        self.end_process(text)

    def end_process(self, text: str, *, report: Any = None) -> None:
        """Tell everybody, and leave. Does not return.

        Args:
            text: what has happened.
            report: what the others are told, if not that.
        """
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread is at it
        last = threading.Thread(target=self._last_words, args=(text, text if report is None else report), daemon=True)
        last.start()
        last.join(GRACE_SECONDS)
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(EXIT_STATUS)

    def _last_words(self, text: str, report: Any) -> None:
        with suppress(Exception):
            print(f"mlx_paged: rank {self.rank} of {self.size} ends: {text}", file=sys.stderr, flush=True)
        threads = [threading.Thread(target=self._try_to_send, args=(peer, report), daemon=True) for peer in self.peers]
        threads += [threading.Thread(target=callback, args=(text,), daemon=True) for callback in self.on_fault]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GRACE_SECONDS)

    @staticmethod
    def _try_to_send(peer: Peer, report: Any) -> None:
        with suppress(RankError):
            peer.send(FAULT, report)
