"""Penalties: windows of rows' last tokens, and the logits with repetition, presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .params import SamplingParams

ALL = 1 << 30  # context size that stands for all tokens
ROOM = 256  # windows of all tokens have multiples of this many places, so that arrays rarely change shape
NONE = -1  # a place without a token
KINDS = ("repetition", "presence", "frequency")


class _Kind(NamedTuple):
    """A penalty of all rows; the arrays are ``[B, 1]``.

    Attributes:
        size: how strong it is, float32; neutral in rows without it.
        first: the place in the window from which on tokens count, int32.
    """

    size: mx.array
    first: mx.array

    def of(self, rows: mx.array) -> _Kind:
        """Return the penalty of some rows."""
        return _Kind(self.size[rows], self.first[rows])


class Penalties:
    """The last tokens of a batch's rows, ``[B, W]`` on the device with the latest one at the end, and their penalties.
    There are no arrays while no row has a penalty."""

    def __init__(self) -> None:
        self.rows: list[SamplingParams] = []
        self._lengths: list[int] = []  # tokens of each row, without the steps since the arrays were made
        self._num_steps = 0  # since then
        self._num_left = 0  # steps until a window of all tokens is full
        self._windows: mx.array | None = None
        self._kinds: dict[str, _Kind] = {}  # those that some row has
        self._ahead: tuple[mx.array, int] | None = None  # tokens of the last :meth:`step_ahead`, and most of a row

    @property
    def are_on(self) -> bool:
        """Whether any row has a penalty."""
        return self._windows is not None

    @property
    def capacity(self) -> int:
        """Tokens that each row's window has places for."""
        return 0 if self._windows is None else int(self._windows.shape[1])

    def add(self, rows: Sequence[tuple[SamplingParams, Sequence[int]]]) -> None:
        """Append rows: their parameters, and the tokens they have seen."""
        self._arrange(list(range(len(self.rows))), rows)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all rows but these."""
        self._arrange(indices, ())

    def _arrange(
        self, indices: Sequence[int], joining: Sequence[tuple[SamplingParams, Sequence[int]]], least: int = 1
    ) -> None:
        """Make the arrays of rows that stay and join, with room for ``least`` more tokens."""
        old = None if self._windows is None else self._windows[mx.array(list(indices), mx.int32)]
        self.rows = [*(self.rows[index] for index in indices), *(params for params, _ in joining)]
        self._lengths = [self._lengths[index] + self._num_steps for index in indices]
        self._lengths += [len(tokens) for _, tokens in joining]
        self._num_steps, self._num_left = 0, ALL
        self._windows, self._kinds = None, {}
        if not any(row.has_penalties for row in self.rows):
            return
        contexts = [_contexts(row) for row in self.rows]
        width = max((size for each in contexts for size in each if size < ALL), default=1)
        endless = [n + least for n, each in zip(self._lengths, contexts, strict=True) if ALL in each]
        if endless:
            width = max(width, -(-max(endless) // ROOM) * ROOM)
            self._num_left = width - max(endless) + least
        windows = []
        if indices:
            windows.append(mx.full((len(indices), 1), NONE, mx.int32) if old is None else old)
            missing = width - windows[0].shape[1]
            if missing > 0:
                windows = [mx.concatenate([mx.full((len(indices), missing), NONE, mx.int32), windows[0]], axis=1)]
            windows[0] = windows[0][:, -width:]
        if joining:
            own = np.full((len(joining), width), NONE, np.int32)
            for place, (params, tokens) in enumerate(joining):
                if params.has_penalties and (last := list(tokens[-width:])):
                    own[place, -len(last) :] = last
            windows.append(mx.array(own))
        self._windows = mx.concatenate(windows)
        for kind, name in enumerate(KINDS):
            neutral = 1.0 if name == "repetition" else 0.0
            sizes = [getattr(row, f"{name}_penalty") or neutral for row in self.rows]
            if any(getattr(row, f"{name}_penalty") for row in self.rows):
                first = [max(0, width - each[kind]) for each in contexts]
                self._kinds[name] = _Kind(mx.array(sizes)[:, None], mx.array(first, mx.int32)[:, None])

    def step(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Add a token to each row, and return the logits with penalties.

        Args:
            logits: ``[B, vocab]``.
            inputs: the tokens that they follow, ``[B]``.

        Returns:
            ``[B, vocab]`` float32, a new array.
        """
        if self._num_left == 0:
            self._arrange(list(range(len(self.rows))), ())
        assert self._windows is not None
        self._windows = mx.concatenate([self._windows[:, 1:], inputs.astype(mx.int32)[:, None]], axis=1)
        self._num_steps += 1
        self._num_left -= 1
        return _penalised(logits, self._windows, self._kinds)

    def step_ahead(self, logits: mx.array, inputs: mx.array, rows: Sequence[int]) -> mx.array:
        """Add several tokens to each row, and return the logits with penalties. Call :meth:`note_accepted` with the
        number of tokens that each row keeps.

        Args:
            logits: ``[T, vocab]``.
            inputs: the tokens that they follow, ``[T]``.
            rows: the row of each of the logits, ascending; each row comes at least once.

        Returns:
            ``[T, vocab]`` float32, a new array.
        """
        of = np.array(rows)
        starts = np.searchsorted(of, np.arange(len(self.rows)))
        ahead = np.arange(len(of)) - starts[of]
        most = int(ahead.max()) + 1
        if self._num_left < most:
            self._arrange(list(range(len(self.rows))), (), most)
        assert self._windows is not None
        width = self._windows.shape[1]
        # The windows, followed by all inputs of the row (and other rows' where it has fewer, which nobody reads).
        at = np.minimum(starts[:, None] + np.arange(most), len(of) - 1)
        tokens = mx.concatenate([self._windows, inputs.astype(mx.int32)[mx.array(at)]], axis=1)
        self._ahead = tokens, most
        own = mx.array(of)
        windows = mx.take_along_axis(tokens[own], mx.array(ahead[:, None] + 1 + np.arange(width)), axis=1)
        return _penalised(logits, windows, {name: kind.of(own) for name, kind in self._kinds.items()})

    def note_accepted(self, counts: Sequence[int]) -> None:
        """Keep the first token of the last :meth:`step_ahead` and ``counts`` more of each row."""
        if self._ahead is None:
            return
        (tokens, most), self._ahead = self._ahead, None
        at = np.array(counts)[:, None] + 1 + np.arange(tokens.shape[1] - most)
        self._windows = mx.take_along_axis(tokens, mx.array(at), axis=1)
        self._lengths = [length + 1 + count for length, count in zip(self._lengths, counts, strict=True)]
        self._num_left -= 1 + max(counts)


def _penalised(logits: mx.array, windows: mx.array, kinds: dict[str, _Kind]) -> mx.array:
    """Return logits ``[T, vocab]`` in float32 with the penalties of the tokens in windows ``[T, W]``."""
    x = logits.astype(mx.float32)
    places = mx.arange(windows.shape[1])
    latest = windows[:, -1:]
    for name, (size, first) in kinds.items():
        counts = (windows >= 0) & (places >= first)
        tokens = mx.where(counts, windows, latest)  # which always counts, so that its logit is written again
        if name == "frequency":
            rows = mx.arange(x.shape[0])[:, None]
            x = x.at[rows, tokens].subtract(mx.where(counts, size, 0))
            continue
        picked = mx.take_along_axis(x, tokens, axis=1)
        changed = mx.where(picked > 0, picked / size, picked * size) if name == "repetition" else picked - size
        x = mx.put_along_axis(x, tokens, changed, axis=1)
    return x


def _contexts(params: SamplingParams) -> tuple[int, int, int]:
    """Return the number of last tokens that each penalty counts; 1 if it is off."""
    first, second, third = (
        (getattr(params, f"{name}_context_size") or ALL) if getattr(params, f"{name}_penalty") else 1 for name in KINDS
    )
    return first, second, third
