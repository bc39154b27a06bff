"""Quantised pages, functional, in place and rotated."""

import copy
import warnings

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mlx_paged.attention import dispatch
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.errors import ConfigError, GeometryError
from mlx_paged.kernels import availability
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import CheckResult
from mlx_paged.kernels.quantized import rotate
from mlx_paged.kv import blocks
from mlx_paged.kv.allocator import NULL_BLOCK
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.blocks import kernel_unsupported_reason, prefill_unsupported_reason
from mlx_paged.kv.geometry import AttentionParams, Geometry, PageFormat, QueryHeads
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.host_blocks import HostBlocks
from mlx_paged.kv.new_tokens import NewTokens
from mlx_paged.kv.pool import BlockPool
from mlx_paged.warn import NotPagedWarning
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.pools import DTYPES, kv, noise, pool_of
from tests.support.twins import HEADS, KD, SIZE, Twin

FORMATS = [PageFormat(8, 8, 64), PageFormat(8, 8, 32), PageFormat(8, 8, 128), PageFormat(4, 4, 64)]
FORMATS += [PageFormat(4, 4, 32), PageFormat(4, 4, 128), PageFormat(8, 4, 64)]


def append(pool: BlockPool, table: BlockTable, seed: int, n: int, **shape) -> tuple[mx.array, mx.array]:
    """Append n tokens of noise to layer 0."""
    k, v = kv(seed, n, kd=128, vd=128, **shape)
    pool.append_tokens(table, n)
    pool.write(0, [table], k, v)
    return k, v


def stored(k: mx.array, v: mx.array, page_format: PageFormat) -> list[np.ndarray]:
    """Return codes, scales and biases of all tokens as mlx-lm's quantised cache holds them."""
    found = []
    for x, bits in ((k, page_format.k_bits), (v, page_format.v_bits)):
        cache = QuantizedKVCache(page_format.group_size, bits)
        found += [np.array(part.astype(mx.float32)) for part in cache.update_and_fetch(x, x)[0]]
    return found


def split(pool: BlockPool, table: BlockTable) -> list[np.ndarray]:
    rows = pool.groups[0].geometry.rows
    parts = [form.split(x) for form, x in zip(rows, pool.gather_visible(table, 0, stored=True), strict=True)]
    return [np.array(part.astype(mx.float32)) for triple in parts for part in triple]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_pages_hold_the_bytes_of_mlx_lms_cache(page_format: PageFormat, dtype: mx.Dtype) -> None:
    """Tokens are written in bulk, in chunks and one by one, at odd lengths, alone and in a batch."""
    pool = pool_of(page_format=page_format)
    tables, parts = [pool.new_table() for _ in range(3)], [[], [], []]
    for table, chunks, mine in zip(tables, ([37], [5, 13, 2, 1], [1] * 9), parts, strict=True):
        for seed, n in enumerate(chunks):
            mine.append(append(pool, table, seed, n, dtype=dtype))
    for step in range(3):
        k, v = kv(100 + step, 1, batch=3, kd=128, vd=128, dtype=dtype)
        for table in tables:
            pool.append_tokens(table, 1)
        pool.write(0, tables, k, v)
        for row, mine in enumerate(parts):
            mine.append((k[row : row + 1], v[row : row + 1]))
    for table, mine in zip(tables, parts, strict=True):
        whole = [mx.concatenate(each, axis=2) for each in zip(*mine, strict=True)]
        for got, want in zip(split(pool, table), stored(*whole, page_format), strict=True):
            np.testing.assert_array_equal(got, want)
        # Reads dequantise these bytes to the dtype of the model's keys.
        forms = pool.groups[0].geometry.rows
        for got, form, x in zip(pool.gather_visible(table, 0), forms, whole, strict=True):
            want = mx.dequantize(*mx.quantize(x, form.group_size, form.bits), form.group_size, form.bits)
            assert got.dtype == dtype and mx.array_equal(got, want)
    pool.check_integrity()
    assert pool.stats().quantized_tokens == 37 + 21 + 9 + 3 * 3


