"""Drawing a token of each row from numbers in [0, 1), three a row. Those of a row with a seed depend on nothing but the
seed and the token's position in the answer."""

from __future__ import annotations

import mlx.core as mx

from .filters import exponential
from .row_parameters import RowParameters

_BLOCK = 128  # words; about the root of a vocabulary, and a divisor of most

_uniforms = mx.vmap(lambda key: mx.random.uniform(shape=(3,), key=key))


def uniforms(rows: RowParameters, positions: mx.array) -> mx.array:
    """Numbers for the tokens at ``positions`` ``[R]`` (uint32) of the rows' answers, ``[R, 3]``."""
    if rows.keys is None:
        return mx.random.uniform(shape=(positions.shape[0], 3))
    # Seeds first, or neighbouring ones would share keys at other positions.
    mixed = _uniforms(rows.keys)[:, :2].view(mx.uint32)
    own = _uniforms(mx.stack([mixed[:, 0], mixed[:, 1] ^ positions], axis=-1))
    if rows.seeded is None:
        return own
    return mx.where(rows.seeded, own, mx.random.uniform(shape=own.shape))


def draw(
    logits: mx.array, kept: mx.array | None, temperature: mx.array, numbers: mx.array, *, keeps_top: bool
) -> mx.array:
    """A word of each row with probabilities ``softmax(logits / temperature)`` among those kept. First a block of words
    is drawn and then one of it: sums stay short, so that float32 loses nothing of words that are unlikely.

    Args:
        logits: ``[R, vocab]``.
        kept: which words may be drawn, ``[R, vocab]``; None: all.
        temperature: ``[R, 1]``.
        numbers: ``[R, 2]`` or more in [0, 1).
        keeps_top: the largest logit of every row is kept.

    Returns:
        ``[R]``, uint32.
    """
    num_rows, vocab = logits.shape
    x = logits.astype(mx.float32)
    top = (x if keeps_top or kept is None else mx.where(kept, x, -mx.inf)).max(axis=-1, keepdims=True)
    weights = exponential(mx.minimum(x - top, 0) / temperature)
    if kept is not None:
        weights = weights * kept
    if vocab % _BLOCK:
        weights = mx.pad(weights, [(0, 0), (0, -vocab % _BLOCK)])
    blocks = weights.reshape(num_rows, -1, _BLOCK)
    block = _place(blocks.sum(axis=-1), numbers[:, :1])
    word = _place(mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0], numbers[:, 1:2])
    return (block * _BLOCK + word)[:, 0].astype(mx.uint32)


def _place(weights: mx.array, numbers: mx.array) -> mx.array:
    """Which of the weights ``[R, n]`` the numbers ``[R, 1]`` fall on, ``[R, 1]``; never on a weight of 0."""
    ends = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0)  # a parallel sum need not ascend to the last bit
    return mx.argmax((ends > numbers * ends.max(axis=-1, keepdims=True)).astype(mx.int32), axis=-1, keepdims=True)
