"""Random cases for the batch generator, each drawn from a seed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler

from scripts.support import model_configs
from tests.support.models import builders

SEAM = (
    "qwen2", "phi3", "cohere2", "olmo3", "gemma2", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3n",
    "smollm3", "exaone4", "gemma3_text", "mimo_v2_flash", "ministral3", "mamba", "jamba", "lfm2", "qwen3_next",
    "iquestloopcoder", "nemotron-nas",
)  # fmt: skip
# The adapters' families come four times as often as one that goes through mlx-lm's attention function.
FAMILIES = builders.KINDS * 4 + SEAM
HYBRIDS = (  # every module of mlx-lm whose layers keep states beside keys and values, or in their place
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "granitemoehybrid", "jamba",
    "kimi_k3", "kimi_linear", "lfm2", "lfm2_moe", "longcat_flash_ngram", "mamba", "mamba2", "nemotron_h", "olmo_hybrid",
    "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv7", "gear",
)  # fmt: skip
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # attend to the tokens that an indexer chooses
PACKING_HYBRIDS = tuple(name for name in HYBRIDS if name not in ("baichuan_m1", "plamo2"))
BOUNDED = ("llama", "qwen3", "qwen2", "phi3", "mixtral", "jamba")  # max_kv_size makes a difference to them
BLOCK_SIZES = (8, 8, 16, 32, 64, 128)
STEP_SIZES = (8, 16, 17, 33, 64, 512)

Sampler = Callable[[mx.array], mx.array]


@functools.cache
def model_of(family: str) -> Any:
    return builders.build(family) if family in builders.KINDS else model_configs.build(family)


def vocabulary(family: str) -> int:
    return builders.VOCAB if family in builders.KINDS else model_configs.VOCAB


@dataclass
class Request:
    """One request of a case.

    Attributes:
        prompt: token ids.
        num_tokens: number of tokens to generate.
        follows: request whose prompt, and in most cases answer, this prompt begins with.
        sampler: as the caller gives it.
        changes: arguments of mlx-lm's ``make_logits_processors``.
        cut: where the prompt is cut into two segments, or None.
        given: kind of the cache that comes with the request, and the number of first tokens in it. None: no cache.
        arrives: the call of ``next()`` before which it is inserted.
        cancelled: the call before which it is cancelled, or None.
        has_stop: one of its own tokens is a stop token.
        seed: its tokens are drawn with this seed; None: as the sampler says.
    """

    prompt: list[int]
    num_tokens: int
    follows: Request | None = None
    sampler: Sampler = greedy_sampler
    changes: dict[str, Any] = field(default_factory=dict)
    cut: int | None = None
    given: tuple[str, int] | None = None
    arrives: int = 0
    cancelled: int | None = None
    has_stop: bool = False
    seed: int | None = None

    def replace_prompt(self, prompt: list[int]) -> None:
        """Replace the prompt; a cut and given tokens still end before its last token."""
        self.prompt = prompt
        if self.cut is not None:
            self.cut = min(self.cut, len(prompt) - 1)
        if self.given is not None:
            self.given = self.given[0], min(self.given[1], len(prompt) - 1)


@dataclass
class Case:
    """One generator, its pool and its requests.

    Attributes:
        seed: everything else is drawn from it.
        budget_slack: blocks of memory beyond what the longest request alone takes; None: ample.
        in_place: the pool is in place, over fake kernels.
        prefixes: "none", "memory", or "disk" for a prefix cache with a folder.
        lookup: most tokens that are looked up in a step.
        tell: called with each request's prompt and answer before it runs.
        interval: tokens between checkpoints of states.
        preempts: the share of steps after which a request is preempted.
        restarts: how often the process is killed and another one continues from disk.
        packs: prompts go through the model in packs; None: as on this device.
    """

    seed: int
    family: str
    block_size: int
    step_size: int
    max_kv_size: int | None
    in_place: bool
    prefixes: str
    running: int
    prefilling: int
    budget_slack: int | None
    requests: list[Request] = field(repr=False)
    lookup: int = 0
    tell: Callable[[list[int], list[int]], None] = field(default=lambda prompt, tokens: None, repr=False)
    interval: int | None = None
    preempts: float = 0.0
    restarts: int = 0
    packs: bool | None = None


def draw(seed: int, families: tuple[str, ...] = FAMILIES) -> Case:
    """Draw the case of a seed."""
    rng = random.Random(seed)
    family = rng.choice(families)
    max_kv_size = rng.randint(5, 48) if family in BOUNDED and rng.random() < 0.2 else None
    requests = _requests(rng, family, is_bounded=max_kv_size is not None)
    has_given = any(request.given for request in requests)  # the caller's caches take memory, too
    return Case(
        seed=seed,
        family=family,
        block_size=rng.choice(BLOCK_SIZES),
        step_size=model_configs.CHUNKS.get(family) or rng.choice(STEP_SIZES),
        max_kv_size=max_kv_size,
        in_place=family in builders.KINDS and rng.random() < 0.25,
        prefixes="none" if max_kv_size is not None else rng.choice(("none", "memory", "memory", "disk")),
        running=rng.randint(1, 6),
        prefilling=rng.randint(1, 6),
        budget_slack=rng.choice((0, 0, 1, 2, 5, 10)) if rng.random() < 0.6 and not has_given else None,
        requests=requests,
    )


def draw_varied(seed: int, families: tuple[str, ...] = HYBRIDS) -> Case:
    """Draw a case with checkpoints of states, preemption at any step, edited prompts, seeded requests, kills, packs and
    look-up."""
    case = draw(seed, families)
    rng = random.Random(f"{seed} states")
    case.packs = rng.choice((None, True, True))
    case.lookup = rng.choice((0, 0, 1, 3, 8))
    case.in_place = case.max_kv_size is None and rng.random() < 0.3
    case.interval = rng.choice((0, 32, 32, 64, None))
    case.preempts = rng.choice((0.0, 0.1, 0.5))
    if case.prefixes == "disk":
        case.restarts = rng.choice((0, 1))
    for request in case.requests:
        if request.follows is None and request.given is None and len(request.prompt) > 2 and rng.random() < 0.3:
            edited = list(rng.choice(case.requests).prompt)
            edited[rng.randrange(len(edited))] = rng.randrange(vocabulary(case.family))
            request.replace_prompt([*edited, 1, 2])
        if rng.random() < 0.3:
            request.seed, request.changes = rng.randrange(1 << 30), {}
    if rng.random() < 0.1:  # a single request
        del case.requests[1:]
    return case


def _requests(rng: random.Random, family: str, *, is_bounded: bool) -> list[Request]:
    vocab = vocabulary(family)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    stems = [tokens(rng.randint(1, 150)) for _ in range(rng.randint(1, 3))]
    samplers = [greedy_sampler, greedy_sampler, *(_biased(rng, vocab) for _ in range(2))]
    requests: list[Request] = []
    for _ in range(rng.randint(2, 9)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))] + tokens(rng.choice((0, 0, 1, rng.randint(1, 60))))
        follows = rng.choice(requests) if requests and rng.random() < 0.3 else None
        if follows is not None:
            prompt = follows.prompt + tokens(rng.randint(1, 20))
        request = Request(prompt, rng.choice((1, 2, rng.randint(1, 40))), follows, sampler=rng.choice(samplers))
        if rng.random() < 0.5:
            request.changes = _changes(rng, vocab)
        if not is_bounded and len(prompt) > 3 and rng.random() < 0.3:
            request.cut = rng.randint(1, len(prompt) - 1)
        if not is_bounded and len(prompt) > 2 and rng.random() < 0.2:
            request.given = rng.choice(("stock", "paged")), rng.randint(1, len(prompt) - 1)
            request.cut = None
            # Unpatched mlx-lm keeps as many n-grams as there are tokens, and cannot batch rows of fewer than 3, either.
            if family == "longcat_flash_ngram" and request.given[1] < 3:
                request.given = None
        request.arrives = rng.choice((0, 0, 0, rng.randint(0, 20)))
        request.cancelled = rng.randint(0, 25) if rng.random() < 0.15 else None
        request.has_stop = rng.random() < 0.2
        requests.append(request)
    return requests


def _biased(rng: random.Random, vocab: int) -> Sampler:
    """Return a custom sampler: the most likely token after a fixed random bias."""
    bias = mx.array(np.random.default_rng(rng.randrange(1 << 30)).normal(0, 0.3, vocab).astype(np.float32))
    mx.eval(bias)
    return lambda logprobs: mx.argmax(logprobs + bias, axis=-1)


def _changes(rng: random.Random, vocab: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["repetition_penalty"] = rng.choice((1.1, 1.5, 0.7))
        options["repetition_context_size"] = rng.choice((1, 5, 20, 100, 0))
    for name in ("presence", "frequency"):
        if rng.random() < 0.5:
            options[f"{name}_penalty"] = rng.uniform(-1, 2)
            options[f"{name}_context_size"] = rng.choice((1, 20, 300))
    if rng.random() < 0.3:
        options["logit_bias"] = {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(3)}
    return options
