"""Penalties: histories of rows' tokens, and the logits with repetition, presence and frequency penalties."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .params import SamplingParams

ALL = 1 << 30  # context size that stands for the whole history
ROOM = 256  # capacities are multiples of this, so that arrays rarely change shape


class Seen(NamedTuple):
    """A row with penalties.

    Attributes:
        params: its parameters.
        length: entries of its history, without the steps since the arrays were made.
    """

    params: SamplingParams
    length: int


class Histories(NamedTuple):
    """Token histories of R rows; entries after a row's length repeat another entry.

    Attributes:
        tokens: token ids, one entry per token, ``[R, L]`` uint32.
        counts: occurrences of the entry's token in the row's three windows (of the repetition, presence and frequency
            penalty), then 1 for the last entry of each token, else 0, ``[4, R, L]`` int32.
        spans: length of the row, then sizes of its three windows, ``[R, 4]`` int32.
        penalties: repetition, presence and frequency, ``[R, 3]`` float32.
    """

    tokens: mx.array
    counts: mx.array
    spans: mx.array
    penalties: mx.array


class Penalties:
    """Token histories of some rows, on the device. They are lists of tokens rather than counts over the vocabulary, so
    that a step changes only as many logits as a row has tokens in its history or its longest window.

    Every entry stores how often its token occurs in each of the row's three windows, so a token may have several
    entries; unused entries repeat another one (:class:`Histories`).
    """

    def __init__(self) -> None:
        self.rows: list[Seen] = []
        self._seen: Histories | None = None
        self._num_steps = 0  # since the arrays were made
        self._num_left = 0  # steps that they still have room for
        self._has_windows = False
        self._ahead: list[Histories] = []  # histories after each token of the last :meth:`step_ahead`

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def capacity(self) -> int:
        """Entries that each row has room for."""
        return 0 if self._seen is None else int(self._seen.tokens.shape[1])

    def add(self, rows: Sequence[tuple[SamplingParams, Sequence[int]]]) -> None:
        """Append rows: their parameters, and the tokens they have seen."""
        if rows:
            self._arrange(list(range(len(self.rows))), rows)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(indices) < len(self.rows):
            self._arrange(indices, ())

    def _arrange(
        self, indices: Sequence[int], joining: Sequence[tuple[SamplingParams, Sequence[int]]], least: int = 1
    ) -> None:
        """Make the arrays of rows that stay and join, with the tokens that still count and room for ``least`` more."""
        lengths = [self.rows[index].length + self._num_steps for index in indices]
        stay = [self.rows[index].params for index in indices]
        rows = [Seen(params, min(n, max(contexts_of(params)))) for params, n in zip(stay, lengths, strict=True)]
        rows += [Seen(params, min(len(tokens), max(contexts_of(params)))) for params, tokens in joining]
        longest = max((row.length for row in rows), default=0)
        capacity = -(-(longest + least) // ROOM) * ROOM
        histories, counts = [], []
        if stay:
            assert self._seen is not None
            columns = np.arange(capacity)[None] + np.array([[n - rows[i].length] for i, n in enumerate(lengths)])
            ends = np.array([[n] for n in lengths])
            at = mx.array(np.minimum(columns, np.maximum(ends - 1, 0)).astype(np.int32))
            is_entry = mx.array((columns < ends).astype(np.int32))
            which = mx.array(list(indices))
            histories.append(mx.take_along_axis(self._seen.tokens[which], at, axis=1))
            kept = mx.take_along_axis(self._seen.counts[:, which], mx.broadcast_to(at, (4, *at.shape)), axis=2)
            counts.append(mx.where(_last(), kept * is_entry, kept))
        if joining:
            own_history, own_counts = (
                np.zeros((len(joining), capacity), np.uint32),
                np.zeros((4, len(joining), capacity), np.int32),
            )
            for place, (params, tokens) in enumerate(joining):
                _enter(own_history[place], own_counts[:, place], params, tokens)
            histories.append(mx.array(own_history))
            counts.append(mx.array(own_counts))
        self.rows = rows
        self._num_steps, self._num_left = 0, capacity - longest
        self._has_windows = any(min(contexts_of(row.params)) < ALL for row in rows)
        if not rows:
            self._seen = None
            return
        self._seen = Histories(
            mx.concatenate(histories),
            mx.concatenate(counts, axis=1),
            mx.array([[row.length, *contexts_of(row.params)] for row in rows], mx.int32),
            mx.array([_numbers(row.params) for row in rows], mx.float32),
        )

    def step(self, logits: mx.array, inputs: mx.array, rows: Sequence[int]) -> mx.array:
        """Add a token to each row's history, and return the logits with penalties.

        Args:
            logits: ``[T, vocab]``.
            inputs: the tokens that they follow, ``[T]``.
            rows: index in ``logits`` of each row, in order.

        Returns:
            ``[T, vocab]`` float32, a new array.
        """
        if self._num_left == 0:
            self._arrange(list(range(len(self.rows))), ())
        assert self._seen is not None
        indices = None if len(rows) == logits.shape[0] else mx.array(list(rows))
        self._see(inputs if indices is None else inputs[indices])
        changed = self._apply(logits.astype(mx.float32), indices)
        self._num_steps += 1
        self._num_left -= 1
        return changed

    def step_ahead(self, logits: mx.array, inputs: mx.array, places: Sequence[Sequence[int]]) -> mx.array:
        """Add several tokens to each row's history, and return the logits with penalties. Call
        :meth:`note_accepted` with the number of tokens that each row keeps.

        Args:
            logits: ``[T, vocab]``.
            inputs: the tokens that they follow, ``[T]``.
            places: indices in ``logits`` of each row's tokens, in order; at least one per row.

        Returns:
            ``[T, vocab]`` float32, a new array.
        """
        depth = max(map(len, places))
        if self._num_left < depth:
            self._arrange(list(range(len(self.rows))), (), depth)
        self._ahead = []
        order = list(range(logits.shape[0]))
        parts = [logits.astype(mx.float32)]
        for ahead in range(depth):
            now = [own[min(ahead, len(own) - 1)] for own in places]  # results beyond a row's last token are not used
            for index, own in enumerate(places):
                if ahead < len(own):
                    order[own[ahead]] = logits.shape[0] + ahead * len(places) + index
            at = mx.array(now)
            parts.append(self.step(logits[at], inputs[at], range(len(now))))
            assert self._seen is not None
            self._ahead.append(self._seen)
        return mx.concatenate(parts)[mx.array(order)]

    def note_accepted(self, counts: Sequence[int]) -> None:
        """Keep the first token of the last :meth:`step_ahead` and ``counts`` more of each row."""
        states, self._ahead = self._ahead, []
        if not states:
            return
        depth = len(states)
        self.rows = [Seen(row.params, row.length + 1 + n - depth) for row, n in zip(self.rows, counts, strict=True)]
        if len(set(counts)) == 1:
            self._seen = states[counts[0]]
            return
        at, each = mx.array(list(counts)), mx.arange(len(counts))
        self._seen = Histories(
            mx.stack([state.tokens for state in states])[at, each],
            mx.stack([state.counts for state in states], axis=1)[:, at, each],
            mx.stack([state.spans for state in states])[at, each],
            states[0].penalties,
        )

    def _see(self, tokens: mx.array) -> None:
        """Add a token ``[R]`` to each row's history."""
        assert self._seen is not None
        history, counts, spans, penalties = self._seen
        token, slot = tokens.astype(mx.uint32)[:, None], spans[:, :1]
        is_same = history == token
        count = mx.where(_last(), 0, mx.where(is_same, counts, 0).max(axis=-1, keepdims=True) + 1)
        counts = mx.where(is_same, count, counts)
        history = mx.put_along_axis(history, slot, token, axis=1)
        counts = mx.put_along_axis(counts, mx.broadcast_to(slot, count.shape), mx.where(_last(), 1, count), axis=2)
        if self._has_windows:
            contexts = mx.concatenate([spans[:, 1:4], mx.full(slot.shape, ALL, mx.int32)], axis=1)
            first = slot - contexts.T[:, :, None]  # the entry that leaves each window
            gone = mx.take_along_axis(mx.broadcast_to(history, counts.shape), mx.maximum(first, 0), axis=2)
            counts = counts - ((history == gone) & (first >= 0))
        self._seen = Histories(history, counts, spans + _step(), penalties)

    def _apply(self, logits: mx.array, indices: mx.array | None) -> mx.array:
        """Return logits ``[B, vocab]`` float32 with penalties in these rows ``[R]`` (None: all), as a new array."""
        assert self._seen is not None
        tokens = self._seen.tokens
        if indices is None:
            return mx.put_along_axis(
                logits, tokens, self._penalised(mx.take_along_axis(logits, tokens, axis=1)), axis=1
            )
        rows = indices[:, None]
        picked = self._penalised(logits[rows, tokens])
        changed = logits + 0.0  # a copy: assignment would change the argument
        changed[rows, tokens] = picked
        return changed

    def _penalised(self, x: mx.array) -> mx.array:
        """Return the logits of the entries' tokens ``[R, L]`` with penalties."""
        assert self._seen is not None
        repetition, presence, frequency = self._seen.penalties.T[:, :, None]
        repeated, present, count, _ = self._seen.counts  # indexing each with a number would be a gather
        x = mx.where(repeated > 0, mx.where(x > 0, x / repetition, x * repetition), x)
        x = mx.where(present > 0, x - presence, x)
        return x - frequency * count


