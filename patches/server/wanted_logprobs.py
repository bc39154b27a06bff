"""Log-probabilities of a step's tokens, for those requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm import server as upstream
from mlx_lm.generate import GenerationBatch


class WantedLogprobs(NamedTuple):
    """What a request asks for; ``top`` is how many of the likeliest words."""

    top: int

    @classmethod
    def of(cls, args: upstream.GenerationArguments) -> WantedLogprobs | None:
        """None: it asks for nothing."""
        top = max(args.top_logprobs, 0)
        return cls(top) if args.logprobs or top else None


class ToldLogprobs(NamedTuple):
    """What its client is told of a token; ``top`` as in mlx-lm, the likeliest first."""

    logprob: float
    top: tuple[dict[str, Any], ...]


NOT_WANTED = ToldLogprobs(0.0, ())


def told_logprobs(
    asking: Sequence[tuple[GenerationBatch.Response, WantedLogprobs]], tokenizer: Any
) -> dict[int, ToldLogprobs]:
    """What each of these requests is told, by uid: computed together, and fetched in one transfer."""
    if not asking:
        return {}
    rows = mx.stack([response.logprobs for response, _ in asking])
    tokens = mx.array([[response.token] for response, _ in asking])
    most = min(max(wanted.top for _, wanted in asking), rows.shape[-1])
    if most:
        likeliest = mx.argpartition(-rows, kth=most - 1, axis=-1)[:, :most].astype(mx.int32)
        tokens = mx.concatenate([tokens, likeliest], axis=1)
    values = mx.take_along_axis(rows, tokens, axis=1).astype(mx.float32)
    # Both in one array, so that there is one transfer; float32 is exact for as many words as there are.
    fetched: Any = mx.stack([tokens.astype(mx.float32), values], axis=1).tolist()
    told = {}
    for (response, wanted), (words, logprobs) in zip(asking, fetched, strict=True):
        order = sorted(range(1, len(words)), key=logprobs.__getitem__, reverse=True)[: wanted.top]
        ids = [int(words[place]) for place in order]
        names = tokenizer.convert_ids_to_tokens(ids) if ids else []
        told[response.uid] = ToldLogprobs(
            logprobs[0],
            tuple(
                {"id": token, "token": name, "logprob": logprobs[place]}
                for token, name, place in zip(ids, names, order, strict=True)
            ),
        )
    return told
