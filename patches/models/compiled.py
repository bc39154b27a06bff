"""What replaces a model's own __call__: decode steps over in-place blocks run compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...cache.batch_cache import PagedBatchKVCache
from ...cache.packed_cache import PackedKVCache
from ...cache.paged_kv_cache import PagedKVCache
from ...engine.compiled.compiled_step import CompiledStep
from ...kv.pool import BlockPool
from ...warn import warn_once

ModelCall = Callable[..., mx.array]
_steps: weakref.WeakKeyDictionary[BlockPool, CompiledStep] = weakref.WeakKeyDictionary()


def adapt(original: ModelCall) -> ModelCall:
    """From a model class's ``__call__`` to one that takes decode steps by :class:`CompiledStep` where it can."""

    def __call__(
        self: Any, inputs: mx.array, cache: Sequence[Any] | None = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        if cache and input_embeddings is None and inputs.shape[1] == 1:
            first = cache[0]
            is_pack = isinstance(first, PackedKVCache) and first.pack.as_rows
            if is_pack or isinstance(first, PagedKVCache | PagedBatchKVCache):
                step = step_of(first.pool, original)
                if step.failure is None:
                    with first.pool.turn:
                        logits = step(self, inputs, cache)
                    if logits is not None:
                        return logits
                    if step.failure is not None:
                        warn_once(f"decode steps of {type(self).__module__} are not compiled: {step.failure}")
        return original(self, inputs, cache, *(() if input_embeddings is None else (input_embeddings,)))

    return __call__


def step_of(pool: BlockPool, original: ModelCall) -> CompiledStep:
    """The pool's compiled step."""
    step = _steps.get(pool)
    if step is None:
        step = _steps[pool] = CompiledStep(pool, original)
    return step
