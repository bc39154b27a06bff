"""Groups of layers divide the budget; tensors grow, and go with the last block."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.memory import Append, PoolBudget
from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.geometry import Geometry, QueryHeads
from mlx_paged.kv.group import Group, LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.pool_memory import WINDOW_CHUNK, WINDOW_ROWS, divided
from mlx_paged.prefix.prefix_cache import PrefixCache
from tests.support.cases import quick
from tests.support.kernels.fake_kernels import fake_kernels

HEADS, DIM, SIZE, WINDOW = 2, 64, 8, 20
LAYERS = ((0, 2), (1, 3, 4))  # of the global group and of the window group
BLOCK_BYTES = SIZE * HEADS * 2 * DIM * 4  # in one layer
SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 3, 4, 5))]


@pytest.fixture(params=["functional", "in place"])
def in_place(request: Any) -> Iterator[bool]:
    if request.param == "functional":
        yield False
    else:
        with fake_kernels():
            yield True


def make_pool(layer_blocks: int = 1 << 20, in_place: bool = False, window: int | None = WINDOW) -> BlockPool:
    """Return a pool with a budget of ``layer_blocks`` blocks of one layer."""
    groups = [LayerGroup(LAYERS[0]), LayerGroup(LAYERS[1], window, "window")]
    pool = BlockPool(
        groups, block_size=SIZE, memory_budget=layer_blocks * BLOCK_BYTES, choose_blocks=blocks_choice(in_place)
    )
    for layer in (0, 1):
        k = mx.zeros((1, HEADS, 1, DIM))
        pool.set_geometry(layer, k, k, batch=1, heads=QueryHeads(4))
    assert all(group.in_place == in_place for group in pool.groups)
    return pool


def keys_of(layer: int, tokens: range, salt: int) -> mx.array:
    """``[1, HEADS, n, DIM]``, different for every layer, position and salt."""
    values = np.arange(tokens.start, tokens.stop, dtype=np.float32)[:, None] + np.arange(DIM, dtype=np.float32) / 128
    return mx.array(np.broadcast_to(values + 1000 * layer + 10_000 * salt, (1, HEADS, len(tokens), DIM)))


def extend(pool: BlockPool, table: BlockTable, num_tokens: int, salt: int) -> None:
    """Append and write ``num_tokens`` tokens."""
    pool.append_tokens(table, num_tokens)
    for layer in pool.places:
        k = keys_of(layer, range(table.length - num_tokens, table.length), salt)
        pool.write_prefill(table, layer, k, -k)


def check(pool: BlockPool, table: BlockTable, salt: int) -> None:
    """Assert that the table holds what :func:`extend` wrote."""
    for layer, (group, _) in pool.places.items():
        k, v = pool.gather_visible(table, layer)
        expected = np.array(keys_of(layer, range(table.starts[group], table.length), salt))
        np.testing.assert_array_equal(np.array(k), expected)
        np.testing.assert_array_equal(np.array(v), -expected)


# Parts of the budget ----------------------------------------------------------------------------------------------


def parts(budget: int, window: int | None, layers: tuple[int, int] = (1, 5)) -> list[float]:
    """Return the parts of the budget, in bytes, of a global group and of one with a window, if a token takes a byte in
    each layer."""
    groups = [Group(0, LayerGroup(tuple(range(layers[0]))), 32)]
    groups.append(Group(1, LayerGroup(tuple(range(layers[0], sum(layers))), window), 32))
    for group in groups:
        group.geometry = Geometry(1, 1, 0, mx.int8, None)
    most = divided(groups, budget)
    assert all(blocks >= 2 for blocks in most)
    sizes = [group.bytes_per_block for group in groups]
    assert sum(n * size for n, size in zip(most, sizes, strict=True)) <= budget
    return [n * size for n, size in zip(most, sizes, strict=True)]


def test_windows_get_what_their_rows_need_and_no_more_than_half() -> None:
    row = (1024 + WINDOW_CHUNK) * 5  # bytes of a row behind the window of a Gemma 3 with few layers
    ample, half, tight, least = (parts(budget, 1024) for budget in (1000 * row, 20 * row, row * 8 // 5, row))
    assert ample[1] == pytest.approx(WINDOW_ROWS * row, rel=0.02) and ample[0] > 900 * row
    assert half == pytest.approx([10 * row] * 2, rel=0.02)
    assert tight == pytest.approx([row * 3 / 5, row], rel=0.07), "more than half only if one row needs it"
    assert least == pytest.approx([row / 4, row * 3 / 4], rel=0.05)


def test_groups_without_windows_get_as_many_blocks_each() -> None:
    assert parts(1 << 20, None, (1, 3)) == pytest.approx([(1 << 20) / 4, (3 << 20) / 4], rel=0.01)


def test_slots_of_a_group_fit_32_bits_whatever_the_budget() -> None:
    groups = make_pool().groups
    assert all(
        0 < blocks * group.block_size < 1 << 31 for blocks, group in zip(divided(groups, 1 << 60), groups, strict=True)
    )


def test_larger_budgets_hold_no_less() -> None:
    pool = make_pool()
    before = [0, 0]
    for blocks in range(5, 3000, 7):
        most = divided(pool.groups, blocks * BLOCK_BYTES)
        assert all(a <= b for a, b in zip(before, most, strict=True))
        before = most


def test_what_one_group_holds_is_not_taken_from_another(in_place: bool) -> None:
    """A burst of short sequences fills the window group; a long one then fills the global group."""
    pool = make_pool(300, in_place)
    longest = max(n for n in range(1, 2000) if PoolBudget(pool, chunk=8).holds(n))
    burst: list[BlockTable] = []
    while True:
        burst.append(pool.new_table())
        try:
            extend(pool, burst[-1], 20, len(burst))
        except PoolExhaustedError:
            pool.release_table(burst.pop())
            break
    kept = burst.pop()
    for table in burst:
        pool.release_table(table)
    long = pool.new_table()
    while (length := long.length) < longest - 24:  # without the blocks of the sequence that is kept
        extend(pool, long, min(8, longest - 24 - length), 99)
        assert pool.stats().bytes_reserved <= pool.memory_budget
    check(pool, kept, len(burst) + 1)
    check(pool, long, 99)
    pool.check_integrity()
    with pytest.raises(PoolExhaustedError):
        extend(pool, long, 8 * 100, 99)


# Tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2, 4, 6])  # of the tensors that grow, keys before values in each layer
def test_failed_growth_leaves_every_layer_usable(failing: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_paged.kv.group.IN_PLACE_FIRST_BYTES", 0)
    pool, calls, zeros = make_pool(in_place=in_place), 0, mx.zeros
    sequences = [pool.new_table() for _ in range(3)]
    for salt, table in enumerate(sequences):
        extend(pool, table, 21, salt)

    def watched(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
        nonlocal calls
        calls += len(shape) == 4 or (len(shape) == 2 and shape[0] > 1000)  # a tensor of blocks
        if calls == failing:
            raise RuntimeError("out of memory")
        return zeros(shape, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "zeros", watched)
        with pytest.raises(RuntimeError, match="out of memory"):
            extend(pool, sequences[0], 3000, 0)
    assert calls == failing
    pool.check_integrity()
    for salt, table in enumerate(sequences):
        check(pool, table, salt)
        extend(pool, table, 300, salt)
        check(pool, table, salt)
    assert not any(group.resize_failed for group in pool.groups)
    pool.check_integrity()


def test_memory_goes_back_to_the_system_with_the_last_block() -> None:
    pool = make_pool()
    before = mx.get_active_memory()
    table, others = pool.new_table(), pool.new_table()
    for _ in range(40):
        extend(pool, table, 100, 0)
    extend(pool, others, 30, 1)
    pool.release_table(table)
    mx.eval(pool.ready())
    assert mx.get_active_memory() - before > 8 << 20 and pool.stats().bytes_reserved > 8 << 20
    check(pool, others, 1)
    pool.release_table(others)
    assert pool.stats().bytes_reserved == 0 and pool.stats().total_blocks == 0
    assert mx.get_active_memory() - before < 1 << 16
    table = pool.new_table()
    extend(pool, table, 30, 2)
    check(pool, table, 2)


# What fits --------------------------------------------------------------------------------------------------------


def test_cached_blocks_are_evicted_in_all_groups_by_their_last_use() -> None:
    pool = make_pool(230)
    tree = PrefixCache(pool)
    for salt in range(2):
        table = pool.new_table()
        extend(pool, table, 60, salt)
        tree.insert(tuple(range(salt, salt + 60)), table)
        pool.release_table(table)
    held = [group.allocator.num_live for group in pool.groups]
    ids = pool.allocate(0, pool.memory.room()[0] + 1)
    assert tree.evictions > 0 and pool.stats().bytes_reserved <= pool.memory_budget
    assert tree.match((*range(60), 0)).length < 56 == tree.match((*range(1, 61), 0)).length
    assert pool.groups[1].allocator.num_live < held[1]
    assert PoolBudget(pool, chunk=16).fits([Append(None, 60)])
    ids += pool.allocate(0, pool.memory.room()[0] + tree.reclaimable(0))
    with pytest.raises(PoolExhaustedError):
        pool.allocate(0, 1)
    pool.release(0, ids)
    tree.check_integrity()


@pytest.mark.parametrize("seed", quick(SEEDS, 1))
def test_lone_sequence_within_the_budget_can_always_append(seed: int) -> None:
    """It runs in chunks after a burst of others; about half of the chunks are inserted into the prefix cache."""
    rng = np.random.default_rng(seed)
    for blocks in rng.integers(30, 120, 4):
        pool = make_pool(int(blocks))
        tree = PrefixCache(pool)
        chunk = int(rng.integers(1, 30))
        budget = PoolBudget(pool, chunk=chunk)
        longest = max((n for n in range(1, 600) if budget.holds(n)), default=0)
        for salt in range(int(rng.integers(1, 8))):
            others = pool.new_table()
            length = int(rng.integers(1, 30))
            if budget.fits([Append(others, length)]):
                extend(pool, others, length, salt)
                tree.insert(tuple(range(1000 * salt, 1000 * salt + length)), others)
            pool.release_table(others)
        table, tokens = pool.new_table(), tuple(range(-longest, 0))
        while (length := table.length) < longest:
            step = int(rng.choice([1, chunk, rng.integers(1, chunk + 1)]))
            step = min(step, longest - length)
            assert budget.fits([Append(table, step)])
            extend(pool, table, step, 77)
            if rng.random() < 0.5:
                tree.insert(tokens[: length + step], table)
        check(pool, table, 77)
        pool.check_integrity()
        tree.check_integrity()


@pytest.mark.parametrize("seed", quick(SEEDS, 1))
def test_lone_sequence_with_a_cached_prefix_can_always_append(seed: int) -> None:
    """The budget is the least that holds it. The cache serves a prefix and keeps the shared blocks."""
    rng = np.random.default_rng(seed)
    for longest in rng.integers(20, 300, 6).tolist():
        chunk, window = int(rng.integers(1, 30)), (None, 1, WINDOW)[int(rng.integers(3))]
        pool = make_pool(window=window)
        tree = PrefixCache(pool)
        budget = PoolBudget(pool, chunk=chunk)
        pool.memory.budget = budget.bytes_for(longest)
        assert budget.holds(longest) and not budget.holds(longest + SIZE)
        for number in range(10):
            common = int(rng.integers(longest // 2, longest))  # with all others
            tokens = (*range(common), *range(1000 * (number + 1), 1000 * (number + 1) + longest - common))
            _, table = tree.adopt(tokens)
            while (length := table.length) < longest:
                step = min(int(rng.integers(1, chunk + 1)), longest - length)
                assert budget.fits([Append(table, step)])
                extend(pool, table, step, 0)
                if rng.random() < 0.5:
                    tree.insert(tokens[: length + step], table)
            tree.check_integrity()
            pool.check_integrity()
            pool.release_table(table)
