"""Peer and Watch: connections to the other ranks, and the detection of ranks that are gone.

Rank 0 listens, and sends its address to the others in one reduction over the model's own network.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from typing import Any

import mlx.core as mx

from ..errors import RankError

_HEAD = struct.Struct(">Ic")  # length of the body in bytes, kind
MOST_BYTES = 1 << 30

DATA, BEAT, FAULT, LEAVE = b"D", b"B", b"F", b"L"


def send_frame(connection: socket.socket, kind: bytes, value: Any) -> int:
    """Send a frame. Returns its size in bytes. Raises OSError; RankError: the value is too large."""
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(body) > MOST_BYTES:
        raise RankError(f"a message to another rank has {len(body):,} bytes; the limit is {MOST_BYTES:,}")
    connection.sendall(_HEAD.pack(len(body), kind) + body)
    return _HEAD.size + len(body)


def read_frame(connection: socket.socket) -> tuple[bytes, Any]:
    """Return the kind and value of the next frame. Raises OSError; ValueError: it is no frame; EOFError at the end."""
    length, kind = _HEAD.unpack(read_bytes(connection, _HEAD.size))
    if length > MOST_BYTES:
        raise ValueError(f"a frame has {length:,} bytes; the limit is {MOST_BYTES:,}")
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
    """The connection to another rank. A thread reads what it sends.

    Args:
        rank: the other rank.
        connection: to it; owned by this object from now on.

    Attributes:
        heard_at: when it last sent something, by ``time.monotonic``.
        idle_since: since when it reports to be in no step; None: it is in one.
        step: the last step it has begun.
        has_left: it has announced that it ends.
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
        """Start the reading thread.

        Args:
            on_fault: called by that thread with the other rank's report, or None if it has ended without one.
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
        """Send a message. Raises RankError: the other rank is gone."""
        try:
            with self._sending:
                size = send_frame(self._connection, kind, value)
        except OSError as error:
            # The same words for a connection closed at the other end as in Watch._reported, whichever comes first.
            closed = isinstance(error, BrokenPipeError | ConnectionResetError)
            what = "has ended" if self.has_left else "has died" if closed else f"cannot be reached: {error}"
            raise RankError(f"rank {self.rank} {what}") from None
        if kind == DATA:
            self.num_sent += 1
            self.bytes_sent += size

    def receive(self) -> Any:
        """Wait for the next value from the other rank, and return it. Raises RankError: it has left."""
        value = self._inbox.get()
        if value is None:
            self._inbox.put(None)
            raise RankError(f"rank {self.rank} has ended")
        return value

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


EXIT_STATUS = 70  # of a process that ends because of another rank
STEP_FACTOR = 4  # timeouts that a step may take if every rank is busy: it may have to compile
GRACE_SECONDS = 2.0  # before the process ends, for reports to other ranks and answers to clients


class Watch:
    """Threads that end this process if another rank is gone or the ranks hang.

    - A connection closes without a ``LEAVE``: the other rank has died. Noticed at once.
    - A rank sends nothing for ``timeout`` seconds: it is stopped, or its machine or network is gone.
    - This rank has been in a step for ``timeout`` seconds, and another in none for as long: one of them waits where the
      other never arrives.
    - All ranks have been in a step for :data:`STEP_FACTOR` times ``timeout``: they hang.

    Args:
        rank, size: this rank, and the number of ranks.
        peers: the ranks it is connected to.
        timeout: in seconds.
    """

    def __init__(self, rank: int, size: int, peers: Sequence[Peer], timeout: float) -> None:
        self.rank, self.size, self.peers, self.timeout = rank, size, peers, timeout
        self.fault_callbacks: list[Callable[[str], None]] = []
        self.explain: Callable[[Any], str] = str  # turns another rank's report into text
        self.step = 0
        self._idle_since: float | None = time.monotonic()
        self._busy_since = 0.0
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self._is_ending = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        for peer in self.peers:
            peer.start(self._reported)
        for target in (self._beat, self._look):
            threading.Thread(target=target, name=f"ranks: {target.__name__}", daemon=True).start()

    def close(self) -> None:
        """Stop the threads, and ignore what other ranks report."""
        self._closed.set()

    # For the computing thread ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a step begins, or goes on after a wait."""
        self._busy_since, self._idle_since = time.monotonic(), None

    def end(self) -> None:
        """Note that a step has ended, or waits for other ranks."""
        self._idle_since = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether this rank is in a step."""
        return self._idle_since is None

    def await_fault(self) -> None:
        """Wait up to :data:`GRACE_SECONDS` for the threads to notice a fault. If they do, the process ends, and this
        does not return."""
        if self._is_ending.wait(min(GRACE_SECONDS, self.timeout / 2)):
            threading.Event().wait()

    # Threads --------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._closed.wait(min(1.0, self.timeout / 6)):
            idle = self._idle_since
            for peer in self.peers:
                with suppress(RankError):  # the reading thread notices
                    peer.send(BEAT, [self.step, None if idle is None else time.monotonic() - idle])

    def _look(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(min(0.5, self.timeout / 6)):
            now = time.monotonic()
            if now - looked_at > self.timeout / 2:  # this process itself was stopped, and received nothing
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
                return f"rank {peer.rank} has sent nothing for {silent:.0f} s: it is stopped or cannot be reached"
        if self._idle_since is not None:
            return None
        busy = now - self._busy_since
        for peer in self.peers:
            idle = peer.idle_since
            if busy > self.timeout and idle is not None and now - idle > self.timeout:
                where = "has ended" if peer.has_left else f"has been idle since step {peer.step}"
                return f"rank {self.rank} has been in step {self.step} for {busy:.0f} s, and rank {peer.rank} {where}"
        if busy > STEP_FACTOR * self.timeout:
            return f"rank {self.rank} has been in step {self.step} for {busy:.0f} s, and so have the others"
        return None

    # Ending ---------------------------------------------------------------------------------------------------------

    def _reported(self, peer: Peer, report: Any) -> None:
        if self._closed.is_set():
            return
        text = f"rank {peer.rank} has died" if report is None else self.explain(report)
        self.end_process(text)

    def end_process(self, text: str) -> None:
        """Report to all ranks what has happened, and end the process. Does not return."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # another thread already ends the process
        self._is_ending.set()
        last = threading.Thread(target=self._last_words, args=(text,), daemon=True)
        last.start()
        last.join(GRACE_SECONDS)
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(EXIT_STATUS)

    def _last_words(self, text: str) -> None:
        with suppress(Exception):
            print(f"mlx_paged: rank {self.rank} of {self.size} ends: {text}", file=sys.stderr, flush=True)
        threads = [threading.Thread(target=self._try_to_send, args=(peer, text), daemon=True) for peer in self.peers]
        threads += [threading.Thread(target=callback, args=(text,), daemon=True) for callback in self.fault_callbacks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GRACE_SECONDS)

    @staticmethod
    def _try_to_send(peer: Peer, text: str) -> None:
        with suppress(RankError):
            peer.send(FAULT, text)


