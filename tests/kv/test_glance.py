"""Looking at a pool while a thread computes on it."""

from __future__ import annotations

import threading

import pytest

from mlx_paged import BlockPool, LayerGroup
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.server.report.server_report import block_map
from tests.support.processes import threads


def test_nobody_who_looks_waits_for_a_turn() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    tree = RadixTree(pool)
    table = pool.new_table()
    pool.append_tokens(table, 9)
    has_turn, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        with pool.turn:
            has_turn.set()
            assert may_end.wait(60)

    ended = threads.start(compute)
    assert has_turn.wait(60)
    assert pool.stats().live_blocks == 3
    assert block_map(pool)[0][0] == ("l", 3)
    assert tree.nbytes == 0
    may_end.set()
    ended()


def test_what_changes_under_ones_eyes_is_read_again() -> None:
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    seen: list[bool] = []

    def read(is_exact: bool) -> int:
        seen.append(is_exact)
        if len(seen) < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return 7

    with pytest.raises(RuntimeError):  # with the lock nothing changes: what is wrong is wrong
        pool.turn.glance(read)
    seen.clear()
    with pool.turn:
        assert threads.in_thread(lambda: pool.turn.glance(read)) == 7
    assert seen == [False, False, False]
    seen[:] = [True]
    assert pool.turn.glance(lambda is_exact: is_exact)

    def broken(is_exact: bool) -> int:
        raise KeyError("gone")

    with pool.turn, pytest.raises(KeyError):
        threads.in_thread(lambda: pool.turn.glance(broken))
