"""Connections between ranks: rank 0 listens, and sends its address and a token to the others in a reduction."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import mlx.core as mx

from ..errors import RankError

_ADDRESS_BYTES = 512  # of rank 0; in the reduction each is an int32
_TOKEN_BYTES = 16
_STRANGER_SECONDS = 2.0  # in which a new connection has to send its token


class Connection:
    """The connection to another rank; messages are lines of JSON. A thread reads what the other rank sends.

    Args:
        rank: the other rank.
        source: a socket to it; owned by this object from now on.
        lines: what reads from the socket.
        timeout: seconds after which the system ends it if the other machine does not answer any more.

    Attributes:
        has_left: the other rank has announced that it ends.
    """

    def __init__(self, rank: int, source: socket.socket, lines: BinaryIO, timeout: float) -> None:
        self.rank = rank
        self.has_left = False
        self._socket, self._lines = source, lines
        _settle(source, timeout)
        self._sending = threading.Lock()
        self._inbox: SimpleQueue[list[Any] | None] = SimpleQueue()

    def start(self, on_end: Callable[[str], None]) -> None:
        """Start the reading thread, which calls ``on_end`` if the other rank has failed, with the reason."""
        threading.Thread(target=self._read_all, args=(on_end,), name=f"rank {self.rank}", daemon=True).start()

    def _read_all(self, on_end: Callable[[str], None]) -> None:
        why = f"rank {self.rank} has died"
        with suppress(OSError, ValueError):
            for line in self._lines:
                message = json.loads(line)
                if isinstance(message, str):
                    why = message
                    break
                self._inbox.put(message)
        if why:
            on_end(why)
        self.has_left = True
        self._inbox.put(None)

    def send(self, message: list[Any] | str) -> None:
        """Send JSON-serialisable values, or why this rank ends: a text, "" if the other rank may go on.

        Raises:
            RankError: the other rank is gone.
        """
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            if self.has_left:
                raise OSError
            with self._sending:
                self._socket.sendall(line)
        except OSError:
            raise RankError(f"rank {self.rank} has {'ended' if self.has_left else 'died'}") from None

    def receive(self) -> list[Any]:
        """Wait for the next values from the other rank, and return them. Raises RankError: it has ended."""
        if (values := self._inbox.get()) is None:
            self._inbox.put(None)
            raise RankError(f"rank {self.rank} has ended")
        return values

    def close(self) -> None:
        """Tell the other rank that this one ends, and close the connection."""
        with suppress(RankError):
            self.send("")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _settle(source: socket.socket, timeout: float) -> None:
    """Set a connection up: it waits without end, sends at once, and ends if the other machine is lost."""
    source.settimeout(None)
    source.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, int(timeout / 4))
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPALIVE", every),  # macOS's name for it
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(1000 * timeout)),
    ):
        with suppress(AttributeError):
            source.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# Meeting --------------------------------------------------------------------------------------------------------------


def meet(group: Any, timeout: float) -> list[Connection]:
    """Connect rank 0 to all others, and return the connections of this rank. A collective call.

    Args:
        group: MLX's group.
        timeout: seconds to wait for the other ranks.

    Raises:
        RankError: the ranks could not connect.
    """
    if group.rank() > 0:
        host, port, token = _share_address(group, None)
        return [_connect(host, port, token, group.rank(), timeout)]
    host = _own_host()
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise RankError(f"rank 0 cannot listen at {host or 'any address'}: {error}") from error
    with listener:
        token = secrets.token_hex(_TOKEN_BYTES)
        _share_address(group, [host or socket.gethostname(), listener.getsockname()[1], token])
        return _accept(listener, group.size(), token, timeout)


def _own_host() -> str:
    """Return this process's host from the launcher's variables; "" if they have none: every address of the machine.

    Raises:
        RankError: the launcher's list of hosts cannot be read.
    """
    if path := os.environ.get("MLX_HOSTFILE"):
        try:
            addresses = json.loads(Path(path).read_text())[int(os.environ["MLX_RANK"])]
            return str(addresses[0]).rsplit(":", 1)[0]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RankError(f"cannot read rank 0's address in MLX_HOSTFILE, {path}: {error!r}") from error
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rsplit(":", 1)[0]
    return os.environ.get("NCCL_HOST_IP", "")


def _share_address(group: Any, address: list[Any] | None) -> list[Any]:
    """Return rank 0's address and token on every rank, by a reduction: there are no connections yet."""
    encoded = b"" if address is None else json.dumps(address).encode()
    mine = mx.array(list(encoded.ljust(_ADDRESS_BYTES, b" " if address else b"\0")), mx.int32)
    try:
        values: Any = mx.distributed.all_sum(mine, group=group).tolist()
    except RuntimeError as error:
        raise RankError(f"another rank ended during the start: {error}") from error
    found: list[Any] = json.loads(bytes(values))
    return found


def _accept(listener: socket.socket, size: int, token: str, timeout: float) -> list[Connection]:
    """Wait for the other ranks, each of which sends the token and its number first."""
    found: dict[int, Connection] = {}
    until = time.monotonic() + timeout
    while len(found) < size - 1:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            source, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - set(found))
            raise RankError(f"rank(s) {missing} have not connected to rank 0 within {timeout:.0f} s") from None
        source.settimeout(_STRANGER_SECONDS)
        lines, said = source.makefile("rb"), b""
        with suppress(OSError):
            said = lines.readline(len(_hello(token, 0)))
        rank = next((each for each in range(1, size) if secrets.compare_digest(said, _hello(token, each))), None)
        if rank is None or rank in found:
            source.close()
        else:
            found[rank] = Connection(rank, source, lines, timeout)
    return [found[rank] for rank in sorted(found)]


def _hello(token: str, rank: int) -> bytes:
    """Return the line that a rank sends first."""
    return f"{token}{rank:8}\n".encode()


def _connect(host: str, port: int, token: str, rank: int, timeout: float) -> Connection:
    try:
        source = socket.create_connection((host, port), timeout)
        source.sendall(_hello(token, rank))
    except OSError as error:
        raise RankError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}") from error
    return Connection(0, source, source.makefile("rb"), timeout)
