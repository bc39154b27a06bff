"""PagedBatchKVCache: mlx-lm's batch cache protocol on block tables. Each row against a cache of its own."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import pytest

from mlx_paged import BlockPool, LayerGroup, PagedKVCache, PoolExhaustedError, SequenceTables
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.batch_tables import BatchTables, OncePerBatch
from mlx_paged.errors import BlockStateError, GeometryError, PromptCacheError
from mlx_paged.kv import group, step
from mlx_paged.kv.storage.attention_params import AttentionParams

HEADS, KV_HEADS, DIM, BLOCK, WINDOW = 4, 2, 16, 8, 20
LAYERS = 3  # 0 and 2 global, 1 sliding
SCALE = DIM**-0.5


def pool_of(budget: int = 1 << 30) -> BlockPool:
    groups = [LayerGroup((0, 2)), LayerGroup((1,), WINDOW, "window")]
    return BlockPool(groups, block_size=BLOCK, memory_budget=budget)


def sequence(pool: BlockPool, length: int, seed: int = 0) -> list[PagedKVCache]:
    """A sequence of random keys and values."""
    tables = SequenceTables(pool)
    caches = [PagedKVCache(tables, layer) for layer in range(LAYERS)]
    mx.random.seed(seed)
    for cache in caches if length else ():
        x = mx.random.normal((1, KV_HEADS, length, DIM))
        cache.update(x, x + 1)
    mx.eval([cache.pool.fence(cache.layer) for cache in caches])
    return caches


def merged(rows: list[list[PagedKVCache]]) -> list[PagedBatchKVCache]:
    return [PagedBatchKVCache.merge(list(layer)) for layer in zip(*rows, strict=True)]


def random_step(batch: int, width: int, seed: int) -> list[tuple[mx.array, mx.array, mx.array]]:
    mx.random.seed(1000 + seed)
    return [
        (
            mx.random.normal((batch, HEADS, width, DIM)),
            mx.random.normal((batch, KV_HEADS, width, DIM)),
            mx.random.normal((batch, KV_HEADS, width, DIM)),
        )
        for _ in range(LAYERS)
    ]


def attend(caches: list, step: list[tuple[mx.array, mx.array, mx.array]]) -> list[mx.array]:
    width = step[0][0].shape[2]
    outputs = []
    for cache, (q, k, v) in zip(caches, step, strict=True):
        mask = cache.make_mask(width, window_size=cache.window)
        outputs.append(cache.attend(q, k, v, AttentionParams(SCALE, mask)))
    mx.eval(outputs)
    return outputs


def row_of(step: list, index: int, count: int | None = None) -> list:
    return [tuple(x[index : index + 1, :, :count] for x in layer) for layer in step]


def check_decode(pool: BlockPool, batch: list[PagedBatchKVCache], solo: list[list[PagedKVCache]], seed: int) -> None:
    step = random_step(len(solo), 1, seed)
    outputs = attend(batch, step)
    for index, caches in enumerate(solo):
        for got, expected in zip(outputs, attend(caches, row_of(step, index)), strict=True):
            assert mx.array_equal(got[index : index + 1], expected)
    assert [cache.offset.tolist() for cache in batch] == [[c[0].offset for c in solo]] * LAYERS
    pool.check_integrity()


LENGTHS = (1, 7, 8, 19, 20, 21, 45)


def test_decode_of_a_merged_batch_equals_each_row_alone() -> None:
    pool = pool_of()
    rows = [sequence(pool, n, seed=n) for n in LENGTHS]
    batch = merged(rows)
    for seed in range(25):
        assert all(cache.make_mask(1, window_size=cache.window) is None for cache in batch)
        check_decode(pool, batch, rows, seed)


def test_filter_extend_extract_keep_each_row_what_it_is() -> None:
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in (5, 8, 30)]
    late = [sequence(pool, n, seed=n) for n in (17, 1)]
    batch = merged(solo)
    check_decode(pool, batch, solo, 0)
    other = merged(late)
    for mine, theirs in zip(batch, other, strict=True):
        mine.extend(theirs)
    assert all(cache.batch is batch[0].batch for cache in batch)
    solo += late
    check_decode(pool, batch, solo, 1)
    for cache in batch:
        cache.filter([4, 0, 2])
    solo = [solo[4], solo[0], solo[2]]
    check_decode(pool, batch, solo, 2)
    for index in range(3):
        row = [cache.extract(index) for cache in batch]
        assert len({id(cache.sequence) for cache in row}) == 1
        step = random_step(1, 1, 9)
        expected = attend(copy.deepcopy(solo[index]), step)
        assert all(mx.array_equal(a, b) for a, b in zip(attend(row, step), expected, strict=True))
    check_decode(pool, batch, solo, 3)
    for cache in batch:
        cache.filter(mx.array([1]))
    check_decode(pool, batch, solo[1:2], 4)


def test_members_move_without_moving_bytes() -> None:
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in LENGTHS]
    before = pool.stats()
    batch = merged(solo)
    other = copy.deepcopy(batch)
    for cache, twin in zip(batch, other, strict=True):
        cache.filter([0, 3, 5])
        twin.filter([1])
        cache.extend(twin)
    rows = [[cache.extract(i) for cache in batch] for i in range(4)]
    after = pool.stats()
    assert (after.live_blocks, after.bytes_in_use, after.cow_forks) == (
        before.live_blocks,
        before.bytes_in_use,
        before.cow_forks,
    )
    assert [row[0].offset for row in rows] == [1, 19, 21, 7]
    pool.check_integrity()


def test_what_leaves_is_released_and_what_is_kept_holds_only_itself() -> None:
    pool = pool_of()
    batch = merged([sequence(pool, n, seed=n) for n in (16, 40, 24)])
    kept = [cache.extract(2) for cache in batch]
    for cache in batch:
        cache.filter([0])
    gc.collect()
    assert pool.stats().live_blocks == (2 + 3) * 2  # ceil(n / 8) in both groups; the window still covers 24 tokens
    del batch, cache
    gc.collect()
    assert pool.stats().live_blocks == 3 * 2
    del kept
    gc.collect()
    assert pool.stats().live_blocks == 0


def test_empty_batches() -> None:
    pool = pool_of()
    batch = merged([sequence(pool, 3), sequence(pool, 9)])
    for cache in batch:
        cache.filter([])
    assert all(cache.empty() and cache.size() == 0 and cache.nbytes == 0 for cache in batch)
    assert batch[0].offset.shape == (0,)
    more = merged([sequence(pool, 4)])
    for cache, other in zip(batch, more, strict=True):
        cache.extend(other)
    assert batch[1].offset.tolist() == [4]
    fresh = merged([sequence(pool, 0), sequence(pool, 0)])
    assert all(cache.empty() for cache in fresh)
    row = [cache.extract(1) for cache in fresh]
    assert all(cache.empty() and cache.offset == 0 for cache in row)


def test_sizes_and_trim() -> None:
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in (5, 18)]
    batch = merged(solo)
    assert [cache.size() for cache in batch] == [18, 18, 18]
    assert batch[0].nbytes == sum(row[0].nbytes for row in solo)
    assert all(cache.is_trimmable() for cache in batch)
    assert [cache.trim(3) for cache in batch] == [3, 3, 3]
    for row in solo:
        for cache in row:
            cache.trim(3)
    check_decode(pool, batch, solo, 1)
    long = merged([sequence(pool, 40)])
    assert [cache.is_trimmable() for cache in long] == [True, False, True]
    assert [cache.size() for cache in long] == [40, WINDOW, 40]


@pytest.mark.parametrize("before", [(0, 0, 0), (3, 17, 30)])
def test_right_padding_is_neither_written_nor_read(before: tuple[int, ...]) -> None:
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in before]
    batch = merged(solo)
    lengths, width = (25, 1, 12), 25
    step = random_step(3, width, 5)
    for index, length in enumerate(lengths):
        for tensors in step:
            for x in tensors:
                x[index, :, length:] = float("nan")
    for cache in batch:
        cache.prepare(lengths=list(lengths), right_padding=[width - n for n in lengths])
    outputs = [attend(batch, [tuple(x[:, :, a:b] for x in layer) for layer in step]) for a, b in ((0, 10), (10, 25))]
    for cache in batch:
        cache.finalize()
    for index, length in enumerate(lengths):
        parts = [(0, min(10, length)), (10, length)]
        for part, (a, b) in enumerate(parts):
            if a >= b:
                continue
            expected = attend(solo[index], [tuple(x[index : index + 1, :, a:b] for x in layer) for layer in step])
            for got, layer in zip(outputs[part], expected, strict=True):
                assert mx.array_equal(got[index : index + 1, :, : b - a], layer)
                assert mx.all(got[index, :, b - a :] == 0)
    check_decode(pool, batch, solo, 6)


def test_offsets_are_one_array_per_step_and_depend_on_nothing() -> None:
    pool = pool_of()
    batch = merged([sequence(pool, n, seed=n) for n in (5, 9)])
    for _ in range(3):
        assert batch[0].batch.reserve() is None
        first = batch[0].offset
        assert all(cache.offset is first for cache in batch)
        attend(batch, random_step(2, 1, 0))
    assert batch[0].offset.tolist() == [8, 12]


def test_rows_are_looked_at_once_in_a_step_not_once_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of()
    batch = merged([sequence(pool, 3), sequence(pool, 6)])
    asked = []
    whole = group.step_key

    def counted(tables: list, *args: int) -> tuple[int, ...]:
        asked.append(len(tables))
        return whole(tables, *args)

    monkeypatch.setattr(group, "step_key", counted)
    monkeypatch.setattr(step, "step_key", counted)
    for seed in range(3):
        attend(batch, random_step(2, 1, seed))
    assert sum(asked) <= 3 * 2 * 2  # 3 steps of 2 rows: when it is made, and by the first that asks
    # A table that changes behind the batch's back has the step made and checked again.
    before = batch[0].batch.step(0)
    pool.groups[0].touch()
    assert batch[0].batch.step(0) is not before


def test_a_missing_block_changes_nothing() -> None:
    pool = pool_of(200_000)
    solo = [sequence(pool, n, seed=n) for n in (8, 7, 16)]
    taken = []
    with pytest.raises(PoolExhaustedError):
        while True:  # take what is left
            taken += pool.allocate(0, 1)
    before = pool.stats()
    batch = BatchTables(pool, [row[0].sequence for row in solo])
    failed = batch.reserve()
    assert failed is not None and failed.row == 0 and isinstance(failed.error, PoolExhaustedError)
    caches = [PagedBatchKVCache(batch, layer) for layer in range(LAYERS)]
    with pytest.raises(PoolExhaustedError):
        attend(caches, random_step(3, 1, 0))
    assert [cache.offset.tolist() for cache in caches] == [[8, 7, 16]] * LAYERS
    assert pool.stats() == before
    pool.release(0, taken)
    pool.check_integrity()


def test_take_back_undoes_a_step_that_some_layers_have_written() -> None:
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in (8, 15, 40)]
    batch = merged(solo)
    check_decode(pool, batch, solo, 0)
    tables = batch[0].batch
    assert tables.reserve() is None
    q, k, v = random_step(3, 1, 7)[0]
    batch[0].attend(q, k, v, AttentionParams(SCALE))
    tables.take_back()
    assert [cache.offset.tolist() for cache in batch] == [[9, 16, 41]] * LAYERS
    check_decode(pool, batch, solo, 1)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 17, 30), (40, 0, 25)])
def test_fetched_arrays_are_padded_on_the_left(lengths: tuple[int, ...], width: int) -> None:
    """What update_and_fetch returns, under make_mask's array, gives each row what it would have alone."""
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in lengths]
    batch = merged(solo)
    for seed in range(3):
        step = random_step(len(solo), width, seed)
        for layer, (cache, (q, k, v)) in enumerate(zip(batch, step, strict=True)):
            mask = cache.make_mask(width, return_array=True)
            keys, values = cache.update_and_fetch(k, v)
            again = cache.keys_and_values()
            assert mask.shape == (len(solo), 1, width, keys.shape[2])
            assert mx.array_equal(keys, again[0]) and mx.array_equal(values, again[1])
            got = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE, mask=mask)
            for index, caches in enumerate(solo):
                row = tuple(x[index : index + 1] for x in (q, k, v))
                own = caches[layer].make_mask(width, window_size=caches[layer].window)
                expected = caches[layer].attend(*row, AttentionParams(SCALE, own))
                assert mx.allclose(got[index : index + 1], expected, atol=1e-5)
    pool.check_integrity()


