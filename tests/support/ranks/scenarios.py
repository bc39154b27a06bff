"""Scenarios for ranks, in one process or in several; their outcomes must be the same."""

import importlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.drafts import depth
from mlx_paged.engine.request import RequestOptions
from mlx_paged.errors import RequestFailedError
from mlx_paged.patches import registry
from mlx_paged.patches.sharded import shard_head
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.models.batch_runs import with_packs
from tests.support.models.drafting import in_every_step

VOCAB, BLOCK, LAYERS, KV_HEADS, HEAD_DIM = 128, 8, 2, 4, 16
generate = importlib.import_module("mlx_lm.generate")


class World:
    """The model of a scenario, sharded if there are several ranks, and the scenario's deliveries.

    Args:
        num_blocks: blocks of the pool.
        config: further options of PagedConfig.
        options: further arguments of the model.
    """

    def __init__(self, num_blocks: int = 400, config: dict[str, Any] | None = None, **options: Any) -> None:
        mx.random.seed(7)
        shape = {"hidden_size": 64, "num_hidden_layers": LAYERS, "intermediate_size": 96, "vocab_size": VOCAB}
        heads = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5}
        args = {"model_type": "llama", "tie_word_embeddings": False, **shape, **heads, **options}
        self.model = llama.Model(llama.ModelArgs(**args))
        mx.eval(self.model.parameters())
        self.group = mx.distributed.init()
        if self.group.size() > 1:
            self.model.shard(self.group)
            assert shard_head(self.model, self.group)
        local = KV_HEADS // self.group.size()
        budget = num_blocks * BLOCK * 2 * LAYERS * local * HEAD_DIM * 4
        registry.remove_patches()
        mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=budget, **(config or {})))
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        self.pool = mlx_paged.pool_of(self.model)

    def generator(self, *, packs: bool = False, shares: bool = False, **options: Any) -> Any:
        prefixes = SharedPrefixes(PrefixCache(self.pool)) if shares else None
        with with_packs(packs or None):
            return generate.BatchGenerator(self.model, prefixes=prefixes, **options)

    def step(self, gen: Any) -> bool:
        try:
            prompts, generated = gen.next()
        except RequestFailedError as error:
            self.failures[error.uid] = str(error.__cause__ or error)
            return True
        for response in generated:
            self.tokens.setdefault(response.uid, []).append(response.token)
            if response.finish_reason is not None:
                self.reasons[response.uid] = response.finish_reason
        return bool(prompts or generated)

    def run(self, gen: Any) -> None:
        while self.step(gen):
            pass

    def outcome(self, gen: Any, **more: Any) -> dict[str, Any]:
        self.pool.check_integrity()
        outcome = {"tokens": self.tokens, "reasons": self.reasons, "failures": self.failures, **more}
        outcome["preemptions"] = gen.preemptions
        outcome["live"] = self.pool.stats().live_blocks
        gen.close()
        return outcome


def prompt(length: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCAB) for _ in range(length)]


def shared_prefixes() -> dict[str, Any]:
    world = World()
    gen = world.generator(shares=True, completion_batch_size=3, prefill_step_size=16)
    common = prompt(40, 1)
    gen.insert([common + prompt(n, n) for n in (5, 9, 12)], [4, 5, 3])
    world.run(gen)
    gen.insert([common + prompt(n, n) for n in (5, 30)], [4, 5])
    world.run(gen)
    return world.outcome(gen, computed=gen.computed_prompt_tokens)


class Plain(NamedTuple):
    """A scenario of requests that are inserted together: the lengths of their prompts and of their answers."""

    lengths: tuple[int, ...]
    num_tokens: tuple[int, ...]
    world: dict[str, Any] = {}  # noqa: RUF012 - never changed
    packs: bool = False

    def __call__(self) -> dict[str, Any]:
        world = World(**self.world)
        sizes = {} if self.packs else {"prefill_step_size": 16}
        gen = world.generator(packs=self.packs, completion_batch_size=6 if self.packs else 4, **sizes)
        gen.insert([prompt(n, n) for n in self.lengths], list(self.num_tokens))
        world.run(gen)
        return world.outcome(gen, packs=gen._engine.packs)


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
QUANTIZED = {"config": {"kv_bits": 8, "kv_group_size": 32}, "head_dim": 32}
PLAIN = {
    "ragged": Plain((1, 3, 40, 17, 9, 25), (6, 12, 5, 9, 3, 8)),
    "packs": Plain((1, 3, 40, 17, 9, 25), (4, 8, 3, 6, 2, 5), packs=True),
    "preemption": Plain((20, 18, 25, 22), (10, 10, 8, 8), {"num_blocks": 13}),
    "windows": Plain((30, 5, 22), (13, 13, 13), WINDOWS),
    "quantized": Plain((30, 5, 22), (6, 6, 6), QUANTIZED),
}


