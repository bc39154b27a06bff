"""Pool memory moves between groups and returns to the system."""

import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.errors import BlockStateError, PoolExhaustedError
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.attention_params import QueryHeads
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.budget import Append, PoolBudget
from mlx_paged.kv.choice import blocks_choice
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache
from tests.support.cases import crossed, quick
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


def extend(pool: BlockPool, tables: list[BlockTable], num_tokens: int, salt: int) -> None:
    """Append and write ``num_tokens`` tokens to each table."""
    for table in tables:
        pool.append_tokens(table, num_tokens)
        for layer in LAYERS[table.group]:
            k = keys_of(layer, range(table.length - num_tokens, table.length), salt)
            pool.write_prefill(table, layer, k, -k)


def check(pool: BlockPool, tables: list[BlockTable], salt: int) -> None:
    """Assert that the tables hold what :func:`extend` wrote."""
    for table in tables:
        for layer in LAYERS[table.group]:
            k, v = pool.gather_visible(table, layer)
            expected = np.array(keys_of(layer, range(table.logical_start, table.length), salt))
            np.testing.assert_array_equal(np.array(k), expected)
            np.testing.assert_array_equal(np.array(v), -expected)


def new_tables(pool: BlockPool) -> list[BlockTable]:
    return [pool.new_table(group) for group in range(2)]


def test_blocks_move_to_the_lowest_free_ids_with_their_references() -> None:
    allocator = BlockAllocator()
    allocator.grow(10)
    ids = allocator.allocate(9)
    allocator.retain([8])
    allocator.release([2, 3, 5, 9])
    with pytest.raises(BlockStateError, match="cannot shrink to 4 blocks: 5 are held"):
        allocator.moves(5)
    moves = allocator.moves(6)
    assert moves == {6: 2, 7: 3, 8: 5}
    allocator.renumber(moves, 6)
    held = [moves.get(b, b) for b in ids if b not in (2, 3, 5, 9)]
    allocator.check_integrity([held, [5]])
    assert allocator.num_blocks == 6 and allocator.num_free == 0 and allocator.refcount(5) == 2


def test_memory_unused_by_one_group_serves_another(in_place: bool) -> None:
    """A burst of short sequences fills the window group; a long one then gets the memory for the global group."""
    pool = make_pool(300, in_place)
    burst = [new_tables(pool) for _ in range(18)]
    for salt, tables in enumerate(burst):
        extend(pool, tables, 20, salt)
    kept = burst.pop()
    for tables in burst:
        for table in tables:
            pool.release_table(table)
    reserved = [group.bytes_reserved for group in pool.groups]
    long = new_tables(pool)
    for _ in range(100):
        extend(pool, long, 8, 99)
        assert pool.stats().bytes_reserved <= pool.memory_budget
    assert pool.groups[1].bytes_reserved < reserved[1] and pool.stats().shrinks > 0
    check(pool, kept, 17)
    check(pool, long, 99)
    pool.check_integrity()
    with pytest.raises(PoolExhaustedError):
        extend(pool, long, 8 * 100, 99)
    for table in long:
        pool.release_table(table)
    for salt in range(len(burst)):  # the memory moves back
        burst[salt] = new_tables(pool)
        extend(pool, burst[salt], 20, salt)
    for salt, tables in enumerate(burst):
        check(pool, tables, salt)


def scattered(pool: BlockPool) -> tuple[list[list[BlockTable]], PrefixCache]:
    """Sequences with holes between their blocks, a fork, and a tree that holds one prefix alone and shares another."""
    tree = PrefixCache(pool)
    sequences = [new_tables(pool) for _ in range(6)]
    for _ in range(3):
        for salt, tables in enumerate(sequences):
            extend(pool, tables, 7, salt)
    tree.insert(tuple(range(21)), sequences[5])
    tree.insert(tuple(range(100, 121)), sequences[4])
    for gone in (0, 2, 4):
        for table in sequences[gone]:
            pool.release_table(table)
    rest = [sequences[salt] for salt in (1, 3, 5)]
    rest.append([pool.fork(table) for table in rest[0]])
    return rest, tree


