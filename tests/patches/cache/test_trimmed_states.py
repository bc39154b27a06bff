"""mlx-lm's trim_prompt_cache for models with states: only to where a prompt began or ended."""

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache import kept_states
from mlx_paged.cache.composites import leaves
from mlx_paged.cache.kept_states import MOST_COPIES
from scripts.support import model_configs
from tests.support.cases import quick
from tests.support.models.batch_runs import model_of
from tests.support.models.builders import greedy, prompt_of, rms

HYBRIDS = (
    "bailing_hybrid", "bailing_moe_linear", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    "longcat_flash_ngram", "kimi_k3", "bailing_moe_v3",
)  # fmt: skip
FIRST, SECOND, THIRD = (
    prompt_of(length, seed=seed) % model_configs.VOCAB for length, seed in ((21, 1), (13, 2), (9, 3))
)
TURN = 12


def offset_of(cache: list[Any]) -> int:
    return next(int(part.offset) for part in leaves(cache) if hasattr(part, "offset"))


def chat(model: Any, cache: list[Any], *prompts: Any) -> tuple[list[int], np.ndarray]:
    """Run turns of a chat; return tokens and log probabilities of the last one."""
    for prompt in prompts:
        answer = greedy(model, prompt, TURN, prompt_cache=cache, prefill_step_size=8)
    return answer


def assert_equal(got: tuple[list[int], np.ndarray], expected: tuple[list[int], np.ndarray]) -> None:
    assert got[0] == expected[0] and rms(got[1], expected[1]) < 1e-5


@pytest.mark.parametrize("kind", quick(HYBRIDS, "qwen3_next", "lfm2", single=True))
def test_trimmed_turns_do_not_affect_later_ones(kind: str) -> None:
    model = model_configs.build(kind)
    first, then = (chat(model, upstream.make_prompt_cache(model), *each) for each in ((FIRST,), (FIRST, THIRD)))
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = upstream.make_prompt_cache(model)
    chat(model, cache, FIRST)
    answered = offset_of(cache)
    chat(model, cache, SECOND)
    count = offset_of(cache) - answered
    assert upstream.trim_prompt_cache(cache, count) == count and offset_of(cache) == answered
    assert_equal(chat(model, cache, THIRD), then)
    # To the end of the first prompt except its last token: the same answer follows.
    count = offset_of(cache) - (FIRST.size - 1)
    assert upstream.trim_prompt_cache(cache, count) == count and offset_of(cache) == FIRST.size - 1
    assert_equal(chat(model, cache, FIRST[-1:]), first)
    # To an empty cache.
    count = offset_of(cache)
    assert upstream.trim_prompt_cache(cache, count + 100) == count
    assert_equal(chat(model, cache, FIRST, THIRD), then)
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    del cache
    assert pool.stats().live_blocks == 0 and pool.stats().state_bytes == 0


@pytest.fixture
def model() -> Any:
    made = model_of("falcon_h1")
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    return made


def refuses(cache: list[Any], num_tokens: int) -> bool:
    """Return whether trimming reports 0 tokens and leaves the cache unchanged."""
    before = offset_of(cache), [part.nbytes for part in leaves(cache)]
    trimmed = upstream.trim_prompt_cache(cache, num_tokens)
    return trimmed == 0 and before == (offset_of(cache), [part.nbytes for part in leaves(cache)])


def test_trimming_to_a_length_without_states_is_refused(model: Any) -> None:
    cache = upstream.make_prompt_cache(model)
    assert refuses(cache, 1)
    chat(model, cache, FIRST, SECOND)
    length, answered = offset_of(cache), FIRST.size + TURN
    kept = {0, FIRST.size - 1, answered, answered + SECOND.size - 1}
    assert all(refuses(cache, length - end) for end in range(length) if end not in kept)  # also inside a prompt
    assert refuses(cache, 0) and refuses(cache, -1)
    assert not upstream.can_trim_prompt_cache(cache)  # not by an arbitrary number
    assert refuses(copy.deepcopy(cache), length - answered)
    assert upstream.trim_prompt_cache(cache, length - answered) == length - answered
    assert refuses(cache, 0)


def test_trimming_drops_the_states_of_the_trimmed_tokens(model: Any) -> None:
    cache = upstream.make_prompt_cache(model)
    chat(model, cache, FIRST, SECOND)
    answered, end = FIRST.size + TURN, FIRST.size + TURN + SECOND.size - 1
    upstream.trim_prompt_cache(cache, offset_of(cache) - answered)
    chat(model, cache, SECOND[:5])
    assert offset_of(cache) > end and refuses(cache, offset_of(cache) - end)


def test_cache_with_a_full_window_is_not_trimmed() -> None:
    model = model_configs.build("recurrent_gemma")
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = upstream.make_prompt_cache(model)
    chat(model, cache, FIRST)
    assert refuses(cache, offset_of(cache) - (FIRST.size - 1))


def test_kept_states_are_limited_and_evicted_when_blocks_need_memory(model: Any) -> None:
    cache = upstream.make_prompt_cache(model)
    chat(model, cache, *[SECOND] * MOST_COPIES)
    pool = mlx_paged.pool_of(model)
    of_one = sum(part.nbytes for part in leaves(cache) if isinstance(part, upstream.ArraysCache))
    assert pool.stats().state_bytes == pool.stats().checkpoint_bytes == MOST_COPIES * of_one
    with mock.patch.object(kept_states, "COPIES_SHARE", 2.5 * of_one / pool.memory.budget):
        chat(model, cache, SECOND)
    assert pool.stats().state_bytes == 2 * of_one
    pool.memory.owners.evict_states(1)
    assert pool.stats().state_bytes == of_one
    assert upstream.trim_prompt_cache(cache, TURN + 1) == TURN + 1  # the newest is left
    pool.check_integrity()