def test_padding_on_the_right_of_fetched_arrays_is_masked() -> None:
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in (3, 30)]
    batch = merged(solo)
    q, k, v = random_step(2, 4, 0)[1]
    k[0, :, 2:] = v[0, :, 2:] = float("nan")
    batch[1].prepare(lengths=[2, 4])
    mask = batch[1].make_mask(4, return_array=True)
    keys, values = batch[1].update_and_fetch(k, v)
    batch[1].finalize()
    got = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE, mask=mask)
    for index, count in enumerate((2, 4)):
        row = tuple(x[index : index + 1, :, :count] for x in (q, k, v))
        cache = solo[index][1]
        expected = cache.attend(*row, AttentionParams(SCALE, cache.make_mask(count, window_size=WINDOW)))
        assert mx.allclose(got[index : index + 1, :, :count], expected, atol=1e-5)


def test_a_narrower_window_than_the_layers() -> None:
    """A model may mask a global layer by a window: rows are then attended to over gathered arrays."""
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in (3, 30)]
    batch = merged(solo)
    q, k, v = random_step(2, 1, 0)[0]
    mask = batch[0].make_mask(1, window_size=4)
    got = batch[0].attend(q, k, v, AttentionParams(SCALE, mask))
    for index, caches in enumerate(solo):
        row = tuple(x[index : index + 1] for x in (q, k, v))
        expected = caches[0].attend(*row, AttentionParams(SCALE, caches[0].make_mask(1, window_size=4)))
        assert mx.allclose(got[index : index + 1], expected, atol=1e-5)