def test_all_holders_of_moved_blocks_see_the_new_ids(in_place: bool) -> None:
    """Holders are tables, forks, a prefix cache, and tables that were dropped but not collected yet."""
    pool = make_pool(in_place=in_place)
    sequences, tree = scattered(pool)
    dropped = [pool.fork(table) for table in sequences[1]]
    lists = [table.block_ids for table in dropped]
    gc.disable()
    try:
        del dropped[:]
        for index, group in enumerate(pool.groups):
            versions = [tables[index].version for tables in sequences]
            size = group.allocator.num_live + 1
            with pool.lock:
                pool.memory.shrink(index, size)
            assert group.allocator.num_blocks == size and group.allocator.num_free == 0
            assert all(a < tables[index].version for a, tables in zip(versions, sequences, strict=True))
            assert lists[index] == sequences[1][index].block_ids
    finally:
        gc.enable()
    tree.check_integrity()
    for salt, tables in zip((1, 3, 5, 1), sequences, strict=True):
        check(pool, tables, salt)
        extend(pool, tables, 5, salt)  # a shared block is copied first
        check(pool, tables, salt)
    pool.check_integrity()
    for salt, tokens in ((5, range(30)), (4, range(100, 130))):
        match, tables = tree.adopt(tuple(tokens))
        assert match.length == 21 // SIZE * SIZE
        check(pool, tables, salt)
        for table in tables:
            pool.release_table(table)
    tree.clear()
    del tables, sequences
    pool.collect()
    assert pool.stats().live_blocks == 0
    pool.check_integrity()