_MOST_BYTES = 1024  # of rank 0's address; in the reduction each byte is an int32
SECRET_VARIABLE = "MLX_PAGED_RANK_SECRET"  # has the same value on all ranks, or is unset
_NONCE_BYTES = _PROOF_BYTES = 32
_PROOF_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LOOPBACK = ("127.", "::1", "localhost")


def meet(group: Any, timeout: float) -> list[Peer]:
    """Connect rank 0 to all others, and return the peers of this rank. A collective call.

    Args:
        group: MLX's group.
        timeout: seconds to wait for the other ranks.

    Raises:
        RankError: the ranks could not connect.
    """
    if group.rank() == 0:
        hosts = _own_hosts()
        is_local = all(host.startswith(_LOOPBACK) for host in hosts)
        with _listen(is_local, hosts[0] if len(hosts) == 1 else None) as listener:
            token = secrets.token_hex(16)
            # The loopback address comes last: on another machine it leads to another process.
            where = [[*hosts, "127.0.0.1"], listener.getsockname()[1], token]
            _share_address(group, where)
            return _accept(listener, group.size(), token, timeout)
    hosts, port, token = _share_address(group, None)
    return [_connect(hosts, port, token, group.rank(), timeout)]


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


def _listen(is_local: bool, host: str | None) -> socket.socket:
    """Listen on the loopback if ``is_local``, else on ``host``; on all interfaces if it is None or not here."""
    if is_local:
        return socket.create_server(("127.0.0.1", 0))
    if host is not None:
        with suppress(OSError):
            return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _share_address(group: Any, where: list[Any] | None) -> list[Any]:
    """Return rank 0's value on every rank, by a reduction: there are no connections yet."""
    encoded = b"" if where is None else json.dumps(where).encode()
    if len(encoded) > _MOST_BYTES:
        raise RankError(f"the addresses of rank 0 take {len(encoded):,} bytes; the limit is {_MOST_BYTES:,}")
    padded = encoded + b" " * (_MOST_BYTES - len(encoded)) if where is not None else bytes(_MOST_BYTES)
    try:
        values: Any = mx.distributed.all_sum(mx.array(list(padded), mx.int32), group=group).tolist()
    except RuntimeError as error:
        raise RankError(f"another rank ended during the start: {error}") from error
    found: list[Any] = json.loads(bytes(values))
    return found


