"""A program: greedy tokens of requests that come and go in two generators over one pool, on two streams.

    python -m mlx_paged.cli.doctor.ordering SEED STEPS

Prints the tokens of each request as JSON, and how often attention took which path. Run with other limits on MLX's
command buffers (MLX_MAX_OPS_PER_BUFFER), the kernels are cut into other buffers and the tokens must be the same: only
the chain of fences orders them.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from dataclasses import replace

import mlx.core as mx

from ...config import PagedConfig
from .report import Outcome, run_program
from .speed import VOCAB, random_llama

PROMPTS = (1, 7, 33, 64, 150, 300)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
WINDOW = 40
# Tokens of the gathered blocks are what all others are compared with.
REFERENCE = {"MLX_PAGED_KERNEL": "off"}
VARIANTS = {
    "1 operation in a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1"},
    "1000 operations in a command buffer": {"MLX_MAX_OPS_PER_BUFFER": "1000"},
}


def tokens_of(seed: int, steps: int) -> dict[int, list[int]]:
    """Tokens by request; requests come at random while there are ``steps`` steps to take, so that the pool grows and
    blocks are used again. Whether the kernels run, the variable ``MLX_PAGED_KERNEL`` says."""
    from ... import patches

    upstream = importlib.import_module("mlx_lm.generate")
    rng = random.Random(seed)
    model = random_llama(layer_types=LAYERS, sliding_window=WINDOW)
    patches.apply_patches(replace(PagedConfig.from_env(), block_size=8, kv_cache_memory=1 << 28))
    device = mx.default_device()
    generators = [upstream.BatchGenerator(model, stream=mx.new_stream(device), prefill_step_size=64) for _ in range(2)]
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


def tokens_with(seed: int, steps: int, **variables: str) -> Outcome:
    """:func:`tokens_of` in a process of its own, with these variables: tokens by request, and calls by path."""
    return run_program("mlx_paged.cli.doctor.ordering", str(seed), str(steps), variables=variables)


def ordering_stress(seed: int = 0, steps: int = 100) -> dict[str, str]:
    """Compare tokens under several limits on command buffers with those of gathered blocks.

    Returns:
        What came out of each: ``same``, or how it differs or failed.
    """
    reference = tokens_with(seed, steps, **REFERENCE)
    if reference.error is not None or not reference.values:
        return {"gathered blocks": reference.error or "said nothing"}
    expected: dict[str, list[int]] = reference.values[0]
    outcome = {}
    for name, variables in VARIANTS.items():
        got = tokens_with(seed, steps, **variables)
        if got.error is not None or not got.values:
            outcome[name] = got.error or "said nothing"
        else:
            outcome[name] = difference(expected, got.values[0]) or "same"
            if not got.values[-1].get("kernel"):
                outcome[name] += ", but the kernels did not run"
    return outcome


def difference(expected: dict[str, list[int]], got: dict[str, list[int]]) -> str | None:
    """Return where tokens by request differ first, and in how many requests; None if they do not."""
    wrong = [request for request, tokens in expected.items() if got.get(request) != tokens]
    if not wrong:
        return None
    first = wrong[0]
    pairs = zip(expected[first], got.get(first, []), strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected[first]), len(got.get(first, []))))
    return f"tokens differ in {len(wrong)} of {len(expected)} requests, first in request {first} at token {at}"


if __name__ == "__main__":
    from ...attention.dispatch import dispatch_counts

    print(json.dumps(tokens_of(int(sys.argv[1]), int(sys.argv[2]))))
    paths: Counter[str] = Counter()
    for choice, calls in dispatch_counts().items():
        paths[choice.path] += calls
    print(json.dumps(paths))
