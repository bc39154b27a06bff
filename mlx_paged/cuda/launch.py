"""CompiledKernel: launches machine code."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..kernels.bodies import BODIES, text_of
from ..kernels.build import TYPE_NAMES, Constants, condensed, kernel_source

# Strides of inputs [batch, heads, length, dim] that a text may read with strides; heads and dim are the pool's. Values
# come from a projection and are [batch, length, heads, dim] in memory; rotation has left keys row-contiguous.
_STRIDES = {
    "k": "int64_t(k_pool_1) * k_2 * {D}, int64_t(k_2) * {D}, {D}, 1",
    "v": "int64_t(k_pool_1) * k_2 * {DV}, {DV}, int64_t(k_pool_1) * {DV}, 1",
}
_TOKENS_FIRST = ("v",)
_AS_ROWS = "x"  # an input of any number of dimensions whose text reads the sizes [rows, last dimension]


class Source(NamedTuple):
    """The complete CUDA source of a kernel.

    Attributes:
        name: the kernel's name, which contains a hash of the text.
        text: source for NVRTC.
        types: element types of the inputs, in C.
        axes: (input, its axes) whose sizes the kernel takes as integers after its outputs.
        num_outputs: number of outputs; the kernel returns at once if the first is a null pointer.
        tokens_first: inputs [batch, heads, length, dim] that it reads as [batch, length, heads, dim].
        shared: bytes of shared memory that a launch asks for.
        has_rows: whether it reads the sizes of its first input as [rows, last dimension].
    """

    name: str
    text: str
    types: tuple[str, ...]
    axes: tuple[tuple[int, tuple[int, ...]], ...]
    num_outputs: int
    tokens_first: tuple[int, ...]
    shared: int = 0
    has_rows: bool = False


@lru_cache(maxsize=1024)
def source_of(body: str, given: Constants) -> Source:
    """Return the complete source of a kernel for NVRTC."""
    header, source = (condensed(text) for text in kernel_source(body, "cuda", given))
    record, constants = BODIES[body], dict(given)
    inputs, outputs = record.inputs, record.outputs

    def kind(name: str) -> str:
        known = record.type_of(name, constants)
        return TYPE_NAMES["cuda"][constants[known]] if known in constants else known

    parameters = [f"const {kind(name)}* {name}" for name in inputs] + [f"{kind(name)}* {name}" for name in outputs]
    axes, declared = [], []
    strided = [name for name in inputs if f"{name}_strides[" in source]
    for i, name in enumerate(inputs):
        own = tuple(sorted({int(axis) for axis in re.findall(rf"\b{name}_shape\[(\d)\]", source)}))
        if own:
            axes.append((i, own))
            parameters += [f"int {name}_{axis}" for axis in own]
            sizes = (f"{name}_{axis}" if axis in own else "0" for axis in range(max(own) + 1))
            declared.append(f"const int {name}_shape[] = {{{', '.join(sizes)}}};")
        if name in strided:
            steps = _STRIDES[name].format_map(constants)
            declared.append(f"const int64_t {name}_strides[] = {{{steps}}};")
    bounds = f"__launch_bounds__({32 * constants['SG']}, {constants['GROUPS']}) " if "GROUPS" in constants else ""
    before = f'{text_of("types.cuh")}{header}namespace mlx::core::cu {{\nextern "C" __global__ void {bounds}'
    # A launch without arrays does nothing: it makes MLX load the machine code (see load).
    start = [f"({', '.join(parameters)}) {{", f"if ({outputs[0]} == nullptr) return;"]
    after = "\n".join([*start, *declared, source]) + "}\n}\n"
    name = f"{body}_{hashlib.sha256((before + after).encode()).hexdigest()[:32]}"
    swapped = tuple(i for i, each in enumerate(inputs) if each in _TOKENS_FIRST and each in strided)
    types, shared = tuple(kind(each) for each in inputs), constants.get("SHARED", 0)
    has_rows = inputs[0] == _AS_ROWS
    return Source(name, before + name + after, types, tuple(axes), len(outputs), swapped, shared, has_rows)


# libstdc++'s std::hash of a string is MurmurHash64A with this seed; each of its steps can be inverted for an input of
# one word of 8 bytes.
_SEED, _MULTIPLIER, _MASK = 0xC70F6907, 0xC6A4A7935BD1E995, (1 << 64) - 1
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)


def _hash(code: bytes) -> int | None:
    """Return ``std::hash<std::string>`` of these bytes, as MLX's C++ library has it; None without libstdc++."""
    try:
        function = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    except (OSError, AttributeError):
        return None
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return int(function(code, len(code), _SEED))


