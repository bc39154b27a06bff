"""How mlx-lm's generators and model calls take turns at a pool (see kv/turn.py)."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ...kv.turn import Stepwise
from ..cache import prompt_cache as kv_bits


def adapt(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Yield the replacement of ``generate_step``: each token is a step of its own, whoever asks for it."""

    @functools.wraps(original)
    def generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
        models = (*args, kwargs.get("model"), kwargs.get("draft_model"))
        kv_bits.use_quantized_pages([model for model in models if hasattr(model, "layers")], kwargs)
        steps = original(*args, **kwargs)
        step, begun_by = Stepwise(), threading.get_ident()
        try:
            while True:
                with step:
                    try:
                        token = next(steps)
                    except StopIteration:
                        return
                yield token
        finally:
            # MLX's stream context cannot be left in another thread, and mlx-lm's generator is in one. All else is done.
            with suppress(RuntimeError) if threading.get_ident() != begun_by else nullcontext():
                steps.close()  # type: ignore[attr-defined]
            if not sys.is_finalizing() and threading.get_ident() != threading.main_thread().ident:
                # A step may be being computed still: MLX ends the process if the thread ends before it is done.
                with suppress(Exception):  # there is no such stream in this thread, and nothing to wait for
                    mx.synchronize(args[2] if len(args) > 2 else kwargs.get("stream", generation_stream))

    return generate_step
