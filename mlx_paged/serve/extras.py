"""RequestExtras: what a client may say of a request that mlx-lm's has no place for."""

from __future__ import annotations

from typing import NamedTuple

from .constraints.constraint import Constraint


class RequestExtras(NamedTuple):
    """Of one request.

    Attributes:
        salt: only requests with the same one share prefixes.
        constraint: what its answer has to be.
        prompt_lookup: most tokens that are looked up in a step; None: as configured.
    """

    salt: str | None = None
    constraint: Constraint | None = None
    prompt_lookup: int | None = None
