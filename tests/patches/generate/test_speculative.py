"""Speculative decoding with the caches of two models in one list, for models whose layers share keys."""

from typing import Any

import pytest
from mlx.utils import tree_map
from mlx_lm.generate import speculative_generate_step as stock_step
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig, PromptCacheError
from mlx_paged.patches.generate.steps import TwoCaches
from scripts.support import model_configs
from tests.support.cases import quick
from tests.support.models.batch_runs import mlx_lm_generate
from tests.support.models.builders import prompt_of

SHARED = ["gemma3n", "afm7", "gemma4_text"]


def run(step: Any, model: Any, draft: Any, length: int, **options: Any) -> list[int]:
    prompt = prompt_of(length) % model_configs.VOCAB
    return [int(token) for token, *_ in step(prompt, model, draft, max_tokens=12, **options)]


def test_two_caches_moves_only_the_cut_at_the_number_of_layers() -> None:
    caches = TwoCaches("abcdefg", 5, 3)
    assert caches[:5] == ["a", "b", "c"] and caches[5:] == ["d", "e", "f", "g"]
    assert caches[1] == "b" and caches[:4] == ["a", "b", "c", "d"] and caches[1:5] == ["b", "c", "d", "e"]


@pytest.mark.parametrize("name", quick(SHARED, "gemma3n"))
def test_prompt_cache_of_both_models_gives_stock_tokens(name: str) -> None:
    model, draft = model_configs.build(name), model_configs.build(name)
    draft.update(tree_map(lambda w: w * 1.02, draft.parameters()))
    expected = run(stock_step, model, draft, 5)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    caches = [upstream.make_prompt_cache(m) for m in (model, draft)]
    assert len(caches[0]) < len(model.layers)
    got = run(mlx_lm_generate.speculative_generate_step, model, draft, 5, prompt_cache=caches[0] + caches[1])
    assert got == expected
    with pytest.raises(PromptCacheError, match="parts, the model and its draft model"):
        run(mlx_lm_generate.speculative_generate_step, model, draft, 5, prompt_cache=caches[0])
