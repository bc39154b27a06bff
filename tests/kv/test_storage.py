"""FunctionalStorage: bytes go in and come out unchanged, in every dtype, and nothing else is touched."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kv.block_table import Segment
from mlx_paged.kv.step import Columns
from mlx_paged.kv.storage.base import Geometry
from mlx_paged.kv.storage.functional import FunctionalStorage

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SIZE, HEADS, KD, VD = 4, 3, 8, 16


def bits(x: mx.array) -> np.ndarray:
    """The bytes, so that NaNs and signed zeros compare."""
    return np.array(mx.contiguous(x).view({2: mx.uint16, 4: mx.uint32}[x.dtype.size]))


def noise(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def storage_of(num_blocks: int, dtype: mx.Dtype = mx.float32) -> FunctionalStorage:
    return FunctionalStorage(Geometry(HEADS, KD, VD, dtype), SIZE, num_blocks)


def slots(storage: FunctionalStorage, places: list[tuple[int, int]]) -> tuple[mx.array, mx.array]:
    block_ids, offsets = zip(*places, strict=True)
    rows = mx.array([block_ids], mx.int32)
    positions = mx.array([[place * SIZE + offset for place, offset in enumerate(offsets)]], mx.int32)
    return storage.read_rows(Columns(rows, positions))


def test_geometry_of_keys_and_values() -> None:
    geometry = Geometry.of(mx.zeros((1, 2, 5, 8), mx.float16), mx.zeros((1, 2, 5, 12), mx.float16))
    assert geometry == Geometry(2, 8, 12, mx.float16)
    assert geometry.bytes_per_token() == 2 * (8 + 12) * 2


def test_new_storage_is_zero() -> None:
    storage = storage_of(3)
    k, v = storage.gather_blocks(storage.block_index(range(3)))
    assert k.shape == (1, HEADS, 3 * SIZE, KD) and v.shape == (1, HEADS, 3 * SIZE, VD)
    assert not np.array(k).any() and not np.array(v).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segments_round_trip_bit_for_bit(dtype: mx.Dtype) -> None:
    storage = storage_of(8, dtype)
    k, v = noise(1, 1, HEADS, 14, KD, dtype=dtype), noise(2, 1, HEADS, 14, VD, dtype=dtype)
    k[0, 0, 0, :3] = mx.array([float("nan"), -0.0, float("inf")])
    segments = [Segment(26, 2, 0), Segment(12, 8, 2), Segment(4, 4, 10)]
    storage.write_segments(segments, k, v)
    places = [(6, 2), (6, 3), *[(3, i) for i in range(4)], *[(4, i) for i in range(4)], *[(1, i) for i in range(4)]]
    got_k, got_v = slots(storage, places)
    assert got_k.dtype == got_v.dtype == dtype
    np.testing.assert_array_equal(bits(got_k), bits(k))
    np.testing.assert_array_equal(bits(got_v), bits(v))
    untouched = [(block, offset) for block in range(8) for offset in range(4) if (block, offset) not in places]
    assert not bits(slots(storage, untouched)[0]).any() and not bits(slots(storage, untouched)[1]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_go_to_their_own_block_and_slot(dtype: mx.Dtype) -> None:
    storage = storage_of(6, dtype)
    k, v = noise(1, 3, HEADS, 1, KD, dtype=dtype), noise(2, 3, HEADS, 1, VD, dtype=dtype)
    places = [(5, 3), (2, 0), (2, 1)]
    storage.write_rows(storage.flat_index(mx.array([[23], [8], [9]])), k, v)
    got_k, got_v = slots(storage, places)
    np.testing.assert_array_equal(bits(got_k[0]), bits(k[:, :, 0]).transpose(1, 0, 2))
    np.testing.assert_array_equal(bits(got_v[0]), bits(v[:, :, 0]).transpose(1, 0, 2))
    everywhere = slots(storage, [(b, o) for b in range(6) for o in range(4) if (b, o) not in places])
    assert not bits(everywhere[0]).any() and not bits(everywhere[1]).any()


@pytest.mark.parametrize("then", ["segments", "blocks", "view", "copy", "resize", "fence", "rows"])
def test_written_rows_are_visible_to_every_other_operation(then: str) -> None:
    """`write_rows` leaves the blocks in another shape."""
    storage, index = storage_of(6), mx.array([[9], [22]])
    expected_k, expected_v = (np.zeros((HEADS, 6 * SIZE, dim), np.float32) for dim in (KD, VD))
    for seed in (1, 3):
        k, v = noise(seed, 2, HEADS, 1, KD), noise(seed + 1, 2, HEADS, 1, VD)
        storage.write_rows(storage.flat_index(index), k, v)
        for row, slot in enumerate((9, 22)):
            expected_k[:, slot], expected_v[:, slot] = k[row, :, 0], v[row, :, 0]
    before = storage.snapshot()
    if then == "segments":
        k, v = noise(5, 1, HEADS, 2, KD), noise(6, 1, HEADS, 2, VD)
        storage.write_segments([Segment(14, 2, 0)], k, v)
        expected_k[:, 14:16], expected_v[:, 14:16] = k[0], v[0]
    elif then == "copy":
        storage.copy_blocks([2, 5], [0, 3])
        for x in (expected_k, expected_v):
            x[:, 0:4], x[:, 12:16] = x[:, 8:12].copy(), x[:, 20:24].copy()
    elif then == "resize":
        storage.resize(7)
        expected_k, expected_v = (np.pad(x, ((0, 0), (0, SIZE), (0, 0))) for x in (expected_k, expected_v))
    elif then == "fence":
        mx.eval(storage.fence(), storage.latest())
    elif then == "rows":
        storage.write_rows(storage.flat_index(index), noise(7, 2, HEADS, 1, KD), noise(8, 2, HEADS, 1, VD))
        storage.restore(before)
    end = storage.num_blocks * SIZE
    by_blocks = storage.gather_blocks(storage.block_index(range(storage.num_blocks)))
    got_k, got_v = by_blocks if then == "blocks" else storage.view_tokens(0, end)
    np.testing.assert_array_equal(np.array(got_k)[0], expected_k)
    np.testing.assert_array_equal(np.array(got_v)[0], expected_v)
    tokens = storage.read_tokens(storage.flat_index(mx.array([[22, 9]])))
    np.testing.assert_array_equal(np.array(tokens[0])[0], expected_k[:, [22, 9]])


def test_gather_blocks_follows_the_order_of_ids() -> None:
    storage = storage_of(5)
    k, v = noise(1, 1, HEADS, 16, KD), noise(2, 1, HEADS, 16, VD)
    storage.write_segments([Segment(4, 16, 0)], k, v)
    got_k, got_v = storage.gather_blocks(storage.block_index([4, 2]))
    order = [12, 13, 14, 15, 4, 5, 6, 7]
    np.testing.assert_array_equal(np.array(got_k), np.array(k)[:, :, order])
    np.testing.assert_array_equal(np.array(got_v), np.array(v)[:, :, order])


def test_copy_block_copies_that_block_and_later_writes_stay_apart() -> None:
    storage = storage_of(4)
    k, v = noise(1, 1, HEADS, 4, KD), noise(2, 1, HEADS, 4, VD)
    storage.write_segments([Segment(4, 4, 0)], k, v)
    storage.copy_blocks([1], [3])
    storage.write_segments([Segment(4, 4, 0)], -k, -v)
    for block, sign in ((1, -1), (3, 1)):
        got_k, got_v = slots(storage, [(block, i) for i in range(4)])
        np.testing.assert_array_equal(np.array(got_k), sign * np.array(k))
        np.testing.assert_array_equal(np.array(got_v), sign * np.array(v))
    assert not np.array(slots(storage, [(2, i) for i in range(4)])[0]).any()


def test_grow_keeps_the_contents_and_adds_zeros() -> None:
    storage = storage_of(2)
    k, v = noise(1, 1, HEADS, 4, KD), noise(2, 1, HEADS, 4, VD)
    storage.write_segments([Segment(4, 4, 0)], k, v)
    storage.resize(5)
    assert storage.num_blocks == 5
    got_k, got_v = slots(storage, [(1, i) for i in range(4)])
    np.testing.assert_array_equal(np.array(got_k), np.array(k))
    np.testing.assert_array_equal(np.array(got_v), np.array(v))
    new = slots(storage, [(block, i) for block in (2, 3, 4) for i in range(4)])
    assert not np.array(new[0]).any() and not np.array(new[1]).any()


def test_a_growth_that_fails_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(2)
    k, v = noise(1, 1, HEADS, 4, KD), noise(2, 1, HEADS, 4, VD)
    storage.write_segments([Segment(4, 4, 0)], k, v)
    evaluate, left = mx.eval, [1]

    def fail_later(*arrays: mx.array) -> None:
        if left.pop() == 0:
            raise RuntimeError("out of memory")
        left.append(0)
        evaluate(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail_later)
        with pytest.raises(RuntimeError, match="out of memory"):
            storage.resize(50)
    assert storage.num_blocks == 2

    def check() -> None:
        for got, written in zip(slots(storage, [(1, i) for i in range(4)]), (k, v), strict=True):
            np.testing.assert_array_equal(np.array(got), np.array(written))

    check()
    storage.write_segments([Segment(0, 4, 0)], v[..., :KD], v)
    check()
    storage.resize(3)
    assert storage.num_blocks == 3
    check()


def test_fence_waits_for_writes_and_keeps_no_tensor() -> None:
    storage = FunctionalStorage(Geometry(8, 64, 64, mx.float32), 32, 256)  # 32 MiB in all
    k = noise(1, 1, 8, 32, 64)
    storage.write_segments([Segment(32, 32, 0)], k, k)
    fence = storage.fence()
    mx.eval(fence)
    assert fence.size == 2
    held = mx.get_active_memory()
    del storage
    assert held - mx.get_active_memory() >= 32 << 20
    assert fence.tolist() == [0.0, 0.0]
