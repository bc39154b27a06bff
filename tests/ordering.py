"""A program: greedy tokens of requests that come and go in two generators over one pool, on two streams.

    python tests/ordering.py SEED STEPS

Prints the tokens of each request as JSON. Run with other limits on MLX's command buffers (MLX_MAX_OPS_PER_BUFFER), the
kernels are cut into other buffers and the tokens must be the same: only the chain of fences orders them.
"""

from __future__ import annotations

import importlib
import json
import random
import sys

import mlx.core as mx

import mlx_paged
from mlx_paged import PagedConfig
from tests.builders import VOCAB, build

mlx_lm_generate = importlib.import_module("mlx_lm.generate")
PROMPTS = (1, 7, 33, 64, 150, 300)


def tokens_of(seed: int, steps: int) -> dict[int, list[int]]:
    """Tokens by request; requests come at random while there are ``steps`` steps to take, so that the pool grows and
    blocks are used again."""
    rng = random.Random(seed)
    model = build("llama-sliding")
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=1 << 28))
    device = mx.default_device()
    generators = [
        mlx_lm_generate.BatchGenerator(model, stream=mx.new_stream(device), prefill_step_size=64) for _ in range(2)
    ]
    requests: dict[tuple[int, int], int] = {}
    tokens: dict[int, list[int]] = {}
    for step in range(steps):
        which = rng.randrange(2)
        if step % 5 == 0:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice(PROMPTS))]
            (uid,) = generators[which].insert([prompt], [rng.randint(1, 40)])
            requests[which, uid] = len(tokens)
            tokens[len(tokens)] = []
        for response in generators[which].next()[1]:
            tokens[requests[which, response.uid]].append(response.token)
    for which, generator in enumerate(generators):
        while generated := generator.next_generated():
            for response in generated:
                tokens[requests[which, response.uid]].append(response.token)
        generator.close()
    return tokens


if __name__ == "__main__":
    print(json.dumps(tokens_of(int(sys.argv[1]), int(sys.argv[2]))))
