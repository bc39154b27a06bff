"""What MLX's GPU backend, its default device and the GPU support."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

# CUdevice_attribute of the CUDA driver API.
_MULTIPROCESSORS, _SHARED_OF_MULTIPROCESSOR, _SHARED_OF_GROUP = 16, 81, 97
_RESERVED = 1024  # bytes of shared memory that the driver takes for itself in each thread group


@lru_cache(maxsize=1)
def backend() -> str | None:
    """Return the GPU dialect, "metal" or "cuda", or None if MLX has no GPU that runs kernels."""
    if mx.metal.is_available():
        return "metal"
    if mx.cuda.is_available():
        return "cuda"
    return None


@lru_cache(maxsize=1)
def gpu_cores() -> int | None:
    """Return the number of cores of an Apple GPU; None on other GPUs, or if macOS does not report it."""
    if backend() != "metal":
        return None
    command = ["ioreg", "-r", "-c", "AGXAccelerator", "-d", "1"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return cores_listed(listed)


def cores_listed(listed: str) -> int | None:
    """Return the number of GPU cores in the output of ``ioreg``, or None."""
    found = re.search(r'"gpu-core-count"\s*=\s*(\d+)', listed)
    return int(found.group(1)) if found else None


def device_unsupported_reason() -> str | None:
    """Return why no kernel can run on MLX's default device, or None. Builds nothing."""
    if backend() is None:
        return "MLX has no GPU here"
    if mx.default_device() != mx.Device(mx.gpu):
        return f"MLX's default device is {mx.default_device()}"
    return None


def on_metal() -> bool:
    """Return whether MLX's GPU backend is Metal."""
    return backend() == "metal"


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
