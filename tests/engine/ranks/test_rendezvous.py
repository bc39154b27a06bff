"""Who may connect, and what is compared; in one process."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

import pytest

from mlx_paged.engine.ranks import peers as rendezvous
from mlx_paged.engine.ranks.peers import Peer
from mlx_paged.engine.ranks.ranks import StepRecord
from mlx_paged.engine.ranks.world import group_of, parse_timeout
from mlx_paged.errors import ConfigError, RankError
from tests.support.models.builders import build


def test_strangers_are_turned_away() -> None:
    found: list[Peer] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        accepting = threading.Thread(target=lambda: found.extend(rendezvous._accept(listener, 2, "right", 30)))
        accepting.start()
        # One that says nothing, and one that promises 1 GB, stay connected meanwhile.
        silent, dripping = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        dripping.sendall(struct.pack(">Ic", 1 << 30, b"D"))
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 20, b"", b"[" * 200_000):
            with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                stranger.sendall(said)
        for token, rank in (("wrong", 1), ("right", 7), ("right", 0)):
            with pytest.raises(RankError):
                rendezvous._connect(["127.0.0.1"], port, token, rank, 30)
        peer = rendezvous._connect(["127.0.0.1"], port, "right", 1, 30)
        accepting.join(30)
        silent.close()
        dripping.close()
    assert [each.rank for each in found] == [1]
    for each in (peer, *found):
        each.close()


def test_a_rank_that_ends_during_the_first_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("[ring] connection to a peer was lost")

    monkeypatch.setattr(rendezvous.mx.distributed, "all_sum", lost)
    with pytest.raises(RankError, match=r"another rank has ended while it started: .*peer was lost"):
        rendezvous._tell(None, None)


def test_ranks_need_the_same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, "one")
    proof = rendezvous._proof("token", b"said")
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, "other")
    assert rendezvous._proof("token", b"said") != proof


def test_ranks_that_do_not_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(RankError, match=r"rank\(s\) \[1, 2\]"):
        rendezvous._accept(listener, 3, "token", 0.05)


def test_nobody_to_connect_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RankError, match="rank 1 cannot reach rank 0"):
        rendezvous._connect(["127.0.0.1"], port, "token", 1, 1)


def test_a_record_tells_decisions_apart() -> None:
    def checksum(*entries: tuple[str, dict[str, list[int]]]) -> int:
        record = StepRecord()
        for what, values in entries:
            record.note(what, values)
        return record.checksum

    same = ("step", {"decode": [1, 2], "tokens": [5]})
    assert checksum(same) == checksum(same)
    others = [
        ("remove", same[1]),
        ("step", {"decode": [1, 2], "tokens": [6]}),
        ("step", {"decode": [1], "tokens": [2, 5]}),
        ("step", {"decode": [2, 1], "tokens": [5]}),
    ]
    assert len({checksum(each) for each in (same, *others)}) == 5
    assert checksum(same, others[0]) != checksum(others[0], same)


def test_remarks_are_reported_and_not_compared() -> None:
    one, two = StepRecord(), StepRecord()
    one.note("step", {"failed": [3]}, "out of memory")
    two.note("step", {"failed": [3]})
    assert one.checksum == two.checksum
    assert "out of memory" in one.describe()


def test_a_model_that_is_all_here_has_no_ranks() -> None:
    assert group_of(build("llama")) is None
    assert group_of(object()) is None


@pytest.mark.parametrize("text", ["", "none", "0", "-3", "inf", "nan", "0.5"])
def test_timeouts_that_cannot_be_used(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_timeout(text)
