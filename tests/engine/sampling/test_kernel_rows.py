"""Rows whose tokens the kernel draws, on the emulator: tokens are the same alone and in any batch."""

from collections.abc import Iterator
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.sampling.batch_sampler import BatchSampler, SampledRow
from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.kernels import draw_rows
from tests.support import sampling_model
from tests.support.cases import quick
from tests.support.kernels.emulated_draws import use_emulator

VOCAB = 100
SEEDED = [
    SamplingParams(1.0, seed=1),
    SamplingParams(0.7, top_p=0.8, seed=2),
    SamplingParams(1.5, top_k=12, seed=-3),
    SamplingParams(1.0, min_p=0.1, min_tokens_to_keep=3, seed=1 << 70),
    SamplingParams(1.0, xtc_probability=0.5, xtc_threshold=0.05, top_k=40, seed=5),
    SamplingParams(1.3, top_p=0.9, repetition_penalty=1.3, seed=6),
    SamplingParams(0.0, top_p=0.5, seed=7),
]
OTHERS = [SamplingParams(), SamplingParams(1.0, xtc_probability=1.0), SamplingParams(2.0, frequency_penalty=0.2)]


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_emulator(monkeypatch)
    monkeypatch.setattr(draw_rows, "is_supported", lambda x: True)
    yield


def logits_of(rows: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return (mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * 2).astype(dtype)


def answers(rows: list[SamplingParams], logits: list[mx.array], position: int = 0) -> np.ndarray:
    """Return the tokens, ``[steps, rows]``."""
    sampler = BatchSampler()
    sampler.add([SampledRow(row, (4, 5, 6), position) for row in rows])
    found, inputs = [], mx.full((len(rows),), 9, mx.uint32)
    for step in logits:
        inputs = sampler.sample(sampler.penalised(step, inputs))
        found.append(inputs.tolist())
    return np.array(found)


def test_seeded_tokens_are_the_same_alone_and_in_any_batch() -> None:
    steps = [logits_of(len(SEEDED), seed) for seed in range(3)]
    together = answers(SEEDED, steps)
    for index, row in enumerate(SEEDED):
        own = [step[index : index + 1] for step in steps]
        assert answers([row], own)[:, 0].tolist() == together[:, index].tolist()
        beside = [mx.concatenate([logits_of(len(OTHERS), 77), each]) for each in own]
        assert answers([*OTHERS, row], beside)[:, -1].tolist() == together[:, index].tolist()
        # After a preemption.
        assert answers([row], own[1:], 1)[:, 0].tolist() == together[1:, index].tolist() or row.has_penalties
    assert len({tuple(column) for column in together.T}) == len(SEEDED)


def test_positions_drawn_together_equal_those_of_single_steps() -> None:
    row, step = SamplingParams(3.0, seed=8), logits_of(1, 3)
    one_by_one = answers([row], [step] * 4)[:, 0].tolist()
    sampler = BatchSampler()
    sampler.add([SampledRow(row, (), 0)])
    logits = sampler.penalised(mx.contiguous(mx.broadcast_to(step, (4, VOCAB))), mx.zeros((1,), mx.uint32))
    assert sampler.sample(logits, [0] * 4, range(4)).tolist() == one_by_one
    assert len(set(one_by_one)) > 1


def test_greedy_rows_take_the_first_largest_without_a_launch() -> None:
    logits = logits_of(3, 5, mx.float32)
    logits[1, [40, 90]] = 30.0
    rows = [SamplingParams(1.0), SamplingParams(), SamplingParams(1.0)]
    with mock.patch.object(mx, "argmax", side_effect=AssertionError("a launch of its own")):
        assert answers(rows, [logits])[0, 1] == 40
    with mock.patch.object(draw_rows, "draw_rows", side_effect=AssertionError("nobody draws")):
        assert answers([SamplingParams()] * 3, [logits])[0, 1] == 40


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("others", [SamplingParams(), SamplingParams(1.0)], ids=["greedy", "drawn"])
def test_greedy_16_bit_rows_break_ties_like_log_probabilities(dtype: mx.Dtype, others: SamplingParams) -> None:
    logits = mx.zeros((2, VOCAB), dtype)
    logits[0, 40], logits[0, 90] = 1.0, 1.0 + (2**-7 if dtype == mx.bfloat16 else 2**-10)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert mx.argmax(logits[0]).item() == 90 and mx.argmax(logprobs[0]).item() == 40
    assert answers([SamplingParams(), others], [logits])[0, 0] == 40
    assert answers([SamplingParams(), others], [logits.astype(mx.float32)])[0, 0] == 90


def test_a_temperature_that_float32_cannot_hold_is_greedy() -> None:
    logits = logits_of(1, 3, mx.float32)
    for temperature in (1e-30, 1e-44, 1e-50):
        assert answers([SamplingParams(temperature, seed=3)], [logits])[0, 0] == mx.argmax(logits).item()


def test_rows_without_a_seed_follow_mlxs_state_and_differ() -> None:
    logits = mx.zeros((6, VOCAB))
    found = []
    for seed in (1, 1, 2):
        mx.random.seed(seed)
        found.append(answers([SamplingParams(1.0)] * 6, [logits] * 3))
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any()
    assert len(set(found[0].ravel().tolist())) > 9


CHI_SQUARE = [
    SamplingParams(1.3, top_p=0.9, min_p=0.02, top_k=30),
    SamplingParams(1.0, xtc_probability=0.5, xtc_threshold=0.05, xtc_special_tokens=(1,), top_p=0.95),
]


@pytest.mark.parametrize("params", quick(CHI_SQUARE, CHI_SQUARE[0]), ids=str)
def test_tokens_are_drawn_with_their_probabilities(params: SamplingParams) -> None:
    mx.random.seed(3)
    count, steps, logits = 300, 4, logits_of(1, 11, mx.float32)
    batch = mx.contiguous(mx.broadcast_to(logits, (count, VOCAB)))
    found = answers([params] * count, [batch] * steps)
    sampling_model.assert_drawn_as(found.ravel(), np.array(logits[0]).astype(np.float64), params, 5)


@pytest.mark.parametrize("seed", [None, 4])
def test_random_numbers_of_accepted_drafts_are_not_reused(seed: int | None) -> None:
    """A step draws two tokens of the first row, and both are accepted; the next step draws from the third position
    on."""
    sampler, same = BatchSampler(), mx.zeros((3, VOCAB))
    sampler.add([SampledRow(SamplingParams(1.0, seed=seed), (), 0)] * 2)
    found = []
    for _ in range(12):
        sampler.penalised(same, mx.zeros((3,), mx.uint32), [0, 0, 1])
        found.append(sampler.sample(same, [0, 0, 1], [0, 1, 0]).tolist())
        sampler.note_accepted([1, 0])
    taken = [token for step in found for token in step[:2]]
    assert len(set(taken)) > 15, "24 draws of 100 tokens"
    if seed is not None:
        steps = answers([SamplingParams(1.0, seed=seed)], [same[:1]] * 24)
        assert taken == steps[:, 0].tolist()
        assert [step[2] for step in found] == steps[:12, 0].tolist()
