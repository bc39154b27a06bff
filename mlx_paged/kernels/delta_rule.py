"""The gated delta rule over chunks of tokens, as matrix products instead of a loop over tokens.

A token writes to the state the difference between its value and what the state returns for its key. Given the state
``S`` before a chunk, the chunk's differences are the solution of a triangular system of the chunk's size; with them,
outputs and the state after the chunk are sums over the chunk (Yang et al., arXiv:2412.06464).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

CPU_CHUNK, GPU_CHUNK = 16, 64  # tokens (docs/adr/0069)
LEAST_LOG_DECAY = -30.0  # per token: e^-30 erases a float32, and its sums stay exact enough

DeltaRule = Callable[..., tuple[mx.array, mx.array]]


def _on_gpu() -> bool:
    return mx.default_device() == mx.Device(mx.gpu)


def chunk_size() -> int:
    """Return the tokens of a chunk on the default device."""
    return GPU_CHUNK if _on_gpu() else CPU_CHUNK


def is_supported(q: mx.array, v: mx.array, g: mx.array) -> bool:
    """Return whether :func:`chunked` may compute these arguments, not mlx-lm's loop: some tokens, one decay per head,
    and on a GPU 16 bits, as MLX's products of float32 may be TF32 there."""
    dtypes = (mx.float16, mx.bfloat16) if _on_gpu() else (mx.float32, mx.float16, mx.bfloat16)
    is_usual = g.ndim == 3 and q.dtype in dtypes and q.shape[2] > 0 and v.shape[2] % q.shape[2] == 0
    return is_usual and q.shape[1] >= CPU_CHUNK


def chunked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the outputs ``[B, T, Hv, Dv]`` and the state after the last token.

    Args:
        q, k: queries and keys, ``[B, T, Hk, Dk]``.
        v: values, ``[B, T, Hv, Dv]``.
        g, beta: decay, in (0, 1], and rate of each token, ``[B, T, Hv]``.
        state: before the first token, ``[B, Hv, Dv, Dk]``; None is zeros.
        mask: tokens that count, ``[B, T]``; others leave the state unchanged, and their outputs are meaningless.
    """
    batch, tokens, key_heads, key_size = k.shape
    heads, value_size, dtype = *v.shape[2:], q.dtype
    ratio, size = heads // key_heads, min(chunk_size(), -(-tokens // CPU_CHUNK) * CPU_CHUNK)
    decay = mx.maximum(mx.log(g.astype(mx.float32)), LEAST_LOG_DECAY)
    if mask is not None:  # a token without key, value and decay changes nothing
        k, v = (mx.where(mask[..., None, None], each, 0) for each in (k, v))
        decay, beta = (mx.where(mask[..., None], each, 0) for each in (decay, beta))

    def split(x: mx.array, per_head: int) -> mx.array:
        """Reshape ``[B, T, H, ...]`` to ``[B, chunks, Hk, H / Hk, tokens, ...]``, padded with neutral tokens."""
        x = mx.pad(x.astype(mx.float32), [(0, 0), (0, -tokens % size), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(batch, -1, size, key_heads, per_head, *x.shape[3:])
        return x.transpose(0, 1, 3, 4, 2, *range(5, x.ndim))

    q, k, v, decay, rate = split(q, 1), split(k, 1), split(v, ratio), split(decay, ratio), split(beta, ratio)
    total = mx.cumsum(decay, axis=-1)  # since the chunk's start
    between = mx.exp(mx.minimum(total[..., :, None] - total[..., None, :], 0))
    since, until = mx.exp(total)[..., None], mx.exp(total[..., -1:] - total)[..., None]
    rate = rate[..., None]
    keys_by_token = k.swapaxes(-1, -2)
    solve = _inverse(mx.tril((k @ keys_by_token) * between, -1) * rate)
    writes, reads = solve @ (rate * v), solve @ (rate * since * k)
    scores, queries = mx.tril((q @ keys_by_token) * between), q * since
    last, keys = since[..., -1:, :], (k * until).swapaxes(-1, -2)
    if state is None:
        state = mx.zeros((batch, heads, value_size, key_size))
    now = state.astype(mx.float32).swapaxes(-1, -2).reshape(batch, key_heads, ratio, key_size, value_size)
    outputs = []
    for chunk in range(q.shape[1]):
        differences = writes[:, chunk] - reads[:, chunk] @ now
        outputs.append(queries[:, chunk] @ now + scores[:, chunk] @ differences)
        now = now * last[:, chunk] + keys[:, chunk] @ differences
    out = mx.stack(outputs, axis=1).transpose(0, 1, 4, 2, 3, 5).reshape(batch, -1, heads, value_size)
    return out[:, :tokens].astype(dtype), now.reshape(batch, heads, key_size, value_size).swapaxes(-1, -2)


def _inverse(lower: mx.array) -> mx.array:
    """Return the inverse of 1 + L for strictly lower triangular L, as a product over its powers of two."""
    size, power = lower.shape[-1], -lower
    inverse, done = mx.eye(size) + power, 2
    while done < size:
        power = power @ power
        inverse, done = inverse + inverse @ power, 2 * done
    return inverse
