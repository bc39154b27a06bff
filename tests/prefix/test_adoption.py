"""Detached, parked and adopted prefixes hold references only and give the results of computing them again."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.patches.cache.layer_cache import PagedLayerCache
from mlx_paged.prefix.prefix_cache import PrefixCache
from tests.support.cases import crossed, quick
from tests.support.models.builders import KINDS, WINDOW, build, prompt_of
from tests.support.prefixes import adopt_longest, check_contents, compute, make_pool

BLOCK = 8


def caches_of(sequence: SequenceTables) -> list[PagedLayerCache]:
    return [PagedLayerCache(sequence, layer) for layer in range(sequence.num_layers)]


def paged(kind: str):
    mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
    return build(kind)


def forward(model, tokens, caches) -> np.ndarray:
    logits = model(mx.array(tokens)[None], cache=caches)
    mx.eval(logits, [c.state[0] for c in caches])
    return np.array(logits[0])


def log_probs(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def generate(model, tokens, caches, steps: int = 8) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after ``tokens`` and the logits they came from."""
    rows, out = [forward(model, tokens, caches)[-1]], []
    for _ in range(steps):
        out.append(int(rows[-1].argmax()))
        rows.append(forward(model, out[-1:], caches)[-1])
    return out, np.stack(rows)


def test_prefill_after_an_adopted_prefix_allocates_suffix_blocks_only() -> None:
    model = paged("llama")
    prefix, suffix_tokens = prompt_of(5 * BLOCK + 3, seed=1).tolist(), 2 * BLOCK + 2
    donor = upstream.make_prompt_cache(model)
    forward(model, prefix, donor)
    pool = mlx_paged.pool_of(model)
    assert pool is not None
    parked = copy.deepcopy(donor[0].sequence)
    donor_sequence = donor.pop().sequence
    pool.release_table(donor_sequence.table)
    del donor, donor_sequence
    before = pool.stats()
    assert (before.live_blocks, before.shared_blocks, before.cow_forks) == (6, 0, 0)  # parked sets are counted

    siblings = []
    for number in range(4):
        adopted = copy.deepcopy(parked)
        assert adopted.length == len(prefix)
        stats = pool.stats()
        assert stats.live_blocks == before.live_blocks + number * 3 and stats.bytes_reserved >= before.bytes_reserved
        forward(model, prompt_of(suffix_tokens, seed=number).tolist(), caches_of(adopted))
        siblings.append(adopted)
        stats = pool.stats()
        # 5 whole blocks are shared; the copied tail and the suffix take 3 blocks.
        assert stats.live_blocks == before.live_blocks + (number + 1) * 3
        assert stats.cow_forks == number + 1
    pool.check_integrity()

    pool.release_table(parked.table)
    assert pool.stats().live_blocks == 5 + 4 * 3  # the parked set's own tail is free again
    for adopted in siblings:
        pool.release_table(adopted.table)
    assert pool.stats().live_blocks == 0
    pool.check_integrity()


# The quick cases: one kind with windows, one without.
@pytest.mark.parametrize(
    ("kind", "cut"), quick(crossed(KINDS, [BLOCK, 3 * BLOCK, 56]), ("llama-sliding", 56),
    ("qwen3", 8))
)  # fmt: skip
def test_shared_prefix_equals_a_cold_prefill_with_the_same_cut(kind: str, cut: int) -> None:
    model = paged(kind)
    tokens = prompt_of(70, seed=2).tolist()
    cold = upstream.make_prompt_cache(model)
    forward(model, tokens[:cut], cold)
    tree = PrefixCache(cold[0].pool)
    tree.insert(tokens[:cut], cold[0].sequence.table)
    shared = adopt_longest(tree, tokens)
    assert shared is not None and shared.length == cut
    expected = generate(model, tokens[cut:], cold)
    got = generate(model, tokens[cut:], caches_of(shared))
    assert got[0] == expected[0]
    np.testing.assert_array_equal(got[1], expected[1])
    # Without a cut, only the rounding differs.
    whole = generate(model, tokens, upstream.make_prompt_cache(model))
    assert whole[0] == got[0]
    assert np.abs(log_probs(whole[1]) - log_probs(got[1])).max() <= 1e-4
    shared.pool.check_integrity()
    tree.check_integrity()


@pytest.mark.parametrize("kind", quick(["llama", "gemma3"], "gemma3"))
def test_parked_sequence_continues_like_its_donor(kind: str) -> None:
    """This holds past a window too, after decode steps that rotated mlx-lm's ring."""
    model = paged(kind)
    donor = upstream.make_prompt_cache(model)
    generate(model, prompt_of(WINDOW + 21, seed=3).tolist(), donor, steps=5)
    parked = copy.deepcopy(donor[0].sequence)
    for following in ([7], prompt_of(11, seed=4).tolist()):
        expected = generate(model, following, copy.deepcopy(donor))
        for _ in range(2):  # a parked set can be adopted more than once
            got = generate(model, following, caches_of(copy.deepcopy(parked)))
            np.testing.assert_array_equal(got[1], expected[1])


def test_sharers_of_a_partial_tail_never_see_each_others_tokens() -> None:
    """The donor keeps writing to its tail block after sharing it."""
    pool = make_pool((None, 7))
    shared = tuple(range(10))  # two tokens in the third block
    donor = pool.new_table()
    compute(pool, donor, shared)
    tree = PrefixCache(pool)
    tree.insert(shared, donor)
    sharers = [(donor, shared)] + [(tree.adopt((*shared, 0))[1], shared) for _ in range(3)]
    for step in range(9):
        for number, (table, tokens) in enumerate(sharers):
            sharers[number] = table, (*tokens, 1000 * number + step)
            compute(pool, table, sharers[number][1])
            if step == 4:
                tree.insert(sharers[number][1], table)
            for others, theirs in sharers:
                check_contents(pool, others, theirs)
        pool.check_integrity()
    for number, (_, tokens) in enumerate(sharers):
        match, table = tree.adopt((*tokens, 0))
        assert match.length == (len(shared) + 5) // 4 * 4, number
        check_contents(pool, table, tokens)
    tree.check_integrity()


def test_chunk_after_a_different_prefix_never_matches() -> None:
    model = paged("llama")
    chunk = prompt_of(4 * BLOCK, seed=5).tolist()
    first, second = ([n] * BLOCK + chunk for n in (1, 2))
    cache = upstream.make_prompt_cache(model)
    forward(model, first, cache)
    tree = PrefixCache(cache[0].pool)
    tree.insert(first, cache[0].sequence.table, "model")
    assert adopt_longest(tree, [*second, 0], "model") is None
    assert adopt_longest(tree, [*chunk, 0], "model") is None
    assert adopt_longest(tree, [*first, 0], "other model") is None
    whole = adopt_longest(tree, [*first, 0], "model")
    assert whole is not None and whole.length == len(first)
    again = adopt_longest(tree, first, "model")  # one token is left to compute
    assert again is not None and again.length == len(first) - BLOCK
    assert tree.pool.stats().prefix_hit_tokens == 2 * len(first) - BLOCK
