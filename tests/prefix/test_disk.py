"""Prefixes on disk come back bit for bit, or not at all; a bad file affects only itself; files are private."""

import errno
import gc
import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.errors import DeviceError, PoolExhaustedError
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.device_blocks import DeviceBlocks
from mlx_paged.kv.geometry import QueryHeads
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix import shelf as shelf_module
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.entry import Checkpoint, SavedName
from mlx_paged.prefix.prefix_cache import PrefixCache
from mlx_paged.prefix.shelf import Shelf, ShelfWarning
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.prefixes import check_contents, compute, make_pool

pytestmark = pytest.mark.filterwarnings("error")
WINDOWS = [(None,), (None, 6), (5, None, 1)]
SALT = (SavedName("weights", 0), None)


def new_cache(tier: DiskTier, windows: Any = (None,), **options: Any) -> tuple[PrefixCache, BlockPool]:
    """Return a cache over a new pool that knows its geometry, as after a probe of the model."""
    pool = make_pool(windows, **options)
    for layer in range(len(windows)):
        pool.set_geometry(layer, mx.zeros((1, 1, 1, 2)), mx.zeros((1, 1, 1, 1)), batch=1)
    cache = PrefixCache(pool)
    cache.tier = tier
    return cache, pool


def add(cache: PrefixCache, tokens: Sequence[int], chunk: int = 100, salt: Any = SALT) -> None:
    _, table = cache.adopt(tokens, salt)
    for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
        if end > table.length:
            compute(cache.pool, table, tokens[:end])
            cache.insert(tokens[:end], table, salt)
    cache.pool.release_table(table)


def saved(folder: Path, prefixes: Sequence[Sequence[int]], windows: Any = (None,), chunk: int = 100, **options: Any):
    """Return a shelf with these prefixes, each computed in chunks, inserted and evicted."""
    shelf = Shelf(folder, **options)
    cache, pool = new_cache(DiskTier(shelf), windows)
    for tokens in prefixes:
        add(cache, tokens, chunk)
    cache.clear()
    shelf.flush()
    assert len(cache.entries) == pool.stats().live_blocks == 0
    pool.check_integrity()
    return shelf


def test_states_of_a_lost_device_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks, which cannot be read any more, were saved before."""
    shelf = Shelf(tmp_path)
    cache, pool = new_cache(DiskTier(shelf))
    tokens = list(range(1, 1 + 2 * pool.block_size))
    _, table = cache.adopt(tokens, SALT, to_state=True)
    compute(pool, table, tokens)
    states = Checkpoint.of([SimpleNamespace(state=[mx.ones((4,))])])
    cache.insert(tokens, table, SALT)
    for entry in cache.entries.values():
        DiskTier(shelf).save(cache, entry)
    cache.insert(tokens, table, SALT, states=lambda: states)
    pool.release_table(table)
    monkeypatch.setattr(DeviceError, "count", DeviceError.count + 1)
    for evict in (cache.evict_states, cache.pool.memory.evict):
        with pytest.raises(DeviceError):
            evict(1 << 30)
    shelf.flush()
    assert len(shelf) == 2


def restored(folder: Path, tokens: Sequence[int], windows: Any = (None,), name: str = "weights", **options: Any) -> int:
    """Return the number of tokens that a new pool serves, as after a restart; checks their contents."""
    tier = DiskTier(Shelf(folder))
    cache, pool = new_cache(tier, windows, **options)
    salt = (SavedName(name, 0), None)
    gained = tier.restore(cache, tokens, salt, False)
    assert cache.hit_tokens == 0
    match, table = cache.adopt(tokens, salt)
    assert gained == match.length
    check_contents(pool, table, tokens)
    compute(pool, table, tokens)
    check_contents(pool, table, tokens)
    cache.check_integrity()
    pool.check_integrity()
    return match.length


@pytest.mark.parametrize(("windows", "length"), crossed(WINDOWS, [3, 4, 8, 22]))
def test_round_trip(windows: tuple[int | None, ...], length: int, tmp_path: Path) -> None:
    tokens = tuple(range(length))
    shelf = saved(tmp_path, [tokens], windows)
    assert len(shelf) == len(list(tmp_path.iterdir())) >= length // 4
    assert shelf.nbytes == sum(f.stat().st_size for f in tmp_path.iterdir())
    assert restored(tmp_path, (*tokens, 99), windows) == length // 4 * 4
    assert restored(tmp_path, (*tokens, 98, 97), windows) == length // 4 * 4


def test_what_has_no_meaning_after_a_restart_stays_in_memory(tmp_path: Path) -> None:
    """mlx-lm's tokens for an image are a negative hash of its address, where another image may be after a restart."""
    assert len(saved(tmp_path, [[1, 2, 3, -4, 5, 6, 7, 8]])) == 0
    cache, _pool = new_cache(DiskTier(Shelf(tmp_path)))
    add(cache, range(20), salt=("a model without an identity", None))
    cache.clear()
    assert not list(tmp_path.iterdir())


