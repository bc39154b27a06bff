"""Which words of each row are left to choose from. Every row has its own parameters, and nothing is sorted.

What sorting would find is found by bisection of a float's bits (:func:`largest_above`): 32 sums over the words, or 16
where the logits are bfloat16, whatever they are.
"""

from __future__ import annotations

import mlx.core as mx

from .row_parameters import RowParameters

_LOG2_E = 1.4426950408889634
_SIGN = 0x80000000
# Bits of a float32 that tell values of these dtypes apart.
_BITS = {mx.bfloat16: 16, mx.float16: 19}


def exponential(x: mx.array) -> mx.array:
    """e to the x. MLX's own takes four times as long as its power on a CPU."""
    return mx.exp(x) if mx.default_device() == mx.Device(mx.gpu) else mx.power(2.0, x * _LOG2_E)


def bits_of(dtype: mx.Dtype) -> int:
    """How many leading bits of a float32 tell values of a dtype apart."""
    return _BITS.get(dtype, 32)


def largest_above(x: mx.array, weights: mx.array | None, target: mx.array, bits: int = 32) -> mx.array:
    """The largest value t of each row of x such that what is not less than t weighs ``target`` or more: with weights of
    1 and a target of k, the k-th largest value.

    Args:
        x: ``[R, n]`` float32.
        weights: ``[R, n]``, none negative, or whether they count at all; None: 1 each.
        target: ``[R, 1]``, positive.
        bits: leading ones that tell the values of x apart.

    Returns:
        ``[R, 1]``; minus infinity where all of it weighs less.
    """
    # Built from its first bit on; as unsigned numbers, keys are in the order of the floats they stand for.
    key = mx.zeros(target.shape, mx.uint32)
    for bit in range(31, 31 - bits, -1):
        candidate = key | mx.array(1 << bit, mx.uint32)
        above = x >= _float_of(candidate)
        weight = (above if weights is None else above * weights).sum(axis=-1, keepdims=True)
        key = mx.where(weight >= target, candidate, key)
    is_least = key <= mx.array(0x007FFFFF, mx.uint32)  # of minus infinity; what is below stands for no number
    return mx.where(is_least, -mx.inf, _float_of(key))


def _float_of(key: mx.array) -> mx.array:
    sign = mx.array(_SIGN, mx.uint32)
    return mx.where(key >= sign, key ^ sign, ~key).view(mx.float32)


def largest(x: mx.array, count: mx.array, bits: int, among: mx.array | None = None) -> mx.array:
    """Which values of each row of x ``[R, n]`` are its ``count`` ``[R, 1]`` largest ``among`` some (``[R, n]``, all if
    None); of equal ones the first. All of them, if there are not so many."""
    least = largest_above(x, among, count, bits)
    above, equal = x > least, x == least
    if among is not None:
        above, equal = above & among, equal & among
    num_missing = count - above.sum(axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= num_missing))


def kept_words(logits: mx.array, rows: RowParameters, drawn: mx.array) -> mx.array | None:
    """Which words are left after top-p, min-p, XTC and top-k, in mlx-lm's order. All are asked of the logits as they
    are, not as the temperature changes them.

    Args:
        logits: ``[R, vocab]``; their probabilities, which XTC and top-p need, are computed in float32.
        rows: their parameters.
        drawn: ``[R, 1]``, uniformly from [0, 1), for XTC.

    Returns:
        ``[R, vocab]``, or None if nothing can be dropped.
    """
    if not rows.drops_words:
        return None
    kept: mx.array | None = None
    bits = bits_of(logits.dtype)
    x = logits.astype(mx.float32)
    top = x.max(axis=-1, keepdims=True)
    probs = exponential(x - top) if rows.top_p is not None or rows.xtc_probability is not None else None
    if rows.top_p is not None:
        assert probs is not None
        kept = x >= largest_above(x, probs, rows.top_p * probs.sum(axis=-1, keepdims=True), bits)
    if rows.log_min_p is not None:
        likely = x >= top + rows.log_min_p
        if rows.min_kept is not None:
            likely = likely | largest(x, rows.min_kept, bits)
        kept = _both(kept, likely)
    if rows.xtc_probability is not None:
        assert probs is not None and rows.xtc_threshold is not None
        if kept is not None:
            probs = probs * kept
        likely = probs > rows.xtc_threshold * probs.sum(axis=-1, keepdims=True)
        left = probs <= mx.where(likely, probs, mx.inf).min(axis=-1, keepdims=True)
        if rows.xtc_special is not None:
            left = left | rows.xtc_special
        kept = _both(kept, left | (drawn > rows.xtc_probability))
    if rows.top_k is not None:
        kept = _both(kept, largest(x, rows.top_k, bits, kept))
    return kept


def _both(first: mx.array | None, second: mx.array) -> mx.array:
    return second if first is None else first & second
