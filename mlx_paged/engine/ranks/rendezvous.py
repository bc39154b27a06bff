"""How ranks come to know each other: rank 0 listens, and says where by one reduction of the model's own network."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import RankError
from .peer import DATA, Peer, read_frame, send_frame

_MOST_BYTES = 1024  # of the address, as integers in a reduction
_LOOPBACK = ("127.", "::1", "localhost")


def meet(group: Any, timeout: float) -> list[Peer]:
    """The other ranks: all of them for rank 0, rank 0 for the others. A collective call.

    Args:
        group: of MLX.
        timeout: seconds to wait for each other.

    Raises:
        RankError: they have not met.
    """
    if group.rank() == 0:
        hosts = _own_hosts()
        is_local = all(host.startswith(_LOOPBACK) for host in hosts)
        with _listen(is_local) as listener:
            token = secrets.token_hex(16)
            # The loopback comes last: on another machine it is another process's.
            where = [[*hosts, "127.0.0.1"], listener.getsockname()[1], token]
            _tell(group, where)
            return _accept(listener, group.size(), token, timeout)
    hosts, port, token = _tell(group, None)
    return [_connect(hosts, port, token, group.rank(), timeout)]


def _own_hosts() -> list[str]:
    """Where others may reach this process, as the launcher has told it; else the machine's own names."""
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


def _listen(is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server(("127.0.0.1", 0))
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
    summed = mx.distributed.all_sum(mx.array(list(padded), mx.int32), group=group)
    values: Any = summed.tolist()
    found: list[Any] = json.loads(bytes(values))
    return found


def _accept(listener: socket.socket, size: int, token: str, timeout: float) -> list[Peer]:
    peers: dict[int, Peer] = {}
    until = time.monotonic() + timeout
    while len(peers) < size - 1:
        listener.settimeout(max(0.01, until - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - set(peers))
            raise RankError(f"rank(s) {missing} have not connected to rank 0 within {timeout:.0f} s") from None
        with suppress(OSError, EOFError, ValueError, TypeError):  # a stranger, who is let go
            connection.settimeout(min(5.0, timeout))
            _, (theirs, rank) = read_frame(connection)
            if hmac.compare_digest(str(theirs), token) and rank in range(1, size) and rank not in peers:
                send_frame(connection, DATA, token[::-1])
                peers[rank] = Peer(rank, _settled(connection))
                continue
        connection.close()
    return [peers[rank] for rank in sorted(peers)]


def _connect(hosts: list[str], port: int, token: str, rank: int, timeout: float) -> Peer:
    reasons = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=min(5.0, timeout))
        except OSError as error:
            reasons.append(f"{host}: {error}")
            continue
        try:
            send_frame(connection, DATA, [token, rank])
            if hmac.compare_digest(str(read_frame(connection)[1]), token[::-1]):
                return Peer(0, _settled(connection))
            reasons.append(f"{host}: it is not rank 0")
        except (OSError, EOFError, ValueError) as error:
            reasons.append(f"{host}: {error}")
        connection.close()
    raise RankError(f"rank {rank} cannot reach rank 0 at port {port} ({'; '.join(reasons)})")


def _settled(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
