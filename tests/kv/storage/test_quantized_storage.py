"""Quantised pages: the bytes of mlx-lm's quantised cache, written once, and never anything else."""

from __future__ import annotations

import warnings

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mlx_paged.errors import ConfigError, GeometryError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.storage.base import Geometry, PageFormat
from mlx_paged.kv.storage.quantized import QuantizedStorage
from mlx_paged.prefix.detached import DetachedPrefix, sequence_over
from mlx_paged.warn import NotPagedWarning
from tests.support.pools import DTYPES, kv, pool_of

FORMATS = [PageFormat(8, 8, 64), PageFormat(8, 8, 32), PageFormat(8, 8, 128), PageFormat(4, 4, 64)]
FORMATS += [PageFormat(4, 4, 32), PageFormat(4, 4, 128), PageFormat(8, 4, 64)]


def append(pool: BlockPool, table: BlockTable, seed: int, n: int, **shape) -> tuple[mx.array, mx.array]:
    """Append n tokens of noise to layer 0."""
    k, v = kv(seed, n, kd=128, vd=128, **shape)
    pool.append_tokens(table, n)
    pool.write([table], 0, k, v)
    return k, v


def stored(k: mx.array, v: mx.array, page_format: PageFormat) -> list[np.ndarray]:
    """Codes, scales and biases as mlx-lm's caches hold them, of all tokens in one piece."""
    found = []
    for x, bits in ((k, page_format.k_bits), (v, page_format.v_bits)):
        cache = QuantizedKVCache(page_format.group_size, bits)
        found += [np.array(part.astype(mx.float32)) for part in cache.update_and_fetch(x, x)[0]]
    return found


def split(pool: BlockPool, table: BlockTable) -> list[np.ndarray]:
    rows = pool.groups[0].geometry.rows
    parts = [form.split(x) for form, x in zip(rows, pool.layer(0).read_stored(table), strict=True)]
    return [np.array(part.astype(mx.float32)) for triple in parts for part in triple]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_pages_hold_the_bytes_of_mlx_lms_cache(page_format: PageFormat, dtype: mx.Dtype) -> None:
    """In bulk, in chunks and token by token, at odd lengths, alone and in a batch."""
    pool = pool_of(page_format=page_format)
    tables, parts = [pool.new_table() for _ in range(3)], [[], [], []]
    for table, chunks, mine in zip(tables, ([37], [5, 13, 2, 1], [1] * 9), parts, strict=True):
        for seed, n in enumerate(chunks):
            mine.append(append(pool, table, seed, n, dtype=dtype))
    for step in range(3):
        k, v = kv(100 + step, 1, batch=3, kd=128, vd=128, dtype=dtype)
        for table in tables:
            pool.append_tokens(table, 1)
        pool.write(tables, 0, k, v)
        for row, mine in enumerate(parts):
            mine.append((k[row : row + 1], v[row : row + 1]))
    for table, mine in zip(tables, parts, strict=True):
        whole = [mx.concatenate(each, axis=2) for each in zip(*mine, strict=True)]
        for got, want in zip(split(pool, table), stored(*whole, page_format), strict=True):
            np.testing.assert_array_equal(got, want)
        # What is read is what these bytes stand for, in the dtype of the model's keys.
        forms = pool.groups[0].geometry.rows
        for got, form, x in zip(pool.gather_visible(table, 0), forms, whole, strict=True):
            want = mx.dequantize(*mx.quantize(x, form.group_size, form.bits), form.group_size, form.bits)
            assert got.dtype == dtype and mx.array_equal(got, want)
    pool.check_integrity()
    assert pool.stats().quantized_tokens == 37 + 21 + 9 + 3 * 3


def test_bytes_are_those_of_the_tensors() -> None:
    """What a block is said to take is what it takes."""
    for page_format in FORMATS:
        for dtype in DTYPES:
            geometry = Geometry(2, 128, 256, dtype, page_format)
            storage = QuantizedStorage(geometry, 4, 6)
            assert sum(x.nbytes for x in storage.latest()) == 6 * 4 * geometry.bytes_per_token()
    dense = Geometry(8, 128, 128, mx.bfloat16)
    sizes = [dense._replace(format=PageFormat.of(bits)).bytes_per_token() for bits in (8, 4, (8, 4))]
    assert sizes == [8 * 2 * 136, 8 * 2 * 72, 8 * (136 + 72)]
    assert [round(dense.bytes_per_token() / size, 2) for size in sizes] == [1.88, 3.56, 2.46]


@pytest.mark.parametrize("bits", [3, 16, (4, 8), (8, 3), (8, 8, 8), "8"])
def test_other_bits_are_refused(bits) -> None:
    with pytest.raises(ConfigError, match="8 or 4 bits"):
        PageFormat.of(bits)


@pytest.mark.parametrize("group_size", [16, 63, 256])
def test_other_groups_are_refused(group_size: int) -> None:
    with pytest.raises(ConfigError, match="groups"):
        PageFormat.of(8, group_size)


