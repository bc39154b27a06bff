"""What the engine is handed of mlx-lm: its responses, and its samplers and processors, read from their closures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache, TokenBuffer

from ...engine.upstream import Upstream
from ..patch import fingerprint
from .response import Response

# Upstream's code whose closures are read, and whose meaning the engine's sampling repeats.
KNOWN = {
    "make_sampler": "3634f01145e0de6d",
    "make_logits_processors": "f895d7a476e06b41",
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
_PENALTIES = ("repetition", "presence", "frequency")
# A method of a sampler is a lambda over these of make_sampler's arguments; they differ in each.
_METHODS = ("top_p", "min_p", "min_tokens_to_keep", "xtc_probability", "xtc_threshold", "xtc_special_tokens", "top_k")


@lru_cache(maxsize=1)
def is_known() -> bool:
    """Return whether samplers and processors of the installed mlx-lm are recognised."""
    try:
        return all(fingerprint(getattr(sample_utils, name)) == known for name, known in KNOWN.items())
    except (AttributeError, OSError, TypeError):
        return False


def known_sampler(sampler: Callable[..., mx.array]) -> Mapping[str, Any] | None:
    """Return the arguments of ``SamplingParams`` that ``make_sampler`` has made a sampler of; None: it is not one of
    those."""
    if not is_known():
        return None
    if sampler is sample_utils.greedy_sampler:
        return {}
    cells = _cells(sampler, "make_sampler", "sampler")
    if cells is None:
        return None
    fields: dict[str, Any] = {"temperature": cells["temp"]}
    for method in cells["sampling_methods"]:
        fields |= _cells(method, "make_sampler", "<lambda>") or {}
    return fields if set(fields) <= {"temperature", *_METHODS} else None


def known_processors(processors: Sequence[Callable[..., mx.array]]) -> Mapping[str, Any] | None:
    """Return the arguments of ``SamplingParams`` that ``make_logits_processors`` has made a request's processors of;
    None: it has not, or they are not in its order."""
    if not is_known():
        return None
    fields: dict[str, Any] = {}
    place = -1
    for processor in processors:
        found = _bias(processor)
        here = 0
        for kind, name in enumerate(_PENALTIES, start=1):
            if found is None:
                found, here = _penalty(processor, name), kind
        if found is None or here <= place:
            return None
        fields |= found
        place = here
    return fields


def _bias(processor: Any) -> dict[str, Any] | None:
    cells = _cells(processor, "make_logits_processors", "logit_bias_processor")
    if cells is None:
        return None
    return {"logit_bias": dict(zip(cells["indices"].tolist(), cells["values"].tolist(), strict=True))}


def _penalty(processor: Any, name: str) -> dict[str, Any] | None:
    cells = _cells(processor, f"make_{name}_penalty", f"{name}_penalty_processor")
    if cells is None:
        return None
    return {f"{name}_penalty": cells["penalty"], f"{name}_context_size": cells["context_size"]}


def _cells(function: Any, maker: str, name: str) -> dict[str, Any] | None:
    """Return what a function holds of the one that made it, by name; None: that one has not made it."""
    if not isinstance(function, FunctionType) or not any(function.__code__ is code for code in _codes(maker, name)):
        return None
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


@lru_cache
def _codes(maker: str, name: str) -> tuple[CodeType, ...]:
    """Return the code of the functions of this name that one of mlx-lm's defines."""
    constants = getattr(sample_utils, maker).__code__.co_consts
    return tuple(code for code in constants if isinstance(code, CodeType) and code.co_name == name)


UPSTREAM = Upstream(Response, PromptProcessingBatch.Response, TokenBuffer, known_sampler, known_processors, ArraysCache)
