"""Blocks on disk come back bit for bit, or not at all."""

import errno
import gc
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.attention_params import QueryHeads
from mlx_paged.kv.choice import blocks_choice
from mlx_paged.kv.device_blocks import DeviceBlocks
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix import spill_folder
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.spill import SpillStore
from mlx_paged.prefix.spill_folder import SpillWarning
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.prefixes import check_contents, compute, make_pool, new_tables, release

WINDOWS = [(None,), (None, 6), (5, None, 1)]


def spilled(folder: Path, prefixes: Sequence[Sequence[int]], windows=(None,), chunk: int = 100, **options: Any):
    """Return a store with these prefixes, each computed in chunks, inserted into a tree and evicted."""
    pool, store = make_pool(windows), SpillStore(folder, **options)
    tree = RadixTree(pool, on_evict=lambda salt, node: save(store, pool, node))
    for tokens in prefixes:
        add(tree, tokens, chunk)
    tree.clear()
    assert len(tree) == pool.stats().live_blocks == 0
    pool.check_integrity()
    return store


def save(store: SpillStore, pool: BlockPool, node: Any) -> None:
    store.save(pool, node, "weights")


def add(tree: RadixTree, tokens: Sequence[int], chunk: int = 100) -> None:
    _, tables = tree.adopt(tokens)
    for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
        compute(tree.pool, tables, tokens[:end])
        tree.insert(tokens[: max(end, tables[0].length)], tables)
    release(tree.pool, tables)


def restored(folder: Path, tokens: Sequence[int], windows=(None,), identity: str = "weights", **options: Any) -> int:
    """Return the number of tokens that a new pool serves, as after a restart; checks their contents."""
    pool, store = make_pool(windows, **options), SpillStore(folder)
    tree = RadixTree(pool)
    gained = store.restore(tree, tokens, None, identity)
    assert tree.hit_tokens == 0
    length, tables = tree.adopt(tokens)
    assert gained == length
    check_contents(pool, tables, tokens)
    compute(pool, tables, tokens)
    check_contents(pool, tables, tokens)
    tree.check_integrity()
    pool.check_integrity()
    return length


@pytest.mark.parametrize(
    ("windows", "length"), quick(crossed(WINDOWS, [1, 3, 4, 5, 8, 22]), ((None,), 1), ((None, 6), 3), ((5, None, 1), 4),
    ((None,), 5), ((None,), 8), ((None,), 22))
)  # fmt: skip
def test_round_trip(windows: tuple[int | None, ...], length: int, tmp_path: Path) -> None:
    tokens = tuple(range(length))
    store = spilled(tmp_path, [tokens], windows)
    assert len(store) == -(-length // 4) and store.nbytes == sum(f.stat().st_size for f in tmp_path.iterdir())
    assert restored(tmp_path, (*tokens, 99), windows) == length
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(tmp_path, (*tokens, 98, 97), windows) == length


def test_part_of_a_spilled_prefix_is_served_to_the_token(tmp_path: Path) -> None:
    spilled(tmp_path, [range(22)])
    assert restored(tmp_path, [*range(14), 99, 98]) == 14
    assert restored(tmp_path, range(22)) == 21  # one is left to compute
    assert restored(tmp_path, [99, *range(22)]) == 0
    assert restored(tmp_path, [0]) == 0


def test_prefixes_with_images_stay_in_memory(tmp_path: Path) -> None:
    """mlx-lm's tokens for an image are a negative hash of its address, where another image may be after a restart."""
    assert len(spilled(tmp_path, [[1, 2, 3, 4, -1, -1, 5, 6]])) == 0


def test_common_prefixes_are_written_once(tmp_path: Path) -> None:
    system = tuple(range(10))
    prefixes = [(*system, 100 + n, *range(5)) for n in range(4)]
    store = spilled(tmp_path, prefixes)
    assert len(store) == 2 + 4 * 2
    for tokens in prefixes:
        assert restored(tmp_path, (*tokens, 99)) == 16
    # A longer prefix adds only its own blocks.
    longer = spilled(tmp_path, [(*prefixes[0], *range(50, 60))])
    assert len(longer) == 2 + 4 * 2 + 3 and restored(tmp_path, (*prefixes[0], 99)) == 16


recipes = st.tuples(st.integers(0, 9), st.integers(0, 40), st.lists(st.integers(0, 1), min_size=1, max_size=9))


@settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(recipes, max_size=8), st.sampled_from(WINDOWS), st.integers(1, 9))
def test_random_prefixes(
    tmp_path_factory: pytest.TempPathFactory,
    recipes: list[tuple[int, int, list[int]]],
    windows: tuple[int | None, ...],
    chunk: int,
) -> None:
    prefixes: list[tuple[int, ...]] = [(0, 1, 1, 0, 1)]
    for number, cut, suffix in recipes:
        prefixes.append((*prefixes[number % len(prefixes)][:cut], *suffix))
    folder = tmp_path_factory.mktemp("spill")
    spilled(folder, prefixes, windows, chunk)
    for tokens in prefixes:
        assert restored(folder, (*tokens, 2), windows) == len(tokens)


