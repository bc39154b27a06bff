"""A shared prefix is quantised once, also in rotated pages. Adopted, parked, spilled, restored and saved prefixes
hold the same rows, and a run from them gives the same bits as a cold run."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.entry import SavedName
from mlx_paged.prefix.prefix_cache import PrefixCache
from mlx_paged.prefix.shelf import Shelf
from tests.support.cases import crossed, quick
from tests.support.models.batch_runs import answers, generator
from tests.support.models.builders import build, prompt_of
from tests.support.prefixes import adopt_longest

SIZE = 8
SALT = (SavedName("weights", 0), None)
PREFIX, REST = prompt_of(64, seed=1), prompt_of(9, seed=2)
BITS = [8, 4, (8, 4)]


def configure(bits: Any, **options: Any) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=SIZE, kv_bits=bits, kv_group_size=32, **options))


def caches_over(sequence: SequenceTables, like: list[Any]) -> list[Any]:
    return [type(cache)(sequence, cache.layer) for cache in like]


def logits_of(model: Any, caches: list[Any]) -> mx.array:
    """Return the logits of the rest, and of a token after it."""
    first = model(REST[None], cache=caches)
    logits = mx.concatenate([first, model(prompt_of(1, seed=3)[None], cache=caches)], axis=1)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize(
    ("rotate", "bits", "kind"),
    quick(
        crossed([False, True], BITS, ["llama", "gemma3"]),
        (False, 8, "llama"), (False, (8, 4), "llama"), (False, 4, "gemma3"), (True, 8, "llama"), (True, 4, "gemma3"),
    ), ids=str,
)  # fmt: skip
def test_prefix_has_the_same_rows_from_every_source(kind: str, bits: Any, rotate: bool, tmp_path: Path) -> None:
    model = build(kind)
    configure(bits, kv_rotate=rotate)
    cold = make_prompt_cache(model)
    mx.eval(model(PREFIX[None], cache=cold))
    sequence, pool = cold[0].sequence, cold[0].pool
    tokens = PREFIX.tolist()
    parked, tree, shelf = copy.deepcopy(sequence), PrefixCache(pool), Shelf(tmp_path / "prefixes")
    tree.insert(tokens, sequence.table, SALT)
    for entry in tree.entries.values():
        DiskTier(shelf).save(tree, entry)
    assert all(group.geometry.format.rotate == rotate for group in pool.groups)
    shelf.flush()
    assert len(shelf) == 8 * len(pool.groups) or kind == "gemma3"
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cold)
    expected = logits_of(model, cold)
    before = pool.stats().quantized_tokens
    assert before == 64 + 10

    hits = [parked, adopt_longest(tree, [*tokens, 1], SALT)]
    assert pool.stats().quantized_tokens == before  # a hit quantises nothing
    for hit in hits:
        assert mx.array_equal(logits_of(model, caches_over(hit, cold)), expected)
    assert pool.stats().quantized_tokens == before + 2 * 10

    # In a new pool, as after a restart.
    mlx_paged.remove_patches()
    configure(bits, kv_rotate=rotate)
    fresh = make_prompt_cache(model)
    other = fresh[0].pool
    assert other is not pool
    again = PrefixCache(other)
    again.tier = DiskTier(Shelf(tmp_path / "prefixes"))
    restored = adopt_longest(again, [*tokens, 1], SALT)
    assert restored is not None and restored.length == 64
    assert other.stats().quantized_tokens == 0
    assert mx.array_equal(logits_of(model, caches_over(restored, fresh)), expected)
    if kind == "llama" and bits != (8, 4) and not rotate:  # what mlx-lm has a quantised cache for
        saved = mlx_paged.adopt_prompt_cache(model, load_prompt_cache(str(tmp_path / "cache.safetensors")))
        assert mx.array_equal(logits_of(model, saved), expected)
        assert other.stats().quantized_tokens == 2 * 10  # what the two runs computed
    other.check_integrity()


def test_pages_of_another_format_are_never_served(tmp_path: Path) -> None:
    model, tokens = build("llama"), PREFIX.tolist()
    for bits, rotate in ((8, False), (4, True), (4, False), ((8, 4), False), (None, False)):
        configure(bits, kv_rotate=rotate)
        cache = make_prompt_cache(model)
        pool = cache[0].pool
        tree, tier = PrefixCache(pool), DiskTier(Shelf(tmp_path))
        assert tier.restore(tree, [*tokens, 1], SALT, False) == 0
        model(PREFIX[None], cache=cache)
        tree.tier = tier
        tree.insert(tokens, cache[0].sequence.table, SALT)
        tree.clear()
        tier.shelf.flush()
        assert tier.restore(PrefixCache(pool), [*tokens, 1], SALT, False) == 64
        mlx_paged.remove_patches()


def test_preempted_requests_give_the_same_tokens() -> None:
    model = build("llama")
    prompts = [prompt_of(40, seed=n).tolist() for n in range(4)]
    configure(8)
    gen = generator(model)
    expected = answers(gen, prompts, [30] * 4)
    block = mlx_paged.pool_of(model).groups[0].bytes_per_block
    gen.close()
    mlx_paged.remove_patches()
    configure(8, kv_cache_memory=25 * block)
    gen = generator(model)
    assert answers(gen, prompts, [30] * 4) == expected
    assert gen.preemptions > 0
    gen.close()


# Capacity -------------------------------------------------------------------------------------------------------------
