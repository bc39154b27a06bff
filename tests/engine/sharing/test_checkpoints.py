"""Models with states share prefixes at checkpoints in the prefix cache, and answer as stock mlx-lm does."""

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import sharing
from mlx_paged.engine.sharing import LEAST_INTERVAL, MOST_INTERVAL, interval_of
from mlx_paged.kv.memory import STATES_SHARE
from mlx_paged.kv.pool import BlockPool
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.cache.pools import prefix_pool_of
from mlx_paged.patches.generate.batch_generator import PagedBatchGenerator
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from mlx_paged.prefix.shelf import Shelf
from scripts.support import model_configs
from tests.support.cases import quick
from tests.support.models.batch_runs import model_of
from tests.support.models.builders import greedy, prompt_of
from tests.support.models.recurrent import RECURRENT

INTERVAL = 32
HYBRIDS = (
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5", "qwen3_5_moe",
    "qwen3_next", "recurrent_gemma", "rwkv7", "longcat_flash_ngram", "kimi_k3", "bailing_moe_v3",
)  # fmt: skip


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

    def ask(self, *prompts: list[int], new: int = 4) -> list[int]:
        """Answer the prompts together. Returns how many tokens of each were cached."""
        mlx_paged.remove_patches()
        expected = [greedy(self.model, mx.array(prompt), new)[0] for prompt in prompts]
        mlx_paged.apply_patches(self.config)
        uids = self.gen.insert([list(prompt) for prompt in prompts], [new] * len(prompts))
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        cached: dict[int, int] = {}
        while any(answer := self.gen.next()):
            for response in answer[1]:
                tokens[response.uid].append(response.token)
                cached[response.uid] = response.num_cached
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


@pytest.mark.parametrize("kind", quick(RECURRENT, "falcon_h1"))
def test_turn_computes_at_most_its_new_tokens_and_an_interval(kind: str) -> None:
    chats = Chats(model_of(kind))
    tokens = prompt_of(100, seed=1).tolist()
    chats.ask(tokens)
    for turn in range(5):
        before = len(tokens)
        tokens = tokens[: -(turn % 3) or None] + chats.answers[0][: 2 * (turn % 2)]  # some drop what was generated
        kept = min(before, len(tokens))
        tokens += prompt_of(20, seed=20 + turn).tolist()
        (cached,) = chats.ask(tokens)
        assert cached >= kept - turn % 3 - INTERVAL


@pytest.mark.slow
def test_twelve_turns_over_8k_tokens_compute_what_is_new_and_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Qwen3.5 of 24 layers, 1 of 4 with full attention, and the default interval."""
    shape = {**model_configs.OVERRIDES["qwen3_5"]["text_config"], "num_hidden_layers": 24, "full_attention_interval": 4}
    monkeypatch.setitem(
        model_configs.OVERRIDES, "qwen3_5", {"text_config": {**shape, "max_position_embeddings": 1 << 14}}
    )
    chats = Chats(model_configs.build("qwen3_5"), interval=None)
    tokens = vocabulary_prompt(2500, seed=1)
    for turn in range(12):
        known = len(tokens) - 500 if turn else 0  # the answer before is known, too
        chats.gen.insert([list(tokens)], [4])
        answer: list[int] = []
        cached = 0
        while any(step := chats.gen.next()):
            for response in step[1]:
                answer.append(response.token)
                cached = response.num_cached
        assert known - cached <= LEAST_INTERVAL  # the default for states this small
        if turn < 11:
            tokens += [*answer, *vocabulary_prompt(500, seed=2 + turn)]
    assert len(tokens) > 8000 and chats.pool.stats().checkpoint_bytes > 0
    assert answer == greedy_stock(chats, tokens, 4)


@pytest.mark.parametrize(("shared", "is_compared"), ((0, False), (7, False), (8, True)))
def test_only_prompts_with_a_common_start_are_compared(
    shared: int, is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats, compared = Chats(model_of("mamba")), []
    common_length = sharing.common_length
    monkeypatch.setattr(sharing, "common_length", lambda *given: compared.append(given) or common_length(*given))
    start = vocabulary_prompt(shared, seed=99)
    chats.ask(*([*start, 3 + n, *vocabulary_prompt(40, seed=n)] for n in range(6)))
    assert bool(compared) == is_compared


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
    for number in range(12):
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
    prompts = [prompt_of(60 + 20 * n, seed=n).tolist() for n in range(5)]
    expected = [greedy_stock(chats, prompt, 6) for prompt in prompts]
    uids = chats.gen.insert(prompts, [6] * 5)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    steps = 0
    while any(answer := chats.gen.next()):
        steps += 1
        for response in answer[1]:
            tokens[response.uid].append(response.token)
        if steps % 2:
            chats.gen.preempt_last()
    assert [tokens[uid] for uid in uids] == expected
    chats.pool.check_integrity()


def greedy_stock(chats: Chats, prompt: list[int], new: int) -> list[int]:
    mlx_paged.remove_patches()
    expected = greedy(chats.model, mx.array(prompt), new)[0]
    mlx_paged.apply_patches(chats.config)
    return list(expected)


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
    return cache.insert(
        [ord(c) for c in tokens], cache.pool.table_over((), len(tokens)), states=lambda: (nbytes, [tokens])
    )


def get(cache: PrefixCache, tokens: str) -> Any:
    match, _ = cache.adopt([ord(c) for c in tokens], to_state=True)
    if not match.length:
        return None
    slot = match.path[-1].checkpoint
    return match.length, slot.caches[0] if slot is not None else None


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


KILLED = """
import sys
from pathlib import Path
from scripts.support import model_configs
from tests.engine.sharing.test_checkpoints import Chats, vocabulary_prompt

chats = Chats(model_configs.build(sys.argv[1]), folder=Path(sys.argv[2]))
first = vocabulary_prompt(130, seed=1)
if sys.argv[3] == "first":
    chats.ask(first)
    chats.store.tidy()
    chats.gen.insert([vocabulary_prompt(90, seed=3)], [100_000])
    chats.gen.next()
    print("busy", flush=True)
    while any(chats.gen.next()):
        pass
print(chats.ask([*first[:100], *vocabulary_prompt(9, seed=2)], [*first, 5, 6]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("qwen3_next", "falcon_h1", "mamba"))
def test_killed_process_leaves_its_checkpoints_to_the_next_one(kind: str, tmp_path: Path) -> None:
    """The process gets SIGKILL during an answer; the next one answers as stock does, from the files on disk."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, kind, str(tmp_path)]
    with subprocess.Popen([*command, "first"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "busy\n"
        first.kill()
        assert first.wait() == -signal.SIGKILL
    second = subprocess.run([*command, "second"], capture_output=True, text=True, timeout=300, check=True)
    assert second.stdout == "[96, 129]\n"


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
