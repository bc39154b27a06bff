"""StepLayer: what an attention layer sees of its cache while a decode step is traced."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Any, NoReturn

import mlx.core as mx

from ...cache.lazy_kv import LazyKV, hand_out
from ...kv.storage.in_place import TracedBlocks
from ...kv.storage.scoring import Scoring, Window
from .step_rows import GroupArrays


class NotCompilable(Exception):
    """The model does something in a decode step that the compiled step has no answer to."""


class StepLayer:
    """What an attention layer sees of its cache while a decode step is traced.

    An adapter calls :meth:`attend`. Any other attention calls :meth:`update_and_fetch` and hands what it gets, which is
    good for nothing else, to the attention function that replaces mlx-lm's.
    """

    def __init__(self, blocks: TracedBlocks, arrays: GroupArrays, window: Window | None) -> None:
        self.blocks = blocks
        self.offset = arrays.offsets
        self._sees = window
        self._visible = arrays.visible
        self._slots = arrays.slots[0] if arrays.slots else None
        self._new: tuple[mx.array, mx.array] | None = None  # keys and values
        self._attended = False
        self._misuses: list[str] = []

    @property
    def window(self) -> int | None:
        """Most tokens that one sees, itself included, or None."""
        return None if self._sees is None else self._sees.size

    def settle(self) -> None:
        """At the end of the trace. Raises NotCompilable unless the layer's new tokens have been attended to, which is
        what writes them, and nothing else has been tried, even if whoever tried it went on."""
        if self._misuses:
            raise NotCompilable(self._misuses[0])
        if not self._attended:
            raise NotCompilable("not every layer writes and attends")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """None: rows are masked by their own lengths and the layer's window, whatever kind of mask is asked for. For a
        window that is narrower, what stands for it."""
        if N != 1:
            raise NotCompilable("the model asks for a mask for several tokens")
        return None if window_size is None or self._has(window_size) else NarrowMask(self._misuses, window_size)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scoring: Scoring,
    ) -> mx.array:
        """As :meth:`PagedKVCache.attend`, for one new token per row, in the kernel."""
        self._take(keys, values)
        return self.attend_fetched(queries, scoring)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take the new keys and values ``[B, n_kv_heads, 1, head_dim]``. What is returned stands for all that the rows
        see, and is for the attention function only: it has no shape, and nobody can compute with it."""
        self._take(keys, values)
        self.offset = self.offset + 1  # where the model asks again
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """The same for another layer that attends to what this one has been given."""
        if self._new is None:
            raise NotCompilable("a layer attends before there is anything to attend to")
        keys, values = (FetchedKV(self._misuses, array.dtype) for array in self._new)
        hand_out(keys, values, StepKV(self))
        return keys, values

    def _take(self, keys: mx.array, values: mx.array) -> None:
        if self._new is not None:
            raise NotCompilable("a layer takes two layers' keys")
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != 1:
            raise NotCompilable(f"keys of shape {keys.shape} and values of shape {values.shape}")
        self._new = keys, values

    def attend_fetched(self, queries: mx.array, scoring: Scoring) -> mx.array:
        """Attention of ``[B, n_q_heads, 1, head_dim]`` to what the rows see. The first one writes the new tokens."""
        assert self._new is not None
        keys, values = self._new
        if queries.ndim != 4 or queries.shape[2] != 1 or len(queries) != len(keys):
            raise NotCompilable(f"queries of shape {queries.shape} for {len(keys)} rows")
        if not keys.dtype == values.dtype == queries.dtype == self.blocks.dtype:
            raise NotCompilable("keys of another dtype than the blocks")
        append, slots = (None, None) if self._attended else (self._new, self._slots)
        self._attended = True
        window, visible = self._seen_under(scoring.mask)
        return self.blocks.decode(queries, visible, append, scoring._replace(mask=None, window=window), slots)

    def _seen_under(self, mask: Any) -> tuple[Window | None, tuple[mx.array, mx.array, mx.array]]:
        """What rows see of their blocks under a mask that the model gives to attention."""
        # Causality hides nothing from a row's newest token.
        if mask is None or isinstance(mask, str) or (isinstance(mask, NarrowMask) and self._has(mask.window_size)):
            return self._sees, self._visible
        if not isinstance(mask, NarrowMask) or self._sees is not None:
            raise NotCompilable("the model's attention has a mask of its own")
        tables, ends, starts = self._visible
        return Window(mask.window_size), (tables, ends, mx.maximum(starts, ends - mask.window_size))

    def _has(self, window_size: int) -> bool:
        """Whether the layer's own window hides as much as this one."""
        return self.window is not None and window_size >= self.window


class StandIn:
    """Stands for an array while a step is traced. To recognise it is all that anybody can do with it: whatever computes
    with it, asks for its shape or compares it raises, and the step is not compiled.

    Args:
        misuses: where it is noted if somebody tries: MLX goes on where an object is no array, to raise or to say that
            it equals none.
    """

    __slots__ = ("__weakref__", "_misuses")
    __hash__ = object.__hash__

    def __init__(self, misuses: list[str]) -> None:
        self._misuses = misuses

    def _refuse(self, what: str) -> NoReturn:
        self._misuses.append(f"the model's attention {what} {type(self).__name__} by itself")
        raise NotCompilable(self._misuses[-1])

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"takes {name} of")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("compares")

    def __bool__(self) -> NoReturn:
        self._refuse("decides by")


class FetchedKV(StandIn):
    """Of keys, or values, that a layer has fetched."""

    __slots__ = ("dtype",)

    def __init__(self, misuses: list[str], dtype: mx.Dtype) -> None:
        super().__init__(misuses)
        self.dtype = dtype


class NarrowMask(StandIn):
    """Of a mask for a window narrower than the layer's."""

    __slots__ = ("window_size",)

    def __init__(self, misuses: list[str], window_size: int) -> None:
        super().__init__(misuses)
        self.window_size = window_size


class StepKV(LazyKV):
    """What a pair of :class:`FetchedKV` stands for. Does not keep the layer: an entry of what was handed out would."""

    def __init__(self, layer: StepLayer) -> None:
        self._step_layer = weakref.ref(layer)
        self.thread = get_ident()

    def serves(self, queries: mx.array, mask: mx.array | str | None) -> bool:
        """True; otherwise there are no arrays that could serve, and :meth:`attend` raises."""
        return True

    def attend(self, queries: mx.array, keys: Any, values: Any, scoring: Scoring) -> mx.array:
        """As :meth:`StepLayer.attend`, of what the layer has been given.

        Raises:
            NotCompilable: with a mask, for several tokens, or after the trace.
        """
        layer = self._step_layer()
        if layer is None:
            raise NotCompilable("the model keeps the keys and values of a step")
        return layer.attend_fetched(queries, scoring)

    def is_of(self, pool: object, layer: int) -> bool:
        """False: there is nothing to compute before the layer's next tokens."""
        return False
