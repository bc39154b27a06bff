# ruff: noqa: E501
"""The kernels over latents on the emulator: against float64, what they write, bits, registers, and planted defects."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.launch_shape import LATENT_BODIES, Variant, shape_for
from mlx_paged.kernels.ops import variants_of
from tests.support.cases import crossed, quick
from tests.support.kernels.latent_cases import LatentCase
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import MAX_THREADGROUP_BYTES, emulated, threadgroup_bytes

PORTABLE, TENSOR = LATENT_BODIES
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [1, 15, 16, 17, 150, 33, 5, 6, 70]
MOST_SHARED = 227 * 1024  # bytes of a thread group on Hopper

CLASSES = {
    "f32": {},
    "bf16": {"dtype": mx.bfloat16},
    "f16 heads of two tiles": {"dtype": mx.float16, "heads": 20},
    "a prime number of heads": {"heads": 7},
    "one head": {"heads": 1},
    "17 heads": {"heads": 17},
    "rank 512": {"rank": 512, "dtype": mx.bfloat16, "heads": 6},
    "rope 128": {"rank": 96, "rope": 128},
    "blocks of 8, three queries": {"block_size": 8, "q_len": 3},
}


@pytest.mark.parametrize(
    ("backend", "name"), quick(crossed(["metal", "cuda"], list(CLASSES)), ("metal", "f32"),
    ("cuda", "f16 heads of two tiles"), ("metal", "17 heads"), ("cuda", "rope 128"))
)  # fmt: skip
def test_matches_reference(name, backend):
    case = LatentCase(RAGGED, **CLASSES[name])
    with emulated(backend, orders=(0, 2)):
        out, fence = case.run()
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    assert int(np.asarray(fence)[0]) == 8


TENSOR_CLASSES = {
    "few heads": {"heads": 20, "rank": 256},
    "two tiles of heads": {"heads": 70, "rank": 256, "dtype": mx.float16},
    "rank 512": {"heads": 3, "rank": 512, "contexts": [65]},
    "windows": {"heads": 5, "rank": 256, "contexts": [150, 64, 700], "starts": [3, 0, 600]},
    "three queries": {"heads": 5, "rank": 256, "contexts": [66, 30], "q_len": 3, "block_size": 8},
    "blocks of 128": {"heads": 5, "rank": 256, "contexts": [130, 257], "block_size": 128},
}


def run_tensor(case, append=None, edit=(), orders=(0, 2), checked=True, **shape):
    with emulated("cuda", edit={TENSOR: edit}, orders=orders, checked=checked) as fake:
        variant = case.variant(0)
        assert variant.body == TENSOR
        out, fence = case.run(append=append, variant=variant, launch_shape=shape_for(variant)._replace(**shape))
    assert int(np.asarray(fence)[0]) == 8
    return out, fake


@pytest.mark.parametrize("name", quick(list(TENSOR_CLASSES), "few heads"))
def test_the_body_for_tensor_cores_matches_reference(name):
    options = {"contexts": [1, 17, 64, 150], "dtype": mx.bfloat16, **TENSOR_CLASSES[name]}
    case = LatentCase(**options)
    out, _ = run_tensor(case)
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


@pytest.mark.slow
def test_partitions_of_the_body_for_tensor_cores_are_joined():
    case = LatentCase([700, 20, 513], heads=4, rank=256, dtype=mx.bfloat16, starts=[70, 0, 0])
    for run, parts in ((1, 3), (2, 2), (4, 1)):
        out, fake = run_tensor(case, orders=(0,), run=run)
        assert fake.calls[0][1]["grid"][2] == parts
        assert [body for body, _ in fake.calls] == [TENSOR] + (["merge_partitions"] if parts > 1 else [])
        np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("body", "dtype"), quick([(PORTABLE, mx.float32), (PORTABLE, mx.bfloat16), (TENSOR, mx.bfloat16)],
    ("latent_decode_tensor", mx.bfloat16))
)  # fmt: skip
def test_append_writes_the_newest_token_and_attends_to_it(body, dtype):
    # Its slot holds NaN: reading it from the pool would be seen. 300 tokens: several partitions.
    case = LatentCase([1, 16, 17, 300], heads=18, rank=256, dtype=dtype)
    append = case.take_out_newest()
    with emulated("cuda", orders=(0, 2)) as fake:
        variant = next(v for v in (case.variant(0), case.variant()) if v.body == body)
        out, _ = case.run(append=append, variant=variant)
    np.testing.assert_allclose(out, case.reference(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert case.is_full_again(fake.written)


@pytest.mark.parametrize("body", LATENT_BODIES)
def test_rows_that_see_nothing_are_zero(body):
    for max_blocks in (2, 40):
        case = LatentCase([4, 20], heads=3, rank=256, dtype=mx.bfloat16, max_blocks=max_blocks)
        case.ends[0] = 0
        with emulated("cuda", orders=(0,)):
            variant = next(v for v in (case.variant(0), case.variant()) if v.body == body)
            out, _ = case.run(variant=variant)
        assert not out[0].any()
        np.testing.assert_allclose(out, case.reference(), atol=2e-2)


def test_bits_of_the_portable_body_do_not_depend_on_batchmates():
    case = LatentCase([100, 700])
    with emulated(checked=False, orders=(0,)):
        together, _ = case.run()
        case.q, case.ends, case.starts = case.q[:1], case.ends[:1], case.starts[:1]
        case.tables = case.tables[:1, :7]
        alone, _ = case.run()
    assert alone[0].tobytes() == together[0].tobytes()


def test_unsupported_latents_are_refused_with_a_reason():
    for dim, heads, why in ((512, 300, "heads"), (500, 16, "head_dim")):
        with pytest.raises(ValueError, match=why):
            variants_of(mx.bfloat16, dim, 64, heads, 1, 32, use="latents")
    with emulated("cuda"), pytest.raises(ValueError, match="one KV head"):
        variants_of(mx.bfloat16, 512, 64, 16, 2, 32, use="latents")
    with emulated("cuda"):
        bodies = [v.body for v in variants_of(mx.bfloat16, 512, 64, 16, 1, 32, use="latents")]
        assert bodies == [TENSOR, PORTABLE]
        for dtype, rank, rope in ((mx.float32, 512, 64), (mx.float16, 128, 64), (mx.float16, 512, 128)):
            assert [v.body for v in variants_of(dtype, rank, rope, 16, 1, 32, use="latents")] == [PORTABLE]
    with emulated("metal"):
        assert [v.body for v in variants_of(mx.bfloat16, 512, 64, 16, 1, 32, use="latents")] == [PORTABLE]


def test_memory_of_a_thread_group_is_bounded():
    for dtype in TOLERANCE:
        for heads in range(1, 257):
            with emulated("metal"):
                (variant,) = variants_of(dtype, 512, 64, heads, 1, 32, use="latents")
            shape = shape_for(variant)
            assert heads % variant.gqa == 0 and shape.simdgroups % dict(shape.constants)["HS"] == 0
            assert threadgroup_bytes(shape, variant.gqa, 512) <= MAX_THREADGROUP_BYTES
    tensor = Variant(TENSOR, "cuda", mx.bfloat16, 576, 512, 64, 32)
    assert shape_for(tensor).shared <= MOST_SHARED


PORTABLE_DEFECTS = {  # old, new
    "the rotated part is left out": ("dim < D ? load_packet", "dim < 0 ? load_packet"),
    "the rotated part of the first token": ("v_pool + slot * (D - DV)", "v_pool + slot / BS * BS * (D - DV)"),
    "latents of another slot": ("k_pool + slot * DV", "k_pool + slot / 2 * DV"),
    "reads the slot, not the new latent": ("position == fresh ? k_new", "position == -1 ? k_new"),
    "reads the slot, not the new rotated part": ("position == fresh ? v_new", "position == -1 ? v_new"),
    "no tile of heads stores": ("if (kv_head == 0 && fresh", "if (kv_head == 2 && fresh"),
    "stores half": ("dim < DV; dim += SG * 32", "dim < DV / 2; dim += SG * 32"),
    "one row for all": ("k_new + static_cast<int64_t>(row) * DV", "k_new + static_cast<int64_t>(0) * DV"),
    "values of another packet": ("packet_value<T, VEC>(packets[u * PACKETS + VALUE + i / VEC], i % VEC);\n        UNROLL\n        for (int h = 0; h < HG; h++) {\n          acc", "packet_value<T, VEC>(packets[u * PACKETS + NK - 1 - i / VEC], i % VEC);\n        UNROLL\n        for (int h = 0; h < HG; h++) {\n          acc"),
    "heads of another tile": ("static_cast<int64_t>(sequence * n_kv + kv_head) * G", "static_cast<int64_t>(sequence * n_kv) * G"),
}  # fmt: skip


def is_caught(case, body, edit):
    """Return whether the emulator objects, or the result or the pools are wrong."""
    append = case.take_out_newest()
    try:
        with emulated("cuda", edit={body: edit}, orders=(0,)) as fake:
            variant = next(v for v in (case.variant(0), case.variant()) if v.body == body)
            out, _ = case.run(append=append, variant=variant)
    except EmuError:
        return True
    return not case.is_full_again(fake.written) or not np.allclose(out, case.reference(), atol=2e-2)


TENSOR_DEFECTS = {
    "tiles are not waited for": ("full[GROUP * 2].wait(turn);", ""),
    "second halves are not waited for": ("full[GROUP * 2 + 1].wait(turn);", ""),
    "copied over what is still read": ("used[tile * 2 + half].wait(1 - turn);", ""),
    "said to be used before it is": ("weigh(1);\n          used[2].arrive(lane);", "used[2].arrive(lane);\n          weigh(1);"),
    "a half is said to be used by the other": ("used[1].arrive(lane);", "used[0].arrive(lane);"),
    "weights over rotated parts that are still read": ("warpgroup_barrier(GROUP);\n        T* const weights", "T* const weights"),
    "the first tile's weights are not waited for": ("weighed[0].wait(turn);", ""),
    "the second tile's weights are not waited for": ("weighed[1].wait(turn);", ""),
    "queries are not waited for": ("both->wait(0);", ""),
    "sums are not waited for": ("both->wait(1);", ""),
    "copies are said to be there too early": ("copies.wait_for_all_but<1>();", "copies.wait_for_all_but<2>();"),
    "the last copies are not waited for": ("copies.wait();\n      full", "full"),
    "dead tokens are seen": ("if (token < lo || token >= hi)", "if (token < lo)"),
    "tokens before the window are seen": ("if (token < lo || token >= hi)", "if (token >= hi)"),
    "masked as another tile": ("(step + GROUP) * KEYS;", "step * KEYS;"),
    "the first tile's maximum is not known": ("top[i] = metal::max(top[i], before[i]);", ""),
    "the second tile's maximum is not known": ("raise(after);", ""),
    "no rescale": ("acc[i / 4][i % 4] *= shrink[i % 4 / 2];", ""),
    "rescale of another head": ("*= shrink[i % 4 / 2]", "*= shrink[0]"),
    "sums are not rescaled": ("l[i] *= shrink[i];", ""),
    "weights of another tile": ("stages + tile * STAGE + DV / 64 * TILE, stages", "stages + (1 - tile) * STAGE + DV / 64 * TILE, stages"),
    "sum of one tile": ("sums[head] + sums[M + head]", "2.0f * sums[head]"),
    "values of the other half": ("stages + tile * STAGE + GROUP * HALF * TILE, TILE", "stages + tile * STAGE + (1 - GROUP) * HALF * TILE, TILE"),
    "scores of the other tile": ("T* const own = stages + GROUP * STAGE;", "T* const own = stages;"),
    "eighths not swizzled": ("(eighth ^ row % 8) * 8", "(eighth ^ row % 4) * 8 + row % 2 * 0 - 0 * eighth + (row == 9 ? 8 : 0)"),
    "rotated part left out": ("multiply_rows<TILES - HALF, true>", "multiply_rows<TILES - HALF - 1, true>"),
    "reads the slot, not the new token": ("position == fresh ? NEW", "position == -1 ? NEW"),
    "dead tokens are copied": ("position < lo || position >= hi ? DEAD", "position < -1 ? DEAD"),
    "a new rotated part of another row": ("v_new + static_cast<int64_t>(row) * DP", "v_new + static_cast<int64_t>(0) * DP"),
    "slots of another tile": ("next = slot_of(step + 2);", "next = slot_of(step);"),
    "slots of other tokens": ("simd_shuffle(slot, i * 4 + lane / 8)", "simd_shuffle(slot, i * 4 + lane / 16)"),
    "never stores": ("if (head0 == 0 && fresh >= lo", "if (head0 == 1 && fresh >= lo"),
    "stores to another slot": ("* BS + fresh % BS;", "* BS + (fresh + 1) % BS;"),
    "block of another tile": ("position / BS, lo / BS)", "step * KEYS / BS, lo / BS)"),
    "heads past the last": ("const bool live = head0 + head < n_heads;", "const bool live = true;"),
    "fence not passed on": ("fence_out[0] = fence[0] + 1u;", ""),
    "partition of another size": ("1 << static_cast<int>(params[3])", "2 << static_cast<int>(params[3])"),
    "statistics in another base": ("(c == 0 ? m[0] : m[1]) * gain;", "(c == 0 ? m[0] : m[1]);"),
    "outputs of another half": ("at * DV + GROUP * (DV / 2)", "at * DV + (1 - GROUP) * (DV / 2)"),
    "outputs of another head": ("own_head + c % 2 * 8;", "own_head + (1 - c % 2) * 8;"),
    "outputs in columns of other lanes": ("(DV / 2) + c / 2 * 4;", "(DV / 2) + c % 2 * 4;"),
    "halves of outputs in another order": ("own[0], own[1], other[0], other[1]", "other[0], other[1], own[0], own[1]"),
    "statistics of another head": ("(c == 0 ? m[0] : m[1])", "m[0]"),
}  # fmt: skip
OF_PARTITIONS = ("partition of another size", "statistics in another base", "statistics of another head")


DEFECTS = [(PORTABLE, name) for name in PORTABLE_DEFECTS] + [(TENSOR, name) for name in TENSOR_DEFECTS]


@pytest.mark.parametrize(
    ("body", "name"), quick(DEFECTS, (PORTABLE, "stores half"), (TENSOR, "tiles are not waited for"),
    (TENSOR, "the first tile's weights are not waited for"))
)  # fmt: skip
def test_planted_defects_are_caught(body, name):
    if body == PORTABLE:
        assert is_caught(LatentCase([17, 150], heads=20, rank=128), body, [PORTABLE_DEFECTS[name]])
        return
    contexts, starts = ([300, 7], [0, 0]) if name in OF_PARTITIONS else ([250, 7, 128], [37, 0, 0])
    case = LatentCase(contexts, heads=9, rank=256, dtype=mx.bfloat16, starts=starts)
    assert is_caught(case, body, [TENSOR_DEFECTS[name]])
