"""Cubins: machine code is compiled, kept on disk, and loaded by MLX once."""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.cuda import cubins as cubins_module
from mlx_paged.cuda import launch as launch_module
from mlx_paged.cuda.cubins import CubinFolder, Cubins, cubins, folder_path
from mlx_paged.cuda.launch import Source, _hash, load, short_name
from tests.support.without_collector import without_collector

WAIT_SECONDS = 60


def source(name: str, text: str = "") -> Source:
    return Source(name, text or f"text of {name}", ("uint32_t",), (), 1, ())


class FakeCompiler:
    """A compiler that returns a text in capitals; with ``together``, once that many texts are being compiled."""

    def __init__(self, version: str = "13.0", together: int = 0) -> None:
        self.version = version
        self.texts: list[str] = []
        self._barrier = threading.Barrier(together) if together else None

    def compile(self, text: str, architecture: str) -> bytes:
        self.texts.append(text)
        if self._barrier is not None:
            self._barrier.wait(WAIT_SECONDS)
        if "wrong" in text:
            raise RuntimeError("it does not compile")
        return f"{text.upper()} FOR {architecture}".encode()


def make(compiler: FakeCompiler, folder: CubinFolder | None, architecture: str = "sm_90") -> Cubins:
    return Cubins(compiler, architecture, folder)


@pytest.fixture
def folder(tmp_path: Path) -> CubinFolder:
    return CubinFolder(tmp_path / "cache" / "kernels")


def test_texts_are_compiled_in_parallel_and_each_once() -> None:
    compiler = FakeCompiler(together=3)
    made = make(compiler, None)
    started = [made.start(source(name)) for name in "abcabc"]
    assert [future.result(WAIT_SECONDS) for future in started] == [
        f"TEXT OF {name} FOR sm_90".encode() for name in "ABCABC"
    ]
    assert made.start(source("a")).result(WAIT_SECONDS) == b"TEXT OF A FOR sm_90" and sorted(compiler.texts) == [
        f"text of {name}" for name in "abc"
    ]


@pytest.mark.parametrize("why", ["no more threads", "the main thread has ended"])
def test_without_threads_the_caller_compiles(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = make(FakeCompiler(), None)
    if why == "no more threads":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    else:
        made._threads.shutdown()
    for _ in range(2):
        assert made.start(source("a")).result(WAIT_SECONDS) == b"TEXT OF A FOR sm_90"
        with pytest.raises(RuntimeError, match="does not compile"):
            made.kernel(source("b", "wrong"))


@pytest.mark.parametrize("has_threads", [True, False])
def test_an_error_of_the_compiler_keeps_nothing_of_its_callers(has_threads: bool) -> None:
    made, kept = make(FakeCompiler(), None), set[int]()
    if not has_threads:
        made._threads.shutdown()
    alive = weakref.ref(kept)

    def use(held: set[int]) -> None:
        made.kernel(source("a", "wrong"))

    with without_collector():
        with pytest.raises(RuntimeError, match="does not compile"):
            use(kept)
        del kept
        assert alive() is None


def test_the_next_process_reads_what_the_first_compiled(folder: CubinFolder) -> None:
    first, second = FakeCompiler(), FakeCompiler()
    compiled = make(first, folder).start(source("a")).result(WAIT_SECONDS)
    assert make(second, CubinFolder(folder.path)).start(source("a")).result(WAIT_SECONDS) == compiled
    assert first.texts and not second.texts


@pytest.mark.parametrize(
    ("text", "version", "architecture"),
    [("other", "13.0", "sm_90"), ("", "13.1", "sm_90"), ("", "13.0", "sm_80")],
)
def test_another_text_compiler_or_gpu_is_another_file(
    folder: CubinFolder, text: str, version: str, architecture: str
) -> None:
    make(FakeCompiler(), folder).start(source("a")).result(WAIT_SECONDS)
    compiler = FakeCompiler(version)
    make(compiler, folder, architecture).start(source("a", text)).result(WAIT_SECONDS)
    assert compiler.texts


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b""]
)
def test_damaged_file_is_rewritten(folder: CubinFolder, damage: Any) -> None:
    compiled = make(FakeCompiler(), folder).start(source("a")).result(WAIT_SECONDS)
    (file,) = folder.path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    compiler = FakeCompiler()
    assert make(compiler, folder).start(source("a")).result(WAIT_SECONDS) == compiled and compiler.texts
    assert file.read_bytes() == whole and list(folder.path.iterdir()) == [file]


def test_files_are_private_to_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = CubinFolder(tmp_path / "kernels")
        make(FakeCompiler(), folder).start(source("a")).result(WAIT_SECONDS)
    finally:
        os.umask(before)
    (file,) = folder.path.iterdir()
    assert folder.path.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(mode)
    with pytest.raises(PermissionError):
        CubinFolder(tmp_path / "kernels")


def test_missing_folder_loses_only_the_file(folder: CubinFolder) -> None:
    folder.path.rmdir()
    assert make(FakeCompiler(), folder).start(source("a")).result(WAIT_SECONDS) == b"TEXT OF A FOR sm_90"
    assert not folder.path.exists()


