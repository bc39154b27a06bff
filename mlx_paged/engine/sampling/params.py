"""SamplingParams: how one request's tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...errors import ConfigError

LEAST_TEMPERATURE = 2.0**-126  # the smallest normal float32: GPUs treat smaller ones as 0


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; names, order and meaning are those of mlx-lm's ``make_sampler`` and
    ``make_logits_processors``. The defaults are greedy.

    Args:
        temperature: 0 takes the largest logit; then only the penalties and the bias matter.
        top_p: keep the smallest set of most likely tokens whose probability reaches it; off outside of (0, 1).
        min_p: drop tokens whose probability is less than this fraction of the most likely one's; 0 is off.
        min_tokens_to_keep: ``min_p`` keeps at least this many of the most likely tokens.
        xtc_probability: probability that a step drops all tokens more likely than ``xtc_threshold`` except the least
            likely of them; tokens in ``xtc_special_tokens`` are never dropped.
        top_k: keep the k most likely tokens; 0 is off.
        repetition_penalty, presence_penalty, frequency_penalty: None or 0 is off.
        repetition_context_size, ...: number of last tokens that the penalty counts; None or 0 is all, as 0 in mlx-lm.
        logit_bias: values added to the logits, by token, before the penalties.
        seed: the tokens depend only on it and the logits; None draws from ``mx.random``'s state.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Sequence[int] = ()
    repetition_penalty: float | None = None
    repetition_context_size: int | None = 20
    presence_penalty: float | None = None
    presence_context_size: int | None = 20
    frequency_penalty: float | None = None
    frequency_context_size: int | None = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (*_NUMBERS, *_PENALTIES):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) or (value is None and name in _PENALTIES)
            _check(name, is_number, value, "a number or None" if name in _PENALTIES else "a number")
        _check("temperature", self.temperature >= 0, self.temperature, "at least 0")
        _check("min_p", 0 <= self.min_p <= 1, self.min_p, "from 0 to 1")
        least = self.min_tokens_to_keep
        _check("min_tokens_to_keep", _is_int(least, 1), least, "an integer of at least 1")
        _check("xtc_probability", self.xtc_probability <= 1, self.xtc_probability, "at most 1")
        threshold = self.xtc_threshold
        _check("xtc_threshold", not self.uses_xtc or 0 <= threshold <= 0.5, threshold, "from 0 to 0.5")
        _check("top_k", self.top_k <= 0 or _is_int(self.top_k, 1), self.top_k, "an integer")
        _check("repetition_penalty", (self.repetition_penalty or 0) >= 0, self.repetition_penalty, "at least 0")
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            size = getattr(self, name)
            _check(name, size is None or _is_int(size, 0), size, "None or an integer of at least 0")
        is_seed = self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool))
        _check("seed", is_seed, self.seed, "None or an integer")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError if a value is out of range for a vocabulary of this size."""
        below = f"below the vocabulary size of {vocab_size}"
        _check("top_k", not self.draws or self.top_k < vocab_size, self.top_k, below)
        tokens = [*self.logit_bias, *(self.xtc_special_tokens if self.draws and self.uses_xtc else ())]
        are_tokens = all(_is_int(token, 0) and token < vocab_size for token in tokens)
        _check("token ids", are_tokens, tokens, f"integers from 0 to {vocab_size - 1}")

    @property
    def draws(self) -> bool:
        """Return whether tokens are drawn at random. At a temperature below :data:`LEAST_TEMPERATURE` only the largest
        logit has a probability above 0."""
        return self.temperature >= LEAST_TEMPERATURE

    @property
    def uses_top_p(self) -> bool:
        """Whether ``top_p`` drops any token."""
        return 0 < self.top_p < 1

    @property
    def uses_xtc(self) -> bool:
        """Whether XTC drops any token."""
        return self.xtc_probability > 0

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is on."""
        return any(getattr(self, name) for name in _PENALTIES)


# By their annotations, which are strings because of ``from __future__ import annotations``.
_NUMBERS = [each.name for each in fields(SamplingParams) if each.type == "float"]
_PENALTIES = [each.name for each in fields(SamplingParams) if each.type == "float | None"]


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(name: str, is_usable: bool, value: Any, allowed: str) -> None:
    if not is_usable:
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")
