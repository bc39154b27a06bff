"""Dispatch: which path ran and its counts; ragged batches against dense attention."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.attention import dispatch
from mlx_paged.attention.dispatch import (
    attend,
    dispatch_counts,
    last_dispatch,
    reset_dispatch_counts,
)
from mlx_paged.attention.gather import attention, causal_mask, gather_attention
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import GeometryError
from mlx_paged.kernels import availability
from mlx_paged.kv import blocks, group
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.geometry import AttentionParams, Window
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels
from tests.support.pools import kv as any_kv
from tests.support.pools import noise, paged_attention

HEADS, Q_HEADS, DIM, VDIM, SCALE = 2, 6, 16, 8, 0.25


@pytest.fixture(autouse=True)
def fresh_counts() -> Iterator[None]:
    reset_dispatch_counts()
    yield
    reset_dispatch_counts()


def kv(seed: int, n: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return any_kv(seed, n, heads=HEADS, kd=DIM, vd=VDIM, dtype=dtype)


def assert_equal(got: mx.array, expected: mx.array) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    assert np.array(expected).any()
    np.testing.assert_array_equal(np.array(got), np.array(expected))


def pool_with(
    lengths: list[int], dtype: mx.Dtype = mx.float32
) -> tuple[BlockPool, list[BlockTable], list[tuple[mx.array, mx.array]]]:
    """Return a pool of one layer whose sequences were written in turns, so that their blocks are interleaved."""
    pool = BlockPool([LayerGroup((0,))], block_size=4)
    tables = [pool.new_table() for _ in lengths]
    dense = [kv(seed, n, dtype) for seed, n in enumerate(lengths)]
    for start in range(0, max(lengths), 5):
        for table, (k, v), n in zip(tables, dense, lengths, strict=True):
            end = min(start + 5, n)
            if end > start:
                pool.append_tokens(table, end - start)
                pool.write_prefill(table, 0, k[:, :, start:end], v[:, :, start:end])
    return pool, tables, dense


# What is recorded -------------------------------------------------------------------------------------------------


def test_each_path_is_recorded_with_its_reason_and_counted() -> None:
    assert last_dispatch() is None and dispatch_counts() == {}
    cache = PagedKVCache(SequenceTables(BlockPool([LayerGroup((0,))], block_size=4)), 0)

    def step(seed: int, n: int) -> None:
        cache.attend(noise(seed, 1, Q_HEADS, n, DIM), *kv(seed, n), AttentionParams(SCALE, cache.make_mask(n)))

    step(1, 5)
    cold = last_dispatch()
    assert cold is not None and cold.path == "prefill" and "no prefix" in cold.reason
    step(2, 9)
    chunk = last_dispatch()
    assert chunk is not None and chunk.path == "gather" and "after a prefix" in chunk.reason
    step(3, 1)
    decode = last_dispatch()
    assert decode is not None and decode.path == "gather" and "without kernels" in decode.reason
    step(4, 1)
    assert dispatch_counts() == {cold: 1, chunk: 1, decode: 2}


def test_counts_are_a_copy_and_reset_clears_them() -> None:
    pool, tables, _ = pool_with([3])
    paged_attention(noise(1, 1, Q_HEADS, 1, DIM), pool, 0, tables, AttentionParams(SCALE))
    counts = dispatch_counts()
    counts.clear()
    assert sum(dispatch_counts().values()) == 1
    reset_dispatch_counts()
    assert dispatch_counts() == {} and last_dispatch() is None


# Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[1], [4, 4], [13, 1, 30, 4, 7], [64, 3]])
def test_a_ragged_batch_equals_each_sequence_alone(lengths: list[int], dtype: mx.Dtype) -> None:
    pool, tables, dense = pool_with(lengths, dtype)
    q = noise(99, len(lengths), Q_HEADS, 1, DIM, dtype=dtype)
    got = paged_attention(q, pool, 0, tables, AttentionParams(SCALE))
    assert got.shape == (len(lengths), Q_HEADS, 1, VDIM)
    for row, (k, v) in enumerate(dense):
        expected = mx.fast.scaled_dot_product_attention(q[row : row + 1], k, v, scale=SCALE)
        assert_equal(got[row : row + 1], expected)
    assert sum(dispatch_counts().values()) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_queries_and_tables_must_match_in_number(rows: int) -> None:
    pool, tables, _ = pool_with([5, 9])
    with pytest.raises(GeometryError):
        paged_attention(noise(99, rows, Q_HEADS, 1, DIM), pool, 0, tables, AttentionParams(SCALE))


def test_decode_takes_a_mask_over_the_visible_tokens() -> None:
    pool, tables, [(k, v)] = pool_with([11])
    q = noise(99, 1, Q_HEADS, 1, DIM)
    mask = mx.arange(11) >= 6
    got = paged_attention(q, pool, 0, tables, AttentionParams(SCALE, mask))
    assert_equal(got, mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask))
    np.testing.assert_allclose(
        np.array(got),
        np.array(mx.fast.scaled_dot_product_attention(q, k[:, :, 6:], v[:, :, 6:], scale=SCALE)),
        atol=1e-5,
    )


@pytest.mark.parametrize("prefix", [0, 1, 6])
@pytest.mark.parametrize("mask", ["causal", "array", None])
def test_prefill_equals_dense_with_and_without_a_prefix(prefix: int, mask: str | None) -> None:
    n = 5
    pool, tables, [(k, v)] = pool_with([prefix + n])
    q = noise(99, 1, Q_HEADS, n, DIM)
    given = causal_mask(n, prefix, Window(3)) if mask == "array" else mask
    new = k[:, :, prefix:], v[:, :, prefix:]
    tokens, params = pool.tokens_of(0, tables, n), AttentionParams(SCALE, given)
    got = attend(q, new, pool.groups[0], 0, tokens, params, is_written=True)
    assert_equal(got, mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=given))
    dispatch = last_dispatch()
    assert dispatch is not None and dispatch.path == ("gather" if prefix else "prefill")


@pytest.mark.parametrize("q_len", [1, 3])
def test_an_additive_mask_over_latents_is_added(q_len: int) -> None:
    q, latents, rotated = (mx.random.normal(shape) for shape in ((1, 4, q_len, 24), (1, 1, 7, 16), (1, 1, 7, 8)))
    allowed = mx.random.uniform(shape=(q_len, 7)) < 0.7
    allowed[:, 0] = True
    additive = mx.where(allowed, 0.0, -1e9)
    expected = attention(q, latents, rotated, AttentionParams(0.2, allowed, latent=True))
    got = attention(q, latents, rotated, AttentionParams(0.2, additive, latent=True))
    assert mx.allclose(got, expected, atol=1e-6) and not mx.isnan(got).any()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
def test_rows_attend_with_the_bits_of_each_alone(window: int | None, dtype: mx.Dtype) -> None:
    """Some rows have consecutive blocks, others' are scattered. Every slot that no row has written holds NaN, those
    behind a row's end in its last block included."""
    lengths, follow = [9, 5, 14, 1, 22], [2, 4]
    pool = BlockPool([LayerGroup((0,), window)], block_size=4)
    filler = pool.new_table()
    for _ in range(30):
        pool.append_tokens(filler, 4)
        nans = (mx.full((1, HEADS, 4, dim), float("nan"), dtype) for dim in (DIM, VDIM))
        pool.write(0, [filler], *nans)
    pool.release_table(filler)
    tables = [pool.new_table() for _ in lengths]
    keys = [kv(seed, n, dtype) for seed, n in enumerate(lengths)]
    for row in follow:
        for part in (slice(None, -1), slice(-1, None)):
            k, v = (x[:, :, part] for x in keys[row])
            pool.append_tokens(tables[row], k.shape[2])
            pool.write(0, [tables[row]], k, v)
    for i in range(max(lengths)):
        for row, table in enumerate(tables):
            if row not in follow and i < lengths[row]:
                pool.append_tokens(table, 1)
                pool.write(0, [table], *(x[:, :, i : i + 1] for x in keys[row]))
    q = noise(99, len(lengths), Q_HEADS, 1, DIM, dtype=dtype)
    got = gather_attention(q, pool.groups[0], 0, pool.tokens_of(0, tables, 1), AttentionParams(SCALE))
    for row, (k, v) in enumerate(keys):
        seen = slice(-(window or lengths[row]), None)
        alone = mx.fast.scaled_dot_product_attention(q[row : row + 1], k[:, :, seen], v[:, :, seen], scale=SCALE)
        assert_equal(got[row : row + 1], alone)


