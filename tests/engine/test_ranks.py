"""Ranks that run one engine together: starts, answers, faults and ends."""

import atexit
import functools
import json
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as cache_module

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cli.server import check_ranks, parse
from mlx_paged.engine.scheduler import ScheduledStep
from mlx_paged.errors import ConfigError, RankError, RequestFailedError
from mlx_paged.kv.lock import HeldLocks
from mlx_paged.ranks import peers as rendezvous
from mlx_paged.ranks import ranks as ranks_module
from mlx_paged.ranks import world
from mlx_paged.ranks.peers import DATA, EXIT_STATUS, Peer
from mlx_paged.ranks.ranks import Agreement, Ranks, StepRecord, undo_point
from mlx_paged.ranks.world import SAMPLE_BYTES, check_same, group_of, model_files, parse_timeout, versions
from mlx_paged.server.ranked_loop import RankedLoop
from tests.support.cases import slow
from tests.support.models.builders import build, prompt_of
from tests.support.ranks import launch, scenarios

TIMEOUT = "3"
# Seconds until a test fails, for a busy machine. The awaited event takes TIMEOUT seconds or less.
MOST_SECONDS = 90.0


def _started(folder: Path, name: str, size: int = 2) -> launch.Launch:
    """Start ranks that run a fault of :mod:`tests.support.ranks.faults`."""
    return launch.worker(size, folder, f"fault:{name}", MLX_PAGED_RANK_TIMEOUT=TIMEOUT)


def _running(started: launch.Launch) -> None:
    until = time.monotonic() + MOST_SECONDS
    while not all((started.folder / f"{rank}.running").exists() for rank in range(len(started.processes))):
        assert time.monotonic() < until
        time.sleep(0.05)


def _signalled(sig: int) -> Callable[[launch.Launch], None]:
    def send(started: launch.Launch) -> None:
        _running(started)
        started.processes[1].send_signal(sig)

    return send


@pytest.mark.slow  # tests/cli/test_over_ranks.py always runs this for a server
def test_killed_rank_ends_the_other_rank(tmp_path: Path) -> None:
    started = _started(tmp_path, "none")
    _signalled(signal.SIGKILL)(started)
    first, second = started.ended(MOST_SECONDS)
    assert second.status == -signal.SIGKILL
    assert first.status == EXIT_STATUS
    assert "rank 1 has died" in first.stderr


@pytest.mark.slow
def test_stopped_rank_ends_the_other_rank(tmp_path: Path) -> None:
    started = _started(tmp_path, "none")
    try:
        _signalled(signal.SIGSTOP)(started)
        assert started.processes[0].wait(MOST_SECONDS) == EXIT_STATUS
        assert "rank 1 has sent nothing for" in (tmp_path / "0.err").read_text()
        started.processes[1].send_signal(signal.SIGCONT)  # it finds that it is alone
        assert started.processes[1].wait(MOST_SECONDS) == EXIT_STATUS
    finally:
        started.kill()


@pytest.mark.parametrize(
    ("name", "reason"), slow(("hang", "has been in step"), ("raise_late", "injected: out of memory"),
    ("raise", "ValueError: injected: the script"))
)  # fmt: skip
def test_fault_of_one_rank_is_reported_by_all(name: str, reason: str, tmp_path: Path) -> None:
    for ended in _started(tmp_path, name).ended(MOST_SECONDS):
        assert ended.status == EXIT_STATUS
        assert reason in ended.stderr


def test_rank_that_exits_early_ends_the_other_rank(tmp_path: Path) -> None:
    first, second = _started(tmp_path, "leave").ended(MOST_SECONDS)
    assert second.status == 0
    assert first.status != 0
    assert "rank 1 has ended" in first.stderr


