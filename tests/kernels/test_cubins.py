"""Cubins: machine code is compiled, kept on disk and packed for MLX."""

import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from lz4.block import decompress

from mlx_paged.kernels.cuda import cubins as cubins_module
from mlx_paged.kernels.cuda.cubins import CubinFolder, Cubins, cubins, fat_binary, folder_path
from mlx_paged.kernels.cuda.launch import Source

WAIT_SECONDS = 60


def source(name: str, text: str = "") -> Source:
    return Source(name, text or f"text of {name}", (), (), ())


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
    return Cubins(compiler, architecture, folder, is_packed=False)


def finish() -> None:
    """Wait for the threads that compile: they write files after they have set their results."""
    for thread in threading.enumerate():
        if thread.name == "mlx_paged compiles":
            thread.join(WAIT_SECONDS)


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
    assert made.get(source("a")) == b"TEXT OF A FOR sm_90" and sorted(compiler.texts) == [
        f"text of {name}" for name in "abc"
    ]


def test_without_more_threads_texts_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert make(FakeCompiler(), None).start(source("a")).result(WAIT_SECONDS) == b"TEXT OF A FOR sm_90"


def test_the_next_process_reads_what_the_first_compiled(folder: CubinFolder) -> None:
    first, second = FakeCompiler(), FakeCompiler()
    compiled = make(first, folder).get(source("a"))
    finish()
    assert make(second, CubinFolder(folder.path)).get(source("a")) == compiled
    assert first.texts and not second.texts


@pytest.mark.parametrize(
    ("text", "version", "architecture"),
    [("other", "13.0", "sm_90"), ("", "13.1", "sm_90"), ("", "13.0", "sm_80")],
)
def test_another_text_compiler_or_gpu_is_another_file(
    folder: CubinFolder, text: str, version: str, architecture: str
) -> None:
    make(FakeCompiler(), folder).get(source("a"))
    finish()
    compiler = FakeCompiler(version)
    make(compiler, folder, architecture).get(source("a", text))
    assert compiler.texts


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b""]
)
def test_damaged_file_is_rewritten(folder: CubinFolder, damage: Any) -> None:
    compiled = make(FakeCompiler(), folder).get(source("a"))
    finish()
    (file,) = folder.path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    compiler = FakeCompiler()
    assert make(compiler, folder).get(source("a")) == compiled and compiler.texts
    finish()
    assert file.read_bytes() == whole and list(folder.path.iterdir()) == [file]


def test_files_are_private_to_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = CubinFolder(tmp_path / "kernels")
        make(FakeCompiler(), folder).get(source("a"))
        finish()
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
    assert make(FakeCompiler(), folder).get(source("a")) == b"TEXT OF A FOR sm_90"
    finish()
    assert not folder.path.exists()


def test_a_text_that_does_not_compile_has_no_machine_code(folder: CubinFolder) -> None:
    compiler = FakeCompiler()
    made = make(compiler, folder)
    assert made.get(source("a", "wrong")) is None and made.get(source("a", "wrong")) is None
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


def launches(monkeypatch: pytest.MonkeyPatch, accepts: Any) -> None:
    """Make MLX launch only machine code for which ``accepts`` returns True."""

    def launch(*, compiled_source: bytes, inputs: list[mx.array], **options: Any) -> list[mx.array]:
        if not accepts(compiled_source):
            raise RuntimeError("binary format is not recognized")
        return [inputs[0] + 7]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch, raising=False)


