"""Upstream: what the engine uses of the library that it works for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx


class TokenResponse(Protocol):
    """What the caller gets of a token."""

    uid: int
    token: int
    finish_reason: str | None
    all_tokens: list[int] | None

    def attach(self, request: Any) -> None:
        """Hand over the finished request, whose cache is this response's from now on."""

    def drop_cache(self) -> bool:
        """Release that cache unless it was read. Returns whether it was released."""


class Upstream(NamedTuple):
    """Classes and functions of mlx-lm, given by the patches, so that the engine imports none of it.

    Attributes:
        response: makes what the caller gets of a token, from uid, token, where its log-probabilities are, the reason
            why it is the last one or None, and ``num_cached``.
        prompt_response: makes what the caller gets of a prompt's progress, from uid, (tokens done, tokens in all),
            whether a segment ends there, and whether the prompt does.
        token_buffer: keeps a request's tokens for its logits processors.
        known_sampler: what a sampler does, as arguments of :class:`SamplingParams`, if that is known; else None.
        known_processors: likewise, of all of a request's logits processors.
        state_cache: class of the caches of layers that keep a state instead of keys and values.
    """

    response: Callable[..., TokenResponse]
    prompt_response: Callable[[int, tuple[int, int], bool, bool], Any]
    token_buffer: Callable[[Sequence[int]], Any]
    known_sampler: Callable[[Callable[..., mx.array]], Mapping[str, Any] | None]
    known_processors: Callable[[Sequence[Callable[..., mx.array]]], Mapping[str, Any] | None]
    state_cache: type[Any]
