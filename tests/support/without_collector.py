"""A context without Python's cyclic collector, and a check of what it would have found."""

import gc
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch the cyclic collector off, so that only reference counts free objects. Fails at the end if they left an
    unreachable array, frame, error or object of this package or mlx-lm. Checked objects must have been dropped within
    the context, locals included: call a function."""
    gc.collect()  # free what other tests left
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
    # By type: a weak proxy whose object is gone supports nothing else.
    return issubclass(type(each), kinds) or str(type(each).__module__).startswith(("mlx_paged", "mlx_lm"))