def test_bytes_per_token_equals_the_size_of_the_tensors() -> None:
    for page_format in FORMATS:
        for dtype in DTYPES:
            geometry = Geometry(2, 128, 256, dtype, page_format)
            storage = HostBlocks(geometry, 4, 6)
            assert storage._keys.nbytes + storage._values.nbytes == 6 * 4 * geometry.bytes_per_token()
    dense = Geometry(8, 128, 128, mx.bfloat16)
    sizes = [dense._replace(format=PageFormat.of(bits)).bytes_per_token() for bits in (8, 4, (8, 4))]
    assert sizes == [8 * 2 * 136, 8 * 2 * 72, 8 * (136 + 72)]
    assert [round(dense.bytes_per_token() / size, 2) for size in sizes] == [1.88, 3.56, 2.46]


@pytest.mark.parametrize("bits", [3, 16, (4, 8), (8, 3), (8, 8, 8), "8"])
def test_unsupported_bits_are_refused(bits) -> None:
    with pytest.raises(ConfigError, match=r"kv_bits must be 8, 4 or \(8, 4\), got"):
        PageFormat.of(bits)


@pytest.mark.parametrize("group_size", [16, 63, 256])
def test_unsupported_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(ConfigError, match="kv_group_size must be one of"):
        PageFormat.of(8, group_size)


@pytest.mark.parametrize(
    ("spec", "shape", "why"),
    [
        (LayerGroup((0,)), {"kd": 80, "vd": 80}, "head size 80 is not a multiple of kv_group_size 64"),
        (LayerGroup((0,)), {"kd": 128, "vd": 96}, "head size 96 is not a multiple of kv_group_size 64"),
        (LayerGroup((0,), None, "latents", latent=True), {"kd": 64, "vd": 64}, "latents"),
    ],
)
def test_unquantisable_layer_stays_dense_and_warns_why(spec: LayerGroup, shape: dict, why: str) -> None:
    pool = BlockPool([spec], block_size=4, page_format=PageFormat.of(8))
    table = pool.new_table()
    k, v = kv(1, 5, **shape)
    pool.append_tokens(table, 5)
    with pytest.warns(NotPagedWarning, match=why):
        pool.write(0, [table], k, v)
    assert not pool.groups[0].is_quantized and why in pool.groups[0].dense_reason
    assert all(mx.array_equal(got, x) for got, x in zip(pool.gather_visible(table, 0), (k, v), strict=True))
    assert pool.stats().quantized_tokens == 0
    with warnings.catch_warnings():  # each reason warns once
        warnings.simplefilter("error")
        BlockPool([spec], block_size=4, page_format=PageFormat.of(8)).set_geometry(0, k, v, batch=1)


