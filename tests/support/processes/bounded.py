"""Models and stock runs with a bounded cache (``max_kv_size``)."""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as upstream
from mlx_lm.models import qwen2

import mlx_paged
from tests.support.models.builders import COMMON, build, greedy, prompt_of

KINDS = ("qwen3", "qwen2")  # one by an adapter, one by the seam
SIZE, STEP = 32, 16


@functools.cache
def model_of(kind: str) -> Any:
    return build("qwen3") if kind == "qwen3" else build_qwen2()


def build_qwen2() -> Any:
    """Return a model that goes through the seam."""
    mx.random.seed(0)
    args = {**COMMON, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 3}
    model = qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **args))
    mx.eval(model.parameters())
    return model


@functools.cache
def solo(kind: str, length: int, num_tokens: int, size: int = SIZE, step: int = STEP) -> tuple[list[int], np.ndarray]:
    """Return the tokens and log-probabilities of a single run of stock mlx-lm."""
    assert not mlx_paged.is_applied()
    return greedy(model_of(kind), prompt_of(length, seed=length), num_tokens, max_kv_size=size, prefill_step_size=step)


def conversation(model: Any, turns: Sequence[int]) -> tuple[list[Any], list[np.ndarray]]:
    """Return a bounded prompt cache after ``turns`` of that many tokens, each in one call, and the logits."""
    cache, logits = upstream.make_prompt_cache(model, SIZE), []
    tokens = prompt_of(sum(turns), seed=4)
    done = 0
    for turn in turns:
        logits.append(np.array(model(tokens[None, done : done + turn], cache=cache)))
        done += turn
    return cache, logits
