"""PagedBatchKVCache in decode steps: rows of one token over block tables. Each row is compared with a cache of its
own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import mlx.core as mx
import pytest

from mlx_paged import BlockPool, PagedKVCache, PoolExhaustedError
from mlx_paged.cache.batch import Batch, NoBlocksError
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.errors import BlockStateError, GeometryError, PromptCacheError
from mlx_paged.kv.geometry import AttentionParams
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.sequences import LAYERS, SCALE, Parts, caches_of, parts_of, pool_of, sequences


def sequence(pool: BlockPool, length: int) -> list[PagedKVCache]:
    return caches_of(sequences(pool, [length])[0])


def rows_of(pool: BlockPool, lengths: Sequence[int]) -> list[list[PagedKVCache]]:
    return [caches_of(row) for row in sequences(pool, lengths)]


def merged(rows: list[list[PagedKVCache]]) -> list[PagedBatchKVCache]:
    """A batch of forks of these sequences."""
    batch = Batch(rows[0][0].pool, [copy.deepcopy(row[0].sequence) for row in rows])
    return [PagedBatchKVCache(batch, layer) for layer in range(LAYERS)]


def reserve(caches: list[PagedBatchKVCache]) -> None:
    caches[0].batch.reserve()


def attend(caches: list, step: Parts) -> list[mx.array]:
    width = step[0][0].shape[2]
    if isinstance(caches[0], PagedBatchKVCache):
        reserve(caches)
    outputs = []
    for cache, (q, k, v) in zip(caches, step, strict=True):
        mask = cache.make_mask(width, window_size=cache.window)
        outputs.append(cache.attend(q, k, v, AttentionParams(SCALE, mask)))
    mx.eval(outputs)
    return outputs


def row_of(step: list, index: int, count: int | None = None) -> list:
    return [tuple(x[index : index + 1, :, :count] for x in layer) for layer in step]


def check_decode(pool: BlockPool, batch: list[PagedBatchKVCache], solo: list[list[PagedKVCache]], seed: int) -> None:
    step = parts_of(1000 + seed, len(solo))
    outputs = attend(batch, step)
    for index, caches in enumerate(solo):
        for got, expected in zip(outputs, attend(caches, row_of(step, index)), strict=True):
            assert mx.array_equal(got[index : index + 1], expected)
    assert [cache.offset.tolist() for cache in batch] == [[c[0].offset for c in solo]] * LAYERS
    pool.check_integrity()


LENGTHS = (1, 7, 8, 19, 20, 21, 45)


def test_decode_of_a_merged_batch_equals_each_row_alone() -> None:
    pool = pool_of()
    rows = rows_of(pool, LENGTHS)
    batch = merged(rows)
    for seed in range(25):
        check_decode(pool, batch, rows, seed)


def test_failed_reserve_changes_nothing() -> None:
    pool = pool_of(200_000)
    solo = rows_of(pool, (8, 7, 16))
    taken = []
    with pytest.raises(PoolExhaustedError):
        while True:  # take what is left
            taken += pool.allocate(0, 1)
    before, appended = pool.stats(), pool.appended_tokens
    batch = Batch(pool, [row[0].sequence for row in solo])
    with pytest.raises(NoBlocksError) as failed:
        batch.reserve()
    assert failed.value.row == 0 and isinstance(failed.value.error, PoolExhaustedError)
    caches = [PagedBatchKVCache(batch, layer) for layer in range(LAYERS)]
    with pytest.raises(BlockStateError, match="without reserved positions"):
        caches[0].attend(*parts_of(1000, 3)[0], AttentionParams(SCALE))
    assert [cache.offset.tolist() for cache in caches] == [[8, 7, 16]] * LAYERS
    assert pool.stats() == before and pool.appended_tokens == appended
    pool.release(0, taken)
    pool.check_integrity()


def test_take_back_undoes_a_step_that_some_layers_have_written() -> None:
    pool = pool_of()
    solo = rows_of(pool, (8, 15, 40))
    batch = merged(solo)
    check_decode(pool, batch, solo, 0)
    tables = batch[0].batch
    tables.reserve()
    q, k, v = parts_of(1007, 3)[0]
    batch[0].attend(q, k, v, AttentionParams(SCALE))
    tables.undo_reserve()
    assert [cache.offset.tolist() for cache in batch] == [[9, 16, 41]] * LAYERS
    check_decode(pool, batch, solo, 1)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 17, 30), (40, 0, 25)])
def test_fetched_arrays_are_padded_on_the_left(lengths: tuple[int, ...], in_place: bool) -> None:
    """Attention over the fetched arrays under make_mask's array gives each row the result that it has alone."""
    with fake_kernels() if in_place else nullcontext():
        check_fetched(pool_of(in_place=in_place), lengths)


