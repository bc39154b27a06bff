"""Kernels that this package compiles by NVRTC, in threads, and keeps on disk (docs/adr/0011)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ..kernels.bodies import BODIES, text_of
from ..kernels.build import TYPE_NAMES, Constants, condensed, kernel_source, warn_when_compiling
from .cubins import cubins
from .launch import CompiledKernel, Source, source_of


@lru_cache(maxsize=1024)
def cuda_source(body: str, constants: Constants) -> Source | None:
    """Return the source for NVRTC, or None if :func:`source_of` does not support the kernel."""
    header, source = (condensed(text) for text in kernel_source(body, "cuda", constants))
    record, types = BODIES[body], text_of("types.cuh")
    return source_of(body, types + header, source, record.inputs, record.outputs, dict(constants), TYPE_NAMES["cuda"])


def compiled_kernel(body: str, constants: Constants) -> CompiledKernel | None:
    """Return a kernel compiled by this package, or None if MLX has to compile it. MLX would parse all of its headers
    for each text in each process, about 2 s."""
    known, source = cubins(), cuda_source(body, constants)
    if known is None or source is None:
        return None
    with warn_when_compiling():
        return known.kernel(source, TYPE_NAMES["cuda"])


def compile_ahead(kernels: Iterable[tuple[str, Constants]]) -> None:
    """Start to compile kernels, (body, constants) each, in parallel threads. Does nothing if MLX compiles them."""
    known = cubins()
    if known is not None:
        for source in (cuda_source(*kernel) for kernel in kernels):
            if source is not None:
                known.start(source)


def is_kept() -> bool:
    """Return whether machine code is kept on disk for later processes."""
    known = cubins()
    return known is not None and known.folder is not None


def compiler_name() -> str:
    """Return which compiler builds the kernels on this machine, for reports."""
    known = cubins()
    if known is None:
        return "MLX"
    return f"NVRTC {known.version}, {'once per machine' if known.folder is not None else 'in each process'}"