def test_a_text_that_does_not_compile_has_no_machine_code(folder: CubinFolder) -> None:
    compiler = FakeCompiler()
    made = make(compiler, folder)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not compile"):
            made.kernel(source("a", "wrong"))
    assert len(compiler.texts) == 1 and not list(folder.path.iterdir())


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCompiler]:
    compiler = FakeCompiler()
    monkeypatch.setattr(cubins_module, "nvrtc", lambda: compiler)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    cubins.cache_clear()
    yield compiler
    cubins.cache_clear()


class FakeMLX:
    """MLX's launches of machine code: a kernel is found by its name and the hash of what it is launched with.

    Args:
        accepts: returns whether machine code can be loaded.
        hashes: how MLX's C++ library hashes.
    """

    def __init__(self, accepts: Any = lambda code: True, hashes: Any = _hash) -> None:
        self.loaded: dict[tuple[str, int], bytes] = {}
        self.given: list[bytes] = []
        self._accepts, self._hashes = accepts, hashes

    def __call__(
        self, *, name: str, compiled_source: bytes, inputs: list[mx.array], output_shapes: Any, **options: Any
    ) -> list[mx.array]:
        self.given.append(compiled_source)
        key = name, self._hashes(compiled_source)
        if key not in self.loaded:
            if not compiled_source.endswith(b"FOR sm_90") or not self._accepts(compiled_source):
                raise RuntimeError("binary format is not recognized")
            self.loaded[key] = compiled_source
        return [mx.zeros((0,))] if output_shapes == [(0,)] else [inputs[0] + 7]


def launches(monkeypatch: pytest.MonkeyPatch, **made: Any) -> FakeMLX:
    fake = FakeMLX(**made)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", fake, raising=False)
    return fake


def test_kernels_are_launched_by_a_name_of_eight_bytes(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = launches(monkeypatch)
    made = cubins()
    assert made is not None and made.loads
    assert made.folder is not None and made.folder.path == folder_path() == tmp_path / "mlx_paged" / "kernels"
    kernel = made.kernel(source("a"))
    assert kernel is not None and fake.loaded["a", _hash(b"TEXT OF A FOR sm_90")] == b"TEXT OF A FOR sm_90"
    options: Any = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(1,)], "output_dtypes": [mx.uint32]}
    (out,) = kernel.prepared(**options)([mx.array([1], mx.uint32)])
    assert out.item() == 8 and len(fake.given[-1]) == 8


def test_machine_code_is_given_at_each_launch_where_mlx_hashes_otherwise(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = launches(monkeypatch, hashes=lambda code: code)
    made = cubins()
    assert made is not None and not made.loads
    kernel = made.kernel(source("a"))
    assert kernel is not None and kernel._code == b"TEXT OF A FOR sm_90" and ("a", kernel._code) not in fake.loaded


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4_099, 47_928])
def test_short_name_has_the_hash_of_the_code(size: int) -> None:
    code = bytes(i * 37 % 251 for i in range(size))
    name = short_name(code)
    assert name is not None and len(name) == 8 and _hash(name) == _hash(code)
    assert size == 0 or _hash(name) != _hash(code + b"x")


def test_machine_code_is_named_by_itself_without_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_hash", lambda code: None)
    assert load(source("a"), b"code") == b"code"


def test_files_not_used_for_a_month_are_deleted(folder: CubinFolder) -> None:
    made, files = make(FakeCompiler(), folder), list[Path]()
    for name in "abc":
        made.start(source(name)).result(WAIT_SECONDS)
        files += set(folder.path.iterdir()) - set(files)
    old, used, recent = files
    for file, days in ((old, 31), (used, 29), (recent, 0)):
        os.utime(file, (0, time.time() - days * 86_400))
    again = make(FakeCompiler(), CubinFolder(folder.path))
    assert not old.exists() and used.exists() and recent.exists()
    again.start(source("b")).result(WAIT_SECONDS)
    assert used.stat().st_mtime > time.time() - 86_400, "its month begins again"


@pytest.mark.parametrize("trouble", ["launch", "result"])
def test_short_names_are_off_where_they_cannot_be_launched(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    launches(monkeypatch, accepts=lambda code: trouble != "launch")
    if trouble == "result":
        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda *, inputs, **options: [inputs[0]])
    made = cubins()
    assert made is not None and not made.loads


@pytest.mark.parametrize("trouble", ["compiler", "architecture"])
def test_without_a_compiler_or_a_known_gpu_there_is_no_machine_code(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    if trouble == "compiler":
        monkeypatch.setattr(cubins_module, "nvrtc", lambda: None)
    else:
        monkeypatch.setattr(mx, "device_info", lambda: {})
    assert cubins() is None


def test_nothing_is_kept_on_disk_without_a_folder(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file"))
    made = cubins()
    assert made is not None and made.folder is None and made.start(source("a")).result(WAIT_SECONDS) is not None


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_path() == tmp_path / "mlx_paged" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_path() == tmp_path / ".cache" / "mlx_paged" / "kernels"


def test_text_with_architecture_features_is_compiled_for_sm_90a() -> None:
    text = "#ifdef __CUDA_ARCH_FEAT_SM90_ALL"
    assert b"FOR sm_90a" in (make(FakeCompiler(), None).start(source("a", text)).result(WAIT_SECONDS) or b"")
    for architecture in ("sm_80", "sm_100"):
        code = make(FakeCompiler(), None, architecture).start(source("a", text)).result(WAIT_SECONDS) or b""
        assert code.endswith(f"FOR {architecture}".encode())
