"""How ranks come to know each other: rank 0 listens, and says where by one reduction of the model's own network."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import mlx.core as mx

from ...errors import RankError
from .watch import Peer, read_bytes

_MOST_BYTES = 1024  # of the address, as integers in a reduction
SECRET_VARIABLE = "MLX_PAGED_RANK_SECRET"  # the same on all ranks, or unset
_NONCE_BYTES = _PROOF_BYTES = 32
_PROOF_SECONDS = 5.0
_POLL_SECONDS = 0.05
_LOOPBACK = ("127.", "::1", "localhost")


def meet(group: Any, timeout: float) -> list[Peer]:
    """Return the other ranks: all of them for rank 0, rank 0 for the others. A collective call.

    Args:
        group: of MLX.
        timeout: seconds to wait for each other.

    Raises:
        RankError: they have not met.
    """
    if group.rank() == 0:
        hosts = _own_hosts()
        is_local = all(host.startswith(_LOOPBACK) for host in hosts)
        with _listen(is_local, hosts[0] if len(hosts) == 1 else None) as listener:
            token = secrets.token_hex(16)
            # The loopback comes last: on another machine it is another process's.
            where = [[*hosts, "127.0.0.1"], listener.getsockname()[1], token]
            _tell(group, where)
            return _accept(listener, group.size(), token, timeout)
    hosts, port, token = _tell(group, None)
    return [_connect(hosts, port, token, group.rank(), timeout)]


def _own_hosts() -> list[str]:
    """Return where others may reach this process, as the launcher has told it; else the machine's own names."""
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
    """Listen on the interface of ``host``; on all where there are several, or this machine does not have it."""
    if is_local:
        return socket.create_server(("127.0.0.1", 0))
    if host is not None:
        with suppress(OSError):
            return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _tell(group: Any, where: list[Any] | None) -> list[Any]:
    """Rank 0's value on every rank, by a reduction: there is no other way yet."""
    encoded = b"" if where is None else json.dumps(where).encode()
    if len(encoded) > _MOST_BYTES:
        raise RankError(f"rank 0 has too many addresses: {len(encoded)} bytes")
    padded = encoded + b" " * (_MOST_BYTES - len(encoded)) if where is not None else bytes(_MOST_BYTES)
    try:
        values: Any = mx.distributed.all_sum(mx.array(list(padded), mx.int32), group=group).tolist()
    except RuntimeError as error:
        raise RankError(f"another rank has ended while it started: {error}") from error
    found: list[Any] = json.loads(bytes(values))
    return found


def _accept(listener: socket.socket, size: int, token: str, timeout: float) -> list[Peer]:
    """Wait for the other ranks. A thread per connection: a stranger keeps nobody waiting."""
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
    """Have the other end prove that it knows the token, then prove it to the other end.

    Each side signs the other's random bytes. What a stranger sends has a fixed size and is not parsed.
    """
    with suppress(OSError, EOFError):
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.settimeout(_PROOF_SECONDS)
        connection.sendall(nonce)
        until = time.monotonic() + _PROOF_SECONDS
        said = b""
        while len(said) < 4 + _NONCE_BYTES + _PROOF_BYTES:
            connection.settimeout(max(0.01, until - time.monotonic()))  # for all of it, not for each byte
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
            reasons.append(f"{host}: it is not rank 0")
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
