"""PagedBatchKVCache in packs: several sequences' new tokens as rows of one token. Each sequence is compared with a
cache of its own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import PagedKVCache, PoolExhaustedError, SequenceTables
from mlx_paged.attention.dispatch import Dispatch, dispatch_counts, reset_dispatch_counts
from mlx_paged.cache.batch import Batch, NotPackableError
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.layer_cache import lazy_kv_of
from mlx_paged.errors import BlockStateError, GeometryError, PromptCacheError
from mlx_paged.kernels.build import NoKernelError
from mlx_paged.kv import device_blocks
from mlx_paged.kv.geometry import AttentionParams, Window
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.sequences import (
    BLOCK,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SCALE,
    WINDOW,
    Parts,
    parts_of,
    pool_of,
    sequences,
)

LENGTHS, COUNTS = (0, 5, 30, 16), (23, 1, 9, 40)
TOKENS = sum(COUNTS)


@pytest.fixture(params=["functional", "in place", "kernel"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use functional blocks; blocks in place, read sequence by sequence; or the fake kernel."""
    if request.param == "functional":
        yield request.param
        return
    with fake_kernels(), monkeypatch.context() as own:  # undone before the fake kernels are
        if request.param == "in place":
            own.setattr(device_blocks, "prepare_prefill", no_kernel)
        yield request.param


def no_kernel(*_: object, **__: object) -> None:
    raise NoKernelError("not here")


def pack_of(rows: list[SequenceTables], counts: tuple[int, ...] = COUNTS) -> tuple[Batch, list[PagedBatchKVCache]]:
    pack = Batch(rows[0].pool, rows, counts)
    pack.reserve()
    return pack, [PagedBatchKVCache(pack, layer) for layer in range(LAYERS)]


def solo(cache: PagedKVCache, q: mx.array, k: mx.array, v: mx.array, window: int | None = None) -> mx.array:
    mask = cache.make_mask(q.shape[2], window_size=cache.window if window is None else window)
    return cache.attend(q, k, v, AttentionParams(SCALE, mask))


def expected_of(rows: list[SequenceTables], parts: Parts, layer: int, **options: int) -> list[mx.array]:
    """Return what each sequence's own cache gives for its tokens."""
    outputs, first = [], 0
    for row, count in zip(rows, COUNTS, strict=True):
        q, k, v = (x[first : first + count].swapaxes(0, 2) for x in parts[layer])
        outputs.append(solo(PagedKVCache(row, layer), q, k, v, **options))
        first += count
    mx.eval(outputs)
    return outputs


def assert_close(got: mx.array, expected: list[mx.array]) -> None:
    whole = mx.concatenate([part.swapaxes(0, 2) for part in expected])
    assert got.shape == whole.shape
    assert mx.abs(got - whole).max().item() < 1e-5


def positions() -> list[int]:
    return [n + i for n, count in zip(LENGTHS, COUNTS, strict=True) for i in range(count)]


# Attention ----------------------------------------------------------------------------------------------------------


def test_every_token_sees_what_it_would_see_alone(form: str) -> None:
    pool = pool_of(in_place=form != "functional")
    rows, others = sequences(pool, LENGTHS), sequences(pool, LENGTHS)
    parts = parts_of(99, TOKENS)
    pack, caches = pack_of(rows)
    reset_dispatch_counts()
    for layer, cache in enumerate(caches):
        q, k, v = parts[layer]
        mask = cache.make_mask(1, window_size=cache.window)
        assert mask is None and cache.offset.tolist() == positions()
        got = cache.attend(q, k, v, AttentionParams(SCALE, mask))
        mx.eval(got)
        assert cache.offset.tolist() == [position + 1 for position in positions()]
        assert_close(got, expected_of(others, parts, layer))
    assert caches[0].offset is caches[1].offset, "one array for all layers"
    pack.commit()
    after = [n + count for n, count in zip(LENGTHS, COUNTS, strict=True)]
    assert all([row.offset(layer) for row in rows] == after for layer in range(LAYERS))
    counts = dispatch_counts()
    apart = sum(times for choice, times in counts.items() if choice.path == "apart")
    together = counts.get(Dispatch("kernel", "new tokens of several sequences"), 0)
    assert (apart, together) == ((0, LAYERS) if form == "kernel" else (LAYERS, 0))
    for row, other in zip(rows, others, strict=True):  # both sets continue alike, one token at a time
        q, k, v = parts_of(7, 1)[1]
        assert mx.abs(solo(PagedKVCache(row, 1), q, k, v) - solo(PagedKVCache(other, 1), q, k, v)).max() < 1e-5
    pool.check_integrity()