def test_diverging_ranks_report_the_messages_of_both(tmp_path: Path) -> None:
    found = _started(tmp_path, "diverge").ended(MOST_SECONDS)
    for ended in found:
        assert ended.status == EXIT_STATUS
        assert "Rank 1 at message" in ended.stderr
        assert "Rank 0 at message" in ended.stderr
        assert "remove: requests [0]" in ended.stderr  # what only rank 1 has done


NAMES = [name for name in scenarios.SCENARIOS if name not in ("unseeded", "failing_call", "failing_decode", "schedule")]
SAMPLE = "schedule:40"
WITH_FOUR = ["ragged"]  # waiting ranks spin, which slows the others on few cores
BOTH = ["unseeded", "failing_call", "failing_decode"]  # a single process gives other results


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """Return what a single process delivers, passed through JSON."""
    return json.loads(json.dumps(scenarios.play([name])[name]))


def _outcomes(size: int, folder: Path, *names: str, seconds: float = 200) -> list[dict[str, Any]]:
    """Return the outcomes of each rank: all scenarios in one launch."""
    for ended in launch.worker(size, folder, *names).ended(seconds):
        assert ended.status == 0, ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


# One test, as a launch takes 10 s of CPU. Four on few cores take minutes: MLX's ring waits by spinning.
@pytest.mark.parametrize("size", [2, *slow(4)])
def test_ranks_deliver_the_tokens_of_one_process(size: int, tmp_path: Path) -> None:
    names = [*NAMES, SAMPLE] if size == 2 else WITH_FOUR
    outcomes = _outcomes(size, tmp_path, *names, *BOTH)
    for rank, outcome in enumerate(outcomes):
        for name in names:
            assert outcome[name] == alone(name), name
            assert outcome[name]["tokens"]
        assert outcome["record"] == outcomes[0]["record"], "all ranks made the same decisions"
        assert outcome["unseeded"] == outcomes[0]["unseeded"], "draws without seeds are those of rank 0"
        # A call that fails on one rank fails its request on all.
        prefix = "" if rank == size - 1 else f"rank {size - 1}: ValueError: "
        failed = {"0": f"{prefix}on one rank", "1": "on all ranks"}
        assert outcome["failing_call"]["failures"] == failed
        assert set(outcome["failing_call"]["reasons"]) == {"2", "3"}
        assert outcome["failing_decode"]["failures"] == dict.fromkeys("01", f"{prefix}on one rank")
    assert outcomes[0]["record"][0] > 50


def test_scenarios_cover_what_they_are_named_for() -> None:
    assert alone("preemption")["preemptions"] > 0
    assert alone(SAMPLE)["preemptions"] > 0
    assert alone("packs")["packs"]
    assert alone("look_up")["drafted"] > 0 and alone("timed_look_up")["has_drafted"]
    assert set(alone("failing_decode")["failures"]) == {"0", "1"}
    assert alone("shared_prefixes")["computed"] < 3 * 40  # of 261


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_scenarios_and_a_long_schedule_over_ranks(size: int, tmp_path: Path) -> None:
    names = [*NAMES, "schedule:1000"]
    for outcome in _outcomes(size, tmp_path, *names, seconds=1500):
        for name in names:
            assert outcome[name] == alone(name)


def test_send_to_dead_rank_raises() -> None:
    """The sender raises the same error as the reader."""
    mine, theirs = socket.socketpair()
    peer = Peer(1, mine)
    theirs.close()
    with pytest.raises(RankError, match="rank 1 has died"):
        peer.send(DATA, "x")
    mine.close()


LOST = "[ring] connection to a peer was lost"  # MLX's error in a step


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ranks, socket.socket, list[Any]]]:
    """Rank 0 of two, the other end of its connection, and the list of faults and exit statuses."""
    mine, theirs = socket.socketpair()
    ended: list[Any] = []
    monkeypatch.setattr(ranks_module, "meet", lambda group, timeout: [Peer(1, mine)])
    monkeypatch.setattr(rendezvous.os, "_exit", ended.append)
    ranks = Ranks(SimpleNamespace(rank=lambda: 0, size=lambda: 2), 100.0)
    ranks.on_fault(ended.append)
    yield ranks, theirs, ended
    atexit.unregister(ranks.close)
    ranks._watch.close()
    for each in (mine, theirs):
        each.close()


