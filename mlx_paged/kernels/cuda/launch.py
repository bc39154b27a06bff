"""CompiledKernel: launches machine code as MLX's own kernel objects are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .source import Source


class CompiledKernel:
    """Called like the result of ``mx.fast.cuda_kernel``. Inputs that are not row-contiguous are copied.

    Args:
        source: of the kernel.
        cubin: its machine code.
        type_of: a dtype's name in C.
    """

    def __init__(self, source: Source, cubin: bytes, type_of: dict[mx.Dtype, str]) -> None:
        self.source = source
        self._cubin = cubin
        self._type_of = {**type_of, mx.uint32: "uint32_t"}
        self._is_checked = False

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """See ``mx.fast.cuda_kernel``. The first call raises ValueError for inputs of other dtypes than the text's."""
        name, _, types, axes, tokens_first, shared = self.source
        if not self._is_checked:
            given = tuple(self._type_of.get(x.dtype, str(x.dtype)) for x in inputs)
            if given != types:
                raise ValueError(f"{name} takes {types}, not {given}")
            self._is_checked = True
        sizes: list[Any] = []
        for i, own in axes:
            shape = inputs[i].shape
            sizes += [shape[axis] for axis in own]
        for i in tokens_first:
            if inputs[i].shape[2] > 1:
                inputs = [*inputs[:i], inputs[i].swapaxes(1, 2), *inputs[i + 1 :]]
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=self._cubin,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=sizes,
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=shared,
            ensure_row_contiguous=True,
        )
