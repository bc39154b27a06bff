"""mlx-lm's trim_prompt_cache for models with states."""

import pytest
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.composites import leaves
from scripts.support import model_configs
from tests.support.models.builders import greedy, prompt_of


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_prompt_caches_with_states_are_not_trimmed(kind: str) -> None:
    model = model_configs.build(kind)
    prompt = prompt_of(21) % model_configs.VOCAB
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    cache = upstream.make_prompt_cache(model)
    tokens, _ = greedy(model, prompt, 4, prompt_cache=cache)
    offsets = [part.offset for part in leaves(cache) if hasattr(part, "offset")]
    assert not upstream.can_trim_prompt_cache(cache) and upstream.trim_prompt_cache(cache, 3) == 0
    assert [part.offset for part in leaves(cache) if hasattr(part, "offset")] == offsets and len(tokens) == 4
