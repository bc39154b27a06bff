# ruff: noqa: E501
"""quantized_decode on the emulator: against float64 over what the pages hold, bit invariance, and planted defects."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.launch_shape import HEAD_DIMS, MAX_THREADGROUP_BYTES, Variant, shape_for
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Case, emulated
from tests.support.samples import each_pair

BODY = "quantized_decode"
TOLERANCE = {mx.float32: 3e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [1, 15, 16, 17, 150, 5, 6, 7, 33]  # 9 rows: inputs of 8 and more elements are in device memory
FEW = [17, 140]


def case_of(contexts: list[int], bits: tuple[int, int] = (8, 4), group_size: int = 32, **options: Any) -> Case:
    dtype, head_dim = options.get("dtype", mx.float32), options.get("head_dim", 64)
    pages = page_shape(head_dim, bits, group_size, dtype, options.get("value_dim") or 0)
    return Case(contexts, pages=pages, **options)


def check(case: Case, launch_shape: Any = None, backend: str = "metal", **options: Any) -> np.ndarray:
    with emulated(backend, **options) as fake:
        out, fence = case.run(launch_shape=launch_shape or shape_for(case.variant()))
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    assert int(np.asarray(fence)[0]) == 8 and {body for body, _ in fake.calls} <= {BODY, "merge_partitions"}
    return out


CLASSES: dict[str, dict[str, Any]] = {
    "8 bits f32": {"bits": (8, 8)},
    "4 bits bf16": {"bits": (4, 4), "dtype": mx.bfloat16, "group_size": 64},
    "8/4 f16 extras q_len 3": {"dtype": mx.float16, "q_len": 3, "softcap": 5.0, "sinks": True},
    "value_dim": {"head_dim": 96, "value_dim": 64, "dtype": mx.bfloat16},
    "gqa 16, one group": {"heads": (16, 1), "head_dim": 128, "dtype": mx.bfloat16, "group_size": 128},
    "gqa 7": {"heads": (7, 1), "head_dim": 96, "dtype": mx.float16, "bits": (4, 4)},
    "gqa 1": {"heads": (2, 2), "head_dim": 192, "group_size": 64},
    "block 8": {"block_size": 8, "dtype": mx.bfloat16, "bits": (8, 8)},
    "block 128": {"block_size": 128, "bits": (4, 4)},
}


@pytest.mark.sample(every=6, keep="extras")
@pytest.mark.parametrize(("name", "contexts", "backend"), each_pair(list(CLASSES), [RAGGED, FEW], ["metal", "cuda"]))
def test_matches_reference(name: str, contexts: list[int], backend: str) -> None:
    check(case_of(contexts, **CLASSES[name]), backend=backend)


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
@pytest.mark.parametrize("head_dim", [dim for dim in HEAD_DIMS if dim % 32 == 0])
def test_every_head_dim(head_dim: int, bits: tuple[int, int]) -> None:
    check(case_of([33, 3], bits, head_dim=head_dim, heads=(4, 2), dtype=mx.bfloat16), orders=(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gqa", [1, 2, 3, 5, 8, 12, 16])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4)])
@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (96, 32), (128, 128), (256, 64), (512, 128)])
def test_sweep(head_dim: int, group_size: int, bits: tuple[int, int], gqa: int, dtype: mx.Dtype) -> None:
    options = {"head_dim": head_dim, "heads": (gqa, 1), "block_size": 32, "dtype": dtype}
    check(case_of([130, 1, 31], bits, group_size, **options), orders=(0, 1))


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("starts", [[0, 1, 8, 60], [3, 14, 15, 149]])
def test_window(starts: list[int]) -> None:
    # Tables are wild outside the window and stale slots are NaN: reading either would be seen.
    check(case_of([5, 15, 16, 150], starts=starts, sinks=True))


def test_rows_that_see_nothing_are_zero() -> None:
    case = case_of([4, 20], max_blocks=20, sinks=True)
    case.ends[0] = 0
    with emulated():
        out, _ = case.run()
    assert not out[0].any()
    np.testing.assert_allclose(out, case.reference(), atol=3e-6)


def test_partition_tiers() -> None:
    case = case_of([100, 200, 300, 330], starts=[1, 63, 20, 300])
    with emulated():
        launch_shape = shape_for(case.variant())._replace(partition=64, span=1)
    check(case, launch_shape=launch_shape)


def test_bits_do_not_depend_on_batchmates() -> None:
    case = case_of([100, 700], sinks=True)
    with emulated(checked=False, orders=(0,)):
        together, _ = case.run()
        case.q, case.ends, case.starts = case.q[:1], case.ends[:1], case.starts[:1]
        case.tables = case.tables[:1, :7]
        alone, _ = case.run()
    assert alone[0].tobytes() == together[0].tobytes()


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4)])
@pytest.mark.parametrize("contexts", [[1, 16, 17, 150, 300], [64, 65]])
def test_append_quantises_the_newest_token_and_attends_to_what_its_page_holds(
    contexts: list[int], bits: tuple[int, int], dtype: mx.Dtype
) -> None:
    # Its slot holds NaN: reading it before it is written would be seen. 300 tokens: several partitions.
    case = case_of(contexts, bits, dtype=dtype, head_dim=128, value_dim=64, heads=(4, 2))
    full = np.array(case.k_pool), np.array(case.v_pool)
    with emulated(checked=False, orders=(0,)):
        before, _ = case.run()
    append = case.take_out_newest()
    with emulated() as fake:
        out, _ = case.run(append=append)
    assert out.tobytes() == before.tobytes()
    for name, expected in zip(("k_pool", "v_pool"), full, strict=True):
        np.testing.assert_array_equal(np.asarray(fake.written[name]), expected)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_rows_of_padding_append_nothing(backend: str) -> None:
    case = case_of([5, 150])
    full = np.array(case.k_pool), np.array(case.v_pool)
    append = case.take_out_newest()
    with emulated(backend=backend):
        alone, _ = case.run(append=append)
    case.q, *append = (mx.concatenate([x, mx.full((2, *x.shape[1:]), mx.nan, x.dtype)]) for x in (case.q, *append))
    case.tables, case.ends, case.starts = (
        np.concatenate([x, np.zeros((2, x.shape[1]), np.int32)]) for x in (case.tables, case.ends, case.starts)
    )
    with emulated(backend=backend) as fake:
        out, _ = case.run(append=append)
    assert out[:2].tobytes() == alone.tobytes() and not out[2:].any()
    for name, expected in zip(("k_pool", "v_pool"), full, strict=True):
        np.testing.assert_array_equal(np.asarray(fake.written[name]), expected)


def test_where_bits_differ_the_newest_tokens_are_written_before() -> None:
    case = case_of([5, 40, 1])
    append = case.take_out_newest()
    case.ends[2] = 0  # padding
    # What the emulator writes is a copy: there, the slots stay as they were.
    case.k_pool, case.v_pool = (mx.zeros_like(x) for x in (case.k_pool, case.v_pool))
    with emulated(exact=False) as fake:
        case.run(append=append)
    (write, written), (decode, call), *_ = fake.calls
    assert (write, decode) == ("write_rows", BODY) and call["inputs"][9].tolist()[2] == 0.0
    expected = [case.tables[0, 0] * 16 + 4, case.tables[1, 2] * 16 + 7, -1]
    assert written["inputs"][5].tolist() == expected


def test_append_refuses_rows_that_do_not_fit() -> None:
    case = case_of([5, 6])
    k, v = case.take_out_newest()
    with emulated():
        for bad in ((k[:1], v), (k, v[..., :32]), (k.astype(mx.float16), v)):
            with pytest.raises(ValueError, match="cannot append"):
                case.run(append=bad)
        case.q = case.q.astype(mx.float16)
        with pytest.raises(ValueError, match="do not fit a pool"):
            case.run()


def test_threadgroup_memory_is_bounded() -> None:
    for dtype in TOLERANCE:
        for head_dim in (64, 96, 128, 192, 256, 512):
            for bits in ((8, 8), (4, 4)):
                for gqa in range(1, 17):
                    for backend in ("metal", "cuda"):
                        pages = page_shape(head_dim, bits, 32, dtype)
                        variant = Variant(BODY, backend, dtype, head_dim, head_dim, gqa, 32, pages=pages)
                        shape = shape_for(variant)
                        assert shape.vec == 8
                        assert shape.threadgroup_bytes(gqa, head_dim) <= MAX_THREADGROUP_BYTES


APPEND_DEFECTS = {  # old, new: seen in the result or in the pool
    "attended to before it is written": ("threadgroup_barrier(mem_flags::mem_device);", ""),
    "barrier of other memory": ("threadgroup_barrier(mem_flags::mem_device);", "threadgroup_barrier(mem_flags::mem_threadgroup);"),
    "writes to the wrong slot": ("const int offset = fresh % BS;", "const int offset = (fresh + 1) % BS;"),
    "keys alone": ("task < K_GROUPS + V_GROUPS", "task < K_GROUPS"),
    "one row for all": ("fresh_row = static_cast<int64_t>(row) * n_kv + kv_head", "fresh_row = static_cast<int64_t>(kv_head)"),
    "never stores": ("if (fresh >= lo && fresh < hi) {", "if (fresh < -1) {"),
    "rounded scale": ("(x[i] - affine.bias) / affine.scale", "(x[i] - affine.bias) / (affine.scale * 1.01f)"),
}  # fmt: skip


@pytest.mark.sample(every=6)
@pytest.mark.parametrize("name", list(APPEND_DEFECTS))
def test_planted_append_defects_are_caught(name: str) -> None:
    case = case_of([17, 150], head_dim=64)
    reference, full = case.reference(), (np.array(case.k_pool), np.array(case.v_pool))
    append = case.take_out_newest()
    try:
        with emulated(edit={BODY: [APPEND_DEFECTS[name]]}) as fake:
            out, _ = case.run(append=append)
    except EmuError:
        return
    same = all(np.array_equal(np.asarray(fake.written[n]), x) for n, x in zip(("k_pool", "v_pool"), full, strict=True))
    assert not same or not np.allclose(out, reference, atol=1e-3)


WRONG = {  # old, new: the numbers come out wrong, or the emulator objects
    "wrong kv head": ("static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv + kv_head;", "static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv;"),
    "scale of another group": ("key_factors[dim / GS]", "key_factors[0]"),
    "bias of another group": ("key_factors[K_GROUPS + dim / GS]", "key_factors[K_GROUPS]"),
    "value scale of another group": ("value_factors[dim / GS]", "value_factors[0]"),
    "value bias of another group": ("value_factors[V_GROUPS + dim / GS]", "value_factors[V_GROUPS]"),
    "factors of another token": ("inside * 2 * K_GROUPS", "inside * K_GROUPS"),
    "factors of the codes' plane": ("key_page + BS * K_CODES", "key_page"),
    "key bias dropped": ("metal::fma(bias, query_sum[h * NK + i], score[u * HP + h])", "score[u * HP + h]"),
    "value bias dropped": ("metal::fma(p[h], bias, base[h * NV + i])", "base[h * NV + i]"),
    "biases not rescaled": ("base[h * NV + i] *= factor;", ""),
    "accumulators not rescaled": ("acc[h * NV * VEC + i] *= factor;", ""),
    "places of keys kept": ("1.0f / static_cast<float>(1 << PLACE(j * KBITS))", "1.0f"),
    "places of values kept": ("1.0f / static_cast<float>(1 << PLACE(i % VEC * VBITS))", "1.0f"),
    "high half of a word lost": ("word >> (bit / 16 * 16)", "word"),
    "offset kept": (" - 8388608.0f", ""),
    "codes of another packet": ("dim / VEC * KW", "dim / VEC"),
    "value codes of the first packet": ("dim / VEC * VW", "0"),
    "stale tokens multiplied": ("metal::min(metal::max(token + step_token, lo), hi - 1) % BS", "(token + step_token) % BS"),
    "block not read ahead": ("(table, chunk + STRIPES, lo", "(table, chunk, lo"),
}  # fmt: skip


@pytest.mark.sample(every=12)
@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_numbers_are_seen(name: str) -> None:
    case = case_of([129, 300], starts=[10, 0], heads=(4, 2), q_len=2, sinks=True, head_dim=128)
    try:
        with emulated(edit={BODY: [WRONG[name]]}):
            out, _ = case.run()
    except EmuError:
        return
    assert not np.allclose(out, case.reference(), atol=1e-4)
