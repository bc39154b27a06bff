"""DecodeBatch: one token per row and step, one step ahead; rows join, leave, fail and are suspended."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.engine.decode_batch import DecodeBatch, _elements
from mlx_paged.engine.request import Request
from mlx_paged.engine.runner import NoBlocksError
from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.errors import ConfigError, PoolExhaustedError
from mlx_paged.kv.pool import BlockPool
from tests.support.models.toy_engine import (
    BLOCK_SIZE,
    UPSTREAM,
    VOCAB,
    ToyModel,
    answer,
    caches_of,
    greedy,
    make_pool,
    make_request,
    prompt_of,
)


class Batch:
    """A decode batch and what it delivered."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.model = pool, ToyModel()
        self.batch = DecodeBatch(self.model, UPSTREAM)
        self.tokens: dict[int, list[int]] = {}

    def row(self, uid: int, prompt: list[int], **options: Any) -> Request:
        """A row whose prompt is computed up to its last token."""
        row = make_request(uid, prompt, caches_of(self.pool), max_tokens=100, **options)
        self.compute(row, prompt[:-1])
        self.tokens[uid] = []
        return row

    def compute(self, row: Request, tokens: list[int]) -> None:
        row.caches = caches_of(self.pool)
        if tokens:
            self.model(mx.array([tokens], mx.uint32), cache=row.caches)
        row.length = len(tokens)

    def join(self, *rows: Request) -> None:
        self.batch.add(rows)

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            rows = list(self.batch.rows)
            for row, token, _ in self.batch.step():
                self.tokens[row.uid].append(token)
            for row in rows:
                if row in self.batch.members:
                    row.length += 1


@pytest.fixture
def batch() -> Batch:
    return Batch(make_pool())


PROMPTS = [prompt_of(length, seed=length) for length in (1, 6, 15, 16)]


def test_rows_get_their_own_tokens_a_step_after_they_are_computed(batch: Batch) -> None:
    batch.join(*(batch.row(uid, prompt) for uid, prompt in enumerate(PROMPTS)))
    batch.step()
    assert batch.tokens == {uid: [] for uid in range(4)}, "computed, not delivered"
    batch.step(10)
    assert batch.tokens == {uid: answer(prompt, 10) for uid, prompt in enumerate(PROMPTS)}
    assert batch.model.call_sizes[-11:] == [4] * 11
    batch.pool.check_integrity()


def test_rows_join_and_leave_between_steps(batch: Batch) -> None:
    rows = [batch.row(uid, prompt) for uid, prompt in enumerate(PROMPTS)]
    batch.join(rows[0], rows[1])
    batch.step(4)
    batch.join(rows[2])
    batch.step(3)
    batch.batch.remove([rows[0]])
    assert batch.batch.rows == [rows[1], rows[2]] and len(batch.batch) == 2
    batch.join(rows[3])
    batch.step(3)
    expected = {0: 6, 1: 9, 2: 5, 3: 2}
    assert batch.tokens == {uid: answer(PROMPTS[uid], count) for uid, count in expected.items()}
    batch.batch.remove(rows)
    assert not batch.batch.rows and not batch.batch.members
    batch.pool.check_integrity()


def test_removed_row_keeps_all_its_computed_tokens(batch: Batch) -> None:
    rows = [batch.row(uid, prompt) for uid, prompt in enumerate(PROMPTS[:2])]
    batch.join(*rows)
    batch.step(5)
    row = rows[1]
    batch.batch.remove([row])
    # Of the five tokens that were sampled the last one is not delivered, nor in the cache.
    assert row.caches is not None and row.caches[0].offset == len(PROMPTS[1]) - 1 + 5
    assert row.cached_tokens() == [*PROMPTS[1], *answer(PROMPTS[1], 4)]
    logits = batch.model(mx.array([[7]], mx.uint32), cache=row.caches)
    assert mx.argmax(logits[0, -1]).item() == answer([*row.cached_tokens(), 7], 1)[0]


