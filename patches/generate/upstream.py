"""The parts of mlx-lm that the engine uses: responses, and samplers and processors, read from their closures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache, TokenBuffer

from ...engine.request import Request
from ...engine.sampling.params import SamplingParams
from ...engine.step_logits import TokenLogits
from ...engine.upstream import Upstream
from ...errors import PromptCacheError
from ...kv.allocator import NULL_BLOCK
from ..patch import fingerprint


def request_progress(request: Request) -> dict[str, Any]:
    """Return a request's progress. Any thread may call it; figures are approximate then.

    ``tokens`` are in the request's cache, ``cached_tokens`` of them were found in a prefix cache, ``computing_tokens``
    are being computed after them. ``blocks`` lists, for each group, runs of the blocks held as ``[first, number]``.
    """
    tables = request.tables if request.caches is not None else None
    is_prefilled = request.is_prefilled
    computing = 0 if not tables or is_prefilled else max(0, tables[0].length - request.length)
    has_begun = request.num_reported > 0 or request.num_generated > 0
    if tables is None and request.caches is None:
        state = "preempted" if has_begun else "waiting"
    else:
        state = "decode" if is_prefilled else "prefill"
    return {
        "uid": request.uid,
        "state": state,
        "waiting": request.caches is None,
        "prompt_tokens": request.kept + request.prompt_length,
        "cached_tokens": request.num_cached or 0,
        "tokens": request.length,
        "computing_tokens": computing,
        "generated_tokens": request.num_generated,
        "blocks": [runs(list(table.block_ids)) for table in tables or ()],
    }


def runs(block_ids: Iterable[int]) -> list[list[int]]:
    """Return runs of consecutive ids as ``[first, number]``, without null blocks."""
    found: list[list[int]] = []
    for block_id in sorted({block_id for block_id in block_ids if block_id != NULL_BLOCK}):
        if found and block_id == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([block_id, 1])
    return found


class Response(GenerationBatch.Response):  # type: ignore[misc]
    """A token of a request: a dataclass with mlx-lm's fields, which can be set and replaced as there.

    Log-probabilities are computed when they are read. The last response of a request keeps the request's blocks for as
    long as the response or its cache is referenced. Until ``prompt_cache`` is read, other requests that need the
    blocks may take them.

    Args:
        logprobs: log-probabilities of the token's step, ``[vocab]``, or the object that computes them.

    Attributes:
        num_cached: tokens of the prompt that were found in a prefix cache. Not a dataclass field: 0 after
            ``dataclasses.replace``.
    """

    def __init__(
        self,
        uid: int,
        token: int,
        logprobs: mx.array | TokenLogits,
        finish_reason: str | None,
        prompt_cache: list[Any] | None = None,
        all_tokens: list[int] | None = None,
        *,
        num_cached: int = 0,
    ) -> None:
        self.uid = uid
        self.token = token
        self.finish_reason = finish_reason
        self.num_cached = num_cached
        self.all_tokens = all_tokens
        self._logprobs = logprobs
        self._request: Request | None = None
        self._prompt_cache = prompt_cache
        self._claimed = self._is_dropped = False

    @property
    def logprobs(self) -> mx.array:
        """Log-probabilities ``[vocab]`` that the token was sampled from."""
        if isinstance(self._logprobs, mx.array):
            return self._logprobs
        return self._logprobs.logprobs()

    @logprobs.setter
    def logprobs(self, value: mx.array) -> None:
        self._logprobs = value

    @property
    def prompt_cache(self) -> list[Any] | None:
        """Caches of all layers, if this is the request's last token, else None. Setting it drops them.

        Raises:
            PromptCacheError: the blocks were needed before this was read.
        """
        if self._is_dropped:
            raise PromptCacheError(
                f"the cache of request {self.uid} was dropped because other requests needed its blocks: "
                "read prompt_cache before the next call of the generator"
            )
        if self._request is None:
            return self._prompt_cache
        self._claimed = True
        return self._request.caches

    @prompt_cache.setter
    def prompt_cache(self, value: list[Any] | None) -> None:
        self._request, self._prompt_cache, self._is_dropped = None, value, False

    def attach(self, request: Request) -> None:
        """Take ownership of the finished request."""
        self._request = request

    def drop_cache(self) -> bool:
        """Release the cache unless it has been read. Returns whether it was released."""
        if self._request is None or self._claimed:
            return False
        request, self._request, self._is_dropped = self._request, None, True
        with suppress(Exception):  # if it fails, the tables give their blocks back when they are dropped
            request.release()
        return True

    def __repr__(self) -> str:
        return f"Response(uid={self.uid}, token={self.token}, finish_reason={self.finish_reason!r})"


# Fingerprints of the upstream functions whose closures are read, and which the engine's sampling reimplements.
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
# Each sampling method is a lambda that closes over some of these arguments of make_sampler, no two over the same ones.
_METHODS = ("top_p", "min_p", "min_tokens_to_keep", "xtc_probability", "xtc_threshold", "xtc_special_tokens", "top_k")


@lru_cache(maxsize=1)
def is_known() -> bool:
    """Return whether the installed mlx-lm has the samplers and processors that are recognised here."""
    try:
        return all(fingerprint(getattr(sample_utils, name)) == known for name, known in KNOWN.items())
    except (AttributeError, OSError, TypeError):
        return False


def known_sampler(sampler: Callable[..., mx.array]) -> Mapping[str, Any] | None:
    """Return the arguments of ``SamplingParams`` that describe a sampler of ``make_sampler``; None for any other."""
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
    """Return the arguments of ``SamplingParams`` that describe processors of ``make_logits_processors``; None for any
    others, or if they are in another order."""
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
    """Return the variables that a function closes over, by name; None unless it is ``name``, defined in ``maker``."""
    if not isinstance(function, FunctionType) or not any(function.__code__ is code for code in _codes(maker, name)):
        return None
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


@lru_cache
def _codes(maker: str, name: str) -> tuple[CodeType, ...]:
    """Return the code of the functions called ``name`` that mlx-lm's function ``maker`` defines."""
    constants = getattr(sample_utils, maker).__code__.co_consts
    return tuple(code for code in constants if isinstance(code, CodeType) and code.co_name == name)


UPSTREAM = Upstream(Response, PromptProcessingBatch.Response, TokenBuffer, known_sampler, known_processors, ArraysCache)


def sampler_of(params: SamplingParams) -> Callable[[mx.array], mx.array]:
    """Return mlx-lm's sampler with these parameters, for requests that mlx-lm computes. Equal parameters give the same
    object, so that their rows are sampled together."""
    make = sample_utils.make_sampler
    given = _given(make, params) | {"xtc_special_tokens": tuple(params.xtc_special_tokens)}
    return _sampler(make, params.temperature, tuple(given.items()))


@lru_cache(maxsize=64)
def _sampler(
    make: Callable[..., Any], temperature: float, given: tuple[tuple[str, Any], ...]
) -> Callable[[mx.array], mx.array]:
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in given}
    sampler: Callable[[mx.array], mx.array] = make(temperature, **options)
    return sampler


def processors_of(params: SamplingParams) -> list[Any]:
    """Return mlx-lm's logits processors with these parameters, for requests that mlx-lm computes."""
    make = sample_utils.make_logits_processors
    return list(make(**_given(make, params) | {"logit_bias": dict(params.logit_bias) or None}))


def _given(make: Callable[..., Any], params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are arguments of mlx-lm's function, by name."""
    return {name: getattr(params, name) for name in inspect.signature(make).parameters if hasattr(params, name)}
