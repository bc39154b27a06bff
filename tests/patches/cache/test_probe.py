"""Probes: passes that are built and dropped."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx

import mlx_paged
from scripts.support import model_configs


def test_a_model_that_keeps_what_it_computes_runs_in_another_thread() -> None:
    """Gemma 3n clips weights in each pass and keeps the clipped ones."""
    generate = importlib.import_module("mlx_lm.generate")
    model = model_configs.build("gemma3n")
    prompt = [1, 2, 3, 4, 5]
    expected = [token for token, _ in generate.generate_step(mx.array(prompt), model, max_tokens=5)]
    mlx_paged.apply_patches(mlx_paged.PagedConfig(block_size=16, kv_cache_memory=32 << 20))
    generator = generate.BatchGenerator(model)

    def run() -> list[int]:
        generator.insert([prompt], [5])
        tokens = []
        while responses := generator.next_generated():
            tokens += [response.token for response in responses]
        return tokens

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == expected
    generator.close()
