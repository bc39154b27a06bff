"""Groups of a pool: their layers' blocks, and what a layer refuses."""

import mlx.core as mx
import pytest

from mlx_paged.errors import BlockStateError
from mlx_paged.kv.blocks import BlocksChoice
from mlx_paged.kv.geometry import Geometry
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.host_blocks import HostBlocks
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import bits, kv


def two_groups() -> BlockPool:
    return BlockPool([LayerGroup((0, 2)), LayerGroup((1, 3), 6, "window")], block_size=4)


def test_foreign_tables_are_refused_before_anything_is_changed() -> None:
    pool, other = two_groups(), two_groups()
    k, v = kv(0, 3)
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.blocks_of(0)
    assert pool.ready(0) == []
    table = other.new_table()
    other.append_tokens(table, 3)
    for use in (
        lambda: pool.write(0, [table], k, v),
        lambda: pool.gather_visible(table, 0),
        lambda: pool.tokens_of(0, [table], 3),
    ):
        with pytest.raises(BlockStateError, match="belongs to another pool"):
            use()
    assert pool.groups[0].geometry is None and not pool.groups[0].blocks
    own = pool.new_table()
    pool.append_tokens(own, 3)
    pool.write(0, [own], k, v)
    assert (bits(pool.gather_visible(own, 0)[0]) == bits(k)).all()


def test_fitted_casts_floats_to_the_dtype_of_the_group() -> None:
    pool = two_groups()
    layer = pool.groups[0]
    k, v = kv(0, 1)
    assert layer.fitted(k, v) == (k, v), "the group has no dtype yet"
    pool.set_geometry(0, k.astype(mx.bfloat16), v.astype(mx.bfloat16), batch=1)
    assert [x.dtype for x in layer.fitted(k, v)] == [mx.bfloat16, mx.bfloat16]
    whole = k.astype(mx.int32), v.astype(mx.int32)
    assert layer.fitted(*whole) == whole


def test_failed_first_allocation_leaves_the_layer_unchanged() -> None:
    is_full = True

    def form(geometry: Geometry, block_size: int, num_blocks: int) -> HostBlocks:
        if is_full:
            raise RuntimeError("out of memory")
        return HostBlocks(geometry, block_size, num_blocks)

    pool = BlockPool([LayerGroup((0,))], block_size=4, choose_blocks=lambda *_: BlocksChoice(form, "chosen"))
    table, (k, v) = pool.new_table(), kv(0, 5)
    pool.append_tokens(table, 5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.write(0, [table], k, v)
    assert pool.groups[0].geometry is None and pool.groups[0].blocks_reason == "nothing written yet"
    is_full = False
    pool.write(0, [table], k, v)
    assert (bits(pool.gather_visible(table, 0)[0]) == bits(k)).all()
