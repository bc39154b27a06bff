"""Log-probabilities of generated tokens and of the most likely ones, as Python values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def fetch_logprobs(asking: list[tuple[Any, int]]) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """Return, by uid, the log-probability of each token and of the most likely ones.

    Args:
        asking: responses, each with its number of most likely tokens.
    """
    if not asking:
        return {}
    rows, tokens = mx.stack([response.logprobs for response, _ in asking]), [response.token for response, _ in asking]
    found = gather_logprobs(rows, tokens, max(top for _, top in asking))
    wanted = zip(asking, found, strict=True)
    return {response.uid: (logprob, likeliest[:top]) for (response, top), (logprob, likeliest) in wanted}


def gather_logprobs(
    rows: mx.array, tokens: list[int], num_top: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the log-probability of each row's token, and the row's ``num_top`` most likely tokens with theirs, in one
    transfer."""
    wanted, most = mx.array(tokens)[:, None], min(num_top, rows.shape[-1])
    if most:
        likeliest = mx.argpartition(-rows, kth=most - 1, axis=-1)[:, :most].astype(mx.int32)
        wanted = mx.concatenate([wanted, likeliest], axis=1)
    values = mx.take_along_axis(rows, wanted, axis=1).astype(mx.float32)
    # Ids and values in one array: float32 is exact for ids up to 2**24.
    fetched: Any = mx.stack([wanted.astype(mx.float32), values], axis=1).tolist()
    return [
        (logprobs[0], tuple(sorted(zip(map(int, ids[1:]), logprobs[1:], strict=True), key=lambda pair: -pair[1])))
        for ids, logprobs in fetched
    ]
