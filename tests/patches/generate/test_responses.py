"""Responses of a batch are dataclasses as mlx-lm's are."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.errors import PromptCacheError
from tests.support.models.batch_runs import generator, model_of
from tests.support.models.builders import prompt_of


def last_response(gen: Any, length: int = 20) -> Any:
    gen.insert([prompt_of(length).tolist()], [2])
    last = None
    while responses := gen.next_generated():
        last = responses[0]
    return last


def test_a_response_is_the_dataclass_that_mlx_lms_is() -> None:
    model = model_of("llama")
    stock = last_response(generator(model))
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    ours = last_response(generator(model))
    assert [field.name for field in dataclasses.fields(ours)] == [field.name for field in dataclasses.fields(stock)]
    assert sorted(dataclasses.asdict(ours)) == sorted(dataclasses.asdict(stock))
    assert isinstance(ours, type(stock)) and ours.all_tokens == stock.all_tokens and ours.token == stock.token
    assert copy.copy(ours).token == ours.token and "token=" in repr(ours)
    assert mx.array_equal(type(ours)(**dict(_fields(ours))).logprobs, stock.logprobs)


def _fields(response: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(response, field.name)) for field in dataclasses.fields(response)]


def test_replace_keeps_the_cache_and_log_probabilities() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    response = last_response(generator(model_of("llama")))
    other = dataclasses.replace(response, token=5)
    assert (other.token, other.uid, other.finish_reason) == (5, response.uid, "length")
    assert other.prompt_cache is response.prompt_cache and other.all_tokens == response.all_tokens
    assert mx.array_equal(other.logprobs, response.logprobs)
    zeros = mx.zeros_like(response.logprobs)
    assert dataclasses.replace(response, logprobs=zeros, prompt_cache=None).prompt_cache is None
    response.logprobs = zeros
    assert response.logprobs is zeros


def test_setting_prompt_cache_to_none_gives_its_blocks_back() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    model = model_of("llama")
    gen = generator(model)
    response = last_response(gen)
    pool = mlx_paged.pool_of(model)
    assert pool.stats().live_blocks > 0
    response.prompt_cache = None
    assert response.prompt_cache is None
    pool.collect()
    assert pool.stats().live_blocks == 0
    pool.check_integrity()


def test_a_cache_given_up_can_still_be_set() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    response = last_response(generator(model_of("llama")))
    assert response.drop_cache()
    with pytest.raises(PromptCacheError):
        _ = response.prompt_cache
    response.prompt_cache = None
    assert response.prompt_cache is None and not response.drop_cache()
