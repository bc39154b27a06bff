"""PackedStates: layers with a state run sequences of a pack side by side, and their states can be rewound."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_paged.cache.batch import NotPackableError
from mlx_paged.cache.packed_states import PackedStates

DIM = 3
COUNTS = ((1,), (4,), (3, 3, 3), (5, 1, 3, 1, 4), (1, 2, 9, 2))


def recur(x: mx.array, mask: Any, cache: Any, calls: list[tuple[int, ...]] | None = None) -> tuple[Any, Any]:
    """Run a layer whose state is a sum that halves at each token, and the last token; a sequence's first counts
    twice."""
    if calls is not None:
        calls.append(tuple(x.shape[:2]))
    state = 2 * x[:, 0] if cache[0] is None else cache[0] * 0.5 + x[:, 0]
    sums = [state]
    for token in range(1, x.shape[1]):
        state = state * 0.5 + x[:, token]
        sums.append(state)
    cache[0], cache[1] = state, x[:, -1:]
    y = mx.stack(sums, axis=1)
    return y, y + x


def caches_of(count: int, started: set[int]) -> list[ArraysCache]:
    caches = [ArraysCache(2) for _ in range(count)]
    for index in started:
        recur(mx.full((1, 2, DIM), 1.0 + index), None, caches[index])
    return caches


def tokens_of(counts: tuple[int, ...]) -> list[mx.array]:
    mx.random.seed(sum(counts))
    return [mx.random.normal((1, count, DIM)) for count in counts]


def alone(counts: tuple[int, ...], started: set[int], kept: list[int] | None = None) -> tuple[np.ndarray, list[Any]]:
    """Return the outputs of each sequence alone, ``[T, DIM]``, and its states after ``kept`` tokens (default: all)."""
    caches = caches_of(len(counts), started)
    outputs = [
        recur(x[:, : (kept or counts)[i]], None, cache)[0]
        for i, (x, cache) in enumerate(zip(tokens_of(counts), caches, strict=True))
    ]
    return np.array(mx.concatenate(outputs, axis=1)[0]), [cache.cache for cache in caches]


def packed(counts: tuple[int, ...]) -> mx.array:
    return mx.concatenate(tokens_of(counts), axis=1)[0][:, None]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("started", ((), (0,), (0, 1, 2, 3, 4)))
def test_pack_gives_each_sequence_its_own_result(counts: tuple[int, ...], started: tuple[int, ...]) -> None:
    known = {index for index in started if index < len(counts)}
    expected, states = alone(counts, known)
    caches = caches_of(len(counts), known)
    before = [list(cache.cache) for cache in caches]
    pack = PackedStates.of(caches, counts)
    first, second = pack.run(recur, packed(counts), None, pack)
    np.testing.assert_allclose(np.array(first[:, 0]), expected, rtol=1e-6)
    np.testing.assert_allclose(np.array(second), np.array(first + packed(counts)), rtol=1e-6)
    for got, wanted in zip(pack.of_each(), states, strict=True):
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-6)
    for cache, arrays in zip(caches, before, strict=True):
        assert all(a is b for a, b in zip(cache.cache, arrays, strict=True)), "the sequences' own caches are unchanged"


def test_sequences_share_calls_without_padding() -> None:
    counts, calls = (5, 1, 3, 1, 5), []
    pack = PackedStates.of(caches_of(5, set(range(5))), counts)
    pack.run(lambda x, mask, cache: recur(x, mask, cache, calls), packed(counts), None, pack)
    assert sorted(calls) == [(1, 3), (2, 1), (2, 5)]


@pytest.mark.parametrize("counts", COUNTS)
def test_states_rewind_to_the_kept_tokens(counts: tuple[int, ...]) -> None:
    started = set(range(len(counts)))
    batch = ArraysCache.merge(caches_of(len(counts), started))
    before = list(batch.cache)
    pack = PackedStates.over(batch, counts)
    pack.run(recur, packed(counts), None, pack)
    for kept in ([*counts], [1] * len(counts), [max(1, count - 1 - i % 2) for i, count in enumerate(counts)]):
        _, states = alone(counts, started, kept)
        for got, wanted in zip(pack.batch(kept), zip(*states, strict=True), strict=True):
            np.testing.assert_allclose(np.array(got), np.array(mx.concatenate(wanted)), rtol=1e-6)
    assert all(a is b for a, b in zip(batch.cache, before, strict=True)), "the batch's cache is unchanged"


def test_offsets_are_those_of_the_first_tokens_of_each_call() -> None:
    counts, seen = (2, 3), []

    def note(x: mx.array, cache: Any, offset: mx.array) -> mx.array:
        seen.append(offset.tolist())
        return recur(x, None, cache)[0]

    pack = PackedStates.of(caches_of(2, {0, 1}), counts)
    pack.run(note, packed(counts), pack, offset=mx.array([7, 8, 4, 5, 6]))
    assert seen == [[7], [4]]


def test_code_without_support_for_packs_raises() -> None:
    pack = PackedStates.of(caches_of(2, set()), (1, 2))
    assert pack.make_mask(1) is None
    with pytest.raises(NotPackableError, match="reads its state"):
        recur(packed((1, 2)), None, pack)
    with pytest.raises(NotPackableError, match="writes its state"):
        pack[0] = mx.zeros(1)