def check_fetched(pool: BlockPool, lengths: tuple[int, ...]) -> None:
    solo = rows_of(pool, lengths)
    batch = merged(solo)
    for seed in range(3):
        step = parts_of(1000 + seed, len(solo))
        reserve(batch)
        for layer, (cache, (q, k, v)) in enumerate(zip(batch, step, strict=True)):
            mask = cache.make_mask(1, return_array=True)
            keys, values = cache.update_and_fetch(k, v)
            again = cache.keys_and_values()
            assert mask.shape == (len(solo), 1, 1, keys.shape[2])
            assert mx.array_equal(keys, again[0]) and mx.array_equal(values, again[1])
            got = mx.fast.scaled_dot_product_attention(q, keys, values, scale=SCALE, mask=mask)
            for index, caches in enumerate(solo):
                row = tuple(x[index : index + 1] for x in (q, k, v))
                own = caches[layer].make_mask(1, window_size=caches[layer].window)
                expected = caches[layer].attend(*row, AttentionParams(SCALE, own))
                assert mx.allclose(got[index : index + 1], expected, atol=1e-5)
    pool.check_integrity()


@pytest.mark.parametrize(("lengths", "is_masked"), [((9, 9), False), ((30,), False), ((9, 10), True)])
def test_rows_of_one_length_need_no_mask(lengths: tuple[int, ...], is_masked: bool) -> None:
    pool = pool_of()
    tables = merged(rows_of(pool, lengths))[0].batch
    cache = PagedBatchKVCache(tables, 0)
    reserve([cache])
    assert (cache.make_mask(1) is not None) == is_masked
    assert cache.make_mask(1, return_array=True).shape[0] == len(lengths)
    assert cache.make_mask(1, window_size=4).shape[0] == len(lengths)


def test_mask_may_have_a_narrower_window_than_the_layer() -> None:
    """A model may mask a global layer by a window; attention then reads gathered arrays."""
    pool = pool_of()
    solo = rows_of(pool, (3, 30))
    batch = merged(solo)
    q, k, v = parts_of(1000, 2)[0]
    reserve(batch)
    mask = batch[0].make_mask(1, window_size=4)
    got = batch[0].attend(q, k, v, AttentionParams(SCALE, mask))
    for index, caches in enumerate(solo):
        row = tuple(x[index : index + 1] for x in (q, k, v))
        expected = caches[0].attend(*row, AttentionParams(SCALE, caches[0].make_mask(1, window_size=4)))
        assert mx.allclose(got[index : index + 1], expected, atol=1e-5)


def test_invalid_rows_and_steps_are_refused() -> None:
    pool, stranger = pool_of(), pool_of()
    batch = merged([sequence(pool, 5), sequence(pool, 9)])
    q, k, v = parts_of(1000, 3)[0]
    with pytest.raises(GeometryError, match="3"):
        batch[0].attend(q, k, v, AttentionParams(SCALE))
    with pytest.raises(GeometryError, match="1 token per row, got 2"):
        batch[0].make_mask(2)
    with pytest.raises(GeometryError, match="3"):
        batch[0].update_and_fetch(k, v)
    with pytest.raises(BlockStateError, match="must be of one pool"):
        Batch(pool, [sequence(stranger, 3)[0].sequence])
    uneven = sequence(pool, 3)
    uneven[0].update(k[:1], v[:1])
    with pytest.raises(BlockStateError, match="different offsets"):
        Batch(pool, [uneven[0].sequence])
    with pytest.raises(PromptCacheError, match="has not written"):
        reserve(batch)
        batch[0].keys_and_values()
    with pytest.raises(BlockStateError, match="previous step"):
        reserve(batch)
    pool.check_integrity()