def test_machine_code_is_packed_where_the_driver_unpacks_it(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches(monkeypatch, lambda data: data.startswith(b"\x50\xed\x55\xba"))
    made = cubins()
    assert made is not None and made.get(source("a")).startswith(b"\x50\xed\x55\xba")
    assert made.folder is not None and made.folder.path == folder_path() == tmp_path / "mlx_paged" / "kernels"


def test_machine_code_is_not_packed_where_the_driver_does_not_unpack(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches(monkeypatch, lambda data: b"FOR sm_90" in data[-9:] and not data.startswith(b"\x50\xed"))
    made = cubins()
    assert made is not None and made.get(source("a")) == b"TEXT OF A FOR sm_90"


@pytest.mark.parametrize("trouble", ["launch", "result", "compiler", "architecture"])
def test_cubins_are_off_where_they_cannot_be_launched(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    launches(monkeypatch, lambda data: trouble != "launch")
    if trouble == "result":
        monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda *, inputs, **options: [inputs[0]])
    if trouble == "compiler":
        monkeypatch.setattr(cubins_module, "nvrtc", lambda: None)
    if trouble == "architecture":
        monkeypatch.setattr(mx, "device_info", lambda: {})
    assert cubins() is None


def test_nothing_is_kept_on_disk_without_a_folder(
    on_cuda: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches(monkeypatch, lambda data: True)
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "file"))
    made = cubins()
    assert made is not None and made.folder is None and made.get(source("a")) is not None


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_path() == tmp_path / "mlx_paged" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_path() == tmp_path / ".cache" / "mlx_paged" / "kernels"


def test_text_with_architecture_features_is_compiled_for_sm_90a() -> None:
    text = "#ifdef __CUDA_ARCH_FEAT_SM90_ALL"
    assert b"FOR sm_90a" in (make(FakeCompiler(), None).get(source("a", text)) or b"")
    for architecture in ("sm_80", "sm_100"):
        code = make(FakeCompiler(), None, architecture).get(source("a", text)) or b""
        assert code.endswith(f"FOR {architecture}".encode())


HEADERS = 16 + 64


@pytest.mark.parametrize("architecture", ["sm_90", "sm_90a"])
def test_container_equals_that_of_nvidias_tool(tmp_path: Path, architecture: str) -> None:
    nvcc, tool = shutil.which("nvcc"), shutil.which("fatbinary")
    if nvcc is None or tool is None:
        pytest.skip("needs CUDA's compilers")
    (tmp_path / "kernel.cu").write_text('extern "C" __global__ void k(float* a) { a[threadIdx.x] *= 2; }')
    for command in (
        [nvcc, f"-arch={architecture}", "-cubin", "-o", "kernel.cubin", "kernel.cu"],
        [
            tool,
            "--create=fat",
            "--64",
            "--compress-all",
            "--compress-mode=speed",
            f"--image3=kind=elf,sm={architecture[3:]},file=kernel.cubin",
        ],
    ):
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        if run.returncode:
            pytest.skip(f"another version of CUDA's compilers: {run.stderr[:200]}")
    cubin, theirs = (tmp_path / "kernel.cubin").read_bytes(), (tmp_path / "fat").read_bytes()
    ours = fat_binary(cubin, architecture)
    assert len(ours) % 8 == 0
    sizes = [range(8, 16), range(24, 36)]  # sizes of the packed data, which may differ
    for data in (ours, theirs):
        size, packed = struct.unpack_from("<QI", data, 24)
        assert struct.unpack_from("<Q", data, 8)[0] == len(data) - 16 and size == len(data) - HEADERS
        assert decompress(data[HEADERS : HEADERS + packed], uncompressed_size=len(cubin)) == cubin
    masked = [
        bytes(0 if any(i in part for part in sizes) else byte for i, byte in enumerate(x[:HEADERS]))
        for x in (ours, theirs)
    ]
    assert masked[0] == masked[1]


def test_container_holds_compressed_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code = bytes(range(256)) * 40
    container = fat_binary(code, "sm_90")
    (packed,) = struct.unpack_from("<I", container, 32)
    assert decompress(container[HEADERS : HEADERS + packed], uncompressed_size=len(code)) == code
    assert len(container) < len(code) // 4
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    packing, plain = (Cubins(FakeCompiler(), "sm_90", None, is_packed=is_packed) for is_packed in (True, False))
    assert packing.get(source("a")) is None and plain.get(source("a"))


def test_an_architecture_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError):
        fat_binary(b"code", "gfx")
