"""Kernel texts that do not compile, for pools over fake kernels; the real code chooses and tries the texts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels import trial as kernel_trial
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.trial import MIN_DEVICE_ELEMENTS, KernelKey

PREPARE_DECODE = kernels.prepare_decode
VARYING = ("tables", "ends", "sinks", "stats", "slots", "blocks", "pairs")


class Launched:
    """A fake kernels.build_kernel that records the launched texts and returns zeros. It raises for texts that do not
    compile; MLX would raise when the launch is evaluated."""

    def __init__(self, is_broken: Callable[[KernelKey], bool]) -> None:
        self.is_broken = is_broken
        self.texts: list[KernelKey] = []

    def __call__(self, body: str, constants: Any) -> Callable[..., list[mx.array]]:
        names = BODIES[body].inputs

        def launch(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            few = [
                name for name, x in zip(names, inputs, strict=True) if name in VARYING and x.size < MIN_DEVICE_ELEMENTS
            ]
            key = KernelKey(body, constants, tuple(few))
            self.texts.append(key)
            if self.is_broken(key):
                raise RuntimeError("it does not compile")
            shapes, dtypes = options["output_shapes"], options["output_dtypes"]
            return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

        return launch


@contextmanager
def broken_texts(is_broken: Callable[[KernelKey], bool], dialect: str = "metal") -> Iterator[Launched]:
    """Within :func:`.fake_kernels.fake_kernels`, make every decode launch also launch the kernels' texts."""
    launched = Launched(is_broken)
    stand_in = kernels.prepare_decode

    def prepare_decode(k_pool: mx.array, v_pool: mx.array, visible: Any, **options: Any) -> Any:
        real = PREPARE_DECODE(k_pool, v_pool, visible, **options)
        launch = stand_in(k_pool, v_pool, visible, **options)

        def both(*args: Any) -> Any:
            real(*args)
            return launch(*args)

        return both

    kernels.variants_of.cache_clear()
    try:
        with (
            mock.patch.multiple(kernels, prepare_decode=prepare_decode, build_kernel=launched, backend=lambda: dialect),
            mock.patch.dict(kernels._switched_off, clear=True),
            mock.patch.dict(kernel_trial._outcomes, clear=True),
        ):
            yield launched
    finally:
        kernels.variants_of.cache_clear()
