"""Ranks with a folder each: a prefix comes back as far as all of them have it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.spill import SpillStore
from tests.prefix.test_spill import WINDOWS, spilled
from tests.support.prefixes import check_contents, make_pool

TOKENS = (*range(30), 99)


def restored(folder: Path, windows: Any, everywhere: Callable[[int], Sequence[int]]) -> int:
    """Tokens that the tree serves then; their contents are checked."""
    pool = make_pool(windows)
    tree = RadixTree(pool)
    SpillStore(folder, everywhere=everywhere).restore(tree, TOKENS, None, "weights")
    length, tables = tree.adopt(TOKENS)
    check_contents(pool, tables, TOKENS)
    tree.check_integrity()
    return length


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("most", [0, 1, 7, 8, 13, 29, 30])
def test_another_rank_has_less(windows: Any, most: int, tmp_path: Path) -> None:
    spilled(tmp_path, [TOKENS[:30]], windows, chunk=8)
    asked = []

    def everywhere(mine: int) -> list[int]:
        asked.append(mine)
        return [mine, min(mine, most)]

    found = restored(tmp_path, windows, everywhere)
    assert found <= most
    if windows == (None,):
        assert found == most
    assert asked[0] == 30
    if found:  # all ranks said the same last, and then that their files are as they were
        assert asked[-2:] == [found, 0]


def test_a_file_that_is_bad_on_another_rank_is_looked_at_again(tmp_path: Path) -> None:
    spilled(tmp_path, [TOKENS[:30]])
    theirs = iter([30, 2, 28, 28, 0])  # how far; files that are bad; how far, twice, until all say the same; none bad
    assert restored(tmp_path, (None,), lambda mine: [mine, next(theirs, mine)]) == 28


def test_a_file_that_is_bad_here(tmp_path: Path) -> None:
    spilled(tmp_path, [TOKENS[:30]])
    victim = min(tmp_path.iterdir(), key=lambda path: path.stat().st_size)  # the last block is not whole
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    asked: list[int] = []

    def everywhere(mine: int) -> list[int]:
        asked.append(mine)
        return [mine, mine]

    with pytest.warns(UserWarning, match="was deleted"):
        assert restored(tmp_path, (None,), everywhere) == 28
    assert asked == [30, 1, 28, 0]