def cancels() -> dict[str, Any]:
    world = World()
    gen = world.generator(shares=True, completion_batch_size=3, prefill_step_size=8)
    uids = gen.insert([prompt(n, n) for n in (60, 20, 50)], [7, 7, 7])
    for _ in range(2):
        world.step(gen)
    gen.remove([uids[0]])
    for _ in range(6):
        world.step(gen)
    gen.finish([uids[1]])
    world.run(gen)
    return world.outcome(gen)


def sampling() -> dict[str, Any]:
    world = World()
    stop = [[5], [9, 3]]
    gen = world.generator(completion_batch_size=5, prefill_step_size=16, stop_tokens=stop)
    samplers = [None, make_sampler(0.8), make_sampler(1.0, top_p=0.9), make_sampler(0.7, top_k=12), make_sampler(1.0)]
    penalties = make_logits_processors(repetition_penalty=1.3, logit_bias={3: 1.5})
    options = [RequestOptions(seed=seed) for seed in (None, 3, 4, 5, 2**63)]
    gen.insert_segments(
        [[prompt(n, n)] for n in (12, 5, 22, 9, 3)],
        [8] * 5,
        samplers=[each or (lambda x: mx.argmax(x, axis=-1)) for each in samplers],
        logits_processors=[[], penalties, [], penalties, []],
        options=options,
    )
    world.run(gen)
    return world.outcome(gen)


def unseeded() -> dict[str, Any]:
    """Sample without seeds: the ranks' own draws would differ, and rank 0's must be taken."""
    world = World()
    mx.random.seed(100 + world.group.rank())
    gen = world.generator(completion_batch_size=3)
    gen.insert([prompt(n, n) for n in (12, 5)], [12, 12], samplers=[make_sampler(1.0)] * 2)
    world.run(gen)
    return world.outcome(gen)


def look_up() -> dict[str, Any]:
    world = World(config={"prompt_lookup": 6})
    with in_every_step():
        gen = world.generator(completion_batch_size=3)
    gen.insert([prompt(6, n) * 5 for n in (1, 2)], [14, 14])
    world.run(gen)
    return world.outcome(gen, drafted=world.pool.stats().drafted_tokens)


def timed_look_up() -> dict[str, Any]:
    """Look up as many tokens as rank 0's clock suggests; trials come at once."""
    world = World(config={"prompt_lookup": 6})
    with mock.patch.multiple(depth, FIRST_TRIAL=1, MOST_BETWEEN=1):
        gen = world.generator(completion_batch_size=3)
        gen.insert([prompt(6, n) * 5 for n in (1, 2)], [14, 14])
        world.run(gen)
    return world.outcome(gen, has_drafted=world.pool.stats().drafted_tokens > 0)


def schedule(count: int = 100, seed: int = 0) -> dict[str, Any]:
    """Do random operations in a small pool with a prefix cache; check its integrity on every rank on the way."""
    world = World(num_blocks=16)
    gen = world.generator(shares=True, completion_batch_size=5, prefill_step_size=16)
    chosen = random.Random(seed)
    active: list[int] = []
    roots = [prompt(24, 50 + i) for i in range(3)]
    for index in range(count):
        operation = chosen.random()
        if operation < 0.25 and len(active) < 8:
            tokens = chosen.choice(roots)[: chosen.randrange(1, 24)]
            tokens += prompt(chosen.randrange(1, 30), chosen.randrange(9))
            drawn = chosen.random() < 0.4
            options = RequestOptions(seed=chosen.randrange(1000) if drawn else None)
            sampler = make_sampler(0.9, top_p=0.95) if drawn else make_sampler(0.0)
            most = chosen.randrange(1, 25)
            active += gen.insert_segments([[tokens]], [most], samplers=[sampler], options=[options])
        elif operation < 0.32 and active:
            uid = active.pop(chosen.randrange(len(active)))
            (gen.finish if chosen.random() < 0.5 else gen.remove)([uid])
        else:
            world.step(gen)
            active = [uid for uid in active if uid not in world.reasons and uid not in world.failures]
        if index % 10 == 0:
            world.pool.check_integrity()
    world.run(gen)
    return world.outcome(gen)


OTHERS = (shared_prefixes, cancels, sampling, unseeded, look_up, timed_look_up, schedule)
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {**PLAIN, **{each.__name__: each for each in OTHERS}}


def play(names: Sequence[str]) -> dict[str, Any]:
    """Return the outcomes of scenarios, by name, with string keys as in JSON."""
    found = {}
    for name in names:
        base, _, count = name.partition(":")
        found[name] = schedule(int(count)) if count else SCENARIOS[base]()
    return found
