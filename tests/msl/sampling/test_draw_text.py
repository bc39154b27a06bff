"""The draw kernel on the emulator: it draws the tokens that its NumPy model draws, and only kept tokens."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.kernels import draw_rows as module
from mlx_paged.kernels.draw_rows import BODY, DTYPES, DrawnRow, draw_rows, kernel_key
from tests.support import sampling_model
from tests.support.cases import quick, slow
from tests.support.kernels.drawn import reference_draw, threefry
from tests.support.kernels.emulated_draws import use_emulator
from tests.support.msl import registers
from tests.support.msl.emulator import EmuError

GROUPS = 3
SETTINGS = (
    DrawnRow(0.0),
    DrawnRow(1.0),
    DrawnRow(0.3),
    DrawnRow(1.0, top_p=0.6),
    DrawnRow(4.0, top_p=0.2),
    DrawnRow(2.0, top_k=1),
    DrawnRow(2.0, top_k=7),
    DrawnRow(1.2, min_p=0.3),
    DrawnRow(8.0, min_p=1.0),
    DrawnRow(8.0, min_p=0.9, min_kept=4),
    DrawnRow(3.0, top_p=0.9, min_p=0.05, top_k=12),
)


def drawn(x: np.ndarray, rows: list[DrawnRow], positions: np.ndarray, dtype: mx.Dtype = mx.float32) -> list[int]:
    words = draw_rows(
        mx.array(np.ascontiguousarray(x, np.float32)).astype(dtype),
        mx.array([row.params() for row in rows]),
        mx.array(np.array([row.key_words() for row in rows], np.uint32)),
        mx.array(positions.astype(np.uint32)),
    )
    return [int(word) for word in np.asarray(words)]


def logits_of(count: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Return logits in steps of 1/8, exact in every dtype, so that some are equal, also among the largest of a lane."""
    x = np.round(rng.normal(size=(count, vocab)) * 16).clip(-56, 56) / 8
    x[:, 1:66:32] = 7.25
    return np.asarray(x)


def rows_of(count: int, rng: np.random.Generator) -> list[DrawnRow]:
    return [SETTINGS[i % len(SETTINGS)]._replace(key=int(rng.integers(1 << 63)) * 2 + 1) for i in range(count)]


def check_words(vocab: int, count: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    x, rows = logits_of(count, vocab, rng), rows_of(count, rng)
    positions = rng.integers(1 << 32, size=count)
    expected = [reference_draw(*each, GROUPS) for each in zip(x, rows, positions.tolist(), strict=True)]
    assert drawn(x, rows, positions, dtype) == expected


@pytest.mark.parametrize(
    ("dtype", "vocab", "count"),
    quick([(a, *b) for a in DTYPES for b in [(1, 10), (5, 20), (96, 20), (3 * 1024 + 97, 20), (7000, 10)]],
    (mx.bfloat16, 1, 10), (mx.float16, 5, 20), (mx.float32, 96, 20), (mx.bfloat16, 3169, 20), (mx.bfloat16, 7000, 10))
)  # fmt: skip
def test_tokens_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, vocab: int, count: int, dtype: mx.Dtype
) -> None:
    use_emulator(monkeypatch, GROUPS)
    check_words(vocab, count, dtype)


@pytest.mark.parametrize("count", [2, *slow(9)])
def test_thread_order_does_not_change_a_token(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Run the thread checker, with few rows, whose positions are in Metal's constant memory, and with more."""
    use_emulator(monkeypatch, GROUPS, checked=True, orders=(0, 1, 2))
    check_words(301, count, mx.bfloat16)


@pytest.mark.parametrize("dialect", ["cuda", *slow("metal")], ids=["NVIDIA", "Apple"])
def test_the_self_check_passes_with_the_groups_of_a_gpu(monkeypatch: pytest.MonkeyPatch, dialect: str) -> None:
    use_emulator(monkeypatch, module._GROUPS[dialect])
    assert module._difference(mx.bfloat16) == 0


def test_random_numbers_are_those_of_threefry() -> None:
    """Known answers, from the authors of Random123."""
    assert threefry(0, 0, 0) == (0x6B200159, 0x99BA4EFE)
    assert threefry((1 << 64) - 1, 0xFFFFFFFF, 0xFFFFFFFF) == (0x1CB996FC, 0xBB002BE7)
    assert threefry(0x13198A2E03707344, 0x243F6A88, 0x85A308D3) == (0xC4923A9C, 0x483DF7A0)


def sampling_params(row: DrawnRow) -> SamplingParams:
    top_p = row.top_p if row.top_p < 1 else 0.0
    return SamplingParams(row.temperature, top_p, row.min_p, row.min_kept, row.top_k or 0)


def check_kept(vocab: int = 24, count: int = 180) -> None:
    """Assert that exactly the kept tokens are drawn, equal ones included."""
    x = np.random.default_rng(4).normal(size=vocab).round(1)
    x[3:6] = x.max()
    x[10:20] = -np.inf
    for setting in SETTINGS[1:]:
        rows = [setting._replace(temperature=50.0, key=key) for key in range(count)]
        for logits in (x, np.zeros(vocab)):
            words = drawn(np.broadcast_to(logits, (count, vocab)), rows, np.arange(count))
            left = sampling_model.likely_words(logits, sampling_params(setting), xtc=False)
            assert set(words) == set(np.flatnonzero(left))


@pytest.mark.slow
def test_exactly_the_kept_tokens_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch, GROUPS)
    check_kept()


