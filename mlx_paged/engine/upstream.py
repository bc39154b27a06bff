"""Upstream: what the engine uses of mlx-lm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class TokenResponse(Protocol):
    """The response to the caller for one token."""

    uid: int
    token: int
    finish_reason: str | None
    all_tokens: list[int] | None

    def attach(self, request: Any) -> None:
        """Take ownership of the finished request and its cache."""

    def drop_cache(self) -> bool:
        """Release that cache unless it was read. Returns whether it was released."""


class Upstream(NamedTuple):
    """Classes and functions of mlx-lm, given by the patches, so that the engine imports none of it.

    Attributes:
        response: makes the response for a token, from uid, token, its :class:`.step_logits.TokenLogits`, the finish
            reason or None, and ``num_cached``.
        prompt_response: makes the response for a prompt's progress, from uid, (tokens done, tokens in all), whether a
            segment ends there, and whether the prompt does.
        token_buffer: keeps a request's tokens for its logits processors.
        state_cache: class of the caches of layers that keep a state instead of keys and values.
    """

    response: Callable[..., TokenResponse]
    prompt_response: Callable[[int, tuple[int, int], bool, bool], Any]
    token_buffer: Callable[[Sequence[int]], Any]
    state_cache: type[Any]
