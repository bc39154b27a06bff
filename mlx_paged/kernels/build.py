"""Builds kernels from their texts for the GPU's dialect, and caches what is built.

Nothing is compiled on import, and nothing at all if MLX has no GPU.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from threading import Event, Timer, get_ident
from typing import Any

import mlx.core as mx
import numpy as np

from .availability import backend
from .bodies import BODIES, kernel_text
from .nvidia import part

# Compile-time constants of a kernel: (name, bool | int | dtype).
Constants = tuple[tuple[str, Any], ...]
# What determines a kernel's text: its body, and the constants.
KernelText = tuple[str, Constants]
Output = tuple[tuple[int, ...], mx.Dtype]  # shape and dtype
Launch = Callable[[list[mx.array]], list[mx.array]]

SLOW_SECONDS = 1.0
_has_said_so = Event()  # that kernels are compiled

_TYPE_NAMES = {mx.float32: "float", mx.int32: "int", mx.uint32: "uint32_t"}
TYPE_NAMES = {
    "metal": {**_TYPE_NAMES, mx.float16: "half", mx.bfloat16: "bfloat16_t"},
    "cuda": {**_TYPE_NAMES, mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"},
}


class NoKernelError(RuntimeError):
    """No GPU, or every variant for a geometry is switched off."""


def condensed(text: str) -> str:
    """Return a text without comments, indentation and empty lines."""
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def kernel_source(body: str, dialect: str, constants: Constants) -> tuple[str, str]:
    """Return (header, source), with the constants declared at the top of the body.

    They are not passed as MLX template arguments, which MLX formats and hashes again at every call.
    """
    header, source = kernel_text(body, dialect)
    lines = []
    for name, value in constants:
        if isinstance(value, mx.Dtype):
            lines.append(f"typedef {TYPE_NAMES[dialect][value]} {name};")
        else:
            kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
            lines.append(f"constexpr {kind} {name} = {text};")
    return header, "\n".join(lines) + "\n" + source


@lru_cache(maxsize=1024)
def build_kernel(body: str, constants: Constants) -> Callable[..., list[mx.array]]:
    """Return a callable that launches a kernel with these constants. Raises NoKernelError if MLX has no GPU."""
    dialect = backend()
    if dialect is None:
        raise NoKernelError("the paged kernels need a GPU that MLX can use")
    if dialect == "cuda":
        compiled: Callable[..., list[mx.array]] = part("cubins").compiled_kernel(body, constants)
        return compiled
    # MLX processes the whole text at every call, so it gets no more than the compiler needs.
    header, source = (condensed(text) for text in kernel_source(body, dialect, constants))
    record = BODIES[body]
    made: Any = mx.fast.metal_kernel(
        # MLX caches compiled kernels by name alone, some versions on disk too, so the name contains a hash of the text.
        name=f"{body}_{hashlib.sha256((header + source).encode()).hexdigest()[:16]}",
        input_names=list(record.inputs),
        output_names=list(record.outputs),
        source=source,
        header=header,
        ensure_row_contiguous="_strides[" not in source,
    )
    return made


_LEAST_ELEMENTS = 8


def padded_for_metal(rows: np.ndarray, value: int = 0) -> np.ndarray:
    """Pad an input whose size varies with rows of ``value``, on Metal to 8 elements: MLX passes smaller ones in another
    address space, which would make another text of the kernel."""
    if backend() != "metal" or not 0 < rows.size < _LEAST_ELEMENTS:
        return rows
    missing = -(-_LEAST_ELEMENTS // (rows.size // len(rows))) - len(rows)
    return np.concatenate([rows, np.full((missing, *rows.shape[1:]), value, rows.dtype)])


# MLX on CUDA keeps arrays of up to 8 bytes in memory shared with the host, which kernels read slowly. With the ends and
# starts of one row there, attention to 4,096 tokens takes 26 us instead of 17 (docs/adr/0003).
_HOST_SHARED_BYTES = 8
# Most consecutive increments on the device. If no layer reads the arrays, they are a lazy graph of that many nodes.
MAX_INCREMENTS = 256


class DeviceRows:
    """Integers of a step's rows, ``[B, ...]``, as an array that kernels read fast; one object serves a batch's steps.

    On CUDA an array from the host costs a step 41 us (NVIDIA H100: its pages migrate there and back). So rows that gain
    one token or none per step are incremented on the device, and a small array is a slice of a larger one.
    """

    def __init__(self) -> None:
        self._host = np.zeros(0, np.int32)
        self._device: mx.array | None = None
        self._num_increments = 0
        self._thread = 0  # the thread that made the arrays: no other may use them before they are computed

    def tokens(self, positions: np.ndarray, ends: np.ndarray) -> tuple[mx.array, mx.array]:
        """Return positions ``[B]`` and ends ``[B, 1]`` (:func:`padded_for_metal`), parts of one array on the device."""
        rows = len(positions)
        if backend() != "cuda" or rows == 0:
            return mx.array(positions), mx.array(padded_for_metal(ends))
        if rows > 1:
            first, second = mx.split(self._next(np.concatenate([positions, ends[:, 0]])), 2)
        else:
            first, _, second, _ = mx.split(self._next(np.repeat([positions, ends[:, 0]], 2)), 4)
        return first, second[:, None]

    def of(self, rows: np.ndarray) -> mx.array:
        """Return the rows (:func:`padded_for_metal`) as an array on the device."""
        if rows.size == 0 or backend() != "cuda":
            return mx.array(padded_for_metal(rows))
        whole = rows
        if rows.nbytes <= _HOST_SHARED_BYTES:
            whole = np.zeros((2 * _HOST_SHARED_BYTES * len(rows) // rows.nbytes, *rows.shape[1:]), rows.dtype)
            whole[: len(rows)] = rows
        device = self._next(whole)
        return device if whole is rows else device[: len(rows)]

    def _next(self, rows: np.ndarray) -> mx.array:
        before, self._host = self._host, rows
        if self._device is not None and self._thread == get_ident() and before.shape == rows.shape:
            changes, gains = _gains_of(rows.shape, rows.dtype, (rows - before).tobytes())
            if not changes:
                return self._device
            if gains is not None and self._num_increments < MAX_INCREMENTS:
                self._num_increments += 1
                self._device = self._device + gains
                return self._device
        self._device, self._num_increments, self._thread = mx.array(rows), 0, get_ident()
        return self._device


@lru_cache(maxsize=256)
def _gains_of(shape: tuple[int, ...], dtype: np.dtype[Any], change: bytes) -> tuple[bool, mx.array | None]:
    """Return whether rows of this shape change, and, if each gains one token or none, what to add to them on the
    device. Cached for all batches, since an array from the host costs each new sequence time."""
    rows = np.frombuffer(change, dtype).reshape(shape)
    gains = mx.array(rows) if rows.min() >= 0 and rows.max() == 1 else None
    return bool(rows.any()), gains


@lru_cache(maxsize=256)
def constant_rows(value: int, shape: tuple[int, ...]) -> mx.array:
    """Return rows that all hold a value, int32, as :meth:`DeviceRows.of` does; complete, and cached for all threads."""
    rows = DeviceRows().of(np.full(shape, value, np.int32))
    mx.eval(rows)
    return rows


def prepare(
    text: KernelText,
    grid: tuple[int, int, int],
    threads: int,
    outputs: Sequence[Output],
    init_value: float | None = None,
) -> Launch:
    """Build a kernel, and return a function that launches it. Inputs must have the same shapes at each call, so that
    the host computes what depends on the shapes only once.

    Args:
        text: the kernel.
        grid: threads of the launch.
        threads: of a thread group.
        outputs: shape and dtype of each output.
        init_value: what outputs hold before the launch (Metal), for checks.
    """
    kernel = build_kernel(*text)
    options: dict[str, Any] = {
        "grid": grid,
        "threadgroup": (threads, 1, 1),
        "output_shapes": [shape for shape, _ in outputs],
        "output_dtypes": [dtype for _, dtype in outputs],
    }
    if init_value is not None:
        options["init_value"] = init_value
    own: Callable[..., Launch] | None = getattr(kernel, "prepared", None)  # of kernels that cuda/ has compiled
    return own(**options) if own is not None else lambda inputs: kernel(inputs=inputs, **options)


def compile_ahead(kernels: Iterable[KernelText]) -> None:
    """Start to compile kernels in parallel threads, before they are built. Does nothing on Metal, where MLX compiles
    them."""
    if backend() == "cuda":
        part("cubins").compile_ahead(kernels)


@contextmanager
def warn_when_compiling() -> Iterator[None]:
    """Say on stderr, if that is a terminal, that kernels are compiled, when the block takes more than a second; once in
    a process."""
    if _has_said_so.is_set() or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    timer = Timer(SLOW_SECONDS, _say_so)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_so() -> None:
    if not _has_said_so.is_set():
        _has_said_so.set()
        with suppress(OSError, ValueError):  # its reader may have gone
            print("mlx_paged: compiling kernels", file=sys.stderr, flush=True)