def test_pack_applies_softcap_and_sinks(form: str) -> None:
    pool = pool_of(in_place=form != "functional")
    rows, others = sequences(pool, LENGTHS), sequences(pool, LENGTHS)
    parts = parts_of(98, TOKENS)
    _, caches = pack_of(rows)
    params = AttentionParams(SCALE, None, softcap=2.0, sinks=mx.random.normal((HEADS,)))
    for layer, cache in enumerate(caches):
        got = cache.attend(*parts[layer], params)
        outputs, first = [], 0
        for row, count in zip(others, COUNTS, strict=True):
            q, k, v = (x[first : first + count].swapaxes(0, 2) for x in parts[layer])
            own = PagedKVCache(row, layer)
            mask = own.make_mask(count, window_size=own.window)
            outputs.append(own.attend(q, k, v, params._replace(mask=mask)))
            first += count
        assert_close(got, outputs)


def test_pack_applies_a_window_narrower_than_the_layer(form: str) -> None:
    pool = pool_of(in_place=form != "functional")
    rows, others = sequences(pool, LENGTHS), sequences(pool, LENGTHS)
    parts = parts_of(97, TOKENS)
    pack, caches = pack_of(rows)
    for layer in (0, 1):
        mask = caches[layer].make_mask(1, window_size=6)
        assert mask is caches[layer].make_mask(1, window_size=6) and pack.masks.window_of(mask) == Window(6)
        got = caches[layer].attend(*parts[layer], AttentionParams(SCALE, mask))
        assert_close(got, expected_of(others, parts, layer, window=6))
    with pytest.raises(NotPackableError, match="a mask for a window of 21 tokens is wider than the layer's, 20"):
        caches[1].make_mask(1, window_size=WINDOW + 1)


def test_fetched_arrays_can_be_attended_to_more_than_once(form: str) -> None:
    pool = pool_of(in_place=form != "functional")
    rows, others = sequences(pool, LENGTHS), sequences(pool, LENGTHS)
    parts = parts_of(96, TOKENS)
    pack, caches = pack_of(rows)
    for layer, cache in enumerate(caches):
        q, k, v = parts[layer]
        with pytest.raises(PromptCacheError, match="not written keys and values yet"):
            cache.keys_and_values()
        fetched = cache.update_and_fetch(k, v)
        expected = expected_of(others, parts, layer)
        for pair in (fetched, fetched, cache.keys_and_values()):
            lazy = lazy_kv_of(*pair)
            assert lazy is not None and lazy.can_attend(q, None)
            assert_close(lazy.attend(q, *pair, AttentionParams(SCALE)), expected)
    pack.commit()
    pool.check_integrity()


# What cannot be packed ------------------------------------------------------------------------------------------------


def test_unsupported_use_of_packed_caches_raises() -> None:
    pool = pool_of()
    pack, caches = pack_of(sequences(pool, LENGTHS))
    assert len(pack) == TOKENS
    q, k, v = parts_of(95, TOKENS)[0]
    with pytest.raises(NotPackableError, match="must be for 1 token per row, got 2"):
        caches[0].make_mask(2)
    pair = caches[0].update_and_fetch(k, v)
    lazy = lazy_kv_of(*pair)
    assert lazy is not None
    with pytest.raises(NotPackableError, match="a mask of its own"):
        lazy.can_attend(q, mx.ones((TOKENS, 1, 1, 1), mx.bool_))
    with pytest.raises(NotPackableError, match="a mask of its own"):
        lazy.can_attend(q, "causal")
    with pytest.raises(NotPackableError, match="do not match the pack"):
        lazy.can_attend(q[:2], None)
    with pytest.raises(NotPackableError, match="writes twice"):
        caches[0].update_and_fetch(k, v)
    with pytest.raises(NotPackableError, match="a mask of its own"):
        caches[1].attend(q, k, v, AttentionParams(SCALE, mx.ones((1,))))
    assert lazy_kv_of(pair[0] + 0, pair[1]) is None


