"""RequestOptions: what a caller may say of one request beyond what mlx-lm has a place for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from .grammar.grammar import CompiledGrammar
from .sampling.params import SamplingParams


class RequestOptions(NamedTuple):
    """Of one request.

    Attributes:
        salt: only requests with the same one share prefixes.
        seed: the answer's tokens are a function of it and of the logits, whoever else is in the batch; None draws from
            ``mx.random``'s state. It needs a sampler of mlx-lm's ``make_sampler``; others draw as they do.
        grammar: what its answer has to be; None: anything.
        prompt_lookup: most tokens proposed in a step because the prompt or the answer had them before; 0:
            none; None: as configured.
        sampling: how its tokens are chosen, as numbers; its sampler and processors are not asked then. None: they are.
    """

    salt: Hashable = None
    seed: int | None = None
    grammar: CompiledGrammar | None = None
    prompt_lookup: int | None = None
    sampling: SamplingParams | None = None
