"""Ranks that run one engine together: starts, answers, faults and ends."""

import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_paged.cli.server import check_ranks, parse
from mlx_paged.engine.scheduler import ScheduledStep
from mlx_paged.errors import ConfigError, RankError, RequestFailedError
from mlx_paged.ranks import connection, world
from mlx_paged.ranks import ranks as ranks_module
from mlx_paged.ranks.connection import Connection
from mlx_paged.ranks.ranks import EXIT_STATUS, Ranks
from mlx_paged.ranks.world import check_same, group_of, model_files, parse_timeout
from tests.support.cases import slow
from tests.support.models.builders import build
from tests.support.ranks import launch, scenarios

TIMEOUT = "3"
# Seconds until a test fails, for a busy machine. The awaited event takes TIMEOUT seconds or less.
MOST_SECONDS = 90.0


def ended(folder: Path, fault: str) -> list[launch.Ended]:
    """Run two ranks with a fault of :mod:`tests.support.ranks.faults` to their end."""
    return launch.worker(2, folder, f"fault:{fault}", MLX_PAGED_RANK_TIMEOUT=TIMEOUT).ended(MOST_SECONDS)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("diverge", "the decisions of rank 0 and rank 1 differ"),
        *slow(
            ("raise_late", "rank 1 has failed: RuntimeError: injected: out of memory"),
            ("raise", "rank 1 has failed: ValueError: injected: the script"),
            ("fail_call", "rank 1 has failed: ValueError: injected: the model"),
        ),
    ],
)
def test_fault_of_one_rank_ends_all_with_its_reason(name: str, reason: str, tmp_path: Path) -> None:
    for each in ended(tmp_path, name):
        assert each.status == EXIT_STATUS and reason in each.stderr


def test_rank_that_exits_early_ends_the_other_rank(tmp_path: Path) -> None:
    first, second = ended(tmp_path, "leave")
    assert second.status == 0
    assert first.status != 0
    assert "rank 1 has ended" in first.stderr


NAMES = [name for name in scenarios.SCENARIOS if name not in ("unseeded", "schedule")]
SAMPLE = "schedule:40"
WITH_FOUR = ["ragged"]  # waiting ranks spin, which slows the others on few cores


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """Return what a single process delivers, passed through JSON."""
    return json.loads(json.dumps(scenarios.play([name])[name]))


def _outcomes(size: int, folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return the outcomes of each rank: all scenarios in one launch."""
    for ended in launch.worker(size, folder, *names).ended(200):
        assert ended.status == 0, ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


# One test, as a launch takes 10 s of CPU. Four on few cores take minutes: MLX's ring waits by spinning.
@pytest.mark.parametrize("size", [2, *slow(4)])
def test_ranks_deliver_the_tokens_of_one_process(size: int, tmp_path: Path) -> None:
    names = [*NAMES, SAMPLE] if size == 2 else WITH_FOUR
    outcomes = _outcomes(size, tmp_path, *names, "unseeded")
    for outcome in outcomes:
        for name in names:
            assert outcome[name] == alone(name), name
            assert outcome[name]["tokens"]
        assert outcome["checksum"] == outcomes[0]["checksum"], "all ranks made the same decisions"
        assert outcome["unseeded"] == outcomes[0]["unseeded"], "draws without seeds are those of rank 0"


def test_scenarios_cover_what_they_are_named_for() -> None:
    assert alone("preemption")["preemptions"] > 0
    assert alone(SAMPLE)["preemptions"] > 0
    assert alone("packs")["packs"]
    assert alone("look_up")["drafted"] > 0 and alone("timed_look_up")["has_drafted"]
    assert alone("shared_prefixes")["computed"] < 3 * 40  # of 261


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ranks, socket.socket, SimpleQueue[Any]]]:
    """Rank 0 of two, the other end of its connection, and what it says and exits with at its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        mine, _ = listener.accept()
    ended: SimpleQueue[Any] = SimpleQueue()
    connected = Connection(1, mine, mine.makefile("rb"), 100.0)
    monkeypatch.setattr(ranks_module, "meet", lambda group, timeout: [connected])
    monkeypatch.setattr(ranks_module.os, "_exit", ended.put)
    ranks = Ranks(SimpleNamespace(rank=lambda: 0, size=lambda: 2), 100.0)
    ranks.on_fault(ended.put)
    yield ranks, theirs, ended
    ranks._is_closed = True
    ranks.close()
    theirs.close()


def test_end_of_a_connection_ends_the_process(pair: Any) -> None:
    _, theirs, ended = pair
    theirs.close()
    assert ended.get(timeout=MOST_SECONDS) == "rank 1 has died"
    assert ended.get(timeout=MOST_SECONDS) == EXIT_STATUS


def test_clients_are_told_of_the_end_without_a_stderr(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, theirs, ended = pair
    monkeypatch.setattr(ranks_module.sys, "stderr", SimpleNamespace())  # writing to it raises an error
    theirs.close()
    assert ended.get(timeout=MOST_SECONDS) == "rank 1 has died"


def test_failed_step_names_the_rank_that_is_gone(pair: Any) -> None:
    """MLX's reduction fails before the end of the connection is noticed."""
    ranks, theirs, ended = pair
    failure = RequestFailedError(2, RuntimeError("[ring] connection to a peer was lost"))
    plan = ScheduledStep([], [], [])
    ranks.note_step(plan, [], [RequestFailedError(1, ValueError("its own"))], None)

    def fail() -> None:
        with suppress(RuntimeError):
            ranks.note_step(plan, [], [failure], None)

    threading.Thread(target=fail, daemon=True).start()
    time.sleep(0.1)
    theirs.close()
    assert ended.get(timeout=MOST_SECONDS) == "rank 1 has died"
    assert ended.get(timeout=MOST_SECONDS) == EXIT_STATUS  # after a while: not in the next test


def test_rank_that_has_left_raises_in_the_next_step(pair: Any) -> None:
    ranks, theirs, ended = pair
    Connection(0, theirs, theirs.makefile("rb"), 1.0).close()
    with pytest.raises(RankError, match="rank 1 has ended"):
        ranks._others[0].receive()
    with pytest.raises(RankError, match="rank 1 has ended"):
        ranks.begin_step()
    assert ended.empty()


def test_strangers_are_refused() -> None:
    found: list[Connection] = []
    token = "0123456789abcdef" * 2
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        accepting = threading.Thread(target=lambda: found.extend(connection._accept(listener, 2, token, 30)))
        accepting.start()
        silent = socket.create_connection(address)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 40, b"", b"[" * 200_000):
            with socket.create_connection(address) as stranger, suppress(OSError):
                stranger.sendall(said)
        for wrong, rank in (("f" * 32, 1), (token, 7), (token, 0)):
            connection._connect(*address, wrong, rank, 30).close()
        peer = connection._connect(*address, token, 1, 30)
        accepting.join(30)
        silent.close()
    assert [each.rank for each in found] == [1]
    for each in (peer, *found):
        each.close()


def test_rank_lost_in_the_first_reduction_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("[ring] connection to a peer was lost")

    monkeypatch.setattr(connection.mx.distributed, "all_sum", lost)
    with pytest.raises(RankError, match=r"another rank ended during the start: .*peer was lost"):
        connection._share_address(None, None)


def test_missing_ranks_are_named_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(RankError, match=r"rank\(s\) \[1, 2\]"):
        connection._accept(listener, 3, "token", 0.05)


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({"MLX_HOSTFILE": "hosts.json", "MLX_RANK": "1"}, "10.0.0.2"),
        ({"MLX_JACCL_COORDINATOR": "10.0.0.1:7000"}, "10.0.0.1"),
        ({"NCCL_HOST_IP": "10.0.0.3"}, "10.0.0.3"),
        ({}, ""),  # every address of the machine
    ],
)
def test_host_is_that_of_the_launcher(
    variables: dict[str, str], host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts.json").write_text('[["10.0.0.1:5001"], ["10.0.0.2:5002", "10.1.0.2:5002"]]')
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert connection._own_host() == host


def test_unreachable_rank_0_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RankError, match="rank 1 cannot reach rank 0"):
        connection._connect("127.0.0.1", port, "token", 1, 1)


