"""Models with states share prefixes at checkpoints in the prefix cache, and answer as stock mlx-lm does."""

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.sharing import LEAST_INTERVAL, MOST_INTERVAL, interval_of
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.pool_memory import STATES_SHARE
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.entry import Checkpoint
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from mlx_paged.prefix.shelf import Shelf
from scripts.support import model_configs
from tests.fuzz import cases
from tests.support.cases import quick
from tests.support.models.batch_runs import model_of
from tests.support.models.builders import greedy, prompt_of
from tests.support.models.recurrent import RECURRENT

INTERVAL = 32
HYBRIDS = tuple(name for name in cases.HYBRIDS if name != "gear")


class Chats:
    """A generator with checkpoints, over one model; every answer is compared with stock mlx-lm's."""

    def __init__(
        self,
        model: Any,
        interval: int | None = INTERVAL,
        memory: int | None = None,
        folder: Path | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.config = PagedConfig(block_size=8, state_interval=interval, kv_cache_memory=memory)
        mlx_paged.apply_patches(self.config)
        self.pool = prefix_pool_of(model)
        self.store: PagedPromptCache | None = None
        if folder is None:
            self.tree = PrefixCache(self.pool)
            prefixes = SharedPrefixes(self.tree)
        else:
            self.store = PagedPromptCache(None, disk=DiskTier(Shelf(folder)), identify=lambda key: "weights")
            self.tree, prefixes = self.store.cache_of(self.pool), self.store.shared_prefixes("key", self.pool)
        self.gen = PagedBatchGenerator(model, prefixes=prefixes, **options)

    def ask(self, *prompts: list[int], new: int = 4, preempts: bool = False) -> list[int]:
        """Answer the prompts together, if ``preempts`` with a preemption after every second step. Returns how many
        tokens of each were cached."""
        mlx_paged.remove_patches()
        expected = [greedy(self.model, mx.array(prompt), new)[0] for prompt in prompts]
        mlx_paged.apply_patches(self.config)
        uids = self.gen.insert([list(prompt) for prompt in prompts], [new] * len(prompts))
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        cached: dict[int, int] = {}
        steps = 0
        while any(answer := self.gen.next()):
            for response in answer[1]:
                tokens[response.uid].append(response.token)
                cached[response.uid] = response.num_cached
            steps += 1
            if preempts and steps % 2:
                self.gen.preempt_last()
        assert [tokens[uid] for uid in uids] == expected
        self.tree.check_integrity()
        self.pool.check_integrity()
        self.answers = expected
        return [cached[uid] for uid in uids]


def vocabulary_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, model_configs.VOCAB - 3) for _ in range(length)]


@pytest.mark.parametrize("kind", quick(HYBRIDS, "qwen3_next"))
def test_diverging_prompts_reuse_all_but_an_interval(kind: str) -> None:
    chats = Chats(model_configs.build(kind), prefill_step_size=48)
    first = vocabulary_prompt(150, seed=1)
    assert chats.ask(first) == [0]
    for number, fork in enumerate((149, 101, 70, 31)):
        (cached,) = chats.ask([*first[:fork], *vocabulary_prompt(9, seed=10 + number)])
        assert fork - INTERVAL < cached <= fork
    # A prompt edited in the middle, beside a chat that continues from its answer.
    edited = [*first[:64], 1, *first[65:]]
    chats.ask(first)
    cached_edited, cached_answer = chats.ask(edited, [*first, *chats.answers[0], 5, 6, 7])
    assert cached_edited == 64 and cached_answer >= 149


@pytest.mark.parametrize("kind", quick(RECURRENT, "mamba"))
def test_checkpoint_is_kept_where_prompts_diverge(kind: str) -> None:
    chats = Chats(model_of(kind), interval=0)
    system = prompt_of(77, seed=1).tolist()
    found = [chats.ask([*system, 7 + n, *prompt_of(10, seed=n).tolist()])[0] for n in range(4)]
    assert found == [0, 0, 72, 72]  # the last whole block before it


