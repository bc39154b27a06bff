"""Cubins: machine code of kernels, compiled in parallel threads and kept on disk for later processes. Nvrtc: NVIDIA's
runtime compiler, a library that MLX itself has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import stat
import struct
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import mlx.core as mx

from .launch import CompiledKernel, Source

# The compiler -------------------------------------------------------------------------------------------------------

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--disable-warnings")


class CompileError(RuntimeError):
    """A text that does not compile; the message is the compiler's."""


class Nvrtc:
    """NVIDIA's runtime compiler. Threads may compile at the same time.

    Args:
        library: the loaded library.

    Raises:
        OSError: the library does not report its version.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
            raise OSError("cannot query NVRTC's version")
        self.version = f"{major.value}.{minor.value}"

    def compile(self, text: str, architecture: str) -> bytes:
        """Return the machine code (cubin) of a text for an architecture like "sm_90". Raises CompileError."""
        library, program = self._library, ctypes.c_void_p()
        arguments = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in OPTIONS)]
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
        try:
            failed = library.nvrtcCompileProgram(
                program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)
            )
            if failed:
                log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
                raise CompileError(log or f"NVRTC failed with error {failed}")
            return self._read(program, "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, result: int) -> None:
        if result:
            raise CompileError(f"NVRTC failed with error {result}")


@lru_cache(maxsize=1)
def nvrtc() -> Nvrtc | None:
    """Return the library that is loaded, else one that the system finds; None if none can be used."""
    for mode in (getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW, os.RTLD_NOW):
        for name in _NAMES:
            try:
                return Nvrtc(ctypes.CDLL(name, mode=mode))
            except (OSError, AttributeError):
                continue
    return None


# The container that MLX loads ---------------------------------------------------------------------------------------

_MAGIC, _VERSION = 0xBA55ED50, 1
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHIIIQQQ")
_KIND_ELF, _ENTRY_VERSION = 2, 0x0101
_FLAGS = 0x1 | 0x10 | 0x2000  # 64 bits, Linux, LZ4
_ARCH_SPECIFIC = 0x100000  # code for one architecture only, like "sm_90a"
_ELF_VERSION = (8, 1)  # minor, major


def fat_binary(cubin: bytes, architecture: str) -> bytes:
    """Return a fat binary with one compressed image, for an architecture like "sm_90" or "sm_90a".

    Raises:
        ValueError: the architecture has no number.
        ImportError: lz4 is missing; the extras for CUDA install it.
    """
    number = re.match(r"sm_(\d+)(a?)", architecture)
    if number is None:
        raise ValueError(f"unknown CUDA architecture {architecture!r}, expected e.g. sm_90")
    from lz4.block import compress

    packed = compress(cubin, mode="high_compression", store_size=False)
    padded = packed + bytes(-len(packed) % 8)
    entry = _ENTRY.pack(
        _KIND_ELF,
        _ENTRY_VERSION,
        _ENTRY.size,
        len(padded),
        len(packed),
        0,
        *_ELF_VERSION,
        int(number.group(1)),
        0,
        0,
        _FLAGS | (_ARCH_SPECIFIC if number.group(2) else 0),
        0,
        len(cubin),
    )
    return _HEADER.pack(_MAGIC, _VERSION, _HEADER.size, len(entry) + len(padded)) + entry + padded


_DIGEST_BYTES = 32  # SHA-256 at the start of a file, before the machine code
# By architecture: a text that names this macro uses features that later architectures lack, and is compiled for this
# target only.
_FEATURE_TARGETS = {"sm_90": ("__CUDA_ARCH_FEAT_SM90_ALL", "sm_90a")}
_TEST_KERNEL = Source(
    "mlx_paged_sum",
    'extern "C" __global__ void mlx_paged_sum(const unsigned* a, unsigned* out) { *out = *a + 7; }',
    ("uint32_t",),
    (),
    (),
)


class Compiler(Protocol):
    """A compiler of texts to machine code, callable from any thread."""

    version: str

    def compile(self, text: str, architecture: str) -> bytes:
        """Return machine code. Raises RuntimeError for a text that does not compile."""


class CubinFolder:
    """A folder of machine code, private to its owner (modes 0700 and 0600). A file is written under another name and
    renamed, and begins with a hash of the rest: a torn or altered file is not used, and is written again.

    Args:
        path: created if it is missing.

    Raises:
        OSError: the folder cannot be created, is another user's, or others could write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} must belong to this user and not be writable by others")

    def read(self, key: str) -> bytes | None:
        """Return the machine code of a key; None if its file is missing or damaged."""
        try:
            data = (self.path / f"{key}.cubin").read_bytes()
        except OSError:
            return None
        digest, cubin = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None

    def write(self, key: str, cubin: bytes) -> None:
        """Write the machine code of a key. Raises OSError on failure, and leaves no temporary file."""
        temporary = self.path / f".{os.getpid()}-{threading.get_ident()}-{key}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            temporary.replace(self.path / f"{key}.cubin")
        finally:
            temporary.unlink(missing_ok=True)