def test_refusals_name_what_is_wrong() -> None:
    pool, stranger = pool_of(), pool_of()
    batch = merged([sequence(pool, 5), sequence(pool, 9)])
    q, k, v = random_step(3, 1, 0)[0]
    with pytest.raises(GeometryError, match="3"):
        batch[0].attend(q, k, v, AttentionParams(SCALE))
    with pytest.raises(GeometryError, match="left"):
        batch[0].prepare(left_padding=[0, 3])
    with pytest.raises(GeometryError, match="lengths"):
        batch[0].prepare(lengths=[1])
    with pytest.raises(GeometryError, match="3"):
        batch[0].update_and_fetch(k, v)
    with pytest.raises(BlockStateError, match="another pool"):
        BatchTables(pool, [sequence(stranger, 3)[0].sequence])
    uneven = sequence(pool, 3)
    uneven[0].update(k[:1], v[:1])
    with pytest.raises(BlockStateError, match="different offsets"):
        BatchTables(pool, [uneven[0].sequence])
    with pytest.raises(PromptCacheError):
        batch[0].state = (mx.zeros(1),)
    pool.check_integrity()


def test_state_goes_to_another_cache() -> None:
    pool = pool_of()
    solo = [sequence(pool, n, seed=n) for n in (5, 9)]
    batch = merged(solo)
    twin = merged([sequence(pool, 1)])
    mx.eval([cache.state for cache in batch])
    for cache, other in zip(twin, batch, strict=True):
        cache.state = other.state
    check_decode(pool, twin, solo, 0)


def test_one_object_for_all_layers_and_a_new_one_the_second_time() -> None:
    class Thing:
        pass

    once: OncePerBatch[Thing] = OncePerBatch()
    source, other = Thing(), Thing()
    first = once.get("a", (source,), 0, Thing)
    assert once.get("a", (source,), 1, Thing) is first
    second = once.get("a", (source,), 1, Thing)
    assert second is not first
    assert once.get("a", (source,), 0, Thing) is second
    assert once.get("a", (other,), 2, Thing) is not second
    assert once.get("b", (source,), 2, Thing) is not second
    third = once.get("c", (), 0, Thing)
    del third
    gc.collect()
    assert "c" not in once._made
