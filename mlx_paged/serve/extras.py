"""RequestExtras: what a client may say of a request that mlx-lm's has no place for."""

from __future__ import annotations

from typing import Any, NamedTuple

from .constraints.constraint import Constraint
from .prompt_messages import MadePrompt


class RequestExtras(NamedTuple):
    """Of one request.

    Attributes:
        salt: only requests with the same one share prefixes.
        constraint: what its answer has to be.
        prompt_lookup: most tokens that are looked up in a step; None: as configured.
        made: its prompt, if that is there already.
        scoring: computes the log-probabilities of the prompt's own tokens, if these are wanted.
    """

    salt: str | None = None
    constraint: Constraint | None = None
    prompt_lookup: int | None = None
    made: MadePrompt | None = None
    scoring: Any = None
