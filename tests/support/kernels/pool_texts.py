"""The texts that a pool in place needs."""

from collections.abc import Iterator

import mlx.core as mx

from mlx_paged.kernels.decode_spec import pool_constants_of
from mlx_paged.kernels.launch_shape import Variant
from mlx_paged.kernels.trial import KernelKey


def pool_texts(variant: Variant) -> Iterator[KernelKey]:
    """Yield the texts that write, read and copy blocks of a variant's pool."""
    constants = pool_constants_of(variant.dtype, variant.head_dim, variant.value_dim, variant.block_size)
    yield KernelKey("write_slots", (*constants, ("S", mx.int32)))
    yield KernelKey("gather_blocks", constants)
    yield KernelKey("copy_blocks", constants)