@pytest.mark.parametrize(
    ("failing", "verb"), quick(crossed(range(1, 4), ["copy", "resize"]), (1, "copy"), (3, "copy"), (2, "resize"))
)  # fmt: skip
def test_failed_move_leaves_every_layer_usable(
    verb: str, failing: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(in_place=in_place)
    sequences, tree = scattered(pool)
    kind, calls = type(pool.layer(0).blocks), 0
    original = getattr(kind, verb)

    def watched(blocks: Any, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("out of memory")
        original(blocks, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kind, verb, watched)
        for index, group in enumerate(pool.groups):
            if calls < failing:
                try:
                    pool.memory.shrink(index, group.allocator.num_live + 1)
                except RuntimeError as error:
                    assert str(error) == "out of memory"
    assert calls == failing
    tree.check_integrity()
    pool.check_integrity()
    for salt, tables in zip((1, 3, 5, 1), sequences, strict=True):
        check(pool, tables, salt)
        extend(pool, tables, 60, salt)
        check(pool, tables, salt)
    pool.return_memory()
    assert not any(group.resize_failed for group in pool.groups)
    for salt, tables in zip((1, 3, 5, 1), sequences, strict=True):
        check(pool, tables, salt)
    pool.check_integrity()


def test_idle_memory_goes_back_to_the_system() -> None:
    pool = make_pool()
    before = mx.get_active_memory() + mx.get_cache_memory()
    tables = new_tables(pool)
    for _ in range(40):
        extend(pool, tables, 100, 0)
    others = new_tables(pool)
    extend(pool, others, 30, 1)
    for table in tables:
        pool.release_table(table)
    mx.eval(pool.ready())
    assert mx.get_active_memory() - before > 8 << 20
    pool.return_memory()
    held = pool.stats().bytes_in_use
    step = sum(group.bytes_per_block * group.idle_size(1 << 40) for group in pool.groups) - held
    assert pool.stats().bytes_reserved <= held + step
    assert mx.get_active_memory() + mx.get_cache_memory() - before <= held + step + (1 << 20)
    check(pool, others, 1)
    shrinks = pool.stats().shrinks
    pool.return_memory()
    assert pool.stats().shrinks == shrinks  # nothing more to return


def test_moving_memory_exceeds_the_budget_by_at_most_one_tensor() -> None:
    blocks = 4000
    pool = make_pool(blocks)
    kept = new_tables(pool)
    tables = new_tables(pool)
    for _ in range(40):
        extend(pool, tables, 80, 0)
    extend(pool, kept, 30, 1)
    for table in tables:
        pool.release_table(table)
    mx.eval(pool.ready())
    mx.clear_cache()
    largest = max(group.allocator.num_blocks for group in pool.groups) * BLOCK_BYTES // 2
    start = mx.get_active_memory() - pool.stats().bytes_reserved
    mx.reset_peak_memory()
    most = (blocks - 40) // 3
    ids = pool.allocate(1, most)  # nearly all of it, for the window group
    assert pool.stats().shrinks > 0
    tensor = max(largest, pool.groups[1].allocator.num_blocks * BLOCK_BYTES // 2)
    assert mx.get_peak_memory() - start <= pool.memory_budget + tensor + (1 << 20)
    pool.release(1, ids)
    check(pool, kept, 1)


# What fits --------------------------------------------------------------------------------------------------------


def test_blocks_that_the_same_append_frees_count_as_free() -> None:
    for rows in (1, 3):
        pool = make_pool(window=WINDOW)
        budget = PoolBudget(pool, chunk=16)
        sequences = [new_tables(pool) for _ in range(rows)]
        for tables in sequences:
            extend(pool, tables, 16, 0)
            extend(pool, tables, 16, 0)
        freed = sum(tables[1].num_blocks for tables in sequences)
        for index, group in enumerate(pool.groups):  # keep only the blocks in use
            pool.memory.shrink(index, group.allocator.num_live + 1)
        pool.memory.budget = pool.stats().bytes_reserved
        # Each appends two blocks a group, and frees one in the window group.
        pool.memory.budget += rows * (2 * pool.groups[0].bytes_per_block + pool.groups[1].bytes_per_block)
        assert budget.fits([(tables, 16) for tables in sequences])
        assert not budget.fits([(tables, 17) for tables in sequences])
        assert sum(tables[1].num_blocks for tables in sequences) < freed
        for tables in sequences:
            extend(pool, tables, 16, 0)
            check(pool, tables, 0)


def test_free_and_cached_blocks_of_other_groups_count() -> None:
    pool = make_pool(230)
    tree = PrefixCache(pool)
    tables = new_tables(pool)
    extend(pool, tables, 20, 0)
    extend(pool, tables, 300, 0)
    tree.insert(tuple(range(320)), tables)
    for table in tables:
        pool.release_table(table)
    assert not PoolBudget(pool, chunk=16).fits_blocks(40)
    ids = pool.allocate(1, 60)  # of three layers each
    assert tree.evictions > 0 and pool.stats().bytes_reserved <= pool.memory_budget
    with pytest.raises(PoolExhaustedError):
        pool.allocate(0, 30)
    pool.release(1, ids)
    assert PoolBudget(pool, chunk=16).fits([Append(None, 800)])


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
            others = new_tables(pool)
            length = int(rng.integers(1, 30))
            if budget.fits([(others, length)]):
                extend(pool, others, length, salt)
                tree.insert(tuple(range(1000 * salt, 1000 * salt + length)), others)
            for table in others:
                pool.release_table(table)
        tables, tokens = new_tables(pool), tuple(range(-longest, 0))
        while (length := tables[0].length) < longest:
            step = int(rng.choice([1, chunk, rng.integers(1, chunk + 1)]))
            step = min(step, longest - length)
            assert budget.fits([(tables, step)])
            extend(pool, tables, step, 77)
            if rng.random() < 0.5:
                tree.insert(tokens[: length + step], tables)
        check(pool, tables, 77)
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
            _, tables = tree.adopt(tokens)
            while (length := tables[0].length) < longest:
                step = min(int(rng.integers(1, chunk + 1)), longest - length)
                assert budget.fits([(tables, step)])
                extend(pool, tables, step, 0)
                if rng.random() < 0.5:
                    tree.insert(tokens[: length + step], tables)
            tree.check_integrity()
            pool.check_integrity()
            for table in tables:
                pool.release_table(table)


def test_budget_too_small_for_any_sequence_names_the_least_budget() -> None:
    x = mx.zeros((1, 1, 1, 8))
    least = 2 * 3 * 4 * 2 * 8 * 4  # two blocks of three layers, four tokens of keys and values each

    def pool_of(budget: int) -> BlockPool:
        pool = BlockPool([LayerGroup((0, 1)), LayerGroup((2,), 8)], block_size=4, memory_budget=budget)
        pool.set_geometry(0, x, x, batch=1)
        return pool

    with pytest.raises(PoolExhaustedError, match=f"which needs at least {least:,} bytes"):
        pool_of(least - 1)
    pool = pool_of(least)
    pool.set_geometry(2, x, x, batch=1)
    for group in (0, 1):
        pool.append_tokens(pool.new_table(group), 4)


def test_first_tensors_of_a_group_hold_the_null_block_within_the_budget(in_place: bool) -> None:
    """A group whose tensors were dropped must also fit its null block into the budget."""
    per_block = [len(layers) for layers in LAYERS]  # in blocks of a layer
    pool = make_pool(4 * per_block[0] + 6 * per_block[1], in_place)
    pool.return_memory()
    pool.memory.grow(pool.groups[0], 3, most=3)
    with pytest.raises(PoolExhaustedError):
        pool.memory.grow(pool.groups[1], 6, most=6, kept=[3, 0])
    assert pool.stats().bytes_reserved <= pool.memory_budget
    pool.memory.grow(pool.groups[1], 5, most=5)
    assert pool.stats().bytes_reserved == pool.memory_budget
