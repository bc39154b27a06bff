"""Unsupported models and options run on stock mlx-lm, with equal results and one warning that says why."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from mlx_lm.models import cache as upstream
from mlx_lm.models import qwen2

import mlx_paged
from mlx_paged import GeometryError, PagedConfig
from mlx_paged.patches.cache.layout import layout_of, why_one_by_one
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from scripts.support import model_configs
from tests.fuzz.cases import HYBRIDS
from tests.support.cases import quick
from tests.support.models.batch_runs import answers, fall_throughs, generator
from tests.support.models.builders import COMMON, build, greedy, prompt_of

KINDS_OF_STATES = (
    "baichuan_m1",
    "jamba",
    "kimi_linear",
    "lfm2",
    "longcat_flash_ngram",
    "mamba2",
    "qwen3_next",
    "rwkv7",
)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", quick(HYBRIDS, *KINDS_OF_STATES))
def test_states_are_served_without_a_warning(name: str) -> None:
    """Cover single runs, batches, and checkpoints, which count in the pool's budget."""
    model = model_configs.build(name)
    prompts = [(prompt_of(length, seed=length) % model_configs.VOCAB).tolist() for length in (9, 17)]
    expected = [greedy(model, mx.array(prompt), 3)[0] for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8, state_interval=32))

    def run() -> tuple[list[list[int]], PrefixCache]:
        alone = [greedy(model, mx.array(prompt), 3)[0] for prompt in prompts]
        assert alone == expected
        tree = PrefixCache(prefix_pool_of(model))
        gen = generator(model, prefixes=SharedPrefixes(tree))
        return answers(gen, prompts, [3, 3]), tree

    (got, tree), messages = fall_throughs(run)
    assert messages == [] and got == expected
    assert tree.pool.stats().checkpoint_bytes > 0


def test_unsupported_cache_type_is_warned_of() -> None:
    model = model_configs.build("deepseek_v41")
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    _, messages = fall_throughs(lambda: upstream.make_prompt_cache(model))
    assert len(messages) == 1 and "cache type LayerCache" in messages[0]


def test_attention_that_reads_the_caches_keys_gets_mlx_lms_cache() -> None:
    """Attributes that a paged cache lacks are detected before any token is computed."""

    class Nosy(qwen2.Attention):
        def __call__(self, x: mx.array, mask: object = None, cache: upstream.KVCache | None = None) -> mx.array:
            output = super().__call__(x, mask, cache)
            return output + 0 * cache.keys.sum()

    mx.random.seed(0)
    args = {**COMMON, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **args))
    for layer in model.layers:
        nosy = Nosy(model.args)
        nosy.update(layer.self_attn.parameters())
        layer.self_attn = nosy
    expected = greedy(model, prompt_of(20), 10)[0]
    mlx_paged.apply_patches()
    got, messages = fall_throughs(lambda: greedy(model, prompt_of(20), 10)[0])
    assert got == expected
    assert len(messages) == 1 and "uses internals of its cache (keys)" in messages[0]
    batched, messages = fall_throughs(lambda: answers(generator(model), [prompt_of(20).tolist()] * 2, [10] * 2))
    assert batched == [expected] * 2 and "one by one" in messages[0]
    assert mlx_paged.pool_of(model) is None


def test_unknown_models_are_batched_only_if_they_use_the_seam() -> None:
    class Own(qwen2.Model):
        pass

    mx.random.seed(0)
    args = {**COMMON, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = Own(qwen2.ModelArgs(model_type="qwen2", **args))
    mlx_paged.apply_patches()
    stock = [upstream.KVCache() for _ in model.layers]
    upstream.make_prompt_cache(model)
    assert why_one_by_one(model, stock) is None
    plan = layout_of(model)
    unseen = plan._replace(geometries=tuple((geometry, None) for geometry, _ in plan.geometries))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_paged.patches.cache.layout.layout_of", lambda _: unseen)
        assert "not one of mlx-lm's models" in why_one_by_one(model, stock)


def test_changed_number_of_rows_raises_and_keeps_the_cache() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    cache = upstream.make_prompt_cache(model)
    model(prompt_of(10)[None], cache=cache)
    with pytest.raises(GeometryError, match="got 2"):
        model(mx.stack([prompt_of(3), prompt_of(3)]), cache=cache)
    assert all(c.offset == 10 for c in cache)
    mlx_paged.pool_of(model).check_integrity()
    model(prompt_of(3)[None], cache=cache)
    assert all(c.offset == 13 for c in cache)


def test_stock_caches_made_by_the_user_stay_stock() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    own = [upstream.KVCache() for _ in model.layers]
    paged = greedy(model, prompt_of(40), 10)[0]
    assert greedy(model, prompt_of(40), 10, prompt_cache=own)[0] == paged
    assert type(own[0]) is upstream.KVCache and own[0].offset >= 49


@pytest.mark.usefixtures("unfused")
def test_model_that_caches_computed_weights_runs_in_another_thread() -> None:
    """Gemma 3n clips weights in each pass and keeps the clipped ones."""
    model = model_configs.build("gemma3n")
    prompt = [1, 2, 3, 4, 5]
    expected = greedy(model, mx.array(prompt), 5)[0]
    mlx_paged.apply_patches(mlx_paged.PagedConfig(block_size=16, kv_cache_memory=32 << 20))
    gen = generator(model)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(answers, gen, [prompt], [5]).result() == [expected]
    gen.close()