def test_fork_continues_independently_of_its_row(batch: Batch) -> None:
    row, other = batch.row(0, PROMPTS[1]), batch.row(1, PROMPTS[2])
    batch.join(row, other)
    batch.step(4)
    forked, known = batch.batch.fork(row), row.cached_tokens()
    for token in (3, 5):
        logits = batch.model(mx.array([[token]], mx.uint32), cache=forked)
        known.append(token)
    assert mx.argmax(logits[0, -1]).item() == answer(known, 1)[0]
    batch.step(6)
    assert batch.tokens == {0: answer(PROMPTS[1], 9), 1: answer(PROMPTS[2], 9)}


def test_suspended_row_keeps_its_undelivered_token(batch: Batch) -> None:
    rows = [batch.row(0, PROMPTS[1]), batch.row(1, PROMPTS[2])]
    batch.join(*rows)
    batch.step(5)
    batch.batch.suspend(rows[0])
    assert rows[0] not in batch.batch.members
    rows[0].release()
    batch.compute(rows[0], [*PROMPTS[1], *answer(PROMPTS[1], 4)])
    assert rows[0].next_input() == answer(PROMPTS[1], 5)[4]
    batch.join(rows[0])
    batch.step(4)
    assert batch.tokens[0] == answer(PROMPTS[1], 8) and batch.tokens[1] == answer(PROMPTS[2], 8)


# Sampling ---------------------------------------------------------------------------------------------------------


def least(logprobs: mx.array) -> mx.array:
    return mx.argmin(logprobs, axis=-1)


def test_rows_have_their_own_samplers(batch: Batch) -> None:
    """A sampler is called for each row alone, as by mlx-lm, unless all rows share it."""
    seen: list[tuple[int, ...]] = []

    def shared(logprobs: mx.array) -> mx.array:
        seen.append(logprobs.shape)
        assert mx.allclose(mx.logsumexp(logprobs, axis=-1), mx.zeros(logprobs.shape[0]), atol=1e-5)
        return greedy(logprobs)

    samplers = [shared, least, shared, greedy]
    rows = [
        batch.row(uid, prompt, sampler=sampler)
        for uid, (prompt, sampler) in enumerate(zip(PROMPTS, samplers, strict=True))
    ]
    batch.join(*rows)
    batch.step(4)
    assert seen == [(1, VOCAB)] * 8
    for uid in (0, 2, 3):
        assert batch.tokens[uid] == answer(PROMPTS[uid], 3)
    assert batch.tokens[1] != answer(PROMPTS[1], 3)


def test_processor_sees_and_changes_only_its_own_row(batch: Batch) -> None:
    contexts: list[list[int]] = []
    (first,) = answer(PROMPTS[1], 1)

    def forbid(tokens: mx.array, logits: mx.array) -> mx.array:
        contexts.append(tokens.tolist())
        return mx.where(mx.arange(VOCAB) == first, -1e9, logits)

    rows = [batch.row(0, PROMPTS[1], processors=[forbid]), batch.row(1, PROMPTS[2])]
    batch.join(*rows)
    batch.step(6)
    assert first not in batch.tokens[0]
    assert contexts == [[*PROMPTS[1], *batch.tokens[0][:n]] for n in range(6)]
    assert batch.tokens[1] == answer(PROMPTS[2], 5)


# Failures ---------------------------------------------------------------------------------------------------------


def raising(*_: Any) -> Any:
    raise ValueError("out of luck")


@pytest.mark.parametrize("part", [{"sampler": raising}, {"processors": [raising]}], ids=["sampler", "processor"])
def test_row_whose_sampler_or_processor_raises_is_reported(batch: Batch, part: dict[str, Any]) -> None:
    good, bad, last = batch.row(0, PROMPTS[1]), batch.row(1, PROMPTS[2], **part), batch.row(2, PROMPTS[3])
    batch.join(good, bad, last)
    batch.step()
    assert [(row, str(error)) for row, error in batch.batch.failed] == [(bad, "out of luck")]
    batch.batch.failed.clear()
    batch.batch.remove([bad], keep_caches=False)
    batch.step(5)
    assert batch.tokens[0] == answer(PROMPTS[1], 5) and batch.tokens[2] == answer(PROMPTS[3], 5)


