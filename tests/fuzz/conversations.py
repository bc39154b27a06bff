"""Random conversations over one prompt cache (turns, forks, trims, files, drafts, bounds) against stock mlx-lm."""

import contextlib
import copy
import importlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as upstream_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.patches import registry
from tests.fuzz.cases import HYBRIDS, model_of, vocabulary
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models import builders

mlx_lm_generate = importlib.import_module("mlx_lm.generate")
SEAM = ("qwen2", "phi3", "olmo3", "gemma2", "gpt_oss", "deepseek_v3", "smollm3", "gemma3n", "mimo_v2_flash")
FAMILIES = builders.KINDS * 2 + SEAM
SPECULATIVE = ("llama", "qwen3")  # stock takes no drafts behind a sliding window
TOLERANCE = 1e-3


@dataclass
class Turn:
    """One call of generate_step (or its speculative form).

    Attributes:
        prompt: token ids.
        num_tokens: number of tokens to generate.
        leaves_after: tokens after which the caller closes the generator; None: at its end.
        trims: tokens trimmed afterwards.
        forks: the turn takes a copy of the cache, and the original stays alive.
        saves: the cache goes through a file first.
        num_drafts: tokens drafted at a time.
        step_size: prefill_step_size.
    """

    prompt: list[int]
    num_tokens: int
    leaves_after: int | None
    trims: int
    forks: bool
    saves: bool
    num_drafts: int
    step_size: int


@dataclass
class Conversation:
    """Everything drawn from a seed: the model, the bound of its cache, and the turns."""

    seed: int
    family: str
    is_speculative: bool
    max_kv_size: int | None
    block_size: int
    in_place: bool
    turns: list[Turn] = field(repr=False)


class Outcome(NamedTuple):
    """The outcome of one turn: tokens, their log-probabilities, the caches' offsets, and the result of a trim."""

    tokens: list[int]
    logprobs: list[np.ndarray]
    offsets: tuple[int | None, ...]
    trimmed: int | None


def draw(seed: int, families: tuple[str, ...] = FAMILIES) -> Conversation:
    rng = random.Random(seed)
    family = rng.choice(families)
    has_adapter = family in builders.KINDS
    is_speculative = family in SPECULATIVE and rng.random() < 0.5
    max_kv_size = None if is_speculative else rng.choice((None, None, rng.randint(5, 60)))
    return Conversation(
        seed,
        family,
        is_speculative,
        max_kv_size,
        block_size=rng.choice((8, 16, 32, 64, 128)),
        in_place=has_adapter and max_kv_size is None and rng.random() < 0.3,
        turns=[_turn(rng, vocabulary(family)) for _ in range(rng.randint(1, 5))],
    )


def _turn(rng: random.Random, vocab: int) -> Turn:
    return Turn(
        prompt=[rng.randrange(vocab) for _ in range(rng.choice((1, 2, rng.randint(1, 90))))],
        num_tokens=rng.choice((1, 2, rng.randint(1, 40))),
        leaves_after=rng.randint(1, 5) if rng.random() < 0.3 else None,
        trims=rng.randint(1, 30) if rng.random() < 0.35 else 0,
        forks=rng.random() < 0.25,
        saves=rng.random() < 0.2,
        num_drafts=rng.randint(1, 6),
        step_size=rng.choice((8, 16, 33, 512)),
    )


def run(conversation: Conversation, folder: Path) -> None:
    """Hold the conversation with stock mlx-lm and with the patches; AssertionError if they differ."""
    assert not mlx_paged.is_applied()
    expected = _hold(conversation, folder)
    with contextlib.ExitStack() as stack:
        if conversation.in_place:
            stack.enter_context(fake_kernels())
        stack.callback(registry.remove_patches)
        mlx_paged.apply_patches(PagedConfig(block_size=conversation.block_size, kv_cache_memory=1 << 26))
        outcomes = _hold(conversation, folder)
        pool = mlx_paged.pool_of(model_of(conversation.family))
        assert pool is not None or conversation.family in HYBRIDS  # some have no layer of keys and values
        if pool is not None:
            pool.check_integrity()
            assert pool.stats().live_blocks == 0
    for turn, (got, wanted) in enumerate(zip(outcomes, expected, strict=True)):
        assert (got.tokens, got.offsets, got.trimmed) == (wanted.tokens, wanted.offsets, wanted.trimmed), f"turn {turn}"
        for a, b in zip(got.logprobs, wanted.logprobs, strict=True):
            assert np.abs(a - b)[np.isfinite(b)].max() < TOLERANCE, f"log-probabilities of turn {turn}"


def _hold(conversation: Conversation, folder: Path) -> list[Outcome]:
    model = model_of(conversation.family)
    draft = builders.perturbed(conversation.family, 0.1) if conversation.is_speculative else None
    cache = upstream_cache.make_prompt_cache(model, conversation.max_kv_size)
    if draft is not None:
        cache += upstream_cache.make_prompt_cache(draft)
    originals = []
    outcomes = []
    for turn in conversation.turns:
        if turn.forks:
            originals.append(cache)
            cache = copy.deepcopy(cache)
        if turn.saves and draft is None and any(not layer.empty() for layer in cache):
            cache = _through_a_file(model, cache, folder / "cache.safetensors")
        options = {"prompt_cache": cache, "max_tokens": turn.num_tokens, "prefill_step_size": turn.step_size}
        prompt = mx.array(turn.prompt, mx.uint32)
        if draft is None:
            steps = mlx_lm_generate.generate_step(prompt, model, **options)
        else:
            steps = mlx_lm_generate.speculative_generate_step(
                prompt, model, draft, num_draft_tokens=turn.num_drafts, **options
            )
        outcomes.append(_take(turn, steps, cache))
    return outcomes


def _take(turn: Turn, steps: Any, cache: list[Any]) -> Outcome:
    tokens, logprobs = [], []
    for token, logprob, *_ in steps:
        tokens.append(int(token))
        logprobs.append(np.array(logprob.astype(mx.float32)))
        if len(tokens) == turn.leaves_after:
            break
    steps.close()
    offsets = tuple(getattr(layer, "offset", None) for layer in cache)
    can_trim = turn.trims and upstream_cache.can_trim_prompt_cache(cache)
    return Outcome(tokens, logprobs, offsets, upstream_cache.trim_prompt_cache(cache, turn.trims) if can_trim else None)


def _through_a_file(model: Any, cache: list[Any], file: Path) -> list[Any]:
    upstream_cache.save_prompt_cache(str(file), cache)
    loaded: list[Any] = upstream_cache.load_prompt_cache(str(file))
    if mlx_paged.is_applied():
        loaded = mlx_paged.adopt_prompt_cache(model, loaded)
    return loaded