@pytest.mark.parametrize(
    ("spec", "shape", "why"),
    [
        (LayerGroup((0,)), {"kd": 80, "vd": 80}, "a head of 80"),
        (LayerGroup((0,)), {"kd": 128, "vd": 96}, "a head of 96"),
        (LayerGroup((0,), 16, "window 16 with 4 pinned", 4), {"kd": 64, "vd": 64}, "pinned"),
    ],
)
def test_what_cannot_be_quantised_stays_as_it_is_and_says_why(spec: LayerGroup, shape: dict, why: str) -> None:
    pool = BlockPool([spec], block_size=4, page_format=PageFormat.of(8))
    table = pool.new_table()
    k, v = kv(1, 5, **shape)
    pool.append_tokens(table, 5)
    with pytest.warns(NotPagedWarning, match=why):
        pool.write([table], 0, k, v)
    assert not pool.groups[0].is_quantized and why in pool.groups[0].dense_reason
    assert all(mx.array_equal(got, x) for got, x in zip(pool.gather_visible(table, 0), (k, v), strict=True))
    assert pool.stats().quantized_tokens == 0
    with warnings.catch_warnings():  # once for each reason
        warnings.simplefilter("error")
        BlockPool([spec], block_size=4, page_format=PageFormat.of(8)).set_geometry(0, k, v, batch=1)


def test_keys_that_are_not_the_groups_are_refused_as_without() -> None:
    pool = pool_of(page_format=PageFormat.of(8))
    table = pool.new_table()
    append(pool, table, 0, 5)
    before = split(pool, table)
    pool.append_tokens(table, 2)
    k, v = kv(1, 2, kd=128, vd=128)
    rows = pool.layer(0).read_stored(table)
    for bad in ((k[..., :64], v[..., :64]), (k.astype(mx.float16), v.astype(mx.float16)), rows):
        with pytest.raises(GeometryError):
            pool.write([table], 0, *bad)
    for bad in ((k, v), (rows[0][..., :-1], rows[1]), [x.astype(mx.int32) for x in rows], [x[0] for x in rows]):
        with pytest.raises(GeometryError, match="rows"):
            pool.layer(0).write_stored([table], *bad)
    pool.trim(table, 2)
    for got, want in zip(split(pool, table), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_rows_move_without_being_quantised_again() -> None:
    pools = [pool_of(page_format=PageFormat.of(4, 32), block_size=size) for size in (4, 16)]
    tables = [pool.new_table() for pool in pools]
    append(pools[0], tables[0], 3, 11)
    pools[1].set_geometry(0, *kv(0, 1, kd=128, vd=128), batch=1)
    pools[1].append_tokens(tables[1], 11)
    pools[1].layer(0).write_stored([tables[1]], *pools[0].layer(0).read_stored(tables[0]))
    for got, want in zip(split(pools[1], tables[1]), split(pools[0], tables[0]), strict=True):
        np.testing.assert_array_equal(got, want)
    assert [pool.stats().quantized_tokens for pool in pools] == [11, 0]


@pytest.mark.sample
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 40))])
def test_random_histories_keep_every_row_as_it_was_written(seed: int, window: int | None) -> None:
    """Appends, forks, copies on write, trims, detached sets, rows carried to another pool, and moved blocks: each
    sequence's rows stay those of its tokens' own quantisation, and each token is quantised once."""
    rng = np.random.default_rng(seed)
    page_format = FORMATS[seed % len(FORMATS)]
    pool = pool_of(window=window, page_format=page_format)
    sequences = [(sequence_over(pool, [pool.new_table()]), [])]  # with the (k, v) of every token
    written, parked = 0, []
    for turn in range(50):
        index = int(rng.integers(len(sequences)))
        sequence, tokens = sequences[index]
        table = sequence.tables[0]
        action = rng.choice(["append", "token", "fork", "trim", "drop", "detach", "adopt", "carry", "shrink"])
        if action in ("append", "token") or not tokens:
            n = 1 if action == "token" else int(rng.integers(1, 13))
            k, v = append(pool, table, 1000 * seed + turn, n)
            tokens += [(k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(n)]
            sequence.offsets[0] = table.length
            written += n
        elif action == "fork" and len(sequences) < 5:
            sequences.append((sequence_over(pool, [pool.fork(table)]), list(tokens)))
        elif action == "trim":
            n = int(rng.integers(0, min(len(tokens), 4)))
            if window is None or len(tokens) < window:
                pool.trim(table, n)
                del tokens[len(tokens) - n :]
                sequence.offsets[0] = table.length
        elif action == "drop" and len(sequences) > 1:
            del sequences[index]
        elif action == "detach" and len(parked) < 3:
            parked.append((DetachedPrefix(sequence), list(tokens)))
        elif action == "adopt" and parked and len(sequences) < 5:
            detached, held = parked.pop()
            sequences.append((detached.adopt(), list(held)))
        elif action == "carry" and table.num_visible:  # as to a file and back
            rows = [mx.array(np.array(x)) for x in pool.layer(0).read_stored(table)]
            fresh = pool.new_table(start=table.logical_start)
            pool.append_tokens(fresh, table.num_visible)
            pool.layer(0).write_stored([fresh], *rows)
            sequences[index] = (sequence_over(pool, [fresh]), tokens)
        elif action == "shrink":
            pool.return_memory()
        del sequence, table
        for other, mine in sequences:
            if not mine:
                continue
            held = other.tables[0]
            visible = mine[held.logical_start :]
            whole = [mx.concatenate(each, axis=2) for each in zip(*visible, strict=True)]
            for got, want in zip(split(pool, held), stored(*whole, page_format), strict=True):
                np.testing.assert_array_equal(got, want, err_msg=f"after {action} in turn {turn}")
        pool.check_integrity()
    assert pool.stats().quantized_tokens == written
