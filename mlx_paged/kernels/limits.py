"""Limits of an NVIDIA GPU, queried from the driver: shared memory and multiprocessors."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

# CUdevice_attribute of the CUDA driver API.
_MULTIPROCESSORS, _SHARED_OF_MULTIPROCESSOR, _SHARED_OF_GROUP = 16, 81, 97
_RESERVED = 1024  # bytes of shared memory that the driver takes for itself in each thread group


class CudaLimits(NamedTuple):
    """Limits of one GPU.

    Attributes:
        multiprocessors: number of multiprocessors (MLX and Apple say cores).
        shared_of_group: bytes of shared memory that one thread group may ask for.
        shared_of_multiprocessor: bytes that the thread groups on one multiprocessor share.
    """

    multiprocessors: int
    shared_of_group: int
    shared_of_multiprocessor: int

    def groups_together(self, shared: int) -> int:
        """Return how many thread groups with ``shared`` bytes each fit one multiprocessor; 0 if none does."""
        if shared > self.shared_of_group:
            return 0
        return self.shared_of_multiprocessor // (shared + _RESERVED)


# An H100 or H200, for which the kernels are tuned; also assumed if the driver cannot be queried.
HOPPER = CudaLimits(132, 232_448, 233_472)


@lru_cache(maxsize=1)
def cuda_limits() -> CudaLimits:
    """Return the limits of the first visible GPU; Hopper's without a driver."""
    return _query_driver() or HOPPER


def _query_driver() -> CudaLimits | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return None
        found = []
        for attribute in (_MULTIPROCESSORS, _SHARED_OF_GROUP, _SHARED_OF_MULTIPROCESSOR):
            value = ctypes.c_int()
            if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) or value.value <= 0:
                return None
            found.append(value.value)
    except (OSError, AttributeError):
        return None
    return CudaLimits(*found)
