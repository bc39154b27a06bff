"""PackedStates: the states of a pack's sequences in one layer (SSM, convolution, linear attention)."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from .batch import NotPackableError


class _Part(NamedTuple):
    """Sequences with the same number of new tokens, whose states are side by side.

    Attributes:
        sequences: their indices.
        num_tokens: new tokens of each.
        cache: the layer's cache with these sequences as a batch.
    """

    sequences: list[int]
    num_tokens: int
    cache: Any

    def keeping(self, places: list[int], count: int) -> _Part:
        """Return the part with only the sequences at some places, and another number of new tokens."""
        cache = with_arrays(self.cache, [_taken(x, np.array(places)) for x in self.cache.cache])
        return _Part([self.sequences[place] for place in places], count, cache)


class PackedStates:
    """States of a pack's sequences in one layer. The layer cannot take the tokens of one sequence as rows, because each
    token changes the state for the next: :meth:`run` calls it once for all sequences with the same number of new
    tokens, side by side. So nothing is padded. Sequences without a state are computed apart from those with one,
    because some layers treat a first token differently.

    Args:
        parts: groups of sequences that contain each sequence once.
        counts: new tokens of each sequence.
        records: whether calls are recorded, so that :meth:`batch` can go back to an earlier token.
    """

    def __init__(self, parts: Sequence[_Part], counts: Sequence[int], *, records: bool = False) -> None:
        self._before, self._parts = list(parts), list(parts)
        self._begins = np.cumsum([0, *counts])
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] | None = [] if records else None

    @classmethod
    def of(cls, caches: Sequence[Any], counts: Sequence[int]) -> PackedStates:
        """Return the states of sequences that have a cache each. The caches are not changed."""
        alike: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for index, (cache, count) in enumerate(zip(caches, counts, strict=True)):
            alike[count, cache.empty()].append(index)
        parts = [_Part(own, count, _joined([caches[i] for i in own])) for (count, _), own in alike.items()]
        return cls(parts, counts)

    @classmethod
    def over(cls, batch: Any, counts: Sequence[int]) -> PackedStates:
        """Return the states of a decode batch's rows, to verify drafts. The batch's cache is not changed."""
        return cls(_by_count(_Part(list(range(len(counts))), 0, batch), counts), counts, records=True)

    # What models do with it -----------------------------------------------------------------------------------

    def make_mask(self, N: int) -> None:
        """Return None: nothing is padded."""

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer's module for all tokens of the pack.

        Args:
            call: the module's own code, which takes tokens ``[B, n, ...]`` and a cache of B sequences.
            args, kwargs: the model's arguments: this object as the cache, arrays of all tokens ``[T, 1, ...]``, or
                positions ``[T]``.

        Returns:
            What ``call`` returns, with arrays of all tokens ``[T, 1, ...]``.
        """
        if self._calls is not None:
            self._calls.append((call, args, kwargs))
        outputs = []
        for index, part in enumerate(self._parts):
            output, self._parts[index] = self._run(part, call, args, kwargs)
            outputs.append(output)
        return _in_order(outputs, np.concatenate([self._places(part).reshape(-1) for part in self._parts]))

    def __getitem__(self, index: int) -> Any:
        raise NotPackableError("a layer reads its state directly")

    def __setitem__(self, index: int, value: Any) -> None:
        raise NotPackableError("a layer writes its state directly")

    # Afterwards -----------------------------------------------------------------------------------------------

    def of_each(self) -> list[list[Any]]:
        """Return the arrays of each sequence's state after its tokens, as copies: views would keep the whole batch."""
        found: list[list[Any]] = [[] for _ in self._begins[1:]]
        for sequences, _, cache in self._parts:
            for place, index in enumerate(sequences):
                found[index] = [None if x is None else mx.contiguous(x[place : place + 1]) for x in cache.cache]
        return found

    def batch(self, counts: Sequence[int]) -> list[Any]:
        """Return the arrays of the batch's states after the first ``counts`` new tokens of each sequence. For sequences
        that have more new tokens, the recorded calls are repeated."""
        parts = []
        for before, after in zip(self._before, self._parts, strict=True):
            for part in _by_count(before, counts):
                if part.num_tokens == before.num_tokens:
                    part = after.keeping([before.sequences.index(index) for index in part.sequences], part.num_tokens)
                else:
                    for call, args, kwargs in self._calls or ():
                        _, part = self._run(part, call, args, kwargs)
                parts.append(part)
        order = [index for part in parts for index in part.sequences]
        arrays = _joined([part.cache for part in parts]).cache
        return arrays if order == sorted(order) else [_taken(x, np.argsort(order)) for x in arrays]

    # --------------------------------------------------------------------------------------------------------

    def _places(self, part: _Part) -> np.ndarray:
        """Return the places of a part's tokens in the pack, ``[k, n]``."""
        places: np.ndarray = self._begins[part.sequences][:, None] + np.arange(part.num_tokens)
        return places

    def _run(self, part: _Part, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, _Part]:
        """Call the module for the sequences of a part. Return its output, and the part afterwards."""
        places, cache = self._places(part), with_arrays(part.cache, part.cache.cache)
        output = call(
            *(self._side_by_side(x, places, cache) for x in args),
            **{name: self._side_by_side(x, places, cache) for name, x in kwargs.items()},
        )
        return output, part._replace(cache=cache)

    def _side_by_side(self, value: Any, places: np.ndarray, cache: Any) -> Any:
        """Return an argument for a call with the tokens at these places ``[k, n]`` of the pack."""
        if value is self:
            return cache
        if not isinstance(value, mx.array) or value.shape[:1] != (self._begins[-1],):
            return value
        if value.ndim == 1:  # positions: a call gets that of each sequence's first token
            return _taken(value, places[:, 0])
        return _taken(value, places.reshape(-1)).reshape(*places.shape, *value.shape[2:])


