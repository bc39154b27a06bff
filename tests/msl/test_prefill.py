# ruff: noqa: E501
"""paged_prefill_tensor's and quantized_prefill_tensor's texts on the emulator, one set of tests over dense and quantised
pages: against float64 over what the pages hold, row independence, planted defects; and the helpers that convert
codes."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import launch_shape, ops, prefill
from mlx_paged.kernels.build import NoKernelError
from mlx_paged.kernels.launch_shape import HEAD_DIMS, MAX_GQA, MAX_TENSOR_HEAD_DIM, PREFILL_BODIES, Variant, shape_for
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl import emulator
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import tensor_helpers, to_float
from tests.support.msl.prefill_harness import Pack, emulated

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 2e-2}
DIMS = [dim for dim in HEAD_DIMS if dim <= MAX_TENSOR_HEAD_DIM]
RAGGED = [5, 40, 1, 130], [0, 30, 64, 3]
# RT, KEYS, BUFFERS and QS of launch shapes that the texts support; quantised pages have one buffer.
CUTS = [(1, 32, 1, False), (2, 32, 2, True), (2, 64, 1, True)]

CLASSES = {
    "bf16": {},
    "f16 extras": {"dtype": mx.float16, "softcap": 5.0, "sinks": True},
    "window": {"window": 20, "sinks": True, "dtype": mx.float16},
    "window of one": {"window": 1},
    "chunks": {"window": 20, "stride": 20},
    "chunks of whole blocks": {"window": 32, "stride": 32, "sinks": True, "dtype": mx.float16},
    "chunks longer than a tile": {"window": 96, "stride": 96, "heads": (16, 1)},
    "window of a block": {"window": 64, "block_size": 64},
    "value_dim": {"head_dim": 80, "value_dim": 64},
    "gqa 16": {"heads": (16, 1), "head_dim": 128, "window": 100},
    "gqa 7": {"heads": (7, 1), "head_dim": 112, "dtype": mx.float16},
    "gqa 1": {"heads": (2, 2), "head_dim": 192},
    "256": {"head_dim": 256, "heads": (2, 1), "block_size": 32, "softcap": 20.0},
    "block 8": {"block_size": 8},
    "block 128": {"block_size": 128, "head_dim": 128},
    "8 bits bf16": {"bits": (8, 8)},
    "4 bits bf16": {"bits": (4, 4)},
    "8/4 extras": {"bits": (8, 4), "softcap": 5.0, "sinks": True, "dtype": mx.float16},
    "4/8 window": {"bits": (4, 8), "window": 20, "sinks": True, "dtype": mx.float16},
    "8 bits window of one": {"bits": (8, 8), "window": 1, "dtype": mx.float16},
    "4/8 value_dim": {"bits": (4, 8), "group_size": 32, "head_dim": 96, "value_dim": 64, "dtype": mx.float16},
    "8 bits gqa 16": {"bits": (8, 8), "heads": (16, 1), "head_dim": 128, "window": 100},
    "4 bits gqa 7": {"bits": (4, 4), "group_size": 128, "heads": (7, 1), "head_dim": 128, "dtype": mx.float16},
    "4/8 192": {"bits": (4, 8), "heads": (2, 2), "head_dim": 192, "dtype": mx.float16},
    "8 bits 256": {"bits": (8, 8), "group_size": 32, "head_dim": 256, "heads": (2, 1), "block_size": 32, "softcap": 20.0, "dtype": mx.float16},
    "8/4 block 8": {"bits": (8, 4), "block_size": 8, "dtype": mx.float16},
    "4/8 block 128": {"bits": (4, 8), "block_size": 128, "head_dim": 128, "dtype": mx.float16},
}  # fmt: skip
QUICK = ("bf16", "chunks", "8/4 extras")


def pack_of(counts, prefixes, bits=None, group_size=64, *, head_dim=64, value_dim=0, dtype=mx.bfloat16, **options):
    pages = bits and page_shape(head_dim, bits, group_size, dtype, value_dim)
    return Pack(counts, prefixes, head_dim=head_dim, value_dim=value_dim or None, dtype=dtype, pages=pages, **options)


def check(pack, edit=(), orders=(0, 2), **options):
    with emulated(edit, orders):
        out, fence = pack.run(**options)
    np.testing.assert_allclose(out, pack.reference(), atol=TOLERANCE[pack.dtype], rtol=TOLERANCE[pack.dtype])
    assert fence == 8


@pytest.mark.parametrize("name", quick(CLASSES, *QUICK))
def test_matches_reference(name):
    # One order of threads; the test of launch shapes runs another one, too.
    check(pack_of(*RAGGED, **CLASSES[name]), orders=(2,))


@pytest.mark.parametrize(
    ("name", "cut"),
    quick(
        crossed(["f16 extras", "8/4 extras", "window", "gqa 7", "4/8 window", "4 bits gqa 7"], CUTS),
        *(("f16 extras", cut) for cut in CUTS),
        ("8/4 extras", CUTS[1]),
    ),
    ids=str,
)
def test_every_launch_shape_matches_reference(name, cut, monkeypatch):
    row_tiles, keys, buffers, query_shared = cut
    own = row_tiles, keys, 1 if "bits" in CLASSES[name] else buffers, query_shared
    monkeypatch.setattr(launch_shape, "_PROMPTS", {MAX_TENSOR_HEAD_DIM: (own, own)})
    monkeypatch.setattr(prefill, "shape_for", shape_for.__wrapped__)
    check(pack_of([5, 40, 1], [0, 30, 64], **CLASSES[name]))


@pytest.mark.parametrize(
    "options", [*slow({}), {"window": 50, "sinks": True, "head_dim": 128}, {"bits": (8, 4), "sinks": True}]
)
def test_bits_do_not_depend_on_the_pack(options):
    pack = pack_of([90, 1, 33], [10, 200, 64], dtype=mx.float16, **options)
    with emulated(checked=False, orders=(0,)):
        together, _ = pack.run()
        first = 0
        for s, count in enumerate(pack.counts):
            alone, _ = pack.alone(s).run()
            assert alone.tobytes() == together[first : first + count].tobytes()
            first += count


def test_chunk_boundaries_hardly_change_the_result():
    whole = pack_of([150], [0], dtype=mx.float16)
    with emulated(checked=False, orders=(0,)):
        expected, _ = whole.run()
        for cut in (1, 64, 70):
            rest = whole.alone(0)
            rest.counts, rest.q = [150 - cut], whole.q[cut:]
            np.testing.assert_allclose(rest.run()[0], expected[cut:], atol=2e-3)


def test_tiles_cover_each_token_once_and_the_longest_come_first():
    counts, lengths = [70, 1, 33], [100, 500, 33]
    tiles = prefill.tiles_of(counts, lengths, 16, None)
    rows = [(sequence, row + i, position + i) for sequence, row, position, n in tiles for i in range(n)]
    firsts = [0, 70, 71]
    expected = [(s, firsts[s] + i, lengths[s] - n + i) for s, n in enumerate(counts) for i in range(n)]
    assert sorted(rows) == sorted(expected)
    seen = [position + n for _, _, position, n in tiles]
    assert seen == sorted(seen, reverse=True) and tiles[0][0] == 1
    # Under a window, no tile sees much more than another.
    assert [tile[0] for tile in prefill.tiles_of(counts, lengths, 16, 16)][-1] == 2


def test_geometry_without_a_kernel_is_refused():
    pack = pack_of([5, 6], [0, 3])
    with emulated():
        for change, why in [
            ({"n_q": 3}, "are not a multiple of"),
            ({"n_q": 34}, "query heads per kv head"),
            ({"k_pool": pack.k_pool[..., :40]}, "head_dim"),
            ({"k_pool": pack.k_pool.astype(mx.float32)}, "float32"),
        ]:
            wrong = pack.alone(0)
            wrong.__dict__.update(pack.__dict__ | change)
            with pytest.raises(ValueError, match=why):
                wrong.prepare()


def test_prefill_needs_cuda_and_a_variant_that_is_on(monkeypatch):
    pack = pack_of([5], [0])
    with emulated():
        dim, n_kv, block = pack.k_pool.shape[3], *pack.k_pool.shape[1:3]
        (variant,) = ops.variants_of(pack.k_pool.dtype, dim, dim, pack.n_q, n_kv, block, use="prefill")
        with monkeypatch.context() as here:  # undone before the emulator is
            here.setattr(ops, "backend", lambda: None)
            ops.variants_of.cache_clear()
            with pytest.raises(NoKernelError, match="no kernel"):
                pack.prepare()
        ops.variants_of.cache_clear()
        monkeypatch.setattr(ops, "switched_off", {variant: "it was wrong"})
        with pytest.raises(NoKernelError, match="it was wrong"):
            pack.prepare()


def test_shared_memory_holds_thread_groups():
    for head_dim, value_dim, bits in crossed(DIMS, DIMS, [None, 4, 8]):
        if bits and (head_dim % 64 or value_dim % 64):
            continue
        pages = bits and page_shape(head_dim, (bits, bits), 64, mx.bfloat16, value_dim)
        body = PREFILL_BODIES[bool(bits)]
        cut = shape_for(Variant(body, "cuda", mx.bfloat16, head_dim, value_dim, 4, 32, pages=pages or None))
        keys, threads = dict(cut.constants)["KEYS"], 32 * cut.simdgroups
        staged = -(-keys * max(head_dim, value_dim) * bits // 128 // threads) if bits else 0
        size = cut.shared + staged * threads * 24
        assert size <= 99 << 10, "one group must fit where there is least (a 4090)"
        assert (size + 1024) * cut.groups <= (227 if bits else 164) << 10, "all must fit into a core of an H100 or A100"
        assert bits or cut.rows >= MAX_GQA


CODES = """
const int bits = which[0];
const uint words[2] = {codes[thread_position_in_grid.x * 2], codes[thread_position_in_grid.x * 2 + 1]};
uint pairs[4];
if (bits == 8) value_pairs<T, 8>(words, factors[0], factors[1], pairs);
else value_pairs<T, 4>(words, factors[0], factors[1], pairs);
for (int i = 0; i < 4; i++) out[thread_position_in_grid.x * 4 + i] = pairs[i];
"""


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_dequantised_values_are_rounded_once(dtype, bits):
    codes = np.arange(256, dtype=np.uint8)
    if bits == 4:
        codes = np.repeat(codes, 2)
    words = np.ascontiguousarray(codes).view(np.uint32)  # with 4 bits, eight codes in the first of a thread's two words
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
        # The nearer of the two neighbours; a tie may go either way.
        step = np.abs(to_float(mx.array(exact.astype(np.float32)).astype(dtype)).astype(np.float64) - exact)
        np.testing.assert_array_less(np.abs(got - exact), step * (1 + 1e-5) + 1e-12)


DEFECTS = {  # old, new: the emulator objects, or the numbers come out wrong
    "no barriers": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    "barrier without memory": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "threadgroup_barrier(mem_flags::mem_none);"),
    "block past the context": ("(hi - 1) / BS)];", "(hi - 1) / BS + 1)];"),
    "block before the window": ("metal::min(lane, BLOCKS - 1), lo / BS)", "metal::min(lane, BLOCKS - 1), 0)"),
    "fence not passed on": ("fence_out[0] = fence[0] + 1u;", ""),
    "rows past the last token": ("if (row < n_tokens * G) {", "{"),
    "half a row": ("v < DV / 8; v++) {\n      const float* x", "v < DV / 16; v++) {\n      const float* x"),
    "two heads, one line": ("* G + row % G;", "* G;"),
    "shuffle in a branch": ("if (simd_any(grown)) {", "if (grown && simd_any(grown)) {"),
    "fence input dropped": ("fence[0] + 1u", "1u"),
    "wrong kv head of keys": ("k_pool + static_cast<int64_t>(kv_head)", "k_pool + static_cast<int64_t>(0)"),
    "wrong kv head of values": ("v_pool + static_cast<int64_t>(kv_head)", "v_pool + static_cast<int64_t>(0)"),
    "a token sees the next": ("token > own ||", "token > own + 1 ||"),
    "a token does not see itself": ("token > own ||", "token >= own ||"),
    "window one longer": ("token < from)", "token < from - 1)"),
    "window not masked": ("|| step * KEYS < first_seen(hi - 1)", ""),
    "diagonal not masked": ("step * KEYS + KEYS - 1 > origin ||", ""),
    "mask a step late": ("step * KEYS + KEYS - 1 > origin", "step * KEYS > origin"),
    "dead tokens are read": ("- lo) < static_cast<uint>(hi - lo);", "- lo) < 1u << 31;"),
    "block of another part": ("token / BS % BLOCKS", "(token / BS + 1) % BLOCKS"),
    "slot of another block": ("? step * KEYS % BS + token : token % BS", "? token : token % BS"),
    "skip the rescale": ("if (simd_any(grown)) {", "if (false) {"),
    "rescale by the other row": ("* 2 + i / 2 % 2];", "* 2 + 1 - i / 2 % 2];"),
    "skip the rescale of the sum": ("metal::fma(l[i], shrink[i], sum)", "l[i] + sum"),
    "maximum of half a row": ("top = metal::max(top, simd_shuffle_xor(top, 2));", ""),
    "sum of half a row": ("sum += simd_shuffle_xor(sum, 2);", ""),
    "nothing seen yet": ("top == NOTHING ? 0.0f : top * gain", "top * gain"),
    "fragments exchanged": ("a[0], a[1], a[2], a[3], b.x, b.y", "a[0], a[2], a[1], a[3], b.x, b.y"),
    "keys exchanged": ("lane / 16 * 8 + lane % 8) * KW + lane / 8 % 2 * 8", "lane / 8 % 2 * 8 + lane % 8) * KW + lane / 16 * 8"),
    "values exchanged": ("lane % 16 * VW + lane / 16 * 8", "(lane % 8 + lane / 16 * 8) * VW + lane / 8 % 2 * 8"),
    "weights exchanged": ("u * 2 + i % 4 / 2", "u * 2 + 1 - i % 4 / 2"),
    "not waited for": ("copies.wait();", ""),
    "softcap left out": ("if (SOFTCAP) {", "if (false) {"),
    "sink of another head": ("sinks[kv_head * G + row % G]", "sinks[kv_head * G]"),
    "sink not weighed": ("divide(weight, metal::fma(", "divide(1.0f, metal::fma("),
    "chunk begins one late": (" + stride - 1) / stride * stride", ")"),
    "chunk begins one early": (" + stride - 1) / stride * stride", ") / stride * stride"),
    "another table": ("static_cast<int64_t>(tile[0])", "static_cast<int64_t>(0)"),
    "quantised: not waited for": ("copies.wait();\n  if (is_value)", "if (is_value)"),
    "quantised: keys for values": ("is_value = true;", "is_value = false;"),
    "quantised: half of the codes": ("i * THREADS < KEYS * LOADS; i++) {\n    if (KEYS", "i * THREADS < KEYS * LOADS / 2; i++) {\n    if (KEYS"),
    "quantised: eight lanes, one token": ("/ loads * 8 + thread_index % 8", "/ loads * 8"),
    "quantised: another part of a row": ("(DIM + 8) + load_of(i, LOADS) * CODES", "(DIM + 8) + (load_of(i, LOADS) ^ 1) * CODES"),
    "quantised: scale of another group": ("both_halves(scales[i * THREADS + thread_index], g % 2)", "both_halves(scales[i * THREADS + thread_index], 0)"),
    "quantised: bias of another group": ("(DIM / GS + g) % 2", "(DIM / GS) % 2"),
    "quantised: bias for scale": ("factors + (ROW_GROUPS + g) / 2, live", "factors + g / 2, live"),
    "quantised: codes of another token": ("page + slot * WORDS + at * 4", "page + at * 4"),
    "quantised: factors of another token": ("slot * ROW_GROUPS;", "0;"),
    "quantised: high codes not moved": ("words[0] >> 1", "words[0]"),
}  # fmt: skip
SOME = ("no barriers", "block past the context", "skip the rescale", "quantised: scale of another group")


def packs_for(name):
    """Yield packs over dense pages, with scores that differ much and sinks larger than some; or over quantised
    pages."""
    if name.startswith("quantised"):
        yield pack_of([30, 70], [50, 40], (8, 4), window=37, block_size=8, head_dim=128, dtype=mx.float16)
        yield pack_of([50, 30], [64, 150], (4, 8), block_size=128, heads=(6, 2), head_dim=128)
        return
    yield pack_of([40], [125], window=20, stride=20, dtype=mx.float16)
    for sizes, options in (
        (([30, 70], [50, 40]), {"window": 37, "block_size": 8, "softcap": 3.0, "sinks": True}),
        (([50, 30], [64, 150]), {"block_size": 128, "sinks": True, "heads": (6, 2)}),
        (([40], [130]), {"window": 10}),
    ):
        pack = pack_of(*sizes, dtype=mx.float16, **options)
        pack.scale = 0.5
        if pack.softcap:
            pack.sinks = pack.sinks + pack.softcap
        yield pack


@pytest.mark.parametrize("name", quick(DEFECTS, *SOME))
def test_planted_defects_are_seen(name):
    for pack in packs_for(name):
        try:
            with emulated([DEFECTS[name]], orders=(0, 2)):
                out, fence = pack.run()
        except EmuError:
            return
        if fence != 8 or not np.allclose(out, pack.reference(), atol=2 * TOLERANCE[pack.dtype]):
            return
    pytest.fail("no number was wrong")
