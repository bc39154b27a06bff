"""Quantised pages under models with sinks, soft caps, windows, shared keys, other states and latents."""

from typing import Any

import pytest

import mlx_paged
from mlx_paged import PagedConfig
from scripts.model_matrix import PROMPTS, alone, batched, difference
from scripts.support import model_configs
from tests.support.cases import crossed, quick
from tests.support.models.batch_runs import fall_throughs

WIDE = {"head_dim": 32, "hidden_size": 128, "query_pre_attn_scalar": 32}
SMALL = "head size 24 is not a multiple of kv_group_size 32"
SAMPLE: dict[str, str | None] = {  # why the model's keys are not quantised, if so
    "gpt_oss": None,  # sinks
    "gemma2": None,  # a soft cap
    "gemma3_text": None, "ministral3": None, "cohere2": None,  # windows
    "gemma3n": None, "gemma4_text": None,  # shared keys
    "falcon_h1": None, "baichuan_m1": None,  # states beside keys, windows with states
    "mimo_v2_flash": SMALL,  # values of another size
    "deepseek_v3": "latents", "deepseek_v32": "latents",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "bits"), quick(crossed(list(SAMPLE), [8, (8, 4)]), ("deepseek_v3", (8, 4)))
)  # fmt: skip
def test_batches_and_packs_give_the_tokens_of_solo_runs(name: str, bits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in WIDE.items():
        monkeypatch.setitem(model_configs.COMMON, key, value)
    text = model_configs.OVERRIDES.get(name, {}).get("text_config", {})
    for key in text.keys() & WIDE.keys():  # a copy of the common options
        monkeypatch.setitem(text, key, WIDE[key])
    model = model_configs.build(name)
    chunk = model_configs.CHUNKS.get(name, model_configs.CHUNK)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=1 << 28, kv_bits=bits, kv_group_size=32))

    def run() -> None:
        runs = [alone(model, length, 12, chunk) for length in PROMPTS]
        assert difference(batched(model, 12, chunk)[0], runs) is not None
        assert difference(batched(model, 12, chunk, packs=True)[0], runs) is not None

    _, messages = fall_throughs(run)
    pool, why = mlx_paged.pool_of(model), SAMPLE[name]
    for group in pool.groups:
        assert group.is_quantized == (group.dense_reason is None)
        assert (why is None and group.is_quantized) or (why is not None and why in str(group.dense_reason))
    told = [message for message in messages if "not quantised" in message]
    assert len(told) == (0 if why is None else len(pool.groups)), messages
    assert (pool.stats().quantized_tokens > 0) == (why is None)
    pool.check_integrity()
