"""The formulas of mlx-lm's samplers and penalties, in NumPy's float64, one row at a time."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mlx_paged.engine.sampling.params import SamplingParams


def penalised(logits: np.ndarray, params: SamplingParams, history: Sequence[int]) -> np.ndarray:
    """Return logits ``[vocab]`` with the bias and the penalties, in float64."""
    x = logits.astype(np.float64)
    for token, value in params.logit_bias.items():
        x[token] += value

    def counts(size: int | None) -> Counter[int]:
        return Counter(history[-size:] if size else history)

    if params.repetition_penalty:
        for token in counts(params.repetition_context_size):
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    if params.presence_penalty:
        for token in counts(params.presence_context_size):
            x[token] -= params.presence_penalty
    if params.frequency_penalty:
        for token, count in counts(params.frequency_context_size).items():
            x[token] -= params.frequency_penalty * count
    return x


def likely_words(x: np.ndarray, params: SamplingParams, *, xtc: bool, slack: float = 0.0) -> np.ndarray:
    """Return which tokens are kept, by sorting. A positive ``slack`` adds those that rounding could keep, a negative
    one removes those that rounding could drop."""
    kept = np.isfinite(x)
    probs = np.exp(x - x.max())
    if params.uses_top_p:
        above = np.array([probs[x > value].sum() for value in x])
        kept &= above < (params.top_p + slack) * probs.sum()
    if params.min_p:
        likely = x >= x.max() + np.log(params.min_p) - slack
        likely[_first(x, params.min_tokens_to_keep)] = params.min_tokens_to_keep > 1 or likely[x.argmax()]
        kept &= likely
    if params.uses_xtc and xtc:
        left = np.where(kept, probs, 0) / probs[kept].sum()
        above = left > params.xtc_threshold
        if above.any():
            dropped = left > left[above].min()
            dropped[list(params.xtc_special_tokens)] = False
            kept &= ~dropped
    if params.top_k > 0:
        order = [index for index in _first(x, len(x)) if kept[index]]
        chosen = np.zeros_like(kept)
        chosen[order[: params.top_k]] = True
        kept &= chosen
    return kept


def _first(x: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-x, kind="stable")[:count]


def probabilities(x: np.ndarray, params: SamplingParams, kept: np.ndarray) -> np.ndarray:
    """Return the kept tokens' probabilities ``[vocab]`` at the temperature."""
    scaled = np.where(kept, x, -np.inf) / params.temperature
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def assert_drawn_as(found: np.ndarray, x: np.ndarray, params: SamplingParams, deviations: int) -> None:
    """Assert that tokens were drawn with their probabilities: chi-square is near the degrees of freedom, within this
    many standard deviations."""
    share = params.xtc_probability
    expected = sum(
        part * probabilities(x, params, likely_words(x, params, xtc=xtc))
        for part, xtc in ((1 - share, False), (share, True))
    ) * len(found)
    counts = np.bincount(found, minlength=len(x))
    assert not counts[expected == 0].any()
    often = expected >= 5
    groups, wanted = (np.append(each[often], each[~often].sum()) for each in (counts, expected))
    groups, wanted = groups[wanted > 0], wanted[wanted > 0]
    freedom = max(len(groups) - 1, 1)
    assert abs(((groups - wanted) ** 2 / wanted).sum() - freedom) < deviations * (2 * freedom) ** 0.5