def with_arrays(cache: Any, arrays: Sequence[Any]) -> Any:
    """Return a copy of a cache with other arrays, of a batch without padding."""
    made = copy.copy(cache)
    made.cache, made.left_padding, made.lengths = list(arrays), None, None
    return made


def _by_count(part: _Part, counts: Sequence[int]) -> list[_Part]:
    """Split a part by the number of new tokens, which ``counts`` has for each sequence."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, index in enumerate(part.sequences):
        places[counts[index]].append(place)
    return [part.keeping(own, count) for count, own in places.items()]


def _joined(caches: Sequence[Any]) -> Any:
    """Return one cache of all sequences, in order. Each array is either in all of the caches or in none."""
    if len(caches) == 1:
        return with_arrays(caches[0], caches[0].cache)
    columns = zip(*(cache.cache for cache in caches), strict=True)
    return with_arrays(caches[0], [None if column[0] is None else mx.concatenate(list(column)) for column in columns])


def _taken(x: Any, places: np.ndarray) -> Any:
    """Return the rows of an array at some places, without a copy if they are consecutive."""
    if x is None:
        return x
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places) and (np.diff(places) == 1).all():
        return x if len(places) == x.shape[0] else x[first : last + 1]
    return x[mx.array(places)]


def _in_order(outputs: Sequence[Any], places: np.ndarray) -> Any:
    """Join the outputs of calls ``[k, n, ...]`` to one of all tokens ``[T, 1, ...]``, in the order of the pack."""
    order = np.argsort(places)
    columns = [[leaf for _, leaf in tree_flatten(output)] for output in outputs]
    names = [name for name, _ in tree_flatten(outputs[0])]
    joined = []
    for leaves in zip(*columns, strict=True):
        rows = [leaf.reshape(-1, 1, *leaf.shape[2:]) for leaf in leaves]
        joined.append(_taken(rows[0] if len(rows) == 1 else mx.concatenate(rows), order))
    return joined[0] if names == [""] else tree_unflatten(list(zip(names, joined, strict=True)))
