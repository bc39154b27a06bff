"""Waits for the device, and tells its errors from others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from .errors import check_device, device_failed


def confirm() -> None:
    """Wait until all that this thread's stream was given is computed.

    ``mx.eval`` does not suffice on Metal: it may return before the error of an earlier command buffer is noted.

    Raises:
        DeviceError: some of it was not.
    """
    try:
        mx.synchronize()
    except Exception as error:
        raise device_failed(error) from error


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise MLX's errors of the device as DeviceError."""
    try:
        yield
    except Exception as error:
        check_device(error)
        raise
