"""CompiledKernel: launches machine code as MLX's own kernel objects are launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        return self.prepared(
            grid=grid, threadgroup=threadgroup, output_shapes=output_shapes, output_dtypes=output_dtypes
        )(list(inputs))

    def prepared(self, **options: Any) -> Callable[[list[mx.array]], list[mx.array]]:
        """The call with these keyword arguments, to be given inputs of the same shapes each time: what follows from
        the shapes is computed once."""
        name, _, types, axes, tokens_first, shared = self.source
        options = {
            **{"name": name, "compiled_source": self._cubin, "shared_memory": shared, "ensure_row_contiguous": True},
            **options,
        }
        swapped: list[int] = []
        is_known = False

        def launch(inputs: list[mx.array]) -> list[mx.array]:
            nonlocal is_known
            if not is_known:
                if not self._is_checked:
                    given = tuple(self._type_of.get(x.dtype, str(x.dtype)) for x in inputs)
                    if given != types:
                        raise ValueError(f"{name} takes {types}, not {given}")
                    self._is_checked = True
                shapes = [inputs[i].shape for i, _ in axes]
                options["scalars"] = [shape[axis] for shape, (_, own) in zip(shapes, axes, strict=True) for axis in own]
                swapped.extend(i for i in tokens_first if inputs[i].shape[2] > 1)
                is_known = True
            if swapped:
                inputs = list(inputs)
                for i in swapped:
                    inputs[i] = inputs[i].swapaxes(1, 2)
            return mx.fast.precompiled_cuda_kernel(inputs=inputs, **options)

        return launch