@pytest.mark.parametrize("kind", quick(RECURRENT, "falcon_h1", "mamba"))
def test_state_serves_only_prompts_that_begin_with_its_tokens(kind: str) -> None:
    chats = Chats(model_of(kind))
    shared, tail = prompt_of(64, seed=1).tolist(), prompt_of(40, seed=2).tolist()
    chats.ask([*shared, 3, *tail])
    assert chats.ask([*shared, 4, *tail]) == [64]
    assert chats.ask([5, *shared[1:], 3, *tail]) == [0]


@pytest.mark.parametrize("kind", quick(RECURRENT, "falcon_h1"))
def test_checkpoints_keep_to_their_share_and_useful_ones_stay(kind: str) -> None:
    probe = Chats(model_of(kind))
    probe.ask(prompt_of(70, seed=1).tolist())
    each = probe.tree.state_nbytes // probe.tree.num_states
    mlx_paged.remove_patches()
    per_token = probe.pool.stats().bytes_per_token
    memory = max(int(each * 8 / STATES_SHARE), 600 * per_token)
    chats = Chats(model_of(kind), memory=memory)
    system = prompt_of(128, seed=1).tolist()
    for number in range(8):
        chats.ask([*system, 9 + number, *prompt_of(30, seed=number).tolist()], prompt_of(90, seed=90 + number).tolist())
        assert chats.tree.state_nbytes <= STATES_SHARE * memory
        stats = chats.pool.stats()
        assert stats.checkpoint_bytes == chats.tree.state_nbytes
        assert stats.bytes_reserved + stats.checkpoint_bytes <= memory
    assert chats.tree.dropped_states > 0
    assert chats.ask([*system, 300])[0] >= 96


@pytest.mark.parametrize("kind", quick(RECURRENT, "falcon_h1"))
def test_preempted_requests_continue_from_their_checkpoints(kind: str) -> None:
    chats = Chats(model_of(kind))
    chats.ask(*(prompt_of(60 + 20 * n, seed=n).tolist() for n in range(5)), new=6, preempts=True)


def test_the_interval_follows_the_size_of_the_states() -> None:
    assert interval_of(100) == LEAST_INTERVAL
    assert interval_of(19 << 20) == 2048
    assert interval_of(1 << 40) == MOST_INTERVAL


def test_very_first_prompt_has_checkpoints_by_default() -> None:
    chats = Chats(model_of("qwen3_next"), interval=None)
    prompt = prompt_of(3 * LEAST_INTERVAL + 10, seed=1).tolist()
    assert chats.ask(prompt) == [0]
    edit = 2 * LEAST_INTERVAL + 5
    assert chats.ask([*prompt[:edit], (prompt[edit] + 1) % 20, *prompt[edit + 1 :]]) == [2 * LEAST_INTERVAL]


# The cache alone, without blocks: prefixes are tokens and states only ---------------------------------------------


def cache_of(budget: int = 4000) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool((), block_size=4, memory_budget=budget)
    return pool, PrefixCache(pool)


def put(cache: PrefixCache, tokens: str, nbytes: int = 100) -> bool:
    states = Checkpoint(tokens, {"state": mx.zeros(nbytes, mx.uint8)})
    return cache.insert([ord(c) for c in tokens], cache.pool.table_over((), len(tokens)), states=lambda: states)


def get(cache: PrefixCache, tokens: str) -> Any:
    match, _ = cache.adopt([ord(c) for c in tokens], to_state=True)
    if not match.length:
        return None
    slot = match.path[-1].checkpoint
    return match.length, None if slot is None else slot.text


