"""Prefixes of rotated pages: the same rows wherever they come from, and never those of pages that are not rotated."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.prefix.detached import DetachedPrefix, donate
from mlx_paged.prefix.radix import RadixTree
from mlx_paged.prefix.spill import SpillStore
from tests.prefix.test_quantized_prefixes import PREFIX, SIZE, caches_over, logits_of
from tests.support.cases import crossed, quick
from tests.support.models.builders import build
from tests.support.prefixes import adopt_longest


def configure(bits: Any, *, rotate: bool) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=SIZE, kv_bits=bits, kv_group_size=32, kv_rotate=rotate))


@pytest.mark.parametrize(
    ("bits", "kind"), quick(crossed([8, 4, (8, 4)], ["llama", "gemma3"]), (8, "llama"), ((8, 4), "llama"),
    (4, "gemma3")), ids=str
)  # fmt: skip
def test_hits_and_restored_prefixes_equal_the_run_that_went_on(kind: str, bits: Any, tmp_path: Path) -> None:
    model, tokens = build(kind), PREFIX.tolist()
    configure(bits, rotate=True)
    cold = make_prompt_cache(model)
    mx.eval(model(PREFIX[None], cache=cold))
    sequence, pool = cold[0].sequence, cold[0].pool
    assert all(group.geometry.format.rotate for group in pool.groups)
    parked, tree = DetachedPrefix(sequence), RadixTree(pool)
    node = donate(tree, tokens, sequence).node
    assert SpillStore(tmp_path).save(pool, node, "weights") == 8
    expected = logits_of(model, cold)
    before = pool.stats().quantized_tokens
    for hit in (parked.adopt(), adopt_longest(tree, [*tokens, 1])):
        assert mx.array_equal(logits_of(model, caches_over(hit, cold)), expected)
    assert pool.stats().quantized_tokens == before + 2 * 10  # the rest, twice

    mlx_paged.remove_patches()
    configure(bits, rotate=True)
    fresh = make_prompt_cache(model)
    assert fresh[0].pool is not pool
    again = RadixTree(fresh[0].pool)
    assert SpillStore(tmp_path).restore(again, [*tokens, 1], None, "weights") == 64
    assert fresh[0].pool.stats().quantized_tokens == 0
    restored = adopt_longest(again, [*tokens, 1])
    assert mx.array_equal(logits_of(model, caches_over(restored, fresh)), expected)
    fresh[0].pool.check_integrity()


def test_pages_that_are_rotated_otherwise_are_never_served(tmp_path: Path) -> None:
    model, tokens = build("llama"), PREFIX.tolist()
    for rotate in (True, False):
        configure(4, rotate=rotate)
        cache = make_prompt_cache(model)
        pool = cache[0].pool
        tree, store = RadixTree(pool), SpillStore(tmp_path)
        assert store.restore(tree, [*tokens, 1], None, "weights") == 0
        model(PREFIX[None], cache=cache)
        assert store.save(pool, donate(tree, tokens, cache[0].sequence).node, "weights") == 8
        assert store.restore(RadixTree(pool), [*tokens, 1], None, "weights") == 64
        mlx_paged.remove_patches()
