"""A PagedKVCache made from another cache: forks by reference, restored states, loaded keys and values."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import GeometryError, PoolExhaustedError, PromptCacheError
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.caches import HEADS, KD, VD, assert_same, caches_of, dense_of, filled, kv
from tests.support.pools import noise

# Forks ------------------------------------------------------------------------------------------------------------


def test_deepcopy_is_a_fork_by_reference() -> None:
    pool = BlockPool([LayerGroup((0, 2)), LayerGroup((1,), 6, "window")], block_size=4)
    caches = caches_of(layers=3, pool=pool)
    dense = [dense_of(None), dense_of(6), dense_of(None)]
    for step, n in enumerate((9, 1)):
        for layer in range(3):
            caches[layer].update(*kv(10 * layer + step, n))
            dense[layer].update_and_fetch(*kv(10 * layer + step, n))
    before, active = pool.stats(), mx.get_active_memory()
    forks = copy.deepcopy(caches)
    dense_forks = copy.deepcopy(dense)
    after = pool.stats()
    assert (after.live_blocks, after.bytes_in_use, after.cow_forks) == (before.live_blocks, before.bytes_in_use, 0)
    assert after.shared_blocks == after.live_blocks
    assert mx.get_active_memory() - active < 1 << 20
    assert forks[0].pool is pool
    assert forks[0].sequence is forks[1].sequence is forks[2].sequence is not caches[0].sequence
    assert [f.offset for f in forks] == [10] * 3
    for step in range(8):  # source and fork diverge
        for side, (ours, theirs) in enumerate(((caches, dense), (forks, dense_forks))):
            for layer in range(3):
                k, v = kv(1000 + 100 * side + 10 * step + layer, 1 + step % 2)
                assert_same(ours[layer].update_and_fetch(k, v), theirs[layer].update_and_fetch(k, v))
    pool.check_integrity()


# State and load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6])
def test_the_state_of_a_paged_cache_restores_another(window: int | None) -> None:
    source, dense = filled(window, (9, 1, 1))
    (target,) = caches_of(window=window)
    target.state = source.state
    assert target.pool is not source.pool and target.offset == 11
    k, v = kv(7, 3)  # several tokens, so that the order of a ring starts afresh
    expected = dense.update_and_fetch(k, v)
    assert_same(target.update_and_fetch(k, v), expected)
    for step in range(8):
        k, v = kv(20 + step, 1)
        assert_same(target.update_and_fetch(k, v), dense.update_and_fetch(k, v))
    target.pool.check_integrity()


def test_the_state_of_an_empty_cache_restores_an_empty_one() -> None:
    (source,), (target,) = caches_of(), caches_of()
    target.state = source.state
    assert target.empty()


def test_the_state_of_a_dense_cache_restores_a_paged_one() -> None:
    dense = KVCache()
    dense.update_and_fetch(*kv(1, 7))
    assert dense.state[0].shape[2] > 7  # spare room that must not be taken over
    (paged,) = caches_of()
    paged.state = dense.state
    assert paged.offset == 7
    assert_same(paged.keys_and_values(), dense.keys_and_values())


@pytest.mark.parametrize("state", [(), (1, 2), (1, 2, 3), (None, None), "state"])
def test_invalid_states_are_refused(state: Any) -> None:
    (paged,) = caches_of()
    with pytest.raises(PromptCacheError, match="must be that of a paged cache"):
        paged.state = state
    assert paged.empty()


def test_evaluating_the_state_evaluates_the_writes() -> None:
    paged, _ = filled(None, (6,))
    ready, cache = paged.state
    mx.eval(paged.state)
    assert cache is paged and sum(array.nbytes for array in ready) <= 64


@pytest.mark.parametrize(("window", "n", "offset"), [(None, 9, 9), (6, 5, 11), (6, 6, 11), (6, 9, 11), (6, 4, 4)])
def test_load_in_every_layer(window: int | None, n: int, offset: int) -> None:
    caches = caches_of(layers=2, window=window)
    dense = [dense_of(window) for _ in caches]
    for layer, cache in enumerate(caches):
        k, v = kv(layer, offset)
        dense[layer].update_and_fetch(k, v)
        cache.load(k[:, :, offset - n :], v[:, :, offset - n :], offset)
        assert cache.offset == offset
        assert_same(cache.keys_and_values(), (k[:, :, offset - n :], v[:, :, offset - n :]))
    caches[0].pool.check_integrity()
    for step in range(10):
        for layer, cache in enumerate(caches):
            k, v = kv(50 + 2 * step + layer, 1 + step % 2)
            assert_same(cache.update_and_fetch(k, v), dense[layer].update_and_fetch(k, v))
    caches[0].pool.check_integrity()


@pytest.mark.parametrize(("window", "n", "offset"), [(None, 5, 6), (None, 6, 5), (6, 4, 11), (6, 3, 2)])
def test_load_refuses_missing_or_impossible_tokens(window: int | None, n: int, offset: int) -> None:
    (paged,) = caches_of(window=window)
    with pytest.raises(PromptCacheError, match=f"cannot load {n} tokens ending at {offset}"):
        paged.load(*kv(1, n), offset)
    assert paged.empty() and paged.pool.stats().live_blocks == 0
    part = kv(2, 5)
    paged.load(*part, 5)
    assert_same(paged.keys_and_values(), part)


def test_load_refuses_a_cache_in_use() -> None:
    paged, dense = filled(None, (6,))
    with pytest.raises(PromptCacheError, match="into a cache of 6 tokens"):
        paged.load(*kv(2, 9), 9)
    assert_same(paged.keys_and_values(), dense.keys_and_values())


def test_load_refuses_a_length_unlike_that_of_earlier_layers() -> None:
    first, second = caches_of(layers=2)
    first.load(*kv(1, 6), 6)
    with pytest.raises(PromptCacheError, match="holds positions 0 to 5, the earlier layers 0 to 6"):
        second.load(*kv(2, 5), 5)
    part = kv(3, 6)
    second.load(*part, 6)
    assert_same(second.keys_and_values(), part)


def test_a_refused_load_changes_nothing() -> None:
    (paged,) = caches_of()
    with pytest.raises(GeometryError):
        paged.load(noise(1, 2, HEADS, 3, KD), noise(2, 2, HEADS, 3, VD), 3)
    assert paged.empty() and paged.table.length == 0
    part = kv(1, 5)
    paged.load(*part, 5)
    assert_same(paged.keys_and_values(), part)


def test_load_beyond_the_budget_changes_nothing() -> None:
    (paged,) = caches_of(window=6, memory_budget=3 * 4 * HEADS * (KD + VD) * 4)
    other = PagedKVCache(SequenceTables(paged.pool), 0)
    other.update(*kv(1, 5))
    k, v = (x[:, :, 6:] for x in kv(2, 11))
    with pytest.raises(PoolExhaustedError):
        paged.load(k, v, 11)
    assert paged.empty() and paged.table.length == 0
    del other
    paged.load(k, v, 11)
    assert_same(paged.keys_and_values(), (k, v))
