"""Python's cyclic collector switched off, and what it would have found."""

import gc
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn


@contextmanager
def without_collector() -> Iterator[None]:
    """Within, only reference counts free anything. Fails at the end if something of this package, of mlx-lm, an array,
    a frame or an error has become unreachable that they did not free. What is to be free must have been dropped within,
    locals included: call a function."""
    gc.collect()  # what other tests left
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = Counter(type(each).__name__ for each in gc.garbage if _is_ours(each))
        assert not found, f"only the cyclic collector would free {dict(found)}"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.collect()


def _is_ours(each: object) -> bool:
    kinds = (mx.array, nn.Module, types.FrameType, types.TracebackType, BaseException)
    # By type: a proxy whose object is gone answers to nothing else.
    return issubclass(type(each), kinds) or str(type(each).__module__).startswith(("mlx_paged", "mlx_lm"))