def test_common_prefixes_are_written_once(tmp_path: Path) -> None:
    prefixes = [(*range(8), 100 + n, *range(7)) for n in range(4)]
    assert len(saved(tmp_path, prefixes)) == 2 + 4 * 2
    for tokens in prefixes:
        assert restored(tmp_path, (*tokens, 99)) == 16
    assert len(saved(tmp_path, [(*prefixes[0], *range(50, 60))])) == 2 + 4 * 2 + 2


def test_only_what_memory_lacks_is_read(tmp_path: Path) -> None:
    tokens = tuple(range(28))
    for windows in WINDOWS:
        folder = tmp_path / str(windows)
        saved(folder, [tokens], windows, chunk=4)
        for kept in range(1, 28, 3):
            tier = DiskTier(Shelf(folder))
            cache, pool = new_cache(tier, windows)
            cache.tier = None
            add(cache, tokens[:kept], chunk=4)
            held = cache.match((*tokens, 99), SALT).length
            assert tier.restore(cache, (*tokens, 99), SALT, False) == 28 - held
            match, table = cache.adopt((*tokens, 99), SALT)
            assert match.length == 28
            check_contents(pool, table, tokens)
            assert tier.restore(cache, (*tokens, 99), SALT, False) == 0
            cache.check_integrity()
            pool.check_integrity()


def test_only_same_tokens_weights_and_block_sizes_are_served(tmp_path: Path) -> None:
    saved(tmp_path, [range(22)])
    assert restored(tmp_path, [*range(14), 99, 98]) == 12
    assert restored(tmp_path, range(20)) == 16  # one token is left to compute
    assert restored(tmp_path, [99, *range(22)]) == restored(tmp_path, [0]) == 0
    assert restored(tmp_path, range(20), name="other weights") == restored(tmp_path, range(20), block_size=8) == 0


def flipped(data: bytes, position: int) -> bytes:
    altered = bytearray(data)
    altered[position] ^= 1 << position % 8
    return bytes(altered)


# What a file holds in place of its own bytes, which come with those of another file.
DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "truncated": lambda data, other: data[:-7],
    "empty": lambda data, other: b"",
    "longer": lambda data, other: data + b"x",
    "another file's": lambda data, other: other,
    "no header": lambda data, other: b"\xff" * 4096,
    **{f"a bit at {n} %": lambda data, other, n=n: flipped(data, len(data) * n // 100) for n in range(0, 100, 11)},
}


def saved_file(folder: Path, end: int) -> Path:
    """Save a prefix of 20 tokens; return the file of the block that ends at ``end``."""
    saved(folder, [range(20)])
    cache, _pool = new_cache(DiskTier(Shelf(folder)))
    cache.tier = None
    add(cache, range(20))
    return next(folder / f"{e.key.hex()}.kv0" for e in cache.entries.values() if e.end == end)


@pytest.mark.parametrize(("damage", "number"), crossed([*DAMAGES, "foreign"], [0, 2, 4]))
def test_damaged_files_are_ignored_with_one_warning(damage: str, number: int, tmp_path: Path) -> None:
    path = saved_file(tmp_path, 4 * number + 4)
    other = next(each for each in tmp_path.iterdir() if each != path)
    if damage == "foreign":
        mx.save_safetensors(str(tmp_path / "x.safetensors"), {"weight": mx.zeros((2, 2))}, {"format": "pt"})
        (tmp_path / "x.safetensors").rename(path)
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes(), other.read_bytes()))
    with pytest.warns(ShelfWarning) as caught:
        assert restored(tmp_path, (*range(20), 99)) == number * 4
    assert len(caught) == 1 and not path.exists()