class Cubins:
    """Machine code by text: read from disk, or compiled in a thread of its own and then written to disk.

    Args:
        compiler: compiles the texts.
        architecture: to compile for, like "sm_90".
        folder: where machine code is kept; None: nowhere.
        is_packed: machine code is wrapped by :func:`.fat_binary`.
    """

    def __init__(
        self, compiler: Compiler, architecture: str, folder: CubinFolder | None, *, is_packed: bool = True
    ) -> None:
        self.folder = folder
        self.version = compiler.version
        self._compiler = compiler
        self._architecture = architecture
        self._is_packed = is_packed
        self._futures: dict[str, Future[bytes | None]] = {}
        self._lock = threading.Lock()

    def start(self, source: Source) -> Future[bytes | None]:
        """Start to compile a text unless that has been done. The future's result is None if it does not compile."""
        with self._lock:
            if source.name in self._futures:
                return self._futures[source.name]
            future = self._futures[source.name] = Future()
        key = self._key(source)
        kept = None if self.folder is None else self.folder.read(key)
        if kept is not None:
            future.set_result(kept)
        else:
            # Not a daemon: a process that ends waits for the thread, and does not unload the compiler while it runs.
            thread = threading.Thread(target=self._make, args=(source.text, key, future), name="mlx_paged compiles")
            try:
                thread.start()
            except RuntimeError:  # no thread can start, or the process is ending
                self._make(source.text, key, future)
        return future

    def get(self, source: Source) -> bytes | None:
        """Return the machine code of a text, or None if it does not compile."""
        return self.start(source).result()

    def _architecture_of(self, text: str) -> str:
        """Return the architecture that a text is compiled for."""
        macro, target = _FEATURE_TARGETS.get(self._architecture, ("", ""))
        return target if macro and macro in text else self._architecture

    def _key(self, source: Source) -> str:
        parts = (source.text, self._architecture_of(source.text), self.version, *OPTIONS, str(self._is_packed))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]

    def _make(self, text: str, key: str, future: Future[bytes | None]) -> None:
        try:
            architecture = self._architecture_of(text)
            cubin = self._compiler.compile(text, architecture)
            if self._is_packed:
                cubin = fat_binary(cubin, architecture)
        except Exception:  # MLX then compiles the text, and reports what is wrong with it
            future.set_result(None)
            return
        future.set_result(cubin)
        if self.folder is not None:
            with suppress(OSError):
                self.folder.write(key, cubin)


@lru_cache(maxsize=1)
def cubins() -> Cubins | None:
    """Return the machine code for MLX's GPU; None if MLX has to compile, because there is no NVRTC or MLX cannot launch
    what it compiles."""
    compiler = nvrtc()
    architecture = str(mx.device_info().get("architecture"))
    if compiler is None or not architecture.startswith("sm_") or not hasattr(mx.fast, "precompiled_cuda_kernel"):
        return None
    try:
        folder = CubinFolder(folder_path())
    except (OSError, RuntimeError):  # no home directory, or no permission to write to it
        folder = None
    made = (Cubins(compiler, architecture, folder, is_packed=is_packed) for is_packed in (True, False))
    return next((each for each in made if _passes_test(each)), None)


def _passes_test(made: Cubins) -> bool:
    """Return whether a test kernel compiles, launches and gives the right result."""
    cubin = made.get(_TEST_KERNEL)
    if cubin is None:
        return False
    kernel = CompiledKernel(_TEST_KERNEL, cubin, {})
    size, shapes, dtypes = (1, 1, 1), [(1,)], [mx.uint32]
    try:
        given = [mx.full((1,), 35, mx.uint32)]
        (out,) = kernel(inputs=given, grid=size, threadgroup=size, output_shapes=shapes, output_dtypes=dtypes)
        return out.item() == 42
    except Exception:
        return False


def folder_path() -> Path:
    """Return the folder for machine code: in MLX_PTX_CACHE_DIR if that is set, where MLX keeps its own, else in the
    user's cache folder. Raises RuntimeError if the user has no home."""
    own = os.environ.get("MLX_PTX_CACHE_DIR")
    cache = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mlx_paged" / "kernels"
