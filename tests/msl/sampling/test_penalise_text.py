"""The penalty kernel on the emulator: the results of its NumPy model, and histories with one more token."""

from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.engine.sampling.penalties import Penalties
from mlx_paged.kernels import penalise_rows as module
from mlx_paged.kernels.penalise_rows import BODY, DTYPES, Histories, example, kernel_key, penalise_rows, penalised_step
from mlx_paged.kernels.trial import launch_alone
from tests.engine.sampling.test_penalties import VOCAB, Rows
from tests.support.cases import quick, slow
from tests.support.kernels.emulated_draws import use_emulator
from tests.support.msl import registers
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Emulated


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several chunks per vocabulary and several entries per thread."""
    monkeypatch.setattr(module, "GROUPS", 3)
    monkeypatch.setattr(module, "CHUNK", 200)


def check_step(count: int, vocab: int, room: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> None:
    x, tokens, places, seen = example(np.random.default_rng(seed), count, vocab, room)
    logits = mx.array(x).astype(dtype)
    given = Histories(*(mx.array(each) for each in seen))
    found, after = penalise_rows(logits, mx.array(tokens), mx.array(places), given)
    expected, *known = penalised_step(np.array(logits.astype(mx.float32)), tokens, places, *seen)
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-6, atol=1e-6)
    for mine, right in zip(after[:3], known, strict=True):
        np.testing.assert_array_equal(np.array(mine), right)


@pytest.mark.parametrize(
    ("dtype", "count", "vocab", "room"),
    quick([(a, *b) for a in DTYPES for b in [(1, 5, 8), (3, 200, 40), (9, 450, 130)]], (mx.bfloat16, 1, 5, 8),
    (mx.float16, 3, 200, 40), (mx.float32, 9, 450, 130))
)  # fmt: skip
def test_step_equals_that_of_the_model(
    monkeypatch: pytest.MonkeyPatch, count: int, vocab: int, room: int, dtype: mx.Dtype
) -> None:
    use_emulator(monkeypatch)
    for seed in range(4):
        check_step(count, vocab, room, dtype, seed)


@pytest.mark.parametrize("count", [2, *slow(20)])
def test_thread_order_does_not_change_a_step(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Run the thread checker, with few rows, whose tokens are in Metal's constant memory, and with more."""
    use_emulator(monkeypatch, checked=True, orders=(0, 1, 2))
    check_step(count, 301, 50, mx.bfloat16)


PARAMS = [
    SamplingParams(repetition_penalty=1.3, repetition_context_size=2, presence_penalty=0.7, presence_context_size=5),
    SamplingParams(),
    SamplingParams(frequency_penalty=-1.0, frequency_context_size=None, logit_bias={3: 2.5}),
    SamplingParams(repetition_penalty=0.5, frequency_penalty=0.25, frequency_context_size=1),
]


@pytest.mark.parametrize("first", range(3))
def test_penalties_match_the_histories_as_rows_join_and_leave(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """This is the test of MLX's operations, with the kernel in their place."""
    use_emulator(monkeypatch)
    monkeypatch.setattr(module, "is_supported", lambda x: True)
    monkeypatch.setattr(Penalties, "_see", mock.Mock(side_effect=AssertionError("MLX's operations")))
    rng, rows = np.random.default_rng(first), Rows()
    rows.add([(each, rng.integers(0, VOCAB, int(rng.integers(0, 9))).tolist()) for each in PARAMS[first:]])
    for _ in range(3):
        rows.step(rng, mx.bfloat16)
    leaving = rows.rows[0]
    rows.keep(list(range(1, len(rows.rows))))
    rows.step(rng)
    rows.add([leaving])
    for _ in range(3):
        rows.step(rng)


def test_the_self_check_passes_with_the_groups_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUPS", 8)
    monkeypatch.setattr(module, "CHUNK", 8192)
    use_emulator(monkeypatch)
    assert module._difference(mx.bfloat16) < 1e-6


def test_a_trial_has_the_texts_of_real_launches() -> None:
    build = Emulated(checked=True, orders=(0,))
    for few in ((), ("tokens", "places")):
        out, _, _, spans = launch_alone(kernel_key(mx.float16)._replace(small_inputs=few), build)
        assert not np.asarray(out)[1:].any() and np.asarray(spans)[0, 0] == 2
        assert [x.size < 8 for x in build.calls[-1][1]["inputs"]] == [False, *[bool(few)] * 2, *[False] * 4]


DEFECTS = [
    ("static_cast<int>(threadgroup_position_in_grid.x) % chunks * CW", "0"),
    ("metal::min(begin + CW, vocab)", "begin + CW"),
    ("words[first + entry] == token", "words[entry] == token"),
    ("metal::max(best[kind], static_cast<float>(counts[kind * plane + first + entry]))", "best[kind]"),
    ("? tg_best[kind * SG + lane] : 0.0f)) + 1", "? tg_best[kind * SG + lane] : 0.0f))"),
    ("tg_best[kind * SG + sg] = most", "tg_best[kind * SG] = most"),
    ("goes[kind] = left >= 0", "goes[kind] = left > 0"),
    ("spans[place * 8 + 1 + kind]", "spans[place * 8 + 1]"),
    ("entry == length ? token : words", "false ? token : words"),
    ("is_same ? now[kind] : counts", "entry == length ? now[kind] : counts"),
    ("goes[kind] && word == gone[kind]", "goes[kind] && entry == 0"),
    ("entry == length ? 1 : 0) :", "1) :"),
    ("value > 0.0f ? value / repetition", "value < 0.0f ? value / repetition"),
    ("count[0] > 0 ? repeated", "count[1] > 0 ? repeated"),
    ("count[1] > 0 ? value - presence", "count[2] > 0 ? value - presence"),
    ("static_cast<float>(count[2])", "static_cast<float>(count[1])"),
    ("(thread_ == 0 ? 1 : 0)", "1"),
    ("if (place >= 0)", "if (place > 0)"),
]


@pytest.mark.parametrize(("old", "new"), quick(DEFECTS, DEFECTS[0], DEFECTS[12]))
def test_planted_defects_are_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    use_emulator(monkeypatch, edit={BODY: [(old, new)]})
    with pytest.raises((EmuError, AssertionError)):
        for seed in range(4):
            check_step(9, 450, 130, seed=seed)
            check_step(30, 40, 9, seed=seed)
        use_emulator(monkeypatch, checked=True, edit={BODY: [(old, new)]})
        check_step(3, 450, 9)


def test_a_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);"
    use_emulator(monkeypatch, checked=True, orders=(0, 1, 2), edit={BODY: [(barrier, "")]})
    with pytest.raises((EmuError, AssertionError)):
        check_step(9, 301, 50)


@pytest.mark.skipif(registers.compiler() is None, reason="nvcc is not here")
@pytest.mark.parametrize("dialect", slow("cuda", "metal"), ids=["NVIDIA", "Apple"])
def test_kernel_does_not_spill_registers(dialect: str) -> None:
    key = kernel_key(mx.bfloat16)
    found = registers.registers_of(key.body, key.constants, None if dialect == "cuda" else registers.REGISTERS)
    assert (found.stored, found.loaded) == (0, 0), found
