"""Quantised pages in place hold what functional ones hold, whatever is done to the pool; on a CPU over stand-ins."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.attention import dispatch
from mlx_paged.kernels import availability
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import SelfCheck
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.storage import choice
from mlx_paged.kv.storage.attention_params import AttentionParams, QueryHeads
from mlx_paged.kv.storage.base import Geometry, PageFormat
from mlx_paged.kv.storage.choice import kernel_unsupported_reason, prefill_unsupported_reason, storage_choice
from mlx_paged.kv.storage.in_place import InPlaceStorage
from mlx_paged.kv.storage.quantized import QuantizedStorage
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels

HEADS, DIM, SIZE = 2, 64, 8
FORMATS = [PageFormat(8, 8, 64), PageFormat(4, 4, 32), PageFormat(8, 4, 32)]
FORMATS += [PageFormat(8, 8, 64, True), PageFormat(4, 4, 32, True)]


def noise(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


class Pair:
    """The same operations on two pools, in place and not."""

    def __init__(self, page_format: PageFormat, window: int | None = None) -> None:
        self.pools = [
            BlockPool(
                [LayerGroup((0,), window)],
                block_size=SIZE,
                choose_storage=storage_choice(use_kernel),
                page_format=page_format,
            )
            for use_kernel in (True, False)
        ]
        for pool in self.pools:
            pool.set_geometry(0, noise(0, 1, HEADS, 1, DIM), noise(1, 1, HEADS, 1, DIM), batch=1, heads=QueryHeads(4))
        self.storages = [pool.groups[0].storages[0] for pool in self.pools]
        assert [type(x) for x in self.storages] == [InPlaceStorage, QuantizedStorage]

    def new(self) -> list[BlockTable]:
        return [pool.new_table() for pool in self.pools]

    def append(self, tables: list[BlockTable], seed: int, count: int) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.append_tokens(table, count)
            pool.write([table], 0, noise(seed, 1, HEADS, count, DIM), noise(seed + 1, 1, HEADS, count, DIM))

    def agree(self, tables: list[BlockTable]) -> None:
        for read in ("read_stored", "gather_visible"):
            found = []
            for pool, table in zip(self.pools, tables, strict=True):
                layer = pool.layer(0)
                found.append(layer.read_stored(table) if read == "read_stored" else pool.gather_visible(table, 0))
            for ours, other in zip(*found, strict=True):
                np.testing.assert_array_equal(np.array(ours), np.array(other))


@pytest.fixture
def fake() -> Iterator[FakeKernels]:
    with fake_kernels() as stand_ins:
        yield stand_ins


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_what_is_written_grown_forked_and_moved_is_the_same(page_format: PageFormat, fake: FakeKernels) -> None:
    pair = Pair(page_format, window=20)
    first, second = pair.new(), pair.new()
    pair.append(first, 10, 13)
    pair.append(second, 20, 3)
    forks = [pool.fork(table) for pool, table in zip(pair.pools, first, strict=True)]
    pair.append(first, 30, 40)  # the pool grows, and the fork's last block is copied
    pair.append(forks, 40, 1)
    for tables in (first, second, forks):
        pair.agree(tables)
    assert [x.num_quantized for x in pair.storages] == [57, 57]
    # Rows of one are those of the other, and nothing is quantised again.
    moved = pair.new()
    for pool, table, source in zip(pair.pools, moved, reversed(pair.pools), strict=True):
        rows = source.layer(0).read_stored(second[pair.pools.index(source)])
        pool.append_tokens(table, 3)
        pool.layer(0).write_stored([table], *rows)
    pair.agree(moved)
    np.testing.assert_array_equal(
        *(np.array(pair.pools[0].layer(0).read_stored(tables[0])[0]) for tables in (second, moved))
    )
    assert [x.num_quantized for x in pair.storages] == [57, 57]
    for pool in pair.pools:
        pool.check_integrity()


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_attention_is_over_what_the_pages_hold(page_format: PageFormat, fake: FakeKernels) -> None:
    pair = Pair(page_format)
    tables = pair.new()
    pair.append(tables, 5, 19)
    q, k, v = noise(1, 1, 4, 1, DIM), noise(2, 1, HEADS, 1, DIM), noise(3, 1, HEADS, 1, DIM)
    found = []
    for pool, table in zip(pair.pools, tables, strict=True):
        pool.append_tokens(table, 1)
        step = pool.layer(0).step([table], 1)
        found.append(dispatch.append_attention(q, k, v, pool, 0, [table], step, AttentionParams(0.125)))
        q2 = noise(4, 1, 4, 1, DIM)
        found[-1] = mx.concatenate(
            [found[-1], dispatch.paged_attention(q2, pool, 0, [table], AttentionParams(0.125), step)]
        )
    np.testing.assert_allclose(np.array(found[0]), np.array(found[1]), atol=1e-6)
    assert fake.calls["append"] == 1 and fake.calls["paged_decode"] == 2
    pair.agree(tables)
    assert [x.num_quantized for x in pair.storages] == [20, 20]


def test_a_write_that_is_taken_back_is_counted_once(fake: FakeKernels) -> None:
    pair = Pair(FORMATS[0])
    (pool, _), (storage, _), (table, _) = pair.pools, pair.storages, pair.new()
    pool.append_tokens(table, 3)
    k, v = noise(2, 1, HEADS, 3, DIM), noise(3, 1, HEADS, 3, DIM)
    before = storage.fence()
    pool.write([table], 0, k, v)
    written = storage.fence()
    pool.gather_visible(table, 0)
    assert storage.rewind(written, storage.fence()) and storage.num_quantized == 3
    pool.gather_visible(table, 0)
    assert storage.rewind(before, storage.fence()) and storage.num_quantized == 0
    pool.write([table], 0, k, v)
    assert storage.num_quantized == 3


def test_a_kernel_of_these_pages_is_checked_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(HEADS, DIM, DIM, mx.bfloat16, PageFormat(8, 4, 32))
    checked = []

    def check(variant: kernels.Variant) -> SelfCheck:
        checked.append(variant)
        return SelfCheck(variant, len(checked) > 1, 0.0, 0.1, "it does not compile")

    monkeypatch.setattr(availability, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(availability, "prepares_plans", lambda: True)
    monkeypatch.setattr(kernels, "backend", lambda: "metal")
    monkeypatch.setattr(choice, "checked", check)
    kernels.variants_of.cache_clear()
    try:
        assert "it does not compile" in (kernel_unsupported_reason(geometry, SIZE, QueryHeads(4)) or "")
        assert kernel_unsupported_reason(geometry, SIZE, QueryHeads(4)) is None
        (variant, _) = checked
        assert variant.body == "quantized_decode" and str(variant).endswith("b8 8/4 bits/32]")
        assert variant.pages is not None and (variant.pages.k, variant.pages.v) == geometry.rows
        expected = "no kernel for heads of 64 and pages of 8/4 bits/32 fits this GPU"
        assert prefill_unsupported_reason(geometry, SIZE, QueryHeads(4)) == expected
    finally:
        kernels.variants_of.cache_clear()
