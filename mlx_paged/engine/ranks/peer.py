"""Peer: the connection to another rank. Frames of a kind and a value in JSON; nothing that is read is ever executed."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
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
    """The next frame. Raises OSError, or ValueError for what is none; EOFError at the end."""
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
        """The next value that the other has sent, waiting for it. Raises RankError: it has left."""
        value = self._inbox.get()
        if value is None:
            self._inbox.put(None)
            raise RankError(f"rank {self.rank} has ended")
        return value

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