def short_name(code: bytes) -> bytes | None:
    """Return 8 bytes with the same ``std::hash`` as the code; None if this C++ library hashes in another way."""
    hashed = _hash(code)
    if hashed is None:
        return None

    def unmixed(value: int) -> int:
        return value ^ (value >> 47)  # its own inverse

    value = unmixed(unmixed(hashed) * _INVERSE & _MASK) * _INVERSE & _MASK
    word = unmixed((value ^ _SEED ^ (8 * _MULTIPLIER & _MASK)) * _INVERSE & _MASK) * _INVERSE & _MASK
    name = word.to_bytes(8, "little")
    return name if _hash(name) == hashed else None


def load(source: Source, code: bytes) -> bytes:
    """Make MLX load a kernel's machine code, and return what launches name it by: 8 bytes, or the code itself.

    MLX looks a kernel up by its name and the hash of its machine code, and computes that hash at every launch: 19 % of
    the host's time of a decode step of one row (docs/adr/0011). Raises RuntimeError if MLX cannot load the code.
    """
    name = short_name(code)
    if name is None:
        return code
    outputs = mx.fast.precompiled_cuda_kernel(
        name=source.name,
        compiled_source=code,
        inputs=[mx.zeros((0,))] * len(source.types),
        output_shapes=[(0,)] * source.num_outputs,
        output_dtypes=[mx.uint32] * source.num_outputs,
        scalars=[0] * sum(len(axes) for _, axes in source.axes),
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        shared_memory=source.shared,
        ensure_row_contiguous=True,
    )
    mx.eval(outputs)
    return name


class CompiledKernel:
    """A kernel with its machine code. Inputs that are not row-contiguous are copied.

    Args:
        source: the kernel's source.
        code: its machine code, or its name (see :func:`load`).
    """

    def __init__(self, source: Source, code: bytes) -> None:
        self.source = source
        self._code = code
        self._is_checked = False

    def prepared(self, **options: Any) -> Callable[[list[mx.array]], list[mx.array]]:
        """Return a function of the inputs, with the other arguments of MLX's kernels (:func:`..kernels.build.prepare`).
        The first call raises ValueError if inputs have other dtypes than the text's. Inputs must have the same shapes
        at each call: what depends on the shapes is computed once."""
        name, _, types, axes, _, tokens_first, shared, has_rows = self.source
        options = {
            **{"name": name, "compiled_source": self._code, "shared_memory": shared, "ensure_row_contiguous": True},
            **options,
        }
        swapped: list[int] = []
        is_known = False

        def launch(inputs: list[mx.array]) -> list[mx.array]:
            nonlocal is_known
            if not is_known:
                if not self._is_checked:
                    given = tuple(TYPE_NAMES["cuda"].get(x.dtype, str(x.dtype)) for x in inputs)
                    if given != types:
                        raise ValueError(f"inputs of {name} must have types {types}, got {given}")
                    self._is_checked = True
                shapes = [inputs[i].shape for i, _ in axes]
                if has_rows and axes[0][0] == 0:
                    shapes[0] = inputs[0].size // shapes[0][-1], shapes[0][-1]
                options["scalars"] = [shape[axis] for shape, (_, own) in zip(shapes, axes, strict=True) for axis in own]
                swapped.extend(i for i in tokens_first if inputs[i].shape[2] > 1)
                is_known = True
            if swapped:
                inputs = list(inputs)
                for i in swapped:
                    inputs[i] = inputs[i].swapaxes(1, 2)
            return mx.fast.precompiled_cuda_kernel(inputs=inputs, **options)

        return launch
