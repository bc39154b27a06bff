"""Requests without a model."""

from collections.abc import Sequence
from itertools import pairwise

from mlx_paged.engine.request import Request, RequestOptions


def request_of(
    uid: int, prompt_length: int, boundaries: Sequence[int] = (), *, priority: int = 0, client: str = ""
) -> Request:
    """Return a request for a prompt of ``prompt_length`` tokens, whose segments end at ``boundaries`` and at its
    end."""
    segments = [[1] * (end - begin) for begin, end in pairwise([0, *boundaries, prompt_length])]
    options = RequestOptions(priority=priority, client=client)
    return Request(
        uid,
        segments,
        max_tokens=8,
        caches=[],
        history=[],
        sampler=None,
        processors=[],
        matcher=None,
        options=options,
    )
