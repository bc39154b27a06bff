"""Request: where its chunks end, what it computes next, and what it holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.engine.request import Request, sequence_of
from mlx_paged.kv.pool import BlockPool
from tests.support.models.toy_engine import ToyModel, caches_of, greedy, make_pool, make_request, prompt_of
from tests.support.requests import request_of


def chunks_of(request: Request, most: int | None, grid: int | None = None) -> list[int]:
    """The lengths of its chunks until it decodes."""
    chunks = []
    while not request.is_prefilled:
        chunks.append(request.chunk_length(most, grid))
        request.length += chunks[-1]
    return chunks


@pytest.mark.parametrize(
    ("length", "boundaries", "most", "grid", "chunks"),
    [
        (1, (), None, None, []),  # its only token is decoded
        (20, (), None, None, [19]),
        (20, (), 8, None, [8, 8, 3]),
        (20, (5, 6), None, None, [5, 1, 13]),
        (20, (5, 6), 4, None, [4, 1, 1, 4, 4, 4, 1]),
        (20, (), None, 8, [8, 8, 3]),
        (20, (5,), 6, 8, [5, 3, 8, 3]),
        (50, (), 8, 8, [8, 8, 8, 8, 8, 8, 1]),
        (50, (), 20, 8, [16, 16, 17]),
        (50, (3, 30), 20, 8, [3, 13, 14, 19]),
        (20, (19,), None, None, [19]),
    ],
)
def test_chunks_end_where_segments_do_and_at_the_grid(
    length: int, boundaries: tuple[int, ...], most: int | None, grid: int | None, chunks: list[int]
) -> None:
    request = request_of(0, length, boundaries)
    assert chunks_of(request, most, grid) == chunks
    assert request.length == length - 1 and request.segment_ends == set(boundaries)


def test_cached_tokens_are_not_computed_nor_their_boundaries() -> None:
    request = request_of(0, 20, (5, 12))
    request.length = 7
    assert chunks_of(request, 6) == [5, 6, 1]


def with_prefix(pool: BlockPool, tokens: list[int]) -> list[PagedKVCache]:
    caches = caches_of(pool)
    ToyModel()(mx.array([tokens], mx.uint32), cache=caches)
    return caches


def test_a_request_goes_on_where_the_cache_that_came_with_it_ends() -> None:
    known, new = prompt_of(10), [1, 2, 3]
    request = make_request(0, new, with_prefix(make_pool(), known), history=known, max_tokens=5)
    assert request.length == request.kept == 10 and request.cached_tokens() == known
    assert request.next_tokens(9) == new and request.num_missing == len(new) + 5
    request.length += 2
    assert request.is_prefilled and request.cached_tokens() == [*known, 1, 2]
    assert request.next_tokens(1) == [3] and request.next_input() == 3


def test_empty_caches_are_none() -> None:
    request = make_request(0, [1, 2], caches_of(make_pool()))
    assert request.given is None and request.kept == 0 and request.tables is None


def test_the_token_that_was_sampled_and_not_delivered_comes_next() -> None:
    request = make_request(0, [1, 2], [])
    assert request.next_input() == 2
    request.undelivered = 7
    assert request.next_input() == 7


def test_release_gives_back_what_it_holds_and_keeps_what_it_came_with() -> None:
    pool = make_pool()
    given = with_prefix(pool, prompt_of(10))
    request = make_request(0, [1], given, history=prompt_of(10))
    held = pool.stats().live_blocks
    assert held == 3 and request.tables is not given[0].sequence.tables  # a fork: the owner may go on
    request.caches = with_prefix(pool, prompt_of(17))
    assert request.tables is request.caches[0].sequence.tables and pool.stats().live_blocks == held + 5
    request.release()
    assert request.caches is None and pool.stats().live_blocks == held
    assert [t.block_ids for t in request.tables or ()] == [t.block_ids for t in given[0].sequence.tables]
    request.release()  # there is no more
    assert pool.stats().live_blocks == held
    pool.check_integrity()


def test_the_tables_are_those_of_the_first_paged_layer() -> None:
    class State:
        def empty(self) -> bool:
            return True

    (paged,) = caches_of(make_pool())
    mixed: list[Any] = [State(), paged]
    assert sequence_of(mixed) is paged.sequence
    assert sequence_of([State()]) is None and sequence_of([]) is None
    assert make_request(0, [1, 2], [State()], sampler=greedy).tables is None