def test_a_match_ends_at_the_deepest_checkpoint_of_the_shared_prefix() -> None:
    pool, cache = cache_of()
    assert put(cache, "abcdefgh") and put(cache, "abcd") and put(cache, "abcdxyz") and put(cache, "abcdx")
    assert get(cache, "abcdefghi") == (8, "abcdefgh")
    assert get(cache, "abcdefg") == (4, "abcd")
    assert get(cache, "abcdefgh") == (4, "abcd")  # one token is left to compute
    assert get(cache, "abcdxyz!") == (7, "abcdxyz")
    assert get(cache, "abcdxy!") == (5, "abcdx")
    assert get(cache, "abc!") is None and get(cache, "zabcd") is None
    assert cache.known_length([ord(c) for c in "abcdefghq"]) == 8
    assert cache.known_length([ord(c) for c in "abcdxyzq!"]) == 4  # whole blocks
    cache.check_integrity()
    pool.check_integrity()


def test_least_recently_used_checkpoint_is_evicted_first() -> None:
    pool, cache = cache_of(budget=1600)  # four of 100 bytes
    for tokens in ("a" * 50, "b" * 5, "c" * 20, "d" * 30):
        assert put(cache, tokens)
    assert get(cache, "a" * 60)
    put(cache, "e" * 40)
    assert [bool(get(cache, c * 60)) for c in "abcde"] == [True, False, True, True, True]
    assert not put(cache, "f" * 40, nbytes=401)
    cache.check_integrity()
    pool.check_integrity()
    assert pool.stats().checkpoint_bytes == cache.nbytes == pool.memory.budget - pool.memory.unreserved_bytes
    cache.clear()
    assert pool.stats().checkpoint_bytes == cache.nbytes == cache.num_states == len(cache.entries) == 0


# On disk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick(HYBRIDS, "qwen3_next"))
def test_checkpoints_come_back_from_disk_after_a_kill(kind: str, tmp_path: Path) -> None:
    """Checkpoints written in idle moments serve another process."""
    model = model_configs.build(kind)
    first = vocabulary_prompt(130, seed=1)
    chats = Chats(model, folder=tmp_path)
    chats.ask(first)
    assert chats.store is not None and chats.store.disk is not None
    chats.store.tidy()
    assert not chats.store.disk.shelf.dropped
    chats.store.disk = chats.tree.tier = None  # nothing is written any more
    mlx_paged.patches.cache.pools.forget_pools()
    again = Chats(model, folder=tmp_path)
    assert again.ask([*first[:100], *vocabulary_prompt(9, seed=2)]) == [96]
    assert again.ask([*first, 5, 6]) == [129]
    assert again.ask([*first[:70], 3])[0] in (64, 70)


def test_damaged_file_of_states_loses_only_that_checkpoint(tmp_path: Path) -> None:
    model = model_of("qwen3_next")
    first = prompt_of(130, seed=1).tolist()
    chats = Chats(model, folder=tmp_path)
    chats.ask(first)
    assert chats.store is not None
    chats.store.tidy()
    chats.store.disk = chats.tree.tier = None
    (deepest,) = [entry for entry in chats.tree.entries.values() if entry.end == 128 and entry.checkpoint is not None]
    mlx_paged.patches.cache.pools.forget_pools()
    again = Chats(model, folder=tmp_path)
    assert again.store is not None and again.store.disk is not None
    file = tmp_path / f"{deepest.key.hex()}.states"
    file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    with pytest.warns(UserWarning, match="deleted the unusable file"):
        assert again.ask([*first[:128], 1, 2]) == [96]


def test_evicted_checkpoints_are_written_to_disk(tmp_path: Path) -> None:
    model = model_of("qwen3_next")
    chats = Chats(model, folder=tmp_path)
    first = prompt_of(100, seed=1).tolist()
    chats.ask(first)
    with chats.pool.lock:
        chats.tree.evict_states(1 << 40)
    assert not chats.tree.num_states and chats.pool.stats().checkpoint_bytes == 0
    assert chats.ask([*first, 3]) == [99]
    chats.tree.clear()
    assert chats.pool.stats().live_blocks == 0
