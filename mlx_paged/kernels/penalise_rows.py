"""The penalties of a batch's step, in one launch: appends a token to each row's history, and changes the logits of the
tokens in it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .availability import device_unsupported_reason
from .build import build_kernel
from .check import check_and_warn
from .draw_rows import WIDTH
from .trial import KernelKey


def penalised_step(
    x: np.ndarray,
    tokens: np.ndarray,
    places: np.ndarray,
    history: np.ndarray,
    counts: np.ndarray,
    spans: np.ndarray,
    penalties: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the logits, history, counts and spans after a step: the reference of :func:`penalise_rows`. Counts are
    computed anew from each row's tokens; entries after its length count as the tokens that they repeat."""
    out, history, counts, spans = x.astype(np.float32), history.copy(), counts.copy(), spans.copy()
    for index, place in enumerate(places.tolist()):
        if place < 0:
            continue
        length = int(spans[place, 0])
        history[place, length] = tokens[index]
        spans[place, 0] = length + 1
        row = history[place]
        for kind, window in enumerate(spans[place, 1:4].tolist()):
            seen = row[max(length + 1 - window, 0) : length + 1]
            counts[kind, place] = (row[:, None] == seen[None]).sum(axis=1)
        last = {int(token): entry for entry, token in enumerate(row[: length + 1])}
        counts[3, place] = 0
        counts[3, place, list(last.values())] = 1
        repetition, presence, frequency = (np.float32(each) for each in penalties[place, :3])
        for token, entry in last.items():
            if token >= x.shape[1]:
                continue
            value = out[index, token]
            if counts[0, place, entry] > 0:
                value = value / repetition if value > 0 else value * repetition
            if counts[1, place, entry] > 0:
                value = value - presence
            out[index, token] = value - frequency * np.float32(counts[2, place, entry])
    return out, history, counts, spans


BODY = "penalise_rows"
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
GROUPS = 8  # simdgroups of a thread group
CHUNK = 8192  # logits of a row that a thread group takes


class Histories(NamedTuple):
    """Token histories of R rows; entries after a row's length repeat another entry.

    Attributes:
        tokens: token ids, one entry per token, ``[R, L]`` uint32.
        counts: occurrences of the entry's token in the row's three windows (of the repetition, presence and frequency
            penalty), then 1 for the last entry of each token, else 0, ``[4, R, L]`` int32.
        spans: length of the row, then sizes of its three windows, ``[R, 8]`` int32.
        penalties: repetition, presence and frequency, ``[R, 8]`` float32.
    """

    tokens: mx.array
    counts: mx.array
    spans: mx.array
    penalties: mx.array


def penalise_rows(x: mx.array, tokens: mx.array, places: mx.array, seen: Histories) -> tuple[mx.array, Histories]:
    """Apply penalties to a step's logits, and append its tokens to the histories.

    Args:
        x: logits ``[T, vocab]`` for which :func:`is_supported` is true.
        tokens: the token before each row of logits, ``[T]`` uint32.
        places: the row of the histories for each row of logits, or -1, ``[T]`` int32; no row twice.
        seen: the histories; each row has room for one more entry.

    Returns:
        Logits ``[T, vocab]`` float32, and the histories with the tokens.
    """
    key = kernel_key(x.dtype)
    count, vocab = x.shape
    history, counts, spans, penalties = seen
    out, history, counts, spans = build_kernel(key.body, key.constants)(
        inputs=[x, tokens, places, history, counts, spans, penalties],
        grid=(count * -(-vocab // CHUNK) * 32 * GROUPS, 1, 1),
        threadgroup=(32 * GROUPS, 1, 1),
        output_shapes=[x.shape, history.shape, counts.shape, spans.shape],
        output_dtypes=[mx.float32, mx.uint32, mx.int32, mx.int32],
    )
    return out, Histories(history, counts, spans, penalties)


def kernel_key(dtype: mx.Dtype) -> KernelKey:
    """Return the key of the kernel for logits of a dtype."""
    return KernelKey(BODY, (("T", dtype), ("O", mx.float32), ("S", mx.uint32), ("SG", GROUPS), ("CW", CHUNK)))


def is_supported(x: mx.array) -> bool:
    """Return whether the kernel supports such logits ``[T, vocab]``. A dtype's first call runs the self-check."""
    return x.dtype in DTYPES and x.size > 0 and device_unsupported_reason() is None and passes_check(x.dtype)


@lru_cache(maxsize=8)
def passes_check(dtype: mx.Dtype) -> bool:
    """Return whether the kernel passes its self-check; warns once if it fails or does not compile."""
    return check_and_warn(BODY, dtype, lambda: _difference(dtype))


def _difference(dtype: mx.Dtype) -> float:
    """Return the largest difference from the reference, relative to the largest logit; 1 if histories differ. Launches
    few rows, then more: on Metal these are two texts (kernels/trial.py)."""
    rng, worst = np.random.default_rng(31), 0.0
    for count in (2, 24):
        given = example(rng, count, vocab=3001, room=80)
        x, tokens, places, seen = given
        logits = mx.array(x).astype(dtype)
        found, after = penalise_rows(
            logits, mx.array(tokens), mx.array(places), Histories(*(mx.array(each) for each in seen))
        )
        expected, *known = penalised_step(np.array(logits.astype(mx.float32)), tokens, places, *seen)
        if any((np.array(a) != b).any() for a, b in zip(after[:3], known, strict=True)):
            return 1.0
        worst = max(worst, float(np.abs(np.array(found) - expected).max() / np.abs(expected).max()))
    return worst


def example(
    rng: np.random.Generator, count: int, vocab: int, room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
    """Return random logits, tokens, places and histories; half of the rows have a history, made by the reference."""
    num_rows = max(count // 2, 1)
    places = np.full(count, -1, np.int32)
    places[rng.permutation(count)[:num_rows]] = rng.permutation(num_rows)
    windows = rng.choice([1, 2, 7, 20, 1 << 30], (num_rows, 3))
    spans = np.concatenate([np.zeros((num_rows, 1)), windows, np.zeros((num_rows, WIDTH - 4))], axis=1).astype(np.int32)
    penalties = np.concatenate([rng.uniform(0.5, 1.5, (num_rows, 3)), np.zeros((num_rows, WIDTH - 3))], axis=1)
    history, counts = np.zeros((num_rows, room), np.uint32), np.zeros((4, num_rows, room), np.int32)
    known: tuple[np.ndarray, ...] = (history, counts, spans, penalties.astype(np.float32))
    # Few distinct tokens, so that they repeat; one is in the last chunk.
    some = np.append(rng.integers(0, vocab, 9), vocab - 1).astype(np.uint32)
    # Histories get several lengths: in each step, a third of them gains no token.
    for step in range(int(rng.integers(room // 2, room))):
        taking = np.arange(num_rows, dtype=np.int32)
        taking[step % 3 :: 3] = -1
        _, *state = penalised_step(np.zeros((num_rows, vocab), np.float32), rng.choice(some, num_rows), taking, *known)
        known = (*state, known[3])
    x = rng.normal(size=(count, vocab)).astype(np.float32) * 4
    return x, rng.choice(some, count), places, known
