"""What replaces a model's own __call__: decode steps over in-place blocks run compiled."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...cache.batch_cache import PagedBatchKVCache
from ...cache.composites import leaves
from ...cache.packed_cache import PackedKVCache
from ...cache.paged_kv_cache import PagedKVCache
from ...engine.compiled_step import CompiledStep
from ...kv.pool import BlockPool
from ...warn import warn_once

ModelCall = Callable[..., mx.array]
_steps: weakref.WeakKeyDictionary[BlockPool, CompiledStep] = weakref.WeakKeyDictionary()


def adapt(original: ModelCall) -> ModelCall:
    """Replace a model class's ``__call__`` by one that takes decode steps by :class:`CompiledStep` where it can: calls
    with one token per row and a ``cache``, and nothing else."""
    names = list(inspect.signature(original).parameters)[2:]

    @functools.wraps(original)  # mlx-lm asks for the signature
    def __call__(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        caches = given.pop("cache", None)
        if caches and inputs.shape[1] == 1 and not any(value is not None for value in given.values()):
            first: Any = next(iter(leaves(caches[:1])), None)
            is_pack = isinstance(first, PackedKVCache) and first.pack.as_rows
            if is_pack or isinstance(first, PagedKVCache | PagedBatchKVCache):
                step = step_of(first.pool, original)
                # Of a model in a model, whichever is called first has the step; the other is a part of it.
                if step.forward is original and step.failure is None:
                    with first.pool.turn:
                        logits = step(self, inputs, caches)
                    if logits is not None:
                        return logits
                    if step.failure is not None:
                        warn_once(f"decode steps of {type(self).__module__} are not compiled: {step.failure}")
        return original(self, inputs, *args, **kwargs)

    return __call__


def is_upstreams(call: ModelCall) -> bool:
    """Return whether a model class's ``__call__`` is as mlx-lm wrote it: what others put in its place may do things by
    the way that a trace would do once only."""
    module: str = getattr(call, "__globals__", {}).get("__name__", "")
    return module.startswith("mlx_lm.models.")


def step_of(pool: BlockPool, original: ModelCall) -> CompiledStep:
    """Return the pool's compiled step."""
    step = _steps.get(pool)
    if step is None:
        step = _steps[pool] = CompiledStep(pool, original)
    return step
