"""Who may connect, and what is compared; in one process."""

from __future__ import annotations

import socket
import threading

import pytest

from mlx_paged.engine.ranks import rendezvous
from mlx_paged.engine.ranks.peer import DATA, Peer, send_frame
from mlx_paged.engine.ranks.step_record import StepRecord
from mlx_paged.engine.ranks.world import group_of, parse_timeout
from mlx_paged.errors import ConfigError, RankError
from tests.support.models.builders import build


def test_strangers_are_turned_away() -> None:
    found: list[Peer] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        accepting = threading.Thread(target=lambda: found.extend(rendezvous._accept(listener, 2, "right", 30)))
        accepting.start()
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 20, b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
        for token, rank in (("wrong", 1), ("right", 7), ("right", None), (None, 1)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                send_frame(stranger, DATA, [token, rank])
                assert stranger.recv(1) == b""
        peer = rendezvous._connect(["127.0.0.1"], port, "right", 1, 30)
        accepting.join(30)
    assert [each.rank for each in found] == [1]
    for each in (peer, *found):
        each.close()


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
