"""Wrappers of a model's calls: each holds the pool's lock and the model's (see kv/lock.py), and decode steps run
compiled."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...by_model import ByModel
from ...cache.batch_cache import PagedBatchKVCache, first_paged
from ...engine.compiled_step import CompiledStep, compiled_steps
from ...kernels.inference import Inference
from ...kv.pool import BlockPool
from ...warn import warn_once

ModelCall = Callable[..., mx.array]


def adapt(original: ModelCall) -> ModelCall:
    """Replace a model class's ``__call__`` by one that computes decode steps with :class:`CompiledStep` where possible:
    calls with one token per row, a ``cache``, and no other arguments."""
    names = list(inspect.signature(original).parameters)[2:]

    @functools.wraps(original)  # mlx-lm inspects the signature
    def __call__(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        caches = given.pop("cache", None)
        if caches and inputs.shape[1] == 1 and all(value is None for value in given.values()):
            first = first_paged(caches)
            is_pack = isinstance(first, PagedBatchKVCache) and first.batch.is_pack and not first.batch.as_rows
            if first is not None and not is_pack and first.group.in_place:
                step = step_of(first.pool, original)
                # If a model wraps another one, the first to be called owns the step; the other is a part of it.
                if step.forward is original and step.failure is None:
                    logits = step(self, inputs, caches)
                    if logits is not None:
                        return logits
                    if step.failure is not None:
                        warn_once(f"decode steps of {type(self).__module__} are not compiled: {step.failure}")
        return original(self, inputs, *args, **kwargs)

    return __call__


_locks: ByModel[threading.RLock] = ByModel("lock of calls")


def lock_of(model: Any) -> threading.RLock:
    """Return the lock that each call of a model holds: while one is traced, the model's weights are tracers and classes
    of its layers are replaced, for every thread. It is taken after the pool's lock."""
    lock = _locks.get(model)
    if lock is None:
        with _lock:
            lock = _locks.get(model) or _locks.put(model, threading.RLock())
    return lock


def locking(call: ModelCall, compiled: ModelCall | None = None) -> ModelCall:
    """Wrap a model class's ``__call__`` so that each call holds the model's lock, and over a pool the pool's.

    Args:
        call: the class's own.
        compiled: what is called over blocks on a device; None: the same.
    """
    on_device = call if compiled is None else compiled

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        caches: Any = kwargs.get("cache") or next((arg for arg in args if isinstance(arg, list)), None)
        first = first_paged(caches)
        if first is None:
            with lock_of(self):
                return call(self, *args, **kwargs)
        pool = first.pool
        if first.group.blocks and not first.group.in_place:  # on a CPU nothing is traced, and no kernel applies
            with pool.lock, Inference(allowed=False):
                pool.lock.device.check()
                return call(self, *args, **kwargs)
        # Our kernels are allowed before the first write, too: MLX would take seconds to compile its own for a prompt.
        with pool.lock, lock_of(self), Inference():
            pool.lock.device.check()
            return on_device(self, *args, **kwargs)

    return __call__


def is_upstreams(call: ModelCall) -> bool:
    """Return whether a model class's ``__call__`` is mlx-lm's own. A replacement may have side effects, which a trace
    would run only once."""
    module: str = getattr(call, "__globals__", {}).get("__name__", "")
    return module.startswith("mlx_lm.models.")


def step_of(pool: BlockPool, original: ModelCall) -> CompiledStep:
    """Return the pool's compiled step."""
    return compiled_steps.get(pool) or compiled_steps.put(pool, CompiledStep(original))


_guarded: weakref.WeakSet[type] = weakref.WeakSet()
_lock = threading.Lock()


def guard(model: Any) -> None:
    """Make each call of the model hold its locks, and compile decode steps of mlx-lm's own models where possible."""
    kind = type(model)
    if kind in _guarded:
        return
    with _lock:
        original = kind.__dict__.get("__call__")
        inherited = kind.__call__
        if hasattr(inherited, "guarded"):
            return
        __call__ = locking(inherited, adapt(inherited) if is_upstreams(inherited) else inherited)
        __call__.guarded = original  # type: ignore[attr-defined]
        setattr(kind, "__call__", __call__)  # noqa: B010
        _guarded.add(kind)


def unguard() -> None:
    """Restore the ``__call__`` of all guarded model classes."""
    with _lock:
        for kind in list(_guarded):
            original = kind.__dict__["__call__"].guarded
            if original is None:
                del kind.__call__
            else:
                setattr(kind, "__call__", original)  # noqa: B010
        _guarded.clear()
