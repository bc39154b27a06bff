"""What the engine is handed of mlx-lm: its responses, and its samplers and processors, read from their closures."""

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
    """May be called by any thread, and is only about right then.

    ``tokens`` are in its cache, ``cached_tokens`` of them were found there, ``computing_tokens`` are being computed
    behind them; ``blocks`` are, for each group, runs of the blocks that it holds: ``[first, number]``.
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
    """Consecutive ids as ``[first, number]``, without null blocks."""
    found: list[list[int]] = []
    for block_id in sorted({block_id for block_id in block_ids if block_id != NULL_BLOCK}):
        if found and block_id == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([block_id, 1])
    return found


class Response(GenerationBatch.Response):  # type: ignore[misc]
    """A token of a request; a dataclass with the fields of mlx-lm's, which can be set and replaced as there.

    Log-probabilities are computed when they are read. The cache of a finished request keeps that request's blocks, and
    no others, for as long as the response or the cache is kept; until ``prompt_cache`` was read, requests
    that need the blocks may take them.

    Args:
        logprobs: of the token's step, ``[vocab]``, or where they are to be had from.

    Attributes:
        num_cached: tokens of the prompt that were found in a prefix cache. Not a field: 0 in what
            ``dataclasses.replace`` makes.
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
        """Log-probabilities ``[vocab]`` the token was sampled from."""
        if isinstance(self._logprobs, mx.array):
            return self._logprobs
        return self._logprobs.logprobs()

    @logprobs.setter
    def logprobs(self, value: mx.array) -> None:
        self._logprobs = value

    @property
    def prompt_cache(self) -> list[Any] | None:
        """The caches of all layers, if this is the request's last token. Setting it lets go of them.

        Raises:
            PromptCacheError: the blocks were needed before this was read.
        """
        if self._is_dropped:
            raise PromptCacheError(
                f"the cache of request {self.uid} was given up for requests that needed its blocks: "
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
        """Hand over the finished request, which is this response's from now on."""
        self._request = request

    def drop_cache(self) -> bool:
        """Release the cache unless it was read. Returns whether it was released."""
        if self._request is None or self._claimed:
            return False
        request, self._request, self._is_dropped = self._request, None, True
        with suppress(Exception):  # the request has ended; its tables give their blocks back when they are dropped
            request.release()
        return True

    def __repr__(self) -> str:
        return f"Response(uid={self.uid}, token={self.token}, finish_reason={self.finish_reason!r})"


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


def sampler_of(params: SamplingParams) -> Callable[[mx.array], mx.array]:
    """Return mlx-lm's sampler, for where it computes; the same one each time, so that its rows are sampled together."""
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
    """Return mlx-lm's logits processors, for where it computes."""
    make = sample_utils.make_logits_processors
    return list(make(**_given(make, params) | {"logit_bias": dict(params.logit_bias) or None}))


def _given(make: Callable[..., Any], params: SamplingParams) -> dict[str, Any]:
    """Return what a function of mlx-lm takes of the parameters: names are the same."""
    return {name: getattr(params, name) for name in inspect.signature(make).parameters if hasattr(params, name)}