def test_row_whose_parameters_exceed_the_vocabulary_is_reported(batch: Batch) -> None:
    good = batch.row(0, PROMPTS[1])
    bad = batch.row(1, PROMPTS[2], sampling=SamplingParams(temperature=1.0, top_k=VOCAB))
    batch.join(good, bad)
    batch.step()
    assert [(row, type(error)) for row, error in batch.batch.failed] == [(bad, ConfigError)]
    batch.batch.remove([bad], keep_caches=False)
    batch.step(5)
    assert batch.tokens[0] == answer(PROMPTS[1], 5)


RESULTS: dict[str, Any] = {
    "none": None,
    "a list": [3],
    "a scalar": mx.array(3),
    "two dimensions": mx.array([[3]]),
    "too many": mx.array([3, 4]),
    "floats": mx.array([3.0]),
}


@pytest.mark.parametrize("part", ["sampler", "processor"])
@pytest.mark.parametrize("result", RESULTS.values(), ids=list(RESULTS))
def test_row_with_an_invalid_sampler_or_processor_result_is_reported(batch: Batch, part: str, result: Any) -> None:
    own = {"sampler": lambda _: result} if part == "sampler" else {"processors": [lambda *_: result]}
    good, bad, last = batch.row(0, PROMPTS[1]), batch.row(1, PROMPTS[2], **own), batch.row(2, PROMPTS[3])
    batch.join(good, bad, last)
    batch.step()
    ((row, error),) = batch.batch.failed
    assert row is bad and isinstance(error, TypeError | ValueError) and "must return" in str(error)
    batch.batch.failed.clear()
    batch.batch.remove([bad], keep_caches=False)
    batch.step(5)
    assert batch.tokens[0] == answer(PROMPTS[1], 5) and batch.tokens[2] == answer(PROMPTS[3], 5)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_sampler_for_one_row_serves_several_requests(batch: Batch, rows: int) -> None:
    def of_one_row(logprobs: mx.array) -> mx.array:
        return mx.argmax(logprobs[:1], axis=-1)

    samplers = [of_one_row] * rows + [greedy] * (3 - rows)
    batch.join(*(batch.row(uid, PROMPTS[uid], sampler=sampler) for uid, sampler in enumerate(samplers)))
    batch.step(4)
    assert not batch.batch.failed
    for uid in range(3):
        assert batch.tokens[uid] == answer(PROMPTS[uid], 3)


def test_step_without_a_free_block_names_the_row() -> None:
    batch = Batch(make_pool(num_blocks=4))  # including the null block
    prompts = [prompt_of(2 * BLOCK_SIZE), prompt_of(BLOCK_SIZE + 1, seed=1)[:BLOCK_SIZE]]
    rows = [batch.row(uid, prompt) for uid, prompt in enumerate(prompts)]
    batch.join(*rows)
    batch.step()
    with pytest.raises(NoBlocksError) as caught:
        batch.batch.step()
    assert isinstance(caught.value.error, PoolExhaustedError)
    assert caught.value.request is rows[0], "both need a block, and the first one's is missing first"
    batch.batch.remove([rows[1]], keep_caches=False)
    rows[1].release()
    batch.step(4)
    assert batch.tokens[0] == answer(prompts[0], 4)
    batch.pool.check_integrity()


@pytest.mark.parametrize("indices", [[0], [4], [0, 1, 2, 3, 4], [0, 2, 4], [1, 2, 4], [0, 1, 3]])
def test_elements_selects_the_remaining_rows(indices: list[int]) -> None:
    assert _elements(mx.array([5, 6, 7, 8, 9], mx.uint32), indices).tolist() == [5 + index for index in indices]