def test_nan_and_infinite_logits_give_a_valid_token(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch, GROUPS)
    x = np.zeros((4 * len(SETTINGS), 50))
    x[0::4], x[1::4] = -np.inf, np.nan
    x[2::4, 7], x[3::4, 8] = np.inf, np.nan
    words = drawn(x, [setting for setting in SETTINGS for _ in range(4)], np.arange(len(x)))
    assert all(0 <= word < 50 for word in words)
    assert words[2::4] == [7] * len(SETTINGS) and 8 not in words[3::4]


def check_extremes(monkeypatch: pytest.MonkeyPatch, *edits: tuple[str, str]) -> None:
    """Assert that extreme random numbers draw no token of zero weight."""
    x = np.full((1, 500), -np.inf)
    x[0, [70, 71, 333, 400]] = 0.0
    for number, word in (("0u", 70), ("0xffffffffu", 400)):
        planted = [(f"numbers[{at}] = {half}", f"numbers[{at}] = {number}") for at, half in NUMBERS]
        use_emulator(monkeypatch, GROUPS, edit={BODY: [*planted, *edits]})
        assert drawn(x, [DrawnRow(1.0)], np.zeros(1)) == [word]


NUMBERS = (("2 * half_", "left"), ("2 * half_ + 1", "right"))


@pytest.mark.slow
def test_tokens_of_zero_weight_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    check_extremes(monkeypatch)
    # As if rounding made a sum less than the last number's share of it.
    rounds = ("own > 0.0f && sum > target", "own > 0.0f && sum > 2.0f * target")
    check_extremes(monkeypatch, rounds)
    last = ("simd_max(own > 0.0f ? static_cast<float>(lane)", "simd_max(true ? static_cast<float>(lane)")
    for defect in ([("own > 0.0f && sum > target", "sum >= target")], [rounds, last]):
        with pytest.raises((EmuError, AssertionError)):
            check_extremes(monkeypatch, *defect)


DEFECTS = [
    (
        "(value == pivot && i + 32 * j < metal::min(word, end))",
        "(value == pivot && i + 32 * j <= metal::min(word, end))",
    ),
    ("= value > pivot || (value == pivot && i < word)", "= true"),
    ("above < top_p * all", "above < 1.2f * top_p * all"),
    ("pivot >= top + log_min_p", "pivot > top + log_min_p"),
    ("num_before < top_k", "num_before <= top_k"),
    ("num_before < min_kept", "num_before <= min_kept"),
    ("is_above ? metal", "is_before ? metal"),
    ("(value - top) * LOG2E", "(value - top) * scale"),
    ("schedule[(i / 4 + 2) % 3]", "schedule[(i / 4) % 3]"),
    ("2u * attempt", "attempt"),
    ("if (largest < pivot)", "if (largest <= pivot)"),
    ("positions[row] +", "positions[0] +"),
    ("keys[row * 8 + 1], 0x", "keys[1], 0x"),
    ("place = value > best", "place = value >= best"),
    ("level == 2 ? lane : line + 32 * lane", "level == 2 ? lane : line + 31 * lane"),
    ("(SG * 32) * 32", "(SG * 32) * 31"),
    ("i += 1024", "i += 2048"),
]


@pytest.mark.parametrize(("old", "new"), quick(DEFECTS, DEFECTS[0]))
def test_planted_defects_are_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    use_emulator(monkeypatch, GROUPS, edit={BODY: [(old, new)]})
    with pytest.raises((EmuError, AssertionError)):
        check_words(3 * 1024 + 97, 40)
        check_words(96, 40, seed=1)
        check_words(7000, 10, seed=2)
        check_kept()


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@pytest.mark.parametrize(
    "after",
    [
        "  tg_count[sg] = first;\n}\n",
        *slow("has_top ? -tg_count[lane] : FLOOR));\n", "    tg_mass[sg] = part_mass;\n  }\n  "),
        "      tg_value[0] = metal::min(metal::max(static_cast<float>(x[start + at]), LEAST), -LEAST);\n    }\n  }\n  ",
    ],
)
def test_a_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    edit = {BODY: [(after + BARRIER, after)]}
    use_emulator(monkeypatch, GROUPS, checked=True, orders=(0, 1, 2), edit=edit)
    with pytest.raises((EmuError, AssertionError)):
        check_words(301, 9)


@pytest.mark.skipif(registers.compiler() is None, reason="nvcc is not here")
@pytest.mark.parametrize("dialect", slow("cuda", "metal"), ids=["NVIDIA", "Apple"])
def test_kernel_does_not_spill_registers(dialect: str) -> None:
    key = kernel_key(mx.bfloat16, dialect)
    found = registers.registers_of(*key, None if dialect == "cuda" else registers.REGISTERS)
    assert (found.stored, found.loaded) == (0, 0), found
    assert found.used <= 64, "1,024 threads have no more"