def _accept(listener: socket.socket, size: int, token: str, timeout: float) -> list[Peer]:
    """Wait for the other ranks. Each connection has a thread, so that a stranger delays no rank."""
    found: Queue[tuple[int, socket.socket]] = Queue()
    peers: dict[int, Peer] = {}
    until = time.monotonic() + timeout
    listener.settimeout(_POLL_SECONDS)
    while len(peers) < size - 1:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            threading.Thread(target=_prove, args=(connection, token, size, found), daemon=True).start()
        with suppress(Empty):
            while True:
                rank, connection = found.get_nowait()
                if rank in peers:
                    connection.close()
                else:
                    peers[rank] = Peer(rank, _settled(connection))
        if time.monotonic() > until and len(peers) < size - 1:
            missing = sorted(set(range(1, size)) - set(peers))
            raise RankError(f"rank(s) {missing} have not connected to rank 0 within {timeout:.0f} s")
    return [peers[rank] for rank in sorted(peers)]


def _prove(connection: socket.socket, token: str, size: int, found: Queue[tuple[int, socket.socket]]) -> None:
    """Check that the other end knows the token, then prove to it that this one does.

    Each side signs the other's random bytes. At most a fixed number of bytes is read from a stranger, and none parsed.
    """
    with suppress(OSError, EOFError):
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.settimeout(_PROOF_SECONDS)
        connection.sendall(nonce)
        until = time.monotonic() + _PROOF_SECONDS
        said = b""
        while len(said) < 4 + _NONCE_BYTES + _PROOF_BYTES:
            connection.settimeout(max(0.01, until - time.monotonic()))  # one limit for the whole message
            part = connection.recv(4 + _NONCE_BYTES + _PROOF_BYTES - len(said))
            if not part:
                raise EOFError
            said += part
        theirs, proof = said[:-_PROOF_BYTES], said[-_PROOF_BYTES:]
        rank = int.from_bytes(theirs[:4])
        if hmac.compare_digest(proof, _proof(token, nonce + theirs)) and 0 < rank < size:
            connection.sendall(_proof(token, theirs + nonce))
            found.put((rank, connection))
            return
    connection.close()


def _connect(hosts: list[str], port: int, token: str, rank: int, timeout: float) -> Peer:
    reasons = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=min(_PROOF_SECONDS, timeout))
        except OSError as error:
            reasons.append(f"{host}: {error}")
            continue
        try:
            nonce = read_bytes(connection, _NONCE_BYTES)
            mine = rank.to_bytes(4) + secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(mine + _proof(token, nonce + mine))
            if hmac.compare_digest(read_bytes(connection, _PROOF_BYTES), _proof(token, mine + nonce)):
                return Peer(0, _settled(connection))
            reasons.append(f"{host}: the process there is not rank 0")
        except (OSError, EOFError) as error:
            reasons.append(f"{host}: {error}")
        connection.close()
    raise RankError(f"rank {rank} cannot reach rank 0 at port {port} ({'; '.join(reasons)})")


def _proof(token: str, said: bytes) -> bytes:
    """Sign with the run's token, and with the secret of the environment if there is one."""
    return hmac.digest((token + os.environ.get(SECRET_VARIABLE, "")).encode(), said, "sha256")


def _settled(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