def test_restore_reads_only_what_the_tree_lacks(tmp_path: Path) -> None:
    """The tree may hold a prefix that ends inside a block."""
    tokens = tuple(range(30))
    for windows in WINDOWS:
        folder = tmp_path / str(windows)
        spilled(folder, [tokens], windows, chunk=7)
        for kept in range(1, 30):
            pool, store = make_pool(windows), SpillStore(folder)
            tree = RadixTree(pool)
            add(tree, tokens[:kept])
            assert store.restore(tree, (*tokens, 99), None, "weights") == 30 - kept
            length, tables = tree.adopt((*tokens, 99))
            assert length == 30
            check_contents(pool, tables, tokens)
            assert store.restore(tree, (*tokens, 99), None, "weights") == 0
            tree.check_integrity()
            pool.check_integrity()


def test_other_weights_and_other_block_sizes_find_nothing(tmp_path: Path) -> None:
    spilled(tmp_path, [range(20)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(tmp_path, range(20), identity="other weights") == 0
        assert restored(tmp_path, range(20), block_size=8) == 0


@pytest.mark.parametrize(
    ("damage", "number"), quick(crossed(["truncate", "empty", "flip", "append", "foreign", "rename", "no header",
    "vanish"], [0, 2, 4]), ("truncate", 0), ("append", 0), ("no header", 0), ("empty", 2), ("foreign", 2),
    ("vanish", 2), ("flip", 4), ("rename", 4))
)  # fmt: skip
def test_damaged_files_are_ignored_with_one_warning(damage: str, number: int, tmp_path: Path) -> None:
    store = spilled(tmp_path, [range(20)])
    paths = list(store._order)  # in the order of writing
    path = paths[number]
    data = path.read_bytes()
    reader = SpillStore(tmp_path) if damage == "vanish" else None
    if damage == "truncate":
        path.write_bytes(data[:-7])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "append":
        path.write_bytes(data + b"x")
    elif damage == "foreign":
        mx.save_safetensors(str(path), {"weight": mx.zeros((2, 2))}, {"format": "pt"})
    elif damage == "rename":
        path.rename(path.with_name(paths[(number + 1) % 5].stem.split("-")[0] + "-" + "0" * 32 + ".safetensors"))
    elif damage == "no header":
        path.write_bytes(b"\xff" * 4096)
    elif damage == "vanish":
        path.unlink()
    if damage == "flip":
        for position in range(0, len(data), 37):
            altered = bytearray(data)
            altered[position] ^= 1 << position % 8
            path.write_bytes(altered)
            with pytest.warns(SpillWarning) as caught:
                assert restored(tmp_path, (*range(20), 99)) <= number * 4
            assert len(caught) == 1
        return
    with pytest.warns(SpillWarning) as caught:
        if reader is not None:
            tree = RadixTree(pool := make_pool())
            assert reader.restore(tree, (*range(20), 99), None, "weights") == number * 4 == pool.stats().live_blocks * 4
        else:
            assert restored(tmp_path, (*range(20), 99)) == number * 4
    assert len(caught) == 1


def test_file_of_a_killed_writer_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the process ends while it writes a file, the file is whole or ignored."""

    class Killed(BaseException):
        pass

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    def half_written(file: Any, data: memoryview) -> None:
        file.write(data[: len(data) // 2])
        raise Killed

    for where, name, action in [
        (spill_folder, "_fill", half_written),
        (spill_folder, "_digest", killed),
        (Path, "replace", killed),
    ]:
        folder = tmp_path / name
        spilled(folder, [range(8)])
        with monkeypatch.context() as patch:
            patch.setattr(where, name, action)
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # no clean-up either
            pool = make_pool()
            tree = RadixTree(pool)
            add(tree, range(30))
            store = SpillStore(folder)
            with pytest.raises(Killed):
                store.save(pool, next(tree.nodes()), "weights")
        assert any(path.name.startswith(".") for path in folder.iterdir())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert restored(folder, range(30)) == 8
        # Stale temporary files are deleted at a later start.
        monkeypatch.setattr(spill_folder, "STALE_SECONDS", -1)
        SpillStore(folder)
        monkeypatch.undo()
        assert not any(path.name.startswith(".") for path in folder.iterdir())


def test_full_disk_loses_the_prefix_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(SpillWarning, match="No space left") as caught:
        patch.setattr(spill_folder, "_fill", full)
        store = spilled(tmp_path, [range(20), range(50, 70)])
    assert len(caught) == 1 and len(store) == 0 and not list(tmp_path.iterdir())


def test_evicted_blocks_are_written_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eviction does not wait for the disk; restoring the same prefix does."""
    go_on, threads, fill = threading.Event(), set(), spill_folder._fill

    def slowly(file: Any, data: memoryview) -> None:
        threads.add(threading.current_thread())
        assert go_on.wait(60)
        fill(file, data)

    monkeypatch.setattr(spill_folder, "_fill", slowly)
    pool, store = make_pool(), SpillStore(tmp_path)
    tree = RadixTree(pool, on_evict=lambda salt, node: store.save(pool, node, "weights", wait=False))
    add(tree, range(20))
    add(tree, range(100, 108))
    tree.clear()
    assert pool.stats().live_blocks == len(store) == store.nbytes == 0
    assert store.restore(tree, [500, 501], None, "weights") == 0  # another prefix: does not wait either
    threading.Timer(0.05, go_on.set).start()
    assert store.restore(tree, (*range(20), 99), None, "weights") == 20
    assert len(store) == 5 + 2 and threads and threading.current_thread() not in threads
    assert store.nbytes == sum(f.stat().st_size for f in tmp_path.iterdir())
    check_contents(pool, tree.adopt((*range(20), 99))[1], range(20))
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()  # it ends with its work
    assert restored(tmp_path, (*range(100, 108), 99)) == 8


def test_prefixes_dropped_on_a_slow_disk_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, fill = threading.Event(), spill_folder._fill

    def slowly(file: Any, data: memoryview) -> None:
        assert go_on.wait(60)
        fill(file, data)

    monkeypatch.setattr(spill_folder, "_fill", slowly)
    pool, store = make_pool(), SpillStore(tmp_path, queued_bytes=1500)
    tree = RadixTree(pool, on_evict=lambda salt, node: store.save(pool, node, "weights", wait=False))
    for n in range(10):
        add(tree, range(100 * n, 100 * n + 8))
    tree.clear()
    queued = 20 - store.dropped
    assert 0 < queued < 6
    go_on.set()
    assert store.flush() == queued == len(store) and store.dropped == 20 - queued
    assert restored(tmp_path, (*range(8), 99)) == 8 and restored(tmp_path, (*range(900, 908), 99)) == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_size_limit_deletes_the_least_recently_used_files(restarts: bool, tmp_path: Path) -> None:
    store = spilled(tmp_path, [range(100 * n, 100 * n + 4) for n in range(4)])
    each = store.nbytes // 4
    pool = make_pool()
    tree = RadixTree(pool)
    assert store.restore(tree, [0, 1, 2, 3, 9], None, "weights") == 4
    if restarts:
        store = SpillStore(tmp_path)
    store.max_bytes = 3 * each + each // 2
    add(tree, [900, 901, 902, 903])
    store.save(pool, tree.match([900, 901, 902, 903, 0]).node, "weights")
    assert store.nbytes <= store.max_bytes and len(store) == 3
    assert [restored(tmp_path, [n, n + 1, n + 2, n + 3, 9]) for n in (0, 100, 200, 300, 900)] == [4, 0, 0, 4, 4]
    assert len(SpillStore(tmp_path, max_bytes=each)) <= 1 and len(list(tmp_path.iterdir())) <= 1


def test_prefix_too_large_for_the_pool_stays_on_disk(tmp_path: Path) -> None:
    spilled(tmp_path, [range(40)])
    pool, store = make_pool(num_blocks=6), SpillStore(tmp_path)
    tree = RadixTree(pool)
    add(tree, [50, 51])
    with pytest.raises(PoolExhaustedError):
        store.restore(tree, range(41), None, "weights")
    gc.collect(0)
    tree.check_integrity()
    pool.check_integrity()
    assert all(node.locks == 0 for node in tree.nodes())
    assert pool.stats().live_blocks == pool.stats().cached_blocks
    assert restored(tmp_path, range(41)) == 40


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_its_bits(dtype: mx.Dtype, tmp_path: Path) -> None:
    def filled() -> tuple[BlockPool, RadixTree, list[Any]]:
        pool = make_pool()
        return pool, RadixTree(pool), new_tables(pool)

    pool, tree, tables = filled()
    k, v = (mx.random.normal((1, 2, 9, size)).astype(dtype) for size in (4, 3))
    pool.append_tokens(tables[0], 9)
    pool.write_prefill(tables[0], 0, k, v)
    node = tree.insert(range(9), tables)
    assert SpillStore(tmp_path).save(pool, node, "weights") == 3
    pool, tree, _ = filled()
    assert SpillStore(tmp_path).restore(tree, range(10), None, "weights") == 9
    _, tables = tree.adopt(range(10))
    for got, expected in zip(pool.gather_visible(tables[0], 0), (k, v), strict=True):
        assert got.dtype == dtype and mx.array_equal(got, expected)


def test_files_of_another_shape_are_not_served(tmp_path: Path) -> None:
    """Two models with one identity: files of another geometry are not served, and are kept for the other model."""
    spilled(tmp_path, [range(9)])
    for dtype, heads in ((mx.float32, 5), (mx.float16, 1)):
        pool = make_pool()
        tables = new_tables(pool)
        pool.append_tokens(tables[0], 1)
        pool.write_prefill(tables[0], 0, mx.zeros((1, heads, 1, 2), dtype), mx.zeros((1, heads, 1, 1), dtype))
        tree = RadixTree(pool)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert SpillStore(tmp_path).restore(tree, range(9), None, "weights") == 0
            assert restored(tmp_path, range(9)) == 8
        assert len(tree) == 0
        pool.check_integrity()


def test_restore_that_the_pool_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled(tmp_path, [range(9)], WINDOWS[1])
    pool, store = make_pool(WINDOWS[1]), SpillStore(tmp_path)
    tree = RadixTree(pool)
    real = BlockPool.write_stored

    def refuse(self: BlockPool, layer: int, tables: Any, *arrays: mx.array) -> None:
        if layer:
            raise RuntimeError("no")
        real(self, layer, tables, *arrays)

    with monkeypatch.context() as patch, pytest.warns(SpillWarning, match="do not match the model"):
        patch.setattr(BlockPool, "write_stored", refuse)
        assert store.restore(tree, range(9), None, "weights") == 0
    assert len(tree) == pool.stats().live_blocks == 0
    pool.check_integrity()
    assert store.restore(tree, range(9), None, "weights") == 0  # not tried again


def test_in_place_pools_spill_restore_and_share_prefixes(tmp_path: Path) -> None:
    """Reads and writes go through the pool's own methods, so the form of its storage does not matter."""
    with fake_kernels():

        def new_pool() -> BlockPool:
            groups = [LayerGroup((0, 2)), LayerGroup((1,), 20, "window")]
            pool = BlockPool(groups, block_size=8, choose_blocks=blocks_choice(True))
            for layer in (0, 1):
                pool.set_geometry(layer, mx.zeros((1, 2, 1, 64)), mx.zeros((1, 2, 1, 80)), batch=1, heads=QueryHeads(4))
            assert isinstance(pool.blocks_of(0), DeviceBlocks)
            return pool

        def written(pool: BlockPool, tables: list[Any], count: int) -> None:
            for group in (0, 1):
                pool.append_tokens(tables[group], count)
                for layer in pool.groups[group].spec.layers:
                    k, v = (mx.random.normal((1, 2, count, size)) for size in (64, 80))
                    pool.write_prefill(tables[group], layer, k, v)

        def contents(pool: BlockPool, tables: list[Any]) -> list[mx.array]:
            """Return the last 19 tokens of each layer, which the next token sees in the window."""
            arrays = [x for layer in range(3) for x in pool.gather_visible(tables[layer % 2], layer)]
            return [mx.contiguous(x[:, :, -19:]) + 0 for x in arrays]

        pool = new_pool()
        tables = new_tables(pool)
        written(pool, tables, 45)
        tree, store = RadixTree(pool), SpillStore(tmp_path)
        node = tree.insert(range(45), tables)
        expected = contents(pool, tables)
        mx.eval(expected)
        _, shared = tree.adopt(range(46))
        written(pool, shared, 5)
        written(pool, tables, 3)  # the donor writes on as well
        assert store.save(pool, node, "weights") == 6

        pool = new_pool()
        tree = RadixTree(pool)
        assert SpillStore(tmp_path).restore(tree, range(46), None, "weights") == 45
        _, tables = tree.adopt(range(46))
        for got, want in zip(contents(pool, tables), expected, strict=True):
            assert mx.array_equal(got, want)
        tree.check_integrity()
        pool.check_integrity()
