"""Samplers and logits processors of mlx_lm.sample_utils that carry the parameters they were made with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils

from ..engine.request import RequestOptions, Sampler
from ..engine.sampling.params import SamplingParams
from ..errors import ConfigError, PatchError
from .patch import fingerprint, replaces

# Fingerprints of the functions that the engine's sampling reimplements.
KNOWN = {
    "greedy_sampler": "54ae6de1cbfc0e9f",
    "apply_top_k": "eaf3db325d1bb945",
    "apply_min_p": "8445f558eee11249",
    "apply_top_p": "1fd0148bd93a1d66",
    "apply_xtc": "253b8f7c698ab184",
    "categorical_sampling": "c7ce4f1d2207172a",
    "make_repetition_penalty": "596f2c3e6fc447fd",
    "make_presence_penalty": "cd8443ed6e60ef8d",
    "make_frequency_penalty": "c7b4ed6855056ea1",
}
CHANGES = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")  # in mlx-lm's order


class Given(dict[str, Any]):
    """Arguments of :class:`SamplingParams`, in the ``params`` of a sampler or processor."""


def _check_known() -> None:
    for name, known in KNOWN.items():
        if fingerprint(getattr(sample_utils, name)) != known:
            raise PatchError(f"{name} is not the one that rows of a batch are sampled like")


@replaces("mlx_lm.sample_utils:make_sampler", "3634f01145e0de6d")
def _make_sampler(original: Callable[..., Any]) -> Callable[..., Any]:
    _check_known()
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_sampler(*args: Any, **kwargs: Any) -> Any:
        sampler = original(*args, **kwargs)
        if sampler is not sample_utils.greedy_sampler:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            given["temperature"] = given.pop("temp")
            sampler.params = Given(given, xtc_special_tokens=given["xtc_special_tokens"] or ())
        return sampler

    return make_sampler


@replaces("mlx_lm.sample_utils:make_logits_processors", "f895d7a476e06b41")
def _make_logits_processors(original: Callable[..., Any]) -> Callable[..., Any]:
    _check_known()
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_logits_processors(*args: Any, **kwargs: Any) -> Any:
        processors = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        for processor, name in zip(processors, (name for name in CHANGES if given[name]), strict=True):
            processor.params = Given({name: given[name]})
            if (size := name.replace("penalty", "context_size")) != name:
                processor.params[size] = given[size]
        return processors

    return make_logits_processors


def known_sampler(sampler: Callable[..., mx.array]) -> Mapping[str, Any] | None:
    """Return the arguments of ``SamplingParams`` that describe a sampler of ``make_sampler``; None for any other."""
    if sampler is sample_utils.greedy_sampler:
        return {}
    params = getattr(sampler, "params", None)
    return params if isinstance(params, Given) else None


def known_processors(processors: Sequence[Callable[..., mx.array]]) -> Mapping[str, Any] | None:
    """Return the arguments of ``SamplingParams`` that describe processors of ``make_logits_processors``; None for any
    others, or if they are in another order."""
    found: dict[str, Any] = {}
    place = -1
    for processor in processors:
        params = getattr(processor, "params", None)
        if not isinstance(params, Given) or (here := CHANGES.index(next(iter(params)))) <= place:
            return None
        found |= params
        place = here
    return found


def resolved(
    sampler: Sampler, processors: Sequence[Callable[..., mx.array]], options: RequestOptions
) -> tuple[Sampler | None, Sequence[Callable[..., mx.array]], RequestOptions]:
    """Return a request's sampler and logits processors as far as mlx-lm has not made them, and its options with the
    parameters of the others. With invalid parameters mlx-lm's own functions are called, and raise."""
    if options.sampling is not None:
        return None, (), options
    chooses, changes = known_sampler(sampler), known_processors(processors)
    try:
        params = SamplingParams(**(chooses or {}), **(changes or {}), seed=options.seed)
    except ConfigError:
        return sampler, processors, options
    own = None if chooses is not None else sampler, () if changes is not None else processors
    return *own, options._replace(sampling=params)


def sampler_of(params: SamplingParams) -> Callable[[mx.array], mx.array]:
    """Return mlx-lm's sampler with these parameters, for requests that mlx-lm computes."""
    given = _given(sample_utils.make_sampler, params) | {"xtc_special_tokens": list(params.xtc_special_tokens)}
    sampler: Callable[[mx.array], mx.array] = sample_utils.make_sampler(params.temperature, **given)
    return sampler


def processors_of(params: SamplingParams) -> list[Any]:
    """Return mlx-lm's logits processors with these parameters, for requests that mlx-lm computes."""
    make = sample_utils.make_logits_processors
    return list(make(**_given(make, params) | {"logit_bias": dict(params.logit_bias) or None}))


def _given(make: Callable[..., Any], params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are arguments of mlx-lm's function, by name."""
    return {name: getattr(params, name) for name in inspect.signature(make).parameters if hasattr(params, name)}