def _fail_in_a_step(ranks: Ranks) -> None:
    with ranks.step():
        raise RuntimeError(LOST)


def _fail_requests(ranks: Ranks) -> None:
    failures = [
        RequestFailedError.without_frames(uid, error) for uid, error in enumerate((ValueError(LOST), OSError()))
    ]
    Agreement(ranks, None).note_step(ScheduledStep([], [], []), [], failures)  # at once: no rank is lost
    failures.append(RequestFailedError.without_frames(2, RuntimeError(LOST)))
    Agreement(ranks, None).note_step(ScheduledStep([], [], []), [], failures)
    raise failures[-1]


def _fail_a_turn(ranks: Ranks) -> None:
    """Fail in the server's loop, outside of the engine."""
    told: list[Any] = []
    served = SimpleNamespace(models=None, requests=None, stats=None, memory_watch=None, is_stopping=False)
    loop = RankedLoop(ranks, cast(Any, served))
    loop.turn = lambda: cast(Any, _fail_in_a_step(cast(Any, SimpleNamespace(step=nullcontext))))  # type: ignore[method-assign]
    loop.fail = lambda work, error: told.append(error)  # type: ignore[method-assign]
    loop.rows = cast(Any, {1: SimpleNamespace(work=0)})
    loop.guarded_turn()
    raise told[0]


