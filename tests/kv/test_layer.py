"""PoolLayer: a layer of a pool, and what it refuses."""

import weakref

import mlx.core as mx
import pytest

from mlx_paged.errors import BlockStateError, GeometryError
from mlx_paged.kv.blocks import BlocksChoice
from mlx_paged.kv.geometry import Geometry
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.host_blocks import HostBlocks
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import bits, kv


def two_groups() -> BlockPool:
    return BlockPool([LayerGroup((0, 2)), LayerGroup((1, 3), 6, "window")], block_size=4)


def test_layer_knows_its_group_and_position() -> None:
    pool = two_groups()
    for number, (index, position, window) in {0: (0, 0, None), 2: (0, 1, None), 1: (1, 0, 6), 3: (1, 1, 6)}.items():
        layer = pool.layer(number)
        assert (layer.number, layer.group_index, layer.position, layer.window) == (number, index, position, window)
        assert layer.group is pool.groups[index] and layer.spec is layer.group.spec and layer.in_place is False
        assert pool.group_of(number) == index
    with pytest.raises(KeyError):
        pool.layer(4)


def test_layers_of_a_group_do_not_share_contents() -> None:
    pool = two_groups()
    table = pool.new_table(1)
    pool.append_tokens(table, 5)
    parts = {number: kv(number, 5) for number in (1, 3)}
    for number, (k, v) in parts.items():
        pool.layer(number).write([table], k, v)
    for number, part in parts.items():
        got = pool.layer(number).gather_visible(table)
        assert all((bits(x) == bits(y)).all() for x, y in zip(got, part, strict=True))
    assert pool.layer(3).blocks is not pool.layer(1).blocks


def test_foreign_tables_are_refused_before_anything_is_changed() -> None:
    pool, other = two_groups(), two_groups()
    k, v = kv(0, 3)
    layer = pool.layer(0)
    with pytest.raises(BlockStateError, match="nothing has been written"):
        layer.blocks  # noqa: B018
    assert layer.ready() == []
    for table, error in ((pool.new_table(1), GeometryError), (other.new_table(0), BlockStateError)):
        (other if table.owner is not pool.new_table().owner else pool).append_tokens(table, 3)
        for use in (lambda t: layer.write([t], k, v), layer.gather_visible, lambda t: layer.step([t], 3)):
            with pytest.raises(error):
                use(table)
    assert layer.group.geometry is None and not layer.group.blocks
    own = pool.new_table()
    pool.append_tokens(own, 3)
    layer.write([own], k, v)
    assert (bits(layer.gather_visible(own)[0]) == bits(k)).all()


def test_fitted_casts_floats_to_the_dtype_of_the_layer() -> None:
    layer = two_groups().layer(0)
    k, v = kv(0, 1)
    assert layer.fitted(k, v) == (k, v), "the layer has no dtype yet"
    layer.set_geometry(k.astype(mx.bfloat16), v.astype(mx.bfloat16), batch=1)
    assert [x.dtype for x in layer.fitted(k, v)] == [mx.bfloat16, mx.bfloat16]
    whole = k.astype(mx.int32), v.astype(mx.int32)
    assert layer.fitted(*whole) == whole


def test_a_layer_does_not_keep_its_pool() -> None:
    pool = two_groups()
    layer, gone = pool.layer(0), weakref.ref(pool)
    del pool
    assert gone() is None and layer.window is None


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
            pool.layer(0).write([table], k, v)
    assert pool.groups[0].geometry is None and pool.groups[0].blocks_reason == "nothing written yet"
    is_full = False
    pool.layer(0).write([table], k, v)
    assert (bits(pool.layer(0).gather_visible(table)[0]) == bits(k)).all()
