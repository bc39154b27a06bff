"""PackedStates: the states of a pack's sequences in one layer (SSM, convolution, linear attention)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from .batch import NotPackableError


class _Part(NamedTuple):
    """Sequences whose states are side by side.

    Attributes:
        sequences: their indices, the one with the most new tokens first.
        cache: the layer's cache with these sequences as a batch.
    """

    sequences: list[int]
    cache: Any


class PackedStates:
    """States of a pack's sequences in one layer. The layer cannot take the tokens of one sequence as rows, because each
    token changes the state for the next: :meth:`run` calls it with the sequences side by side.

    The first call has as many tokens as all sequences have, the next one the following tokens of all but the shortest,
    and so on. So nothing is padded, and the calls together are as long as the longest sequence. Sequences without a
    state are computed apart from those with one, because some layers treat a first token differently.

    Args:
        parts: groups of sequences that contain each sequence once.
        counts: new tokens of each sequence.
        records: whether calls are recorded, so that :meth:`batch` can go back to an earlier token.
    """

    def __init__(self, parts: Sequence[_Part], counts: Sequence[int], *, records: bool = False) -> None:
        self._before, self._parts = list(parts), list(parts)
        self._counts = list(counts)
        self._begins = np.cumsum([0, *counts]).tolist()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] | None = [] if records else None

    @classmethod
    def of(cls, caches: Sequence[Any], counts: Sequence[int]) -> PackedStates:
        """Return the states of sequences that have a cache each. The caches are not changed."""
        order = sorted(range(len(caches)), key=lambda index: -counts[index])
        parts = []
        for is_empty in (False, True):
            indices = [index for index in order if caches[index].empty() == is_empty]
            if indices:
                parts.append(_Part(indices, _joined([caches[index] for index in indices])))
        return cls(parts, counts)

    @classmethod
    def over(cls, batch: Any, counts: Sequence[int]) -> PackedStates:
        """Return the states of a decode batch's rows, to verify drafts. The batch's cache is not changed."""
        everyone = _Part(list(range(len(counts))), with_arrays(batch, batch.cache))
        return cls([_selected(everyone, set(everyone.sequences), counts)], counts, records=True)

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
        outputs: list[Any] = []
        places: list[np.ndarray] = []
        for index, part in enumerate(self._parts):
            found, cache = self._scan(part, self._counts, call, args, kwargs)
            self._parts[index] = part._replace(cache=cache)
            outputs += [output for output, _ in found]
            places += [place for _, place in found]
        return _in_order(outputs, np.concatenate(places))

    def __getitem__(self, index: int) -> Any:
        raise NotPackableError("a layer reads its state directly")

    def __setitem__(self, index: int, value: Any) -> None:
        raise NotPackableError("a layer writes its state directly")

    # Afterwards -----------------------------------------------------------------------------------------------

    def of_each(self) -> list[list[Any]]:
        """Return the arrays of each sequence's state after its tokens, as copies: views would keep the whole batch."""
        found: list[list[Any]] = [[] for _ in self._counts]
        for sequences, cache in self._parts:
            for place, index in enumerate(sequences):
                found[index] = [None if x is None else mx.contiguous(x[place : place + 1]) for x in cache.cache]
        return found

    def batch(self, counts: Sequence[int]) -> list[Any]:
        """Return the arrays of the batch's states after the first ``counts`` new tokens of each sequence. For sequences
        that have more new tokens, the recorded calls are repeated."""
        short = {index for index, count in enumerate(counts) if count < self._counts[index]}
        parts = [_selected(part, set(part.sequences) - short, self._counts) for part in self._parts]
        again = [_selected(part, short & set(part.sequences), counts) for part in self._before]
        for call, args, kwargs in self._calls or ():
            for index, part in enumerate(again):
                if part.sequences:
                    again[index] = part._replace(cache=self._scan(part, counts, call, args, kwargs)[1])
        parts = [part for part in (*parts, *again) if part.sequences]
        order = [index for part in parts for index in part.sequences]
        arrays = _joined([part.cache for part in parts]).cache
        return arrays if order == sorted(order) else [_taken(x, np.argsort(order)) for x in arrays]

    # --------------------------------------------------------------------------------------------------------

    def _scan(
        self, part: _Part, counts: Sequence[int], call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[tuple[Any, np.ndarray]], Any]:
        """Call the module for the sequences of a part. Return each call's output with the places of its tokens in the
        pack, and the cache after all of them."""
        found, finished = [], []
        left, cache, done = list(part.sequences), part.cache, 0
        while left:
            end = counts[left[-1]]
            begins = np.array([self._begins[index] for index in left])
            places = begins[:, None] + np.arange(done, end)
            own = with_arrays(cache, cache.cache)
            output = call(*(self._side_by_side(x, places, own) for x in args),
                          **{name: self._side_by_side(x, places, own) for name, x in kwargs.items()})  # fmt: skip
            found.append((output, places.reshape(-1)))
            going_on = sum(counts[index] > end for index in left)
            finished.append(own if not going_on else with_arrays(own, [_cut(x, going_on, None) for x in own.cache]))
            cache = with_arrays(own, [_cut(x, 0, going_on) for x in own.cache])
            left, done = left[:going_on], end
        return found, _joined(finished[::-1])

    def _side_by_side(self, value: Any, places: np.ndarray, cache: Any) -> Any:
        """Return an argument for a call with the tokens at these places ``[k, n]`` of the pack."""
        if value is self:
            return cache
        num_tokens = self._begins[-1]
        if not isinstance(value, mx.array) or value.shape[:1] != (num_tokens,):
            return value
        if value.ndim == 1:  # positions: a call gets that of each sequence's first token
            return _taken(value, places[:, 0])
        return _taken(value, places.reshape(-1)).reshape(*places.shape, *value.shape[2:])


def with_arrays(cache: Any, arrays: Sequence[Any]) -> Any:
    """Return a copy of a cache with other arrays, of a batch without padding."""
    made = copy.copy(cache)
    made.cache, made.left_padding, made.lengths = list(arrays), None, None
    return made


def _joined(caches: Sequence[Any]) -> Any:
    """Return one cache of all sequences, in order. Each array is either in all of the caches or in none."""
    if len(caches) == 1:
        return with_arrays(caches[0], caches[0].cache)
    columns = zip(*(cache.cache for cache in caches), strict=True)
    return with_arrays(caches[0], [None if column[0] is None else mx.concatenate(list(column)) for column in columns])


def _selected(part: _Part, sequences: set[int], counts: Sequence[int]) -> _Part:
    """Return a part with only these sequences, the one with the most new tokens first."""
    places = [place for place, index in enumerate(part.sequences) if index in sequences]
    places.sort(key=lambda place: -counts[part.sequences[place]])
    if places == list(range(len(part.sequences))):
        return part
    arrays = [_taken(x, np.array(places, np.int32)) for x in part.cache.cache] if places else part.cache.cache
    return _Part([part.sequences[place] for place in places], with_arrays(part.cache, arrays))


def _taken(x: Any, places: np.ndarray) -> Any:
    """Return the rows of an array at some places, without a copy if they are consecutive."""
    if x is None or len(places) == 0:
        return x
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places) and (np.diff(places) == 1).all():
        return x if len(places) == x.shape[0] else x[first : last + 1]
    return x[mx.array(places)]


def _cut(x: Any, begin: int, end: int | None) -> Any:
    return None if x is None else x[begin:end]


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