@pytest.mark.parametrize("fail", [_fail_in_a_step, _fail_requests, _fail_a_turn])
@pytest.mark.parametrize("is_gone", [True, False])
def test_failed_step_waits_for_the_watch_to_report_a_lost_rank(
    fail: Callable[[Ranks], None], is_gone: bool, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails first. If a rank is gone, the process ends and reports it; otherwise the step's error is
    raised."""
    ranks, theirs, ended = pair
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", MOST_SECONDS if is_gone else 0.1)
    raised: SimpleQueue[Exception] = SimpleQueue()

    def compute() -> None:
        try:
            fail(ranks)
        except Exception as error:
            raised.put(error)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    if is_gone:
        thread.join(0.1)  # it has failed
        theirs.close()
        until = time.monotonic() + MOST_SECONDS
        while len(ended) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert ended == ["rank 1 has died", EXIT_STATUS]
        assert raised.empty()
    else:
        assert LOST in str(raised.get(timeout=MOST_SECONDS))
        assert not ended


def test_unauthorised_connections_are_rejected() -> None:
    found: list[Peer] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        accepting = threading.Thread(target=lambda: found.extend(rendezvous._accept(listener, 2, "right", 30)))
        accepting.start()
        # A silent connection and one that announces 1 GB stay open meanwhile.
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


def test_rank_lost_in_the_first_reduction_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("[ring] connection to a peer was lost")

    monkeypatch.setattr(rendezvous.mx.distributed, "all_sum", lost)
    with pytest.raises(RankError, match=r"another rank ended during the start: .*peer was lost"):
        rendezvous._share_address(None, None)


def test_ranks_need_the_same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, "one")
    proof = rendezvous._proof("token", b"said")
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, "other")
    assert rendezvous._proof("token", b"said") != proof


def test_missing_ranks_are_named_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(RankError, match=r"rank\(s\) \[1, 2\]"):
        rendezvous._accept(listener, 3, "token", 0.05)


def test_unreachable_rank_0_raises() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(RankError, match="rank 1 cannot reach rank 0"):
        rendezvous._connect(["127.0.0.1"], port, "token", 1, 1)


def test_record_checksums_distinguish_decisions() -> None:
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


def test_model_that_is_not_sharded_has_no_group() -> None:
    assert group_of(build("llama")) is None
    assert group_of(object()) is None


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
    with pytest.raises(ConfigError, match="the versions of rank 0 and rank 1 differ: mlx: 1 and 2; other: missing and"):
        check_same(Others({"mlx": "2", "other": "3"}), "the versions", {"mlx": "1"})  # type: ignore[arg-type]
    check_same(Others({"mlx": "1", "other": "3"}), "", {"mlx": "1"}, are_optional=True)  # type: ignore[arg-type]
    long = "x" * 100
    with pytest.raises(ConfigError, match=r"x{30}1 and x{30}2"):
        check_same(Others({"path": f"{long}2"}), "the arguments", {"path": f"{long}1"})  # type: ignore[arg-type]


def test_versions_include_the_source() -> None:
    assert {"mlx", "mlx-lm", "mlx-paged", "source of mlx-paged"} <= set(versions())


@pytest.mark.parametrize("name", ["engine/a.py", "kernels/text/a.metal", "kernels/text/a.cuh", "patches/a.py"])
def test_versions_differ_if_a_file_differs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patches").mkdir()
    package = tmp_path / "mlx_paged"
    package.mkdir()
    (package / "patches").symlink_to(Path("..", "patches"))
    monkeypatch.setattr(world, "PACKAGE", package)
    found = set()
    for text in ("1", "2"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
        found.add(versions()["source of mlx-paged"])
    assert len(found) == 2


@pytest.mark.parametrize("at", [0, 500, 9_999])
def test_sampled_bytes_of_each_tensor_count(at: int, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.md").write_text(name)  # not loaded
        large = mx.zeros((10 * SAMPLE_BYTES,), mx.uint8)
        small = mx.zeros((10_000,), mx.uint8)
        small[at] = name == "two"
        mx.save_safetensors(str(tmp_path / name / "model.safetensors"), {"large": large, "small": small})
    one, two = model_files(tmp_path / "one"), model_files(tmp_path / "two")
    assert set(one) == set(two) == {"model.safetensors"}
    assert one != two


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


@pytest.mark.parametrize(
    ("options", "in_place"),
    [({"kernel": "off"}, False), ({"kernel": "off", "kv_bits": 8}, False), ({}, True), ({"kv_bits": 8}, True)],
)
def test_undo_discards_the_writes_since_a_checkpoint(options: dict[str, Any], in_place: bool, kernels: Any) -> None:
    model, tokens = build("llama", head_dim=64), prompt_of(30)[None]
    mlx_paged.apply_patches(PagedConfig(block_size=16, kv_cache_memory="8MB", **options))
    cache = cache_module.make_prompt_cache(model)
    mx.eval(model(tokens[:, :20], cache=cache))
    pool = mlx_paged.pool_of(model)
    assert pool is not None and pool.groups[0].in_place == in_place
    storages = pool.groups[0].blocks
    fences = [storage.ready() for storage in storages] if in_place else []
    quantized = [storage.num_quantized for storage in storages]
    with HeldLocks():
        undo = undo_point(pool)
        model(tokens[:, 20:25], cache=cache)
        assert [storage.num_quantized for storage in storages] != quantized or "kv_bits" not in options
        undo()
        del undo
    assert [storage.num_quantized for storage in storages] == quantized
    if in_place:  # a launch that is not computed does not write
        assert all(now[0] is then[0] for now, then in zip(map(_latest, storages), fences, strict=True))
        return
    for layer in cache:  # the owner of the tables puts them back
        layer.trim(5)
    found = model(tokens[:, 20:], cache=cache)
    expected = model(tokens, cache=cache_module.make_prompt_cache(model))[:, 20:]
    assert np.abs(np.array(found) - np.array(expected)).max() < (2e-1 if "kv_bits" in options else 1e-4)


def _latest(storage: Any) -> list[mx.array]:
    return storage.ready()