def test_checksums_distinguish_decisions(pair: Any) -> None:
    def checksum(*entries: tuple[str, list[list[int]]]) -> int:
        ranks.checksum = 0
        for what, values in entries:
            ranks.note(what, *values)
        return int(ranks.checksum)

    ranks = pair[0]
    same = ("step", [[1, 2], [5]])
    assert checksum(same) == checksum(same)
    others = [("remove", same[1]), ("step", [[1, 2], [6]]), ("step", [[1], [2, 5]]), ("step", [[2, 1], [5]])]
    assert len({checksum(each) for each in (same, *others)}) == 5
    assert checksum(same, others[0]) != checksum(others[0], same)


def test_model_that_is_not_sharded_has_no_group() -> None:
    assert group_of(build("llama")) is None and group_of(object()) is None


@pytest.mark.parametrize("text", ["", "none", "0", "-3", "inf", "nan", "0.5"])
def test_invalid_timeouts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_timeout(text)


class Others:
    """Ranks whose other members send the given values; records what this one sends."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others, self.said = others, ""

    def exchange(self, value: Any) -> list[Any]:
        self.said += repr(value)
        return [value, *(self.others or [value])]


def test_check_same_names_the_difference() -> None:
    with pytest.raises(ConfigError, match="the versions of rank 0 and rank 1 differ: mlx: 1 and 2"):
        check_same(Others({"mlx": "2", "other": "3"}), "the versions", {"mlx": "1"})  # type: ignore[arg-type]
    check_same(Others({"mlx": "1", "other": "3"}), "", {"mlx": "1"}, are_optional=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [0, 500_000, -1])
def test_sampled_bytes_of_each_file_count(at: int, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.md").write_text(name)  # not loaded
        weights = bytearray(1_000_000)
        weights[at] = name == "two"
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    one, two = model_files(tmp_path / "one"), model_files(tmp_path / "two")
    assert set(one) == set(two) == {"model.safetensors"}
    assert one != two


def test_heads_that_ranks_would_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    even, odd = (build("qwen3", num_attention_heads=2 * n, num_key_value_heads=n) for n in (2, 3))
    world.check_heads(odd)  # not sharded
    ranks = SimpleNamespace(size=2, exchange=lambda value: [value, value])
    monkeypatch.setattr(world, "ranks_of", lambda model: ranks)
    assert world.agreed_budget(even, 100, {}) == 100
    monkeypatch.setattr(world, "group_of", lambda model: SimpleNamespace(size=lambda: 2))
    world.check_heads(even)
    with pytest.raises(ConfigError, match="3 key and value heads cannot be split over 2 ranks"):
        world.check_heads(odd)


def test_api_keys_are_not_sent_to_other_ranks() -> None:
    ranks = Others()
    args = parse(["--model", "model", "--api-key", "sekrit"])
    check_ranks(args, ranks)  # type: ignore[arg-type]
    assert "sekrit" not in ranks.said
    assert "8080" in ranks.said
    given = {name: repr(value) for name, value in vars(args).items() if name != "api_keys"}
    other = Others(given | {"port": "8081"})
    with pytest.raises(ConfigError, match="the arguments of rank 0 and rank 1 differ: port: 8080 and 8081"):
        check_ranks(args, other)  # type: ignore[arg-type]
