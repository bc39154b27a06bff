"""Several processes over MLX's ring: the tokens of one, and the same decisions on each."""

from __future__ import annotations

import functools
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.engine.ranks.peers import DATA, Peer
from mlx_paged.errors import RankError
from tests.support.ranks import launch, scenarios

NAMES = [name for name in scenarios.SCENARIOS if name not in ("unseeded", "failing_call", "schedule")]
SAMPLE = "schedule:60"
WITH_FOUR = ["ragged"]  # waiting ranks turn: on few cores the others are slow
BOTH = ["unseeded", "failing_call"]  # of which one process says something else


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """What one process delivers, as JSON has it."""
    return json.loads(json.dumps(scenarios.play([name])[name]))


# Four on few cores take minutes: MLX's ring waits by spinning.
@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, all scenarios in one launch."""
    names = [*NAMES, SAMPLE] if request.param == 2 else WITH_FOUR
    return _outcomes(request.param, tmp_path_factory.mktemp("ranks"), *names, *BOTH)


def _outcomes(size: int, folder: Path, *names: str, seconds: float = 200) -> list[dict[str, Any]]:
    for ended in launch.worker(size, folder, *names).ended(seconds):
        assert ended.status == 0, ended.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("name", [*NAMES, SAMPLE])
def test_ranks_deliver_the_tokens_of_one_process(name: str, outcomes: list[dict[str, Any]]) -> None:
    expected = alone(name)
    assert expected["tokens"]
    if name not in outcomes[0]:
        pytest.skip("played by two ranks only")
    for outcome in outcomes:
        assert outcome[name] == expected


def test_scenarios_do_what_they_are_for() -> None:
    assert alone("preemption")["preemptions"] > 0
    assert alone(SAMPLE)["preemptions"] > 0
    assert alone("packs")["packs"]
    assert alone("look_up")["drafted"] > 0
    assert alone("failing_decode")["calls"] > 6
    assert alone("shared_prefixes")["computed"] < 3 * 40  # of 261


def test_all_ranks_have_decided_alike(outcomes: list[dict[str, Any]]) -> None:
    assert outcomes[0]["record"][0] > 50
    for outcome in outcomes:
        assert outcome["record"] == outcomes[0]["record"]


def test_draws_without_seeds_are_those_of_rank_0(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["unseeded"] == outcomes[0]["unseeded"]


def test_a_call_that_fails_on_one_rank_fails_its_request_on_all(outcomes: list[dict[str, Any]]) -> None:
    last = len(outcomes) - 1
    for rank, outcome in enumerate(outcomes):
        failures = outcome["failing_call"]["failures"]
        prefix = "" if rank == last else f"rank {last}: ValueError: "
        assert failures == {
            "0": f"{prefix}on one rank",
            "1": "on all ranks",
            "2": f"{prefix}before anything is built",
        }
        assert set(outcome["failing_call"]["reasons"]) == {"3", "4"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_everything(size: int, tmp_path: Path) -> None:
    names = [*NAMES, "schedule:1000"]
    for outcome in _outcomes(size, tmp_path, *names, seconds=1500):
        for name in names:
            assert outcome[name] == alone(name)


def test_who_writes_to_a_rank_that_is_dead_says_so() -> None:
    """As whoever reads from it does, whichever comes first."""
    mine, theirs = socket.socketpair()
    peer = Peer(1, mine)
    theirs.close()
    with pytest.raises(RankError, match="rank 1 has died"):
        peer.send(DATA, "x")
    mine.close()