@functools.cache
def _last() -> mx.array:
    """Return a mask ``[4, 1, 1]`` of the count that is 1 in the last entry of each token."""
    last = mx.array([False, False, False, True])[:, None, None]
    mx.eval(last)
    return last


@functools.cache
def _step() -> mx.array:
    """Return what a token adds to a row's spans."""
    step = mx.array([1, 0, 0, 0], mx.int32)
    mx.eval(step)
    return step


def _numbers(params: SamplingParams) -> list[float]:
    """Return a row's penalties for :class:`Histories`, with neutral values for those that are off."""
    return [params.repetition_penalty or 1.0, params.presence_penalty or 0.0, params.frequency_penalty or 0.0]


def contexts_of(params: SamplingParams) -> tuple[int, int, int]:
    """Return the context size of each penalty, in tokens; one that is off gets the smallest of the others."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    sizes = (params.repetition_context_size, params.presence_context_size, params.frequency_context_size)
    used = [size or ALL for penalty, size in zip(penalties, sizes, strict=True) if penalty]
    least = min(used, default=1)
    first, second, third = ((s or ALL) if p else least for p, s in zip(penalties, sizes, strict=True))
    return first, second, third


def _enter(history: np.ndarray, counts: np.ndarray, params: SamplingParams, tokens: Sequence[int]) -> None:
    """Write a row's entries from the tokens it has seen."""
    contexts = contexts_of(params)
    last = list(tokens[-max(contexts) :])
    if not last:
        return  # entries stay token 0, seen 0 times
    history[:] = last[-1]
    history[: len(last)] = last
    for kind, context in enumerate(contexts):
        counted = Counter(last[-context:])
        of_entry = [counted[token] for token in last]
        counts[kind] = of_entry[-1]
        counts[kind, : len(last)] = of_entry
    counts[3, list({token: entry for entry, token in enumerate(last)}.values())] = 1
