"""NVRTC, NVIDIA's compiler in a library, which MLX itself has loaded."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--disable-warnings")


class CompileError(RuntimeError):
    """A text does not compile; the message is the compiler's."""


class Nvrtc:
    """The library. Threads may compile at the same time.

    Args:
        library: loaded.

    Raises:
        OSError: it does not tell its version.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
            raise OSError("NVRTC does not tell its version")
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
                raise CompileError(log or f"NVRTC's error {failed}")
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
            raise CompileError(f"NVRTC's error {result}")


@lru_cache(maxsize=1)
def nvrtc() -> Nvrtc | None:
    """Return the one that is loaded, else one that the system finds; None if there is none that can be used."""
    for mode in (getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW, os.RTLD_NOW):
        for name in _NAMES:
            try:
                return Nvrtc(ctypes.CDLL(name, mode=mode))
            except (OSError, AttributeError):
                continue
    return None