def test_commit_raises_if_a_layer_did_not_attend() -> None:
    pool = pool_of()
    rows = sequences(pool, LENGTHS)
    pack, caches = pack_of(rows)
    for layer, cache in enumerate(caches[:2]):
        cache.attend(*parts_of(94, TOKENS)[layer], AttentionParams(SCALE))
    with pytest.raises(NotPackableError, match="layer 2"):
        pack.commit()
    caches[2].update_and_fetch(*parts_of(94, TOKENS)[2][1:])
    with pytest.raises(NotPackableError, match="layer 2"):
        pack.commit()
    pack.undo_reserve()
    assert all([row.offset(layer) for row in rows] == list(LENGTHS) for layer in range(LAYERS))


def test_mismatched_shapes_and_sequences_are_refused() -> None:
    pool = pool_of()
    rows = sequences(pool, LENGTHS)
    with pytest.raises(NotPackableError, match="writes twice"):  # nothing is reserved
        Batch(pool, rows, COUNTS).begin_layer(0)
    pack, caches = pack_of(rows)
    q, k, v = parts_of(93, TOKENS)[0]
    for bad in ((q[:3], k, v), (q, k[:3], v[:3]), (q, k.astype(mx.float16), v.astype(mx.float16))):
        with pytest.raises(GeometryError):
            caches[0].attend(*bad, AttentionParams(SCALE))
    wide = [mx.concatenate([x, x], axis=2) for x in (q, k, v)]
    with pytest.raises(GeometryError):
        caches[0].attend(*wide, AttentionParams(SCALE))
    assert pack.behind == set(range(LAYERS))
    caches[0].attend(q, k, v, AttentionParams(SCALE))
    with pytest.raises(BlockStateError, match="must be of one pool"):
        Batch(pool, [*rows[:2], *sequences(pool_of(), LENGTHS)[2:]], COUNTS)


# Positions --------------------------------------------------------------------------------------------------------


def test_positions_are_reserved_in_all_groups_or_in_none() -> None:
    token = 2 * KV_HEADS * DIM * 4
    pool = pool_of(budget=16 * BLOCK * token * LAYERS)
    rows = sequences(pool, (9, 30))
    lengths = [row.table.length for row in rows]
    stats = pool.stats()
    original = pool.allocate

    def fails_in_the_second_group(group: int, count: int, after: int | None = None) -> list[int]:
        if group == 1:
            raise OSError("injected")
        return original(group, count, after)

    pool.allocate = fails_in_the_second_group  # type: ignore[method-assign]
    with pytest.raises(OSError, match="injected"):
        rows[0].reserve(12)
    del pool.allocate
    with pytest.raises(PoolExhaustedError):
        rows[1].reserve(400)
    assert [row.table.length for row in rows] == lengths
    assert pool.stats().live_blocks <= stats.live_blocks, "only blocks behind a window are released"
    rows[0].reserve(12)  # a sequence that continues alone uses them too
    for layer, (q, k, v) in enumerate(parts_of(5, 1, 12)):
        solo(PagedKVCache(rows[0], layer), q, k, v)
    assert {rows[0].offset(layer) for layer in range(LAYERS)} == {21}
    pool.check_integrity()


def test_pack_does_not_keep_its_pool_alive() -> None:
    pool = pool_of()
    pack, caches = pack_of(sequences(pool, LENGTHS))
    pair = caches[0].update_and_fetch(*parts_of(92, TOKENS)[0][1:])
    gone = weakref.ref(pool)
    gc.disable()
    try:
        del pool, pack, caches
        assert gone() is None, "fetched arrays do not keep the pool"
        with pytest.raises(NotPackableError):
            lazy_kv_of(*pair).can_attend(parts_of(92, TOKENS)[0][0], None)  # type: ignore[union-attr]
    finally:
        gc.enable()
    assert np.array(pair[0]).shape == (TOKENS, KV_HEADS, 1, DIM)