def test_mismatched_keys_and_rows_are_refused() -> None:
    pool = pool_of(page_format=PageFormat.of(8))
    table = pool.new_table()
    append(pool, table, 0, 5)
    before = split(pool, table)
    pool.append_tokens(table, 2)
    k, v = kv(1, 2, kd=128, vd=128)
    rows = pool.gather_visible(table, 0, stored=True)
    for bad in ((k[..., :64], v[..., :64]), (k.astype(mx.float16), v.astype(mx.float16)), rows):
        with pytest.raises(GeometryError):
            pool.write(0, [table], *bad)
    for bad in ((k, v), (rows[0][..., :-1], rows[1]), [x.astype(mx.int32) for x in rows], [x[0] for x in rows]):
        with pytest.raises(GeometryError, match="rows"):
            pool.write(0, [table], *bad, stored=True)
    pool.trim(table, 2)
    for got, want in zip(split(pool, table), before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("window", "seed"),
    quick(crossed([None, 9], list(range(40))), (None, 0), (9, 1), (None, 2)),
)
def test_random_histories_keep_every_row_as_it_was_written(seed: int, window: int | None) -> None:
    """Under appends, forks, copies on write, trims, detached sets, rows carried to another table and moved blocks, each
    sequence's rows equal the quantisation of its tokens, and each token is quantised once."""
    rng = np.random.default_rng(seed)
    page_format = FORMATS[seed % len(FORMATS)]
    pool = pool_of(window=window, page_format=page_format)
    sequences = [(SequenceTables(pool, pool.new_table()), [])]  # with the (k, v) of every token
    written, parked = 0, []
    for turn in range(50):
        index = int(rng.integers(len(sequences)))
        sequence, tokens = sequences[index]
        table = sequence.table
        action = rng.choice(["append", "token", "fork", "trim", "drop", "detach", "adopt", "carry"])
        if action in ("append", "token") or not tokens:
            n = 1 if action == "token" else int(rng.integers(1, 13))
            k, v = append(pool, table, 1000 * seed + turn, n)
            tokens += [(k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(n)]
            written += n
        elif action == "fork" and len(sequences) < 5:
            sequences.append((SequenceTables(pool, pool.fork(table)), list(tokens)))
        elif action == "trim":
            n = int(rng.integers(0, min(len(tokens), 4)))
            if window is None or len(tokens) < window:
                pool.trim(table, n)
                del tokens[len(tokens) - n :]
        elif action == "drop" and len(sequences) > 1:
            del sequences[index]
        elif action == "detach" and len(parked) < 3:
            parked.append((copy.deepcopy(sequence), list(tokens)))
        elif action == "adopt" and parked and len(sequences) < 5:
            detached, held = parked.pop()
            sequences.append((detached, list(held)))
        elif action == "carry" and table.num_visible(0):  # as to a file and back
            rows = [mx.array(np.array(x)) for x in pool.gather_visible(table, 0, stored=True)]
            start = table.starts[0]
            fresh = pool.table_over([[NULL_BLOCK] * (start // pool.block_size)], table.length, [start])
            pool.fill(fresh, 0, start)
            pool.write(0, [fresh], *rows, stored=True)
            sequences[index] = (SequenceTables(pool, fresh), tokens)
        del sequence, table
        for other, mine in sequences:
            if not mine:
                continue
            held = other.table
            visible = mine[held.starts[0] :]
            whole = [mx.concatenate(each, axis=2) for each in zip(*visible, strict=True)]
            for got, want in zip(split(pool, held), stored(*whole, page_format), strict=True):
                np.testing.assert_array_equal(got, want, err_msg=f"after {action} in turn {turn}")
        pool.check_integrity()
    assert pool.stats().quantized_tokens == written


IN_PLACE_FORMATS = [PageFormat(8, 8, 64), PageFormat(4, 4, 32), PageFormat(8, 4, 32)]
IN_PLACE_FORMATS += [PageFormat(8, 8, 64, True), PageFormat(4, 4, 32, True)]


@pytest.mark.parametrize(
    "page_format", quick(IN_PLACE_FORMATS, IN_PLACE_FORMATS[0], IN_PLACE_FORMATS[-1], single=True), ids=str
)
def test_in_place_pages_equal_functional_pages(page_format: PageFormat) -> None:
    with fake_kernels() as fake:
        twin = Twin(page_format)
        for count in (13, 3):
            twin.new()
            twin.append(-1, count)
        twin.fork(0)
        twin.append(0, 40)  # the pool grows, and the fork's last block is copied
        twin.append(2, 1)
        twin.check()
        # Rows of one pool are written to the other as they are, without being quantised again.
        twin.new()
        for pool, source, row in zip(twin.pools, reversed(twin.pools), reversed(twin.sequences[1]), strict=True):
            table = twin.sequences[3][twin.pools.index(pool)]
            pool.append_tokens(table, 3)
            for layer in range(3):
                pool.write(layer, [table], *source.gather_visible(row, layer, stored=True), stored=True)
        twin.check()
        assert twin.pools[0].stats().quantized_tokens == 60
        # Attention of the next token, and again once it is written.
        found: list[list[mx.array]] = []
        for pool, table in zip(twin.pools, twin.sequences[0], strict=True):
            pool.append_tokens(table, 1)
            tokens, new = pool.tokens_of(0, [table], 1), (noise(2, 1, HEADS, 1, KD), noise(3, 1, HEADS, 1, KD))
            found.append(
                [
                    dispatch.attend(
                        noise(seed, 1, 4, 1, KD), new if seed == 1 else None, pool.groups[0], 0, tokens,
                        AttentionParams(0.125), is_written=seed != 1,
                    )
                    for seed in (1, 4)
                ]
            )  # fmt: skip
        assert all(mx.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))
        assert fake.calls["append"] == 1 and fake.calls["paged_decode"] == 2


def test_quantised_decode_kernel_is_checked_before_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(HEADS, KD, KD, mx.bfloat16, PageFormat(8, 4, 32))
    checked = []

    def check(variant: kernels.Variant) -> CheckResult:
        checked.append(variant)
        return CheckResult(len(checked) > 1, 0.0, 0.1, "it does not compile")

    monkeypatch.setattr(availability, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(kernels, "backend", lambda: "metal")
    monkeypatch.setattr(blocks, "checked", check)
    kernels.variants_of.cache_clear()
    try:
        assert "it does not compile" in (kernel_unsupported_reason(geometry, SIZE, QueryHeads(4)) or "")
        assert kernel_unsupported_reason(geometry, SIZE, QueryHeads(4)) is None
        (variant, _) = checked
        assert variant.body == "quantized_decode" and str(variant).endswith("b8 8/4 bits/32]")
        assert variant.pages is not None and (variant.pages.k, variant.pages.v) == geometry.rows
        expected = "no kernel for head size 64 (pages: 8/4 bits/32) fits this GPU"
        assert prefill_unsupported_reason(geometry, SIZE, QueryHeads(4)) == expected
    finally:
        kernels.variants_of.cache_clear()


ROTATED_FORMATS = [PageFormat(*bits, size, True) for bits in ((8, 8), (4, 4), (8, 4)) for size in (32, 64)]


def outlying(seed: int, n: int, dim: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Keys with channels that are far from zero in every token, as RoPE models have them; values are noise."""
    k, v = kv(seed, n, kd=dim, vd=dim, dtype=dtype)
    offset = mx.zeros((dim,), dtype)
    offset[7::64], offset[40::64] = 12, -9
    return k + offset, v


def filled(page_format: PageFormat | None, k: mx.array, v: mx.array) -> tuple[BlockPool, tuple[mx.array, mx.array]]:
    """Return a pool that holds these keys and values, and what it reads back."""
    pool = pool_of(page_format=page_format)
    table = pool.new_table()
    pool.append_tokens(table, k.shape[2])
    pool.write(0, [table], k, v)
    return pool, pool.gather_visible(table, 0)


def rms(a: mx.array, b: mx.array) -> float:
    return mx.sqrt(mx.mean((a.astype(mx.float32) - b.astype(mx.float32)) ** 2)).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_format", ROTATED_FORMATS, ids=str)
def test_pages_hold_the_rows_of_rotated_vectors(page_format: PageFormat, dtype: mx.Dtype) -> None:
    pool = pool_of(page_format=page_format)
    table, parts = pool.new_table(), []
    for seed, n in enumerate((5, 13, 1, 2, 1)):
        parts.append(outlying(seed, n, 64, dtype))
        pool.append_tokens(table, n)
        pool.write(0, [table], *parts[-1])
    k, v = (mx.concatenate(each, axis=2) for each in zip(*parts, strict=True))
    rows = pool.gather_visible(table, 0, stored=True)
    for x, form, held, read in zip(
        (k, v), pool.groups[0].geometry.rows, rows, pool.gather_visible(table, 0), strict=True
    ):
        assert mx.array_equal(held, form.quantize(rotate(x)))
        assert read.dtype == dtype and mx.array_equal(read, rotate(form.dequantize(held)))
    pool.check_integrity()
    assert pool.stats().quantized_tokens == 22


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.015), ((8, 4), 0.15), (4, 0.25)])
def test_attention_over_rotated_pages_is_near_to_dense(bits: int | tuple[int, int], limit: float) -> None:
    k, v = outlying(3, 150, 64)
    q, _ = kv(11, 4, heads=6, kd=64, vd=64)

    def attend(keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125)

    expected = attend(k, v)
    _, got = filled(PageFormat.of(bits, 64, True), k, v)
    assert rms(attend(*got), expected) < limit * mx.sqrt(mx.mean(expected * expected)).item()


def test_stock_bits_require_equal_bits_without_rotation() -> None:
    formats = [PageFormat.of(8), PageFormat.of(4, 32), PageFormat.of((8, 4)), PageFormat.of(4, rotate=True)]
    assert [each.stock_bits for each in formats] == [8, 4, None, None]
    geometries = [Geometry(2, 64, 64, mx.float32, each) for each in (None, *formats)]
    assert [each.rotates for each in geometries] == [False, False, False, False, True]


def test_rows_read_by_positions_are_rotated_back() -> None:
    geometry = Geometry(2, 64, 64, mx.float32, PageFormat.of(8, 64, True))
    pool = pool_of(page_format=geometry.format)
    table = pool.new_table()
    k, v = outlying(2, 10, 64)
    pool.append_tokens(table, 10)
    pool.write(0, [table], k, v)
    storage = pool.blocks_of(0)
    assert isinstance(storage, HostBlocks)
    got = storage.fetch(NewTokens([table], (1,)))
    for x, read in zip((k, v), got, strict=True):
        assert rms(read, x) < 0.03