# On CUDA ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 16])
def test_prompt_of_one_sequence_takes_the_prefill_kernel_on_cuda(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(dispatch, "backend", lambda: "cuda")
    monkeypatch.setattr(dispatch, "MOST_FEW_TOKENS", 10)
    monkeypatch.setattr(dispatch, "WHOLE_CHUNK", 20)
    dense = PagedKVCache(SequenceTables(BlockPool([LayerGroup((0,), window)], block_size=4)), 0)
    taken = []
    with fake_kernels() as fake:
        pool = BlockPool([LayerGroup((0,), window)], block_size=4, choose_blocks=blocks_choice(None))
        cache = PagedKVCache(SequenceTables(pool), 0)
        for seed, n in enumerate((20, 20, 9, 30, 11)):
            outputs = [
                one.attend(noise(seed, 1, Q_HEADS, n, DIM), *kv(seed, n), AttentionParams(SCALE, one.make_mask(n)))
                for one in (dense, cache)
            ]
            np.testing.assert_allclose(*map(np.array, outputs), rtol=1e-5, atol=1e-6)
            taken.append(dispatch.last_dispatch())
        assert fake.calls["paged_prefill"] == 2 + (window is not None)
    # Whole chunks have a plan, but in a window the second sees less than its own size before it.
    kernel = ("kernel", "new tokens of one sequence")
    second = kernel if window else ("gather", "several new tokens after a prefix")
    assert taken == [
        ("prefill", "no prefix: only new keys"), second, ("kernel", "a few new tokens per sequence"), kernel, kernel
    ]  # fmt: skip


@pytest.mark.parametrize("mask", [None, "array"])
def test_prompt_with_another_mask_takes_mlx_attention_on_cuda(
    monkeypatch: pytest.MonkeyPatch, mask: str | None
) -> None:
    monkeypatch.setattr(dispatch, "backend", lambda: "cuda")
    own = causal_mask(70, 0) & (mx.arange(70) != 2) if mask else None
    q, (k, v) = noise(1, 1, Q_HEADS, 70, DIM), kv(1, 70)
    with fake_kernels() as fake:
        pool = BlockPool([LayerGroup((0,))], block_size=4, choose_blocks=blocks_choice(None))
        got = PagedKVCache(SequenceTables(pool), 0).attend(q, k, v, AttentionParams(SCALE, own))
        assert fake.calls["paged_prefill"] == 0
    np.testing.assert_allclose(
        np.array(got), np.array(attention(q, k, v, AttentionParams(SCALE, own))), rtol=1e-5, atol=1e-6
    )


# On a Mac ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKernels]:
    """Stand-ins for the kernels, and Metal's choice of attention for prompts."""
    with fake_kernels() as fake:
        monkeypatch.setattr(availability, "on_metal", lambda: True)
        monkeypatch.setattr(group, "prefill_unsupported_reason", blocks.prefill_unsupported_reason)
        yield fake
        monkeypatch.undo()


@pytest.mark.parametrize("window", [None, 16])
def test_prompt_of_one_sequence_takes_mlx_attention_on_metal(metal: FakeKernels, window: int | None) -> None:
    dense = PagedKVCache(SequenceTables(BlockPool([LayerGroup((0,), window)], block_size=4)), 0)
    pool = BlockPool([LayerGroup((0,), window)], block_size=4, choose_blocks=blocks_choice(None))
    cache = PagedKVCache(SequenceTables(pool), 0)
    for seed, n in enumerate((5, 9, 30, 3)):
        outputs = [
            one.attend(noise(seed, 1, Q_HEADS, n, DIM), *kv(seed, n), AttentionParams(SCALE, one.make_mask(n)))
            for one in (cache, dense)
        ]
        np.testing.assert_allclose(*map(np.array, outputs), rtol=1e-5, atol=1e-6)
    assert metal.calls["paged_prefill"] == 0
    assert metal.calls["gather_blocks"] == 2, "the first chunk has no prefix, the last is short"


def test_sequences_of_a_pack_take_mlx_attention_one_by_one_on_metal(metal: FakeKernels) -> None:
    counts, prefixes = [12, 20, 9], [30, 7, 0]
    pool = BlockPool([LayerGroup((0,))], block_size=4, choose_blocks=blocks_choice(None))
    tables, dense, new = [], [], []
    for seed, (count, prefix) in enumerate(zip(counts, prefixes, strict=True)):
        k, v = kv(seed, count + prefix)
        table = pool.new_table()
        pool.set_geometry(0, k, v, batch=1)
        if prefix:
            pool.append_tokens(table, prefix)
            pool.write_prefill(table, 0, k[:, :, :prefix], v[:, :, :prefix])
        pool.append_tokens(table, count)
        tables.append(table)
        new.append([x[:, :, prefix:].swapaxes(0, 2) for x in (k, v)])
        dense.append(attention(noise(9 + seed, 1, Q_HEADS, count, DIM), k, v, AttentionParams(SCALE, "causal")))
    q = mx.concatenate([noise(9 + i, 1, Q_HEADS, n, DIM).swapaxes(0, 2) for i, n in enumerate(counts)])
    k, v = (mx.concatenate(rows) for rows in zip(*new, strict=True))
    reset_dispatch_counts()
    got = attend(q, (k, v), pool.groups[0], 0, pool.tokens_of(0, tables, counts), AttentionParams(SCALE))
    expected = mx.concatenate([x.swapaxes(0, 2) for x in dense])
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-5, atol=1e-6)
    assert metal.calls["paged_prefill"] == 0 and metal.calls["gather_blocks"] == 2
    assert {(one.path, one.reason): n for one, n in dispatch_counts().items()} == {
        ("apart", "on Metal prompts take MLX's attention"): 1,
        ("gather", "several new tokens after a prefix"): 2,
        ("prefill", "no prefix: only new keys"): 1,
    }