def test_file_that_vanishes_ends_the_prefix(tmp_path: Path) -> None:
    path = saved_file(tmp_path, 12)
    tier = DiskTier(Shelf(tmp_path))
    path.unlink()
    cache, pool = new_cache(tier)
    assert tier.restore(cache, (*range(20), 99), SALT, False) == 8 == pool.stats().live_blocks * 4


def fill_by(patch: pytest.MonkeyPatch, action: Callable[[Callable[[Any], int], memoryview], None]) -> None:
    """Have ``action`` fill a shelf's files; it gets the file's method ``write``, and the data."""

    def opened(descriptor: int, mode: str) -> Any:
        file: Any = open(descriptor, mode)  # noqa: SIM115 - whoever called closes it
        if mode == "wb":
            write = file.write
            file.write = lambda data: action(write, data)
        return file

    patch.setattr(shelf_module, "open", opened, raising=False)


def test_file_of_a_killed_writer_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the process ends while it writes a file, the file is whole or ignored."""

    class Killed(BaseException):
        pass

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    def half_written(write: Callable[[Any], int], data: memoryview) -> None:
        write(data[: len(data) // 2])
        raise Killed

    for name in ("fill", "replace"):
        folder = tmp_path / name
        saved(folder, [range(8)])
        with monkeypatch.context() as patch:
            if name == "fill":
                fill_by(patch, half_written)
            else:
                patch.setattr(Path, "replace", killed)
            patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # no clean-up either
            with pytest.raises(Killed):
                Shelf(folder)._write_file("0" * 32 + ".kv0", memoryview(bytes(100)))
        assert any(path.name.startswith(".") for path in folder.iterdir())
        assert restored(folder, range(30)) == 8
        # Stale temporary files are deleted at a later start.
        monkeypatch.setattr(shelf_module, "STALE_SECONDS", -1)
        Shelf(folder)
        monkeypatch.undo()
        assert not any(path.name.startswith(".") for path in folder.iterdir())


def test_full_disk_loses_the_prefix_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(ShelfWarning, match="No space left") as caught:
        fill_by(patch, full)
        shelf = saved(tmp_path, [range(20), range(50, 70)])
    assert len(caught) == 1 and len(shelf) == 0 and not list(tmp_path.iterdir())


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, set[threading.Thread]]:
    """Make the disk wait for an event; return it, and the threads that write."""
    go_on, threads = threading.Event(), set()

    def slowly(write: Callable[[Any], int], data: memoryview) -> None:
        threads.add(threading.current_thread())
        assert go_on.wait(60)
        write(data)

    fill_by(monkeypatch, slowly)
    return go_on, threads


def test_evicted_blocks_are_written_by_a_thread(tmp_path: Path, slow_disk: Any) -> None:
    """Neither eviction nor restoring waits for the disk."""
    go_on, threads = slow_disk
    tier = DiskTier(Shelf(tmp_path))
    cache, pool = new_cache(tier)
    add(cache, range(20))
    cache.clear()
    assert pool.stats().live_blocks == len(tier.shelf) == tier.shelf.nbytes == 0
    assert tier.restore(cache, (*range(20), 99), SALT, False) == 20  # from what waits to be written
    check_contents(pool, cache.adopt((*range(20), 99), SALT)[1], range(20))
    go_on.set()
    tier.shelf.flush()
    assert len(tier.shelf) == 5 and threads and threading.current_thread() not in threads
    assert restored(tmp_path, (*range(20), 99)) == 20


def test_what_a_slow_disk_has_no_room_for_is_dropped_and_counted(tmp_path: Path, slow_disk: Any) -> None:
    shelf = Shelf(tmp_path, queued_bytes=1500)
    cache, _pool = new_cache(DiskTier(shelf))
    for n in range(10):
        add(cache, range(100 * n, 100 * n + 8))
    cache.clear()
    queued = 20 - shelf.dropped
    assert 0 < queued < 10
    slow_disk[0].set()
    shelf.flush()
    assert len(shelf) == queued and shelf.dropped == 20 - queued


@pytest.mark.parametrize("restarts", [False, True])
def test_size_limit_deletes_the_least_recently_used_files(restarts: bool, tmp_path: Path) -> None:
    shelf = saved(tmp_path, [range(100 * n, 100 * n + 4) for n in range(4)])
    each = shelf.nbytes // 4
    cache, _pool = new_cache(DiskTier(shelf))
    assert cache.adopt([0, 1, 2, 3, 9], SALT)[0].length == 4
    if restarts:
        shelf = Shelf(tmp_path)
        cache.tier = DiskTier(shelf)
    shelf.max_bytes = 3 * each + each // 2
    add(cache, [900, 901, 902, 903])
    cache.clear()
    shelf.flush()
    assert shelf.nbytes <= shelf.max_bytes and len(shelf) == 3
    assert [restored(tmp_path, [n, n + 1, n + 2, n + 3, 9]) for n in (0, 100, 200, 300, 900)] == [4, 0, 0, 4, 4]
    assert len(Shelf(tmp_path, max_bytes=each)) <= 1 and len(list(tmp_path.iterdir())) <= 1


def test_prefix_too_large_for_the_pool_stays_on_disk(tmp_path: Path) -> None:
    saved(tmp_path, [range(40)])
    tier = DiskTier(Shelf(tmp_path))
    cache, pool = new_cache(tier, num_blocks=6)
    assert tier.restore(cache, range(41), SALT, False) == 0
    gc.collect(0)
    cache.check_integrity()
    pool.check_integrity()
    assert pool.stats().live_blocks == 0 and restored(tmp_path, range(41)) == 40


def test_restore_that_the_pool_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, [range(8)], WINDOWS[1])
    tier = DiskTier(Shelf(tmp_path))
    cache, pool = new_cache(tier, WINDOWS[1])
    real = BlockPool.write

    def refuse(self: BlockPool, layer: int, tables: Any, *arrays: mx.array, stored: bool) -> None:
        if layer:
            raise PoolExhaustedError(blocks_needed=1, bytes_needed=1, budget_bytes=1, bytes_reserved=1)
        real(self, layer, tables, *arrays, stored=stored)

    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "write", refuse)
        assert tier.restore(cache, range(9), SALT, False) == 0
    assert len(cache.entries) == pool.stats().live_blocks == 0
    pool.check_integrity()
    assert tier.restore(cache, range(9), SALT, False) == 8


@pytest.mark.parametrize(("dtype", "in_place"), [(mx.float16, False), (mx.bfloat16, False), (mx.float32, True)])
def test_every_form_of_storage_comes_back_bit_for_bit(dtype: mx.Dtype, in_place: bool, tmp_path: Path) -> None:
    sizes, tier, expected = (64, 80), DiskTier(Shelf(tmp_path)), []
    with fake_kernels() if in_place else nullcontext():
        for is_first in (True, False):
            groups = [LayerGroup((0, 2)), LayerGroup((1,), 20, "window")]
            pool = BlockPool(groups, block_size=8, choose_blocks=blocks_choice(in_place))
            for layer in (0, 1):
                like = [mx.zeros((1, 2, 1, size), dtype) for size in sizes]
                pool.set_geometry(layer, *like, batch=1, heads=QueryHeads(4))
            assert isinstance(pool.blocks_of(0), DeviceBlocks) == in_place
            cache = PrefixCache(pool)
            cache.tier = tier
            if is_first:
                table = pool.new_table()
                pool.append_tokens(table, 40)
                for layer in pool.places:
                    new = [mx.random.normal((1, 2, 40, size)).astype(dtype) for size in sizes]
                    pool.write_prefill(table, layer, *new)
                cache.insert(range(40), table, SALT)
            else:
                match, table = cache.adopt(range(41), SALT)
                assert match.length == 40
            # The last 19 tokens of each layer, which the next token sees in the window.
            arrays = [x[:, :, -19:] for layer in range(3) for x in pool.gather_visible(table, layer)]
            expected.append([mx.contiguous(x) + 0 for x in arrays])
            mx.eval(expected)
            cache.check_integrity()
            pool.check_integrity()
            cache.clear()
            tier.shelf.flush()
    for got, want in zip(*expected, strict=True):
        assert got.dtype == dtype and mx.array_equal(got, want)


# The folder ----------------------------------------------------------------------------------------------------------


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in [*folder.iterdir(), folder]}


@pytest.fixture(params=[0o000, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_folder_and_files_are_private_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def save(write: Callable[[Any], int], data: memoryview) -> None:
        seen.append(modes(folder))  # before anything is in the file
        write(data)
        seen.append(modes(folder))

    fill_by(monkeypatch, save)
    folder = tmp_path / "made" / "here"
    (tmp_path / "made").mkdir()
    (tmp_path / "made").chmod(0o755)
    assert len(saved(folder, [range(20)])) == 5
    assert len(seen) == 10 and set().union(*seen) == {0o700, 0o600}
    assert restored(folder, (*range(20), 99)) == 20


def test_files_of_other_users_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, [range(9)])
    monkeypatch.setattr(shelf_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(ShelfWarning, match="not a file of this user"):
        assert len(Shelf(tmp_path)) == 0


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "dangling link": lambda path: path.symlink_to("/nowhere/at/all"),
    "link to a good file": lambda path: path.symlink_to(next(path.parent.iterdir())),
    "link to itself": lambda path: path.symlink_to(path),
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "temporary folder": lambda path: path.with_name(".1-1.tmp").mkdir(),
    "not utf-8": lambda path: path.with_name(os.fsdecode(b"\xff\xfe.kv0")).write_bytes(b""),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_entries_are_ignored(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, [range(20)])
    FOREIGN[kind](tmp_path / ("0" * 32 + ".kv0"))
    monkeypatch.setattr(shelf_module, "STALE_SECONDS", -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert restored(tmp_path, (*range(20), 99)) == 20
    assert len([each for each in caught if each.category is ShelfWarning]) == (kind != "not utf-8")


def test_shelf_starts_while_another_process_writes_and_deletes(tmp_path: Path) -> None:
    saved(tmp_path, [range(20)])
    stop = threading.Event()

    def neighbour() -> None:
        number = 0
        while not stop.is_set():
            path = tmp_path / f".{os.getpid() + 1}-{number}.tmp"
            path.write_bytes(b"x")
            path.rename(tmp_path / f"{number % 50:032x}.kv0")
            (tmp_path / f"{(number + 25) % 50:032x}.kv0").unlink(missing_ok=True)
            number += 1

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        assert all(len(Shelf(tmp_path)) >= 5 for _ in range(50))
    finally:
        stop.set()
        thread.join()


def test_folder_that_cannot_be_created_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Shelf(tmp_path / "file")
    with pytest.raises(OSError):
        Shelf(tmp_path / "file" / "below")


# Ranks ---------------------------------------------------------------------------------------------------------------

TOKENS = (*range(28), 99)


def restored_by_ranks(folder: Path, windows: Any, answer: Callable[[int], int]) -> tuple[int, list[int]]:
    """Restore over two ranks, of which the other answers each number. Return the number of tokens that the cache then
    serves, whose contents are checked, and the numbers that were sent."""
    sent: list[int] = []

    def exchange(mine: int) -> Sequence[int]:
        sent.append(mine)
        return [mine, answer(mine)]

    cache, pool = new_cache(DiskTier(Shelf(folder), exchange), windows)
    match, table = cache.adopt(TOKENS, SALT)
    check_contents(pool, table, TOKENS)
    cache.check_integrity()
    return match.length, sent


@pytest.mark.parametrize(
    ("windows", "most"), quick(crossed(WINDOWS, [0, 4, 8, 20, 28]), ((None,), 0), ((None, 6), 8), ((5, None, 1), 20))
)
def test_ranks_restore_only_what_all_of_them_have(windows: Any, most: int, tmp_path: Path) -> None:
    saved(tmp_path, [TOKENS[:28]], windows, chunk=4)
    found, sent = restored_by_ranks(tmp_path, windows, lambda mine: min(mine, most))
    assert found == most and sent[0] == 28
    if found:  # all ranks ended with the same length, and then with good files
        assert sent[-2:] == [found, 1]


def test_bad_file_on_another_rank_shortens_the_prefix(tmp_path: Path) -> None:
    saved(tmp_path, [TOKENS[:28]])
    theirs = iter([28, 0, 20, 20, 1])  # length; a bad file; length, twice, until all agree; good files
    assert restored_by_ranks(tmp_path, (None,), lambda mine: next(theirs, mine))[0] == 20


def test_bad_file_on_this_rank_shortens_the_prefix(tmp_path: Path) -> None:
    victim = saved_file(tmp_path, 20)
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="deleted the unusable file"):
        assert restored_by_ranks(tmp_path, (None,), lambda mine: mine) == (16, [20, 0, 16, 1])
