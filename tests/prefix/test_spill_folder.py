"""Spill folders: a bad file affects only itself, files are private, and ranks restore only what all of them have."""

import hashlib
import os
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.prefix import spill_folder
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.spill import SpillStore
from mlx_paged.prefix.spill_folder import SpillFolder, SpillWarning
from tests.prefix.test_spill import WINDOWS, restored, spilled
from tests.support.cases import crossed, quick
from tests.support.prefixes import check_contents, make_pool

NOT_OURS = "0" * 32 + "-" + "0" * 32 + ".safetensors"


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in [*folder.iterdir(), folder]}


@pytest.fixture(params=[0o000, 0o022, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_folder_and_files_are_private_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    real = spill_folder._fill

    def save(file: Any, data: memoryview) -> None:
        seen.append(modes(folder))  # before anything is in the file
        real(file, data)
        seen.append(modes(folder))

    monkeypatch.setattr(spill_folder, "_fill", save)
    folder = tmp_path / "made" / "here"
    (tmp_path / "made").mkdir()
    (tmp_path / "made").chmod(0o755)
    assert len(spilled(folder, [range(20)])) == 5
    assert len(seen) == 10 and set().union(*seen) == {0o700, 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert restored(folder, (*range(20), 99)) == 20


def test_folder_open_to_others_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    spilled(folder, [range(20)])
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)
    with pytest.warns(SpillWarning, match="was accessible to other users; now only its owner can access it"):
        store = SpillStore(folder)
    assert len(store) == 5 and modes(folder) == {0o700, 0o600}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpillStore(folder)


@pytest.mark.parametrize("kind", ["with other files", "sticky"])
def test_shared_folder_keeps_its_permissions(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777 if kind == "sticky" else 0o755)
    if kind != "sticky":
        (folder / "notes.txt").write_text("of somebody's")
        (folder / "notes.txt").chmod(0o644)
    before = folder.stat().st_mode
    with pytest.warns(SpillWarning, match="is accessible to other users; the files written there are not"):
        spilled(folder, [range(9)])
    assert folder.stat().st_mode == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.safetensors")} == {0o600}
    if kind != "sticky":
        assert stat.S_IMODE((folder / "notes.txt").stat().st_mode) == 0o644


def test_files_of_other_users_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled(tmp_path, [range(9)])
    monkeypatch.setattr(spill_folder.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(SpillWarning, match="not a prefix file of this user"):
        assert len(SpillStore(tmp_path)) == 0


def put(folder: Path, kind: str) -> None:
    path = folder / NOT_OURS
    if kind == "dangling link":
        path.symlink_to("/nowhere/at/all")
    elif kind == "link to a good file":
        good = next(folder.glob("*.safetensors"))
        path.symlink_to(good)
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge header":
        path.write_bytes((1 << 62).to_bytes(8, "little") + b"{" * 4096)
    elif kind == "deep header":
        path.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    elif kind == "list":
        path.write_bytes((2).to_bytes(8, "little") + b"[]")
    elif kind == "dangling temporary":
        (folder / ".1-1.safetensors").symlink_to("/nowhere/at/all")
    elif kind == "temporary folder":
        (folder / ".1-1.safetensors").mkdir()
    elif kind == "not utf-8":
        (folder / os.fsdecode(b"\xff\xfe.safetensors")).write_bytes(b"")


KINDS = [
    "dangling link", "link to a good file", "link to itself", "folder", "pipe", "huge header", "deep header", "list",
    "dangling temporary", "temporary folder", "not utf-8",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_entries_are_ignored(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled(tmp_path, [range(20)])
    put(tmp_path, kind)
    monkeypatch.setattr(spill_folder, "STALE_SECONDS", -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert restored(tmp_path, (*range(20), 99)) == 20
    assert len([each for each in caught if each.category is SpillWarning]) == (kind != "dangling temporary")


def test_store_starts_while_another_process_writes_and_deletes(tmp_path: Path) -> None:
    spilled(tmp_path, [range(20)])
    stop = threading.Event()

    def neighbour() -> None:
        number = 0
        while not stop.is_set():
            path = tmp_path / f".{os.getpid() + 1}-{number}.safetensors"
            path.write_bytes(b"x")
            path.rename(tmp_path / (f"{number % 50:032x}-" + "0" * 32 + ".safetensors"))
            (tmp_path / (f"{(number + 25) % 50:032x}-" + "0" * 32 + ".safetensors")).unlink(missing_ok=True)
            number += 1

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpillWarning)
            assert {len(SpillStore(tmp_path)) for _ in range(100)} == {5}
    finally:
        stop.set()
        thread.join()


def test_files_deleted_after_the_listing_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled(tmp_path, [range(20)])
    names = os.listdir(tmp_path)
    monkeypatch.setattr(spill_folder.os, "listdir", lambda path: [*names, NOT_OURS, ".7-7.safetensors"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(SpillStore(tmp_path)) == 5


def rewritten(path: Path, change: Callable[[dict[str, mx.array], dict[str, str]], None]) -> Path:
    """Change the contents of a file and rename it to match their hash."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    mx.eval(list(arrays.values()))
    change(arrays, metadata)
    path.unlink()
    mx.save_safetensors(str(path), arrays, metadata)
    return renamed(path)


def renamed(path: Path) -> Path:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    return path.rename(path.with_name(f"{path.name.partition('-')[0]}-{digest}.safetensors"))


CHANGES: dict[str, Callable[[dict[str, mx.array], dict[str, str]], Any]] = {
    "no keys": lambda arrays, metadata: arrays.pop("k1"),
    "other dtype": lambda arrays, metadata: arrays.update(k1=arrays["k1"].astype(mx.float16)),
    "fewer heads": lambda arrays, metadata: arrays.update(k1=mx.concatenate([arrays["k1"]] * 2, axis=1)),
    "fewer tokens": lambda arrays, metadata: arrays.update(v0=arrays["v0"][:, :, :1]),
    "flat": lambda arrays, metadata: arrays.update(k1=arrays["k1"].reshape(-1)),
    "other names": lambda arrays, metadata: arrays.update(k9=arrays.pop("k0")),
    "geometry": lambda arrays, metadata: metadata.update(geometry=metadata["geometry"].replace("[1, 2,", "[3, 2,")),
    "no geometry": lambda arrays, metadata: metadata.update(geometry="[null,null]"),
}


@pytest.mark.parametrize(
    ("number", "change"), quick(crossed([0, 2], CHANGES), (0, "no keys"), (2, "other dtype"), (0, "fewer heads"),
    (0, "fewer tokens"), (0, "flat"), (0, "other names"), (0, "geometry"), (0, "no geometry"))
)  # fmt: skip
def test_bad_file_with_the_right_hash_affects_only_itself(change: str, number: int, tmp_path: Path) -> None:
    windows = (None, None)
    store = spilled(tmp_path, [range(20)], windows)
    chains = [block.path for block in sorted(store._order.values(), key=lambda block: block.tokens)]
    bad = rewritten(chains[number], CHANGES[change])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert restored(tmp_path, (*range(20), 99), windows) == 4 * number
    # A file whose header names another geometry than the blocks before it is not read.
    assert len(caught) == (0 if change == "geometry" and number else 1)
    assert bad.exists() == (not caught)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not read again
        assert restored(tmp_path, (*range(20), 99), windows) == 4 * number
    spilled(tmp_path, [range(20)], windows)  # it can be written again
    assert restored(tmp_path, (*range(20), 99), windows) == 20


def test_file_of_other_groups_is_not_read(tmp_path: Path) -> None:
    store = spilled(tmp_path, [range(20)], (None, None))
    path = min(store._order.values(), key=lambda block: block.tokens).path
    rewritten(path, lambda arrays, metadata: metadata.update(starts="[0]", geometry="[null]"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(tmp_path, (*range(20), 99), (None, None)) == 0
        spilled(tmp_path, [range(20)], (None, None))
        assert restored(tmp_path, (*range(20), 99), (None, None)) == 20


def test_truncated_file_with_the_right_hash_is_deleted(tmp_path: Path) -> None:
    """Cut a file as a full disk would if write errors were missed."""
    store = spilled(tmp_path, [range(20)])
    path = max(store._order.values(), key=lambda block: block.tokens).path
    path.write_bytes(path.read_bytes()[:-5])
    renamed(path)
    with pytest.warns(SpillWarning, match="deleted the unusable file"):
        assert restored(tmp_path, (*range(20), 99)) == 16
    assert len(list(tmp_path.iterdir())) == 4


def test_full_disk_during_a_write_leaves_no_file(tmp_path: Path) -> None:
    """Set a real limit on the size of files, in a separate process."""
    script = f"""
import resource, warnings
from tests.prefix.test_spill import spilled
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert len(spilled(Path({str(tmp_path)!r}), [range(20)])) == 0
assert "was not written" in str(caught[0].message), caught
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_created_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        SpillFolder(tmp_path / "file")
    with pytest.raises(OSError):
        SpillFolder(tmp_path / "file" / "below")


TOKENS = (*range(30), 99)


def restored_by_ranks(folder: Path, windows: Any, exchange: Callable[[int], Sequence[int]]) -> int:
    """Return the number of tokens that the tree serves after a restore over ranks; checks their contents."""
    pool = make_pool(windows)
    tree = RadixTree(pool)
    SpillStore(folder, exchange=exchange).restore(tree, TOKENS, None, "weights")
    length, tables = tree.adopt(TOKENS)
    check_contents(pool, tables, TOKENS)
    tree.check_integrity()
    return length


@pytest.mark.parametrize(
    ("windows", "most"), quick(crossed(WINDOWS, [0, 1, 7, 8, 13, 29, 30]), ((None,), 0), ((None, 6), 1),
    ((5, None, 1), 7), ((None,), 13), ((None, 6), 29), ((5, None, 1), 30))
)  # fmt: skip
def test_ranks_restore_only_what_all_of_them_have(windows: Any, most: int, tmp_path: Path) -> None:
    spilled(tmp_path, [TOKENS[:30]], windows, chunk=8)
    asked = []

    def exchange(mine: int) -> list[int]:
        asked.append(mine)
        return [mine, min(mine, most)]

    found = restored_by_ranks(tmp_path, windows, exchange)
    assert found <= most
    if windows == (None,):
        assert found == most
    assert asked[0] == 30
    if found:  # all ranks ended with the same length, and then no bad files
        assert asked[-2:] == [found, 0]


def test_bad_file_on_another_rank_shortens_the_prefix(tmp_path: Path) -> None:
    spilled(tmp_path, [TOKENS[:30]])
    theirs = iter([30, 2, 28, 28, 0])  # length; bad files; length, twice, until all agree; no bad files
    assert restored_by_ranks(tmp_path, (None,), lambda mine: [mine, next(theirs, mine)]) == 28


def test_bad_file_on_this_rank_shortens_the_prefix(tmp_path: Path) -> None:
    spilled(tmp_path, [TOKENS[:30]])
    victim = min(tmp_path.iterdir(), key=lambda path: path.stat().st_size)  # the partial last block
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    asked: list[int] = []

    def exchange(mine: int) -> list[int]:
        asked.append(mine)
        return [mine, mine]

    with pytest.warns(UserWarning, match="deleted the unusable file"):
        assert restored_by_ranks(tmp_path, (None,), exchange) == 28
    assert asked == [30, 1, 28, 0]
