"""Bad input to a pool: a typed error, and everything as before."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_paged.errors import BlockStateError, GeometryError
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import Watched, assert_holds, joined, kv, pool_of, put

ONE, TWO = kv(1, 1), kv(1, 2)
BAD_WRITES: dict[str, tuple[mx.array, mx.array, str]] = {
    "rank 3": (TWO[0][0], TWO[1][0], r"must be \[batch, n_kv_heads, tokens, head_dim\]"),
    "rank 5": (TWO[0][None], TWO[1][None], "must be"),
    "rank 0": (mx.array(1.0), mx.array(1.0), "must be"),
    "values of rank 3": (TWO[0], TWO[1][0], "must be"),
    "batch": (*kv(1, 2, batch=2), r"2 sequence\(s\), 1 expected"),
    "empty batch": (TWO[0][:0], TWO[1][:0], r"0 sequence\(s\), 1 expected"),
    "heads": (*kv(1, 2, heads=3), "holds"),
    "key head dim": (*kv(1, 2, kd=16), "holds"),
    "value head dim": (*kv(1, 2, vd=4), "holds"),
    "dtype": (*kv(1, 2, dtype=mx.float16), "holds"),
    "dtypes differ": (TWO[0], TWO[1].astype(mx.float16), "keys are mlx.core.float32, values mlx.core.float16"),
    "integers": (TWO[0].astype(mx.int32), TWO[1].astype(mx.int32), "floating point"),
    "heads of values": (TWO[0], kv(1, 2, heads=1)[1], "differ in batch, heads or tokens"),
    "tokens of values": (TWO[0], ONE[1], "differ in batch, heads or tokens"),
    "batch of values": (TWO[0], kv(1, 2, batch=2)[1], "differ in batch, heads or tokens"),
    "more tokens than reserved": (*kv(1, 7), "7 tokens to write, only 6 reserved"),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_keys_and_values_that_do_not_fit_are_refused(case: str) -> None:
    k, v, message = BAD_WRITES[case]
    watched = Watched()
    before = watched.picture()
    with pytest.raises(GeometryError, match=message):
        watched.pool.write_prefill(watched.table, 0, k, v)
    watched.assert_unchanged(before)
    watched.go_on()


@pytest.mark.parametrize("case", BAD_WRITES)
def test_a_refused_first_write_does_not_fix_the_geometry(case: str) -> None:
    k, v, _ = BAD_WRITES[case]
    if case in ("heads", "key head dim", "value head dim", "dtype"):
        pytest.skip("any of these is fine as the first")
    pool = pool_of()
    table = pool.new_table()
    pool.append_tokens(table, 6)
    with pytest.raises(GeometryError):
        pool.write_prefill(table, 0, k, v)
    other = kv(3, 6, heads=5, kd=4, vd=12, dtype=mx.bfloat16)
    pool.write_prefill(table, 0, *other)
    assert_holds(pool, table, *other)


def test_decode_takes_one_token_for_each_table() -> None:
    watched = Watched()
    pool, table = watched.pool, watched.table
    before = watched.picture()
    with pytest.raises(GeometryError, match="one token per sequence, not 2"):
        pool.write_decode([table], 0, *kv(1, 2))
    with pytest.raises(GeometryError, match=r"2 sequence\(s\), 1 expected"):
        pool.write_decode([table], 0, *kv(1, 1, batch=2))
    other = pool.new_table()
    with pytest.raises(GeometryError, match=r"1 sequence\(s\), 2 expected"):
        pool.write_decode([table, other], 0, *kv(1, 1))
    with pytest.raises(GeometryError, match="only 0 reserved"):
        pool.write_decode([table, other], 0, *kv(1, 1, batch=2))
    watched.assert_unchanged(before)
    watched.go_on()


def test_a_layer_of_another_group_is_refused() -> None:
    pool = BlockPool([LayerGroup((0,)), LayerGroup((1,), 8, "window")], block_size=4)
    tables = [pool.new_table(0), pool.new_table(1)]
    parts = [kv(1, 6), kv(2, 6)]
    for layer, table in enumerate(tables):
        pool.append_tokens(table, 6)
        pool.write_prefill(table, layer, *parts[layer])
    with pytest.raises(GeometryError, match="layer 1 is not of the table's group 0"):
        pool.write_prefill(tables[0], 1, *kv(3, 6))
    with pytest.raises(GeometryError, match="layer 0 is not of the table's group 1"):
        pool.write_decode([tables[1]], 0, *kv(3, 1))
    with pytest.raises(GeometryError, match="layer 1 is not of the table's group 0"):
        pool.gather_visible(tables[0], 1)
    for layer, table in enumerate(tables):
        assert_holds(pool, table, *parts[layer], layer)


def test_block_double_release_and_retain_of_a_free_block() -> None:
    watched = Watched()
    pool = watched.pool
    (block,) = pool.allocate(0, 1)
    pool.release(0, [block])
    before = watched.picture()
    for action in (pool.release, pool.retain):
        with pytest.raises(BlockStateError, match=f"block {block} re.* while free"):
            action(0, [block])
        with pytest.raises(BlockStateError, match="while free"):
            action(0, [watched.table.block_ids[0], block])
    watched.assert_unchanged(before)
    watched.go_on()


def test_use_after_release_and_double_release_of_a_table() -> None:
    watched = Watched()
    pool = watched.pool
    gone = pool.fork(watched.table)
    pool.release_table(gone)
    assert gone.released and not gone.block_ids
    before = watched.picture()
    uses: list[Callable[[], object]] = [
        lambda: pool.release_table(gone),
        lambda: pool.append_tokens(gone, 1),
        lambda: pool.fork(gone),
        lambda: pool.trim(gone, 1),
        lambda: pool.copy_on_write_block(gone, 0),
        lambda: pool.write_prefill(gone, 0, *kv(1, 2)),
        lambda: pool.write_decode([gone], 0, *kv(1, 1)),
        lambda: pool.write_decode([watched.table, gone], 0, *kv(1, 1, batch=2)),
        lambda: pool.gather_visible(gone, 0),
    ]
    for use in uses:
        with pytest.raises(BlockStateError, match="after release, or of another pool"):
            use()
    watched.assert_unchanged(before)
    watched.go_on()


def test_a_table_of_another_pool_is_refused() -> None:
    watched, other = Watched(), Watched()
    before, before_other = watched.picture(), other.picture()
    pool, foreign = watched.pool, other.table
    uses: list[Callable[[], object]] = [
        lambda: pool.release_table(foreign),
        lambda: pool.append_tokens(foreign, 1),
        lambda: pool.fork(foreign),
        lambda: pool.trim(foreign, 1),
        lambda: pool.copy_on_write_block(foreign, 0),
        lambda: pool.write_prefill(foreign, 0, *kv(1, 2)),
        lambda: pool.gather_visible(foreign, 0),
    ]
    for use in uses:
        with pytest.raises(BlockStateError, match="of another pool"):
            use()
    watched.assert_unchanged(before)
    other.assert_unchanged(before_other)
    watched.go_on()
    other.go_on()


def test_writing_to_a_shared_block_without_append_is_refused() -> None:
    watched = Watched()
    pool = watched.pool
    fork = pool.fork(watched.table)
    before = watched.picture()
    with pytest.raises(BlockStateError, match="is to be written but held 2 times"):
        pool.write_prefill(watched.table, 0, *kv(9, 2))
    with pytest.raises(BlockStateError, match="is to be written but held 2 times"):
        pool.write_decode([fork], 0, *kv(9, 1))
    watched.assert_unchanged(before)
    for layer in range(2):
        assert_holds(pool, fork, *watched.parts[layer], layer)
    watched.go_on()


def test_writing_behind_the_window_is_refused() -> None:
    pool = pool_of(window=4)
    table = pool.new_table()
    put(pool, table, 1, 12)
    last = put(pool, table, 2, 1)
    with pytest.raises(BlockStateError, match="block 0 is to be written"):
        pool.write_prefill(table, 0, *kv(3, 13))
    assert_holds(pool, table, *joined(tuple(x[:, :, -3:] for x in kv(1, 12)), last))


@pytest.mark.parametrize("n", [0, -1])
def test_appending_no_tokens_is_refused(n: int) -> None:
    watched = Watched()
    before = watched.picture()
    with pytest.raises(ValueError, match="at least one token"):
        watched.pool.append_tokens(watched.table, n)
    watched.assert_unchanged(before)


def test_reading_what_was_never_written_is_refused() -> None:
    pool = pool_of()
    table = pool.new_table()
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.gather_visible(table, 0)
    pool.append_tokens(table, 3)
    with pytest.raises(BlockStateError, match="nothing has been written"):
        pool.gather_visible(table, 0)
