"""Connections between ranks: rank 0 listens, and sends its address and a token to the others in a reduction."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

from ..errors import RankError

MOST_BYTES = 1 << 30  # of a message
DATA, FAULT, LEAVE = b"D", b"F", b"L"

_HEAD = struct.Struct(">Ic")  # length of the body in bytes, kind
_MOST_ADDRESS_BYTES = 1024  # in the reduction each byte is an int32
_TOKEN_BYTES = 16
_STRANGER_SECONDS = 2.0  # in which a new connection has to send its token
_CONNECT_SECONDS = 5.0  # to each address of rank 0
_LOOPBACK = ("127.", "::1", "localhost")


class Connection:
    """The connection to another rank. A thread reads what it sends.

    Args:
        rank: the other rank.
        socket: to it; owned by this object from now on.
        timeout: seconds after which the system ends it if the other machine does not answer any more.

    Attributes:
        has_left: the other rank has announced that it ends.
    """

    def __init__(self, rank: int, socket: socket.socket, timeout: float) -> None:
        self.rank = rank
        self.has_left = False
        self._socket = _settled(socket, timeout)
        self._sending = threading.Lock()
        self._inbox: SimpleQueue[Any] = SimpleQueue()

    def start(self, on_end: Callable[[str], None]) -> None:
        """Start the reading thread, which calls ``on_end`` if the other rank has failed, with the reason."""
        threading.Thread(target=self._read_all, args=(on_end,), name=f"rank {self.rank}", daemon=True).start()

    def _read_all(self, on_end: Callable[[str], None]) -> None:
        try:
            while True:
                length, kind = _HEAD.unpack(_read(self._socket, _HEAD.size))
                value = json.loads(_read(self._socket, length).decode("utf-8", "surrogatepass"))
                if kind == FAULT:
                    on_end(value)
                self.has_left = self.has_left or kind == LEAVE
                self._inbox.put((kind, value))
        except (EOFError, OSError, ValueError):
            if not self.has_left:
                on_end(f"rank {self.rank} has died")

    def send(self, kind: bytes, value: Any) -> None:
        """Send a message. Raises RankError: the other rank is gone, or the value is too large."""
        body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(body) > MOST_BYTES:
            raise RankError(f"a message to another rank has {len(body):,} bytes; the limit is {MOST_BYTES:,}")
        self.check()
        try:
            with self._sending:
                self._socket.sendall(_HEAD.pack(len(body), kind) + body)
        except OSError:
            raise RankError(f"rank {self.rank} has {'ended' if self.has_left else 'died'}") from None

    def receive(self) -> Any:
        """Wait for the next value from the other rank, and return it. Raises RankError: it has ended."""
        kind, value = self._inbox.get()
        if kind == LEAVE:
            self._inbox.put((kind, value))
            self.check()
        return value

    def check(self) -> None:
        """Raise RankError if the other rank has ended."""
        if self.has_left:
            raise RankError(f"rank {self.rank} has ended")

    def close(self) -> None:
        """Tell the other rank that this one ends, and close the connection."""
        with suppress(RankError):
            self.send(LEAVE, None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _read(source: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises OSError; EOFError at the end."""
    parts = []
    while count:
        part = source.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the connection is closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _settled(source: socket.socket, timeout: float) -> socket.socket:
    """Set a connection up: it waits without end, sends at once, and ends if the other machine is lost."""
    source.settimeout(None)
    if source.family == socket.AF_UNIX:  # a pair of sockets in a test
        return source
    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    source.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, int(timeout / 4))
    for name, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPALIVE", every),  # macOS's name for it
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(1000 * timeout)),
    ):
        if hasattr(socket, name):
            source.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return source


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
        hosts, port, token = _share_address(group, None)
        return [_connect(hosts, port, bytes.fromhex(token), group.rank(), timeout)]
    hosts = _own_hosts()
    with _listen(is_local=all(host.startswith(_LOOPBACK) for host in hosts)) as listener:
        token = secrets.token_bytes(_TOKEN_BYTES)
        # The loopback address comes last: on another machine it leads to another process.
        _share_address(group, [[*hosts, "127.0.0.1"], listener.getsockname()[1], token.hex()])
        return _accept(listener, group.size(), token, timeout)


def _own_hosts() -> list[str]:
    """Return up to 8 addresses of this process: from the launcher's variables, else the machine's own."""
    hosts: list[str] = []
    with suppress(KeyError, OSError, ValueError, IndexError, TypeError):
        listed = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        hosts += [address.rsplit(":", 1)[0] for address in listed[int(os.environ.get("MLX_RANK", 0))]]
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        if os.environ.get(name):
            hosts.append(os.environ[name].rsplit(":", 1)[0] if name.startswith("MLX") else os.environ[name])
    if not hosts:
        name = socket.gethostname()
        with suppress(OSError):
            hosts += [name, *socket.gethostbyname_ex(name)[2]]
    return list(dict.fromkeys(hosts))[:8]


def _listen(*, is_local: bool) -> socket.socket:
    """Listen on the loopback if ``is_local``, else on all interfaces."""
    if is_local:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _share_address(group: Any, where: list[Any] | None) -> list[Any]:
    """Return rank 0's value on every rank, by a reduction: there are no connections yet."""
    encoded = b"" if where is None else json.dumps(where).encode().ljust(_MOST_ADDRESS_BYTES)
    if len(encoded) > _MOST_ADDRESS_BYTES:
        raise RankError(f"the addresses of rank 0 take {len(encoded):,} bytes; the limit is {_MOST_ADDRESS_BYTES:,}")
    try:
        mine = mx.array(list(encoded or bytes(_MOST_ADDRESS_BYTES)), mx.int32)
        values: Any = mx.distributed.all_sum(mine, group=group).tolist()
    except RuntimeError as error:
        raise RankError(f"another rank ended during the start: {error}") from error
    found: list[Any] = json.loads(bytes(values))
    return found


def _accept(listener: socket.socket, size: int, token: bytes, timeout: float) -> list[Connection]:
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
        said = b""
        with suppress(OSError, EOFError):
            said = _read(source, _TOKEN_BYTES + 4)
        rank = int.from_bytes(said[_TOKEN_BYTES:])
        if secrets.compare_digest(said[:_TOKEN_BYTES], token) and 0 < rank < size and rank not in found:
            source.sendall(token[::-1])
            found[rank] = Connection(rank, source, timeout)
        else:
            source.close()
    return [found[rank] for rank in sorted(found)]


def _connect(hosts: list[str], port: int, token: bytes, rank: int, timeout: float) -> Connection:
    reasons = []
    for host in hosts:
        try:
            source = socket.create_connection((host, port), timeout=min(_CONNECT_SECONDS, timeout))
            source.sendall(token + rank.to_bytes(4))
            if _read(source, _TOKEN_BYTES) == token[::-1]:
                return Connection(0, source, timeout)
            reasons.append(f"{host}: the process there is not rank 0")
        except (OSError, EOFError) as error:
            reasons.append(f"{host}: {error}")
    raise RankError(f"rank {rank} cannot reach rank 0 at port {port} ({'; '.join(reasons)})")
