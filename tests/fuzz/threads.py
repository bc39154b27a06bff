"""Random generations in several threads at once, over one model, against stock mlx-lm's single runs."""

import importlib
import random
import threading
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches import registry
from tests.fuzz.cases import model_of, vocabulary
from tests.support.models import builders

mlx_lm_generate = importlib.import_module("mlx_lm.generate")
FAMILIES = (*builders.KINDS, "qwen2", "gpt_oss", "deepseek_v3", "mamba", "qwen3_next")
MOST_SECONDS = 120


class InjectedError(Exception):
    """Raised by a caller's sampler."""


class Work:
    """The work of one thread: generations one after the other; ``raises_at`` is the step where its sampler raises."""

    def __init__(self, rng: random.Random, family: str) -> None:
        vocab = vocabulary(family)
        self.prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 90))] for _ in range(rng.randint(1, 3))]
        self.num_tokens = rng.randint(1, 20)
        self.batched = rng.random() < 0.4
        self.raises_at = rng.randint(1, 8) if rng.random() < 0.3 else None
        self.tokens: list[list[int]] = []
        self.error: BaseException | None = None

    def expect(self, model: Any) -> list[list[int]]:
        """Return the tokens of each prompt, one after the other."""
        return [self._one(model, prompt, None) for prompt in self.prompts]

    def run(self, model: Any) -> None:
        try:
            if self.raises_at is not None:
                with pytest.raises(InjectedError):
                    self._one(model, self.prompts[0] * 2, self.raises_at)
            if self.batched:
                generator = mlx_lm_generate.BatchGenerator(model)
                uids = generator.insert(self.prompts, [self.num_tokens] * len(self.prompts))
                tokens: dict[int, list[int]] = {uid: [] for uid in uids}
                while generated := generator.next_generated():
                    for response in generated:
                        tokens[response.uid].append(response.token)
                generator.close()
                self.tokens = [tokens[uid] for uid in uids]
            else:
                self.tokens = self.expect(model)
        except BaseException as error:
            self.error = error

    def _one(self, model: Any, prompt: list[int], raises_at: int | None) -> list[int]:
        calls = 0

        def sampler(logprobs: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            if raises_at is not None and calls >= raises_at:
                raise InjectedError
            return mx.argmax(logprobs, axis=-1)

        steps = mlx_lm_generate.generate_step(
            mx.array(prompt, mx.uint32), model, max_tokens=max(self.num_tokens, raises_at or 0), sampler=sampler
        )
        return [int(token) for token, _ in steps]


def run(seed: int) -> None:
    """Run generations in several threads and alone; AssertionError if they differ."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    model = model_of(family)
    works = [Work(rng, family) for _ in range(rng.randint(2, 5))]
    expected = [work.expect(model) for work in works]
    mlx_paged.apply_patches(PagedConfig(block_size=rng.choice((8, 32)), kv_cache_memory=1 << 26))
    try:
        threads = [threading.Thread(target=work.run, args=(model,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(MOST_SECONDS)
            assert not thread.is_alive(), f"{family}: a thread waits for ever"
        errors = [work.error for work in works if work.error is not None]
        assert not errors, f"{family}: {errors}"
        assert [work.tokens for work in works] == expected, family
        pool = mlx_paged.pool_of(model)
        if pool is not None:
            pool.check_integrity()
            assert pool.stats().live_blocks == 0
    finally:
        registry.remove_patches()
