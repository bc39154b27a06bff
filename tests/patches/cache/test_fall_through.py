"""What is not paged runs on stock mlx-lm, with the same results and one warning that says why."""

from __future__ import annotations

import warnings

import mlx.core as mx
import pytest
from mlx_lm import batch_generate
from mlx_lm.models import cache as upstream
from mlx_lm.models import mamba, qwen2

import mlx_paged
from mlx_paged import GeometryError, NotPagedWarning, PagedConfig, PagedKVCache, PoolExhaustedError
from mlx_paged.patches.cache.layout import layout_of, why_one_by_one
from tests.support.models.batch_runs import generator
from tests.support.models.builders import COMMON, assert_same, build, greedy, prompt_of
from tests.support.models.tokenizers import plain_tokenizer


def fall_throughs(call) -> tuple[object, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in caught if issubclass(w.category, NotPagedWarning)]


def test_quantized_kv_goes_on_in_mlx_lms_cache() -> None:
    model = build("llama", hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    kwargs = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}
    expected = greedy(model, prompt_of(50), 30, **kwargs)
    mlx_paged.apply_patches()
    got, messages = fall_throughs(lambda: greedy(model, prompt_of(50), 30, **kwargs))
    assert_same(got, expected)
    assert len(messages) == 1 and "kv_bits" in messages[0]
    assert mlx_paged.pool_of(model).stats().live_blocks == 0


@pytest.mark.parametrize("size", [1, 4])
def test_max_kv_size_without_room_uses_mlx_lms_cache(size: int) -> None:
    """mlx-lm keeps the first four tokens: with no more room than that, new ones are dropped."""
    model = build("qwen3")
    expected = greedy(model, prompt_of(7), 30, max_kv_size=size)
    mlx_paged.apply_patches()
    for times in (1, 0):  # the reason is given once
        got, messages = fall_throughs(lambda: greedy(model, prompt_of(7), 30, max_kv_size=size))
        assert got[0] == expected[0]
        assert len(messages) == times and all("max_kv_size" in m for m in messages)
    gen, messages = fall_throughs(lambda: generator(model, max_kv_size=size))
    assert gen._engine.batch.kind == "one by one"
    assert len(messages) == 1 and "forgets in a batch which tokens it keeps" in messages[0]
    gen.close()


def test_ssm_layers_use_mlx_lms_cache() -> None:
    mx.random.seed(0)
    args = {"hidden_size": 64, "intermediate_size": 128, "state_size": 16, "num_hidden_layers": 2, "conv_kernel": 4}
    args = {**args, "vocab_size": COMMON["vocab_size"], "use_bias": False, "use_conv_bias": True, "time_step_rank": 8}
    model = mamba.Model(mamba.ModelArgs(model_type="mamba", **args))
    expected = greedy(model, prompt_of(20), 10)[0]
    mlx_paged.apply_patches()
    got, messages = fall_throughs(lambda: greedy(model, prompt_of(20), 10)[0])
    assert got == expected
    assert len(messages) == 1 and "ArraysCache" in messages[0]


def test_attention_that_reaches_into_its_cache_keeps_mlx_lms() -> None:
    """What a paged cache does not have is found out before a token is computed."""

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
    assert len(messages) == 1 and "reaches into its cache (keys)" in messages[0]
    assert mlx_paged.pool_of(model) is None


def test_foreign_models_are_batched_in_one_call_behind_the_seam_only() -> None:
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
        assert "elsewhere" in why_one_by_one(model, stock)


def test_batch_generation_is_paged() -> None:
    model, tokenizer = build("gemma3"), plain_tokenizer()
    prompts = [prompt_of(n, seed=n).tolist() for n in (5, 61, 23)]

    def run() -> list[str]:
        return batch_generate(model, tokenizer, prompts, max_tokens=12).texts

    expected = run()
    mlx_paged.apply_patches()
    got, messages = fall_throughs(run)
    assert got == expected
    assert not messages


def test_paged_caches_can_be_handed_to_batch_generation() -> None:
    """A cache computed alone joins a batch."""
    model, tokenizer = build("llama"), plain_tokenizer()

    def run() -> list[str]:
        caches = []
        for n in (12, 40):
            cache = upstream.make_prompt_cache(model)
            model(prompt_of(n, seed=n)[None], cache=cache)
            caches.append(cache)
        tails = [prompt_of(3, seed=1).tolist(), prompt_of(8, seed=2).tolist()]
        return batch_generate(model, tokenizer, tails, prompt_caches=caches, max_tokens=12).texts

    expected = run()
    mlx_paged.apply_patches()
    assert fall_throughs(run)[0] == expected


def test_several_rows_in_one_cache_turn_it_into_mlx_lms() -> None:
    model = build("gemma3")
    rows = mx.stack([prompt_of(50, seed=1), prompt_of(50, seed=2)])

    def run() -> list[mx.array]:
        cache = upstream.make_prompt_cache(model)
        logits = [model(rows, cache=cache)]
        logits.append(model(rows[:, :1], cache=cache))
        assert cache[0].offset == 51
        return logits

    expected = run()
    mlx_paged.apply_patches()
    got, messages = fall_throughs(run)
    assert all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(messages) == 1


def test_another_number_of_rows_is_an_error_and_nothing_is_lost() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    cache = upstream.make_prompt_cache(model)
    model(prompt_of(10)[None], cache=cache)
    with pytest.raises(GeometryError, match="2 sequence"):
        model(mx.stack([prompt_of(3), prompt_of(3)]), cache=cache)
    assert all(c.offset == 10 for c in cache)
    mlx_paged.pool_of(model).check_integrity()
    model(prompt_of(3)[None], cache=cache)
    assert all(c.offset == 13 for c in cache)


def test_user_built_stock_caches_stay_what_they_are() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    own = [upstream.KVCache() for _ in model.layers]
    paged = greedy(model, prompt_of(40), 10)[0]
    assert greedy(model, prompt_of(40), 10, prompt_cache=own)[0] == paged
    assert type(own[0]) is upstream.KVCache and own[0].offset >= 49


def test_generation_past_the_budget_says_so_and_leaves_the_pool_whole() -> None:
    model = build("llama")
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=200_000))
    with pytest.raises(PoolExhaustedError, match="200,000 bytes") as caught:
        greedy(model, prompt_of(30), 500)
    assert caught.value.budget_bytes == 200_000 and caught.value.blocks_needed >= 1
    del caught
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().bytes_reserved <= 200_000
    assert len(greedy(model, prompt_of(30), 20)[0]) == 20


def test_paged_caches_are_made_only_where_every_layer_has_an_adapter() -> None:
    mlx_paged.apply_patches()
    assert all(isinstance(c, PagedKVCache) for c in upstream.make_prompt_cache(build("llama-sliding")))
