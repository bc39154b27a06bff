# ruff: noqa: E501
"""quantized_prefill_tensor's text on the emulator: against float64 over what the pages hold, row independence, and planted
defects; and what its helpers make of codes."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import prefill
from mlx_paged.kernels.prefill import PrefillShape
from tests.support.kernels.quantized_pages import page_shape, quantized
from tests.support.msl import emulator
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import tensor_helpers, to_float
from tests.support.msl.prefill_harness import Pack, emulated

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}
RAGGED = [5, 40, 1, 130], [0, 30, 64, 3]
CUTS = [PrefillShape(4, 1, 32, 1, False, 2), PrefillShape(2, 2, 32, 1, True, 1), PrefillShape(1, 2, 64, 1, True, 1)]

CLASSES = {
    "8 bits bf16": {"dtype": mx.bfloat16},
    "4 bits bf16": {"bits": (4, 4), "dtype": mx.bfloat16},
    "f16 extras": {"bits": (8, 4), "softcap": 5.0, "sinks": True},
    "window": {"bits": (4, 8), "window": 20, "sinks": True},
    "window of one": {"window": 1},
    "value_dim": {"bits": (4, 8), "group_size": 32, "head_dim": 96, "value_dim": 64},
    "gqa 16": {"dtype": mx.bfloat16, "heads": (16, 1), "head_dim": 128, "window": 100},
    "gqa 7": {"bits": (4, 4), "group_size": 128, "heads": (7, 1), "head_dim": 128},
    "192": {"bits": (4, 8), "heads": (2, 2), "head_dim": 192},
    "256": {"group_size": 32, "head_dim": 256, "heads": (2, 1), "block_size": 32, "softcap": 20.0},
    "block 8": {"bits": (8, 4), "block_size": 8},
    "block 128": {"bits": (4, 8), "block_size": 128, "head_dim": 128},
}


def pack_of(counts, prefixes, bits=(8, 8), group_size=64, *, head_dim=64, value_dim=0, dtype=mx.float16, **options):
    pages = page_shape(head_dim, bits, group_size, dtype, value_dim)
    return Pack(counts, prefixes, head_dim=head_dim, value_dim=value_dim or None, dtype=dtype, pages=pages, **options)


def check(pack, edit=(), orders=(0, 2), **options):
    with emulated(edit, orders):
        out, fence = pack.run(**options)
    np.testing.assert_allclose(out, pack.reference(), atol=TOLERANCE[pack.dtype], rtol=TOLERANCE[pack.dtype])
    assert fence == 8


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("name", list(CLASSES))
def test_matches_reference(name):
    # Threads in any order; that another one gives the same is seen with every cut.
    check(pack_of(*RAGGED, **CLASSES[name]), orders=(2,))


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", ["f16 extras", "window", "gqa 7"])
def test_every_cut(name, cut):
    check(pack_of([5, 40, 1], [0, 30, 64], **CLASSES[name]), launch_shape=cut)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4), (4, 8)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_sweep(head_dim, bits, group_size):
    if head_dim % group_size:
        pytest.skip("groups do not divide it")
    for dtype in TOLERANCE:
        check(pack_of([70, 3], [9, 130], bits, group_size, head_dim=head_dim, dtype=dtype), orders=(0,))


def test_bits_do_not_depend_on_the_pack():
    pack = pack_of([90, 1, 33], [10, 200, 64], (8, 4), sinks=True)
    with emulated(checked=False, orders=(0,)):
        together, _ = pack.run()
        first = 0
        for s, count in enumerate(pack.counts):
            alone, _ = pack.alone(s).run()
            assert alone.tobytes() == together[first : first + count].tobytes()
            first += count


def rounded_once(x, form):
    """What a GPU dequantises: MLX rounds the product before on the CPU."""
    words = mx.array(quantized(x, form))
    codes, scales, biases = form.split(words)
    wide = mx.repeat(codes[..., None], 32 // form.bits, axis=-1) >> (
        mx.arange(32 // form.bits, dtype=mx.uint32) * form.bits
    )
    wide = np.array(wide & ((1 << form.bits) - 1)).reshape(*x.shape).astype(np.float64)
    scales, biases = (np.repeat(to_float(f).astype(np.float64), form.group_size, axis=-1) for f in (scales, biases))
    return to_float(mx.array((scales * wide + biases).astype(np.float32)).astype(form.dtype))


def test_it_is_the_dense_kernel_over_what_the_pages_hold():
    for bits, dtype in (((8, 4), mx.float16), ((4, 8), mx.bfloat16)):
        pack = pack_of([40, 70], [30, 3], bits, dtype=dtype)
        dense = Pack([40, 70], [30, 3], dtype=dtype)
        for s, pair in enumerate(pack.rows):
            for pool, rows, form in zip(("k_pool", "v_pool"), pair, pack.pages, strict=True):
                rows = rounded_once(pack.given[s][pool == "v_pool"], form)
                values = to_float(getattr(dense, pool))
                for t in range(rows.shape[1]):
                    values[dense.tables[s, t // 16], :, t % 16] = rows[:, t]
                setattr(dense, pool, mx.array(values).astype(dtype))
        with emulated(checked=False, orders=(0,)):
            out, _ = pack.run()
            expected, _ = dense.run(launch_shape=prefill.prefill_shape_for(64, 64, pack.pages))
        assert out.tobytes() == expected.tobytes()


CODES = """
const int bits = which[0];
const uint words[2] = {codes[thread_position_in_grid.x * 2], codes[thread_position_in_grid.x * 2 + 1]};
uint pairs[4];
if (bits == 8) value_pairs<T, 8>(words, factors[0], factors[1], pairs);
else value_pairs<T, 4>(words, factors[0], factors[1], pairs);
for (int i = 0; i < 4; i++) out[thread_position_in_grid.x * 4 + i] = pairs[i];
"""


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_are_those_of_one_rounding(dtype, bits):
    codes = np.arange(256, dtype=np.uint8)
    if bits == 4:
        codes = np.repeat(codes, 2)
    words = np.ascontiguousarray(codes).view(np.uint32)  # of 4 bits: eight codes in the first of a thread's two
    numbers = codes if bits == 8 else np.stack([codes.reshape(-1, 8)[:, :4] & 15, codes.reshape(-1, 8)[:, :4] >> 4], -1)
    name = {mx.float16: "half", mx.bfloat16: "bfloat16_t"}[dtype]
    header = f"typedef {name} T;\n" + tensor_helpers("quantized_prefill_tensor")
    kernel = emulator.metal_kernel("codes", ["codes", "factors", "which"], ["out"], CODES, header)
    for scale, bias in ((0.0123, -1.57), (-0.7, 91.0), (3e-4, 5.0), (2.0, -255.0)):
        pair = to_float(mx.array([scale, bias]).astype(dtype)).astype(np.float64)
        given = np.repeat(np.array(mx.array([scale, bias]).astype(dtype).view(mx.uint16)), 2).view(np.uint32)
        (out,) = kernel(
            inputs=[words, given, np.array([bits], np.int32)],
            output_shapes=[(words.size // 2 * 4,)],
            output_dtypes=[mx.uint32],
            grid=(words.size // 2, 1, 1),
            threadgroup=(32, 1, 1),
        )
        got = to_float(mx.array(np.asarray(out)).view(dtype)).reshape(-1)
        exact = pair[0] * numbers.reshape(-1).astype(np.float64) + pair[1]
        # Of the two numbers next to it, the nearer; ties are as likely to be seen as not, and even.
        step = np.abs(to_float(mx.array(exact.astype(np.float32)).astype(dtype)).astype(np.float64) - exact)
        np.testing.assert_array_less(np.abs(got - exact), step * (1 + 1e-5) + 1e-12)


def test_what_codes_need_fits_a_core():
    for head_dim in (64, 128, 256):
        for bits in (4, 8):
            pages = page_shape(head_dim, (bits, bits), 64, mx.bfloat16)
            cut = prefill.prefill_shape_for(head_dim, head_dim, pages)
            waiting = -(-cut.keys * head_dim * bits // 128 // (32 * cut.simdgroups)) * 32 * cut.simdgroups * 24
            size = cut.shared_bytes(head_dim, head_dim) + waiting
            assert size <= 99 << 10, "one, where it may have least (a 4090)"
            assert (size + 1024) * cut.groups <= 227 << 10, "as many as its registers allow, in an H100's core"


WRONG = {  # seen by the emulator, or the numbers come out wrong
    "wrong kv head of keys": ("k_pool + static_cast<int64_t>(kv_head)", "k_pool + static_cast<int64_t>(0)"),
    "wrong kv head of values": ("v_pool + static_cast<int64_t>(kv_head)", "v_pool + static_cast<int64_t>(0)"),
    "dead tokens are read": ("- lo) < static_cast<uint>(hi - lo);", "- lo) < 1u << 31;"),
    "block of another part": ("token / BS % BLOCKS", "(token / BS + 1) % BLOCKS"),
    "slot of another block": ("? step * KEYS % BS + token : token % BS", "? token : token % BS"),
    "not waited for": ("act();", ""),
    "keys for values": ("is_value = true;", "is_value = false;"),
    "half of the codes": ("i * THREADS < KEYS * LOADS; i++) {\n    if (KEYS", "i * THREADS < KEYS * LOADS / 2; i++) {\n    if (KEYS"),
    "eight lanes, one token": ("/ loads * 8 + thread_index % 8", "/ loads * 8"),
    "another part of a row": ("(DIM + 8) + load_of(i, LOADS) * CODES", "(DIM + 8) + (load_of(i, LOADS) ^ 1) * CODES"),
    "scale of another group": ("both_halves(scales[i * THREADS + thread_index], g % 2)", "both_halves(scales[i * THREADS + thread_index], 0)"),
    "bias of another group": ("(DIM / GS + g) % 2", "(DIM / GS) % 2"),
    "bias for scale": ("factors + (ROW_GROUPS + g) / 2, live", "factors + g / 2, live"),
    "codes of another token": ("page + slot * WORDS + at * 4", "page + at * 4"),
    "factors of another token": ("slot * ROW_GROUPS;", "0;"),
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "high codes not moved": ("words[0] >> 1", "words[0]"),
}  # fmt: skip


@pytest.mark.sample(every=12)
@pytest.mark.parametrize("name", list(WRONG))
def test_planted_defects_are_seen(name):
    for pack in (
        pack_of([30, 70], [50, 40], (8, 4), window=37, block_size=8, head_dim=128),
        pack_of([50, 30], [64, 150], (4, 8), block_size=128, heads=(6, 2), dtype=mx.bfloat16, head_dim=128),
    ):
        try:
            with emulated([WRONG[name]], orders=(0,)):
                out, fence = pack.run()
        except EmuError:
            return
        if fence != 8 or not np.allclose(out, pack.reference(), atol=TOLERANCE[pack.dtype]):
            return
    pytest.fail("no number was wrong")
