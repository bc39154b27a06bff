"""Replacements for mlx-lm's generators of steps, which hold pools' locks (see kv/lock.py)."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from ...cache.composites import leaves
from ...device import device_errors
from ...engine.prefill import chunk_cap
from ...errors import check_device
from ...kernels.availability import on_metal
from ...kv.lock import HeldLocks
from ..cache.layer_cache import PagedLayerCache
from ..cache.pools import pool_of
from ..cache.prompt_cache import use_quantized_pages
from ..patch import replaces


@replaces("mlx_lm.generate:speculative_generate_step", "c508203c7dac4b66")
@replaces("mlx_lm.generate:generate_step", "640f5f80cac74587")
def adapt(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return a replacement that holds the locks of pools for a token at a time, in whichever thread asks for it."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
        given = (*args, kwargs.get("model"), kwargs.get("draft_model"))
        models = [model for model in given if hasattr(model, "layers")]
        use_quantized_pages(models, kwargs)
        if on_metal():
            _shorten_steps(original, models[0], args[0] if args else kwargs["prompt"], kwargs)
        steps = original(*args, **kwargs)
        step, begun_by = HeldLocks(), threading.get_ident()
        try:
            while True:
                with device_errors(), step:
                    try:
                        token = next(steps)
                    except StopIteration:
                        return
                yield token
        finally:
            # mlx-lm's generator is inside an MLX stream context, which raises RuntimeError if another thread leaves it.
            # Everything else in close() has been done by then.
            with suppress(RuntimeError) if threading.get_ident() != begun_by else nullcontext():
                steps.close()  # type: ignore[attr-defined]
            if not sys.is_finalizing() and threading.get_ident() != threading.main_thread().ident:
                # MLX ends the process if the thread ends while a step is still being computed.
                try:
                    mx.synchronize(signature.bind_partial(*args, **kwargs).arguments.get("stream", generation_stream))
                except Exception as error:  # this thread has no such stream, so nothing to wait for
                    check_device(error)

    return generate_step


def _shorten_steps(original: Callable[..., Any], model: Any, prompt: Any, options: dict[str, Any]) -> None:
    """Shorten the steps of a prompt whose last one would take too long on Metal (:class:`.scheduler.ChunkCap`).
    ``options``: keyword arguments of ``original``; changed in place."""
    cap = chunk_cap(pool_of(model))
    if cap is None:
        return
    cached = [cache.offset for cache in leaves(options.get("prompt_cache") or ()) if isinstance(cache, PagedLayerCache)]
    most = options.get("prefill_step_size", inspect.signature(original).parameters["prefill_step_size"].default)
    total = max(1, max(cached, default=0) + len(prompt))
    options["prefill_step_size"] = cap.most_tokens(total - most, most)
