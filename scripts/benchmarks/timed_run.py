"""Run: requests that a generator answers, with the times that its caller sees."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx

PERCENTILES = (50, 95, 99)
KEY = ("model", None, None)  # of a prompt cache


class Request(NamedTuple):
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    num_tokens: int


class SequenceGenerator:
    """mlx-lm's ``generate_step``, called like its batch generator, for one request."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps: Iterator[Any] = iter(())
        self._left = 0

    def insert_segments(self, segments: list[list[list[int]]], max_tokens: list[int]) -> list[int]:
        (prompt,), (self._left,) = segments[0], max_tokens
        self._steps = importlib.import_module("mlx_lm.generate").generate_step(
            mx.array(prompt), self._model, max_tokens=self._left, prefill_step_size=2048
        )
        return [0]

    def next(self) -> tuple[list[Any], list[Any]]:
        token, _ = next(self._steps)
        self._left -= 1
        return [], [SimpleNamespace(uid=0, token=token, finish_reason=None if self._left else "length")]

    def close(self) -> None:
        self._steps = iter(())


class CachingGenerator:
    """mlx-lm's batch generator and prompt cache, used as its server uses them.

    Attributes:
        computed_prompt_tokens: tokens of prompts that were not in the cache.
        kv_bytes: most bytes of keys and values in both.
    """

    def __init__(self, generator: Any, prefix: int) -> None:
        from mlx_lm.models.cache import LRUPromptCache

        self._generator, self._prefix = generator, prefix
        self._cache = LRUPromptCache(10)
        self.computed_prompt_tokens = self.kv_bytes = 0

    def insert_segments(self, prompts: list[list[list[int]]], max_tokens: list[int]) -> list[int]:
        return [self._insert(prompt, count) for (prompt,), count in zip(prompts, max_tokens, strict=True)]

    def _insert(self, prompt: list[int], num_tokens: int) -> int:
        found, rest = self._cache.fetch_nearest_cache(KEY, prompt)
        num_cached = len(prompt) - len(rest)
        self.computed_prompt_tokens += len(rest)
        parts = prompt[num_cached : self._prefix], prompt[max(num_cached, self._prefix) :]
        segments = [[part for part in parts if part]]
        (uid,) = self._generator.insert_segments(segments, [num_tokens], [found], [prompt[:num_cached]])
        return int(uid)

    def next(self) -> tuple[list[Any], list[Any]]:
        prompts, generated = self._generator.next()
        ends = [each.uid for each in prompts if each.end_of_segment and not each.end_of_prompt]
        for cache, tokens in self._generator.extract_cache(ends).values():
            self._cache.insert_cache(KEY, tokens[:], cache, cache_type="system")
        for response in generated:
            if response.finish_reason is not None:
                self._cache.insert_cache(KEY, response.all_tokens[:], response.prompt_cache)
        self.kv_bytes = max(self.kv_bytes, self._cache.nbytes + self._generator.prompt_cache_nbytes)
        return prompts, generated

    def close(self) -> None:
        self._generator.close()


class Run:
    """One run of requests that come together.

    Attributes:
        seconds: what it took.
        first: seconds to the first token of each request, in the order of these tokens.
        last_first: seconds until all requests had one.
        gaps: seconds between tokens of one request.
        tokens: of each request, by uid.
        computed_tokens, kv_bytes: what the generator says of them at the end, or 0.
    """

    def __init__(self, generator: Any, requests: Sequence[Request], **options: Any) -> None:
        self._generator, self._requests, self._options = generator, requests, options
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.tokens: dict[int, list[int]] = {}
        self.last_first = self.seconds = 0.0
        self.computed_tokens = self.kv_bytes = 0
        self._first_finish: float | None = None
        self._steps: list[tuple[float, int]] = []  # time and number of tokens of each call that returned some
        self._last: dict[int, float] = {}

    def go(self) -> None:
        """Run to the end."""
        begin = time.perf_counter()
        prompts, counts = [[each.prompt] for each in self._requests], [each.num_tokens for each in self._requests]
        self.tokens = {uid: [] for uid in self._generator.insert_segments(prompts, counts, **self._options)}
        left = len(self._requests)
        while left:
            _, generated = self._generator.next()
            left -= self._take(generated, time.perf_counter() - begin)
        self.seconds = time.perf_counter() - begin

    def close(self) -> None:
        """Close the generator, and let go of it."""
        self.computed_tokens = getattr(self._generator, "computed_prompt_tokens", 0)
        self.kv_bytes = getattr(self._generator, "kv_bytes", 0)
        self._generator.close()
        self._generator = None

    def _take(self, generated: Sequence[Any], now: float) -> int:
        finished = 0
        for response in generated:
            uid = response.uid
            self.tokens[uid].append(response.token)
            if uid in self._last:
                self.gaps.append(now - self._last[uid])
            else:
                self.first.append(now)
                self.last_first = now
            self._last[uid] = now
            finished += response.finish_reason is not None
        if generated:
            self._steps.append((now, len(generated)))
        if finished:
            self._first_finish = self._first_finish or now
        return finished

    def decode_rate(self) -> float | None:
        """Return the tokens per second of the steps in which every row decodes; None if there are too few."""
        end = self._first_finish or self.seconds
        # The call after the last first token may have computed a prompt, too.
        timed = [step for step in self._steps if self.last_first < step[0] <= end][1:]
        if len(timed) < 3:
            return None
        return sum(count for _, count in timed[1:]) / (timed[-1][0] - timed[0][0])


def percentiles(name: str, samples: Sequence[float]) -> dict[str, float]:
    """Return p50, p95 and p99 by nearest rank as ``NAME_p50_s`` and so on; nothing without samples."""
    ranked = sorted(samples)
    return {f"{name}_p{p}_s": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in PERCENTILES if ranked}
