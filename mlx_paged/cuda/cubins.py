"""Kernels that this package compiles, in parallel threads, and keeps on disk for later processes (Cubins), by NVIDIA's
runtime compiler, a library that MLX itself has loaded (Nvrtc)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from ..errors import check_device, without_frames
from ..kernels.build import Constants, KernelText, NoKernelError, warn_when_compiling
from .launch import CompiledKernel, Source, load, source_of

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


# Machine code -------------------------------------------------------------------------------------------------------

_DIGEST_BYTES = 32  # SHA-256 at the start of a file, before the machine code
_DAY = 24 * 60 * 60
_KEPT_SECONDS = 30 * _DAY  # a file that no process has used for so long is deleted
# A text that names this macro uses features of sm_90 that later architectures lack.
_FEATURES_OF_SM_90 = "__CUDA_ARCH_FEAT_SM90_ALL"
_TEST_KERNEL = Source(
    "mlx_paged_sum",
    'extern "C" __global__ void mlx_paged_sum(const unsigned* a, unsigned* out) { if (out) *out = *a + 7; }',
    types=("uint32_t",),
    axes=(),
    num_outputs=1,
    tokens_first=(),
)


class CubinFolder:
    """A folder of machine code, private to its owner (modes 0700 and 0600). A file is written under another name and
    renamed, and begins with a hash of the rest: a torn or altered file is not used, and is written again. Files that
    were not used for 30 days are deleted when a process opens the folder.

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
        now = time.time()
        for file in path.iterdir():
            with suppress(OSError):
                if file.stat().st_mtime < now - _KEPT_SECONDS:
                    file.unlink()

    def read(self, key: str) -> bytes | None:
        """Return the machine code of a key; None if its file is missing or damaged."""
        file = self.path / f"{key}.cubin"
        try:
            data = file.read_bytes()
            if file.stat().st_mtime < time.time() - _DAY:
                os.utime(file)
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
    """Machine code by text: read from disk, or compiled in a thread and written to disk.

    Args:
        compiler: compiles the texts.
        architecture: to compile for, like "sm_90".
        folder: where machine code is kept; None: nowhere.

    Attributes:
        loads: kernels are launched by the names that :func:`.launch.load` gives, not by their machine code.
    """

    def __init__(self, compiler: Nvrtc, architecture: str, folder: CubinFolder | None) -> None:
        self.folder = folder
        self.version = compiler.version
        self.loads = True
        self._compiler = compiler
        self._architecture = architecture
        self._futures: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()
        # A process that ends waits for these threads, and does not unload the compiler while it runs.
        self._threads = ThreadPoolExecutor(thread_name_prefix="mlx_paged compiles")

    def start(self, source: Source) -> Future[bytes]:
        """Start to compile a text unless that has been done. Return its machine code, or the compiler's error."""
        with self._lock:
            if source.name not in self._futures:
                try:
                    future = self._threads.submit(self._machine_code, source.text)
                except RuntimeError:  # the main thread has ended, or no thread can start: this one compiles
                    future = Future()
                    try:
                        future.set_result(self._machine_code(source.text))
                    except Exception as error:
                        future.set_exception(without_frames(error))
                self._futures[source.name] = future
            return self._futures[source.name]

    def kernel(self, source: Source) -> CompiledKernel:
        """Return the kernel of a text. Raises NoKernelError if it does not compile, RuntimeError if MLX cannot load
        it."""
        future = self.start(source)
        if (failed := future.exception()) is not None:  # a new one: the future's would keep the frames of all callers
            raise NoKernelError(str(failed))
        code = future.result()
        return CompiledKernel(source, load(source, code) if self.loads else code)

    def _machine_code(self, text: str) -> bytes:
        has_features = self._architecture == "sm_90" and _FEATURES_OF_SM_90 in text
        architecture = "sm_90a" if has_features else self._architecture
        parts = (text, architecture, self.version, *OPTIONS)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
        cubin = None if self.folder is None else self.folder.read(key)
        if cubin is None:
            cubin = self._compiler.compile(text, architecture)
            if self.folder is not None:
                with suppress(OSError):
                    self.folder.write(key, cubin)
        return cubin


@lru_cache(maxsize=1)
def cubins() -> Cubins | None:
    """Return the machine code for MLX's GPU; None if no NVRTC can be loaded, or MLX does not know the architecture."""
    compiler, architecture = nvrtc(), str(mx.device_info().get("architecture"))
    if compiler is None or not architecture.startswith("sm_"):
        return None
    try:
        folder = CubinFolder(folder_path())
    except (OSError, RuntimeError):  # no home directory, or no permission to write to it
        folder = None
    made = Cubins(compiler, architecture, folder)
    made.loads = _passes_test(made)  # another MLX or C++ library may look kernels up in another way
    return made


def _passes_test(made: Cubins) -> bool:
    """Return whether a test kernel compiles, launches and gives the right result."""
    size = 1, 1, 1
    try:
        launch = made.kernel(_TEST_KERNEL).prepared(
            grid=size, threadgroup=size, output_shapes=[(1,)], output_dtypes=[mx.uint32]
        )
        return launch([mx.full((1,), 35, mx.uint32)])[0].item() == 42
    except Exception as error:
        check_device(error)
        return False


def folder_path() -> Path:
    """Return the folder for machine code: in MLX_PTX_CACHE_DIR if that is set, where MLX keeps its own, else in the
    user's cache folder. Raises RuntimeError if the user has no home."""
    own = os.environ.get("MLX_PTX_CACHE_DIR")
    cache = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mlx_paged" / "kernels"


# Kernels (docs/adr/0011) ---------------------------------------------------------------------------------------------


def compiled_kernel(body: str, constants: Constants) -> CompiledKernel:
    """Return a kernel compiled by this package: MLX would parse all of CUDA's headers for each text in each process,
    about 2 s. Raises RuntimeError if it does not compile, or NVRTC cannot be loaded."""
    known = cubins()
    if known is None:
        raise NoKernelError("NVRTC, CUDA's runtime compiler, cannot be loaded")
    with warn_when_compiling():
        return known.kernel(source_of(body, constants))


def compile_ahead(kernels: Iterable[KernelText]) -> None:
    """Start to compile kernels in parallel threads."""
    known = cubins()
    if known is not None:
        for kernel in kernels:
            known.start(source_of(*kernel))


def compiler_name() -> str:
    """Return which compiler builds the kernels on this machine, for reports."""
    known = cubins()
    if known is None:
        return "none: NVRTC cannot be loaded"
    return f"NVRTC {known.version}, {'once per machine' if known.folder is not None else 'in each process'}"
