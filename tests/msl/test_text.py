# ruff: noqa: E501
"""The kernels' text, type-checked as MLX would generate it for Metal; the emulator's signature is MLX's own."""

import re
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_paged.kernels import bodies, draw_rows, quantized
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.decode_spec import decode_constants_of
from mlx_paged.kernels.launch_shape import HEAD_DIMS, MATRIX_BODIES, shape_for
from tests.support.cases import crossed, quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl import msl_source

checker = pytest.importorskip("tests.support.msl.checker")

POOL = [(4, 99999, "T"), (4, 99999, "T"), (1, 1, "uint32")]


def decode_inputs(rows, dtype):
    small = [(2, rows * 4, "int32"), (2, rows, "int32"), (2, rows, "int32"), (1, 3, "float32"), (1, 2, "float32")]
    return [(4, 9999, dtype), *pool(dtype), (4, 999, dtype), (4, 999, dtype), *small]


def pool(dtype):
    return [(n, size, dtype if d == "T" else d) for n, size, d in POOL]


def decode_constants(dtype, head_dim=128, gqa=4, block=32, extras=True, single=True):
    variant = kernels.Variant("paged_decode", "metal", dtype, head_dim, head_dim, gqa, block, extras, extras)
    out = dtype if single else mx.float32
    return (*decode_constants_of(variant, shape_for(variant)), ("SINGLE", single), ("O", out)), out


def problems(body, constants, inputs, out_dtypes, edit=None):
    header, source = kernel_build.kernel_source(body, "metal", constants)
    if edit:
        assert edit[0] in header + source
        header, source = header.replace(*edit), source.replace(*edit)
    record = BODIES[body]
    return checker.check_kernel(record.inputs, record.outputs, source, header, [(inputs, out_dtypes, [])])


def name_of(dtype):
    return str(dtype).split(".")[-1]


def decode_problems(dtype, rows=9, edit=None, **options):
    constants, out = decode_constants(dtype, **options)
    outs = [name_of(out), "float32", "uint32"]
    return problems("paged_decode", constants, decode_inputs(rows, name_of(dtype)), outs, edit)


def quantized_problems(dtype, rows=9, edit=None, head_dim=128, gqa=4, bits=(8, 4), group_size=32, single=True):
    pages = page_shape(head_dim, bits, group_size, dtype)
    variant = kernels.Variant("quantized_decode", "metal", dtype, head_dim, head_dim, gqa, 32, True, True, pages)
    out = dtype if single else mx.float32
    constants = (*decode_constants_of(variant, shape_for(variant)), ("SINGLE", single), ("O", out))
    d = name_of(dtype)
    inputs = [(n, size, "uint32" if i in (1, 2) else kind) for i, (n, size, kind) in enumerate(decode_inputs(rows, d))]
    return problems("quantized_decode", constants, inputs, [name_of(out), "float32", "uint32"], edit)


DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "rows", "single"), quick(crossed(DTYPES, [2, 9], [True, False]), (mx.float32, 2, True),
    (mx.bfloat16, 9, True), (mx.float16, 9, False))
)  # fmt: skip
def test_decode_is_clean(single, rows, dtype):
    assert decode_problems(dtype, rows, single=single) == []


@pytest.mark.parametrize("head_dim", quick(HEAD_DIMS, 64, 112, 256))
def test_every_head_dim_is_clean(head_dim):
    assert decode_problems(mx.bfloat16, head_dim=head_dim, gqa=16, block=8, extras=False) == []


@pytest.mark.parametrize(
    ("dtype", "rows", "bits", "single"), quick([(a, b, *c) for a in DTYPES for b in [2, 9] for c in [((8, 8), True),
    ((4, 4), False), ((8, 4), True)]], (mx.float32, 2, (8, 8), True), (mx.float16, 9, (4, 4), False),
    (mx.bfloat16, 2, (8, 4), True))
)  # fmt: skip
def test_quantized_decode_is_clean(bits, single, rows, dtype):
    assert quantized_problems(dtype, rows, bits=bits, single=single) == []
    assert quantized_problems(dtype, rows, head_dim=256, gqa=16, group_size=128, bits=bits) == []


@pytest.mark.parametrize(
    ("bits", "rows", "dtype"), quick(crossed([None, (8, 8), (8, 4)], [2, 9], DTYPES[1:]), (None, 2, mx.bfloat16),
    (None, 9, mx.float16), ((8, 4), 9, mx.bfloat16))
)  # fmt: skip
def test_matrix_decode_is_clean(bits, rows, dtype):
    for single, gqa, head_dim in ((True, 5, 96), (False, 16, 128)):
        assert matrix_problems(dtype, rows, bits, single, gqa, head_dim) == []


def matrix_problems(dtype, rows=9, bits=None, single=True, gqa=8, head_dim=64, edit=None):
    pages, body = bits and page_shape(head_dim, bits, 32, dtype), MATRIX_BODIES[bits is not None]
    variant = kernels.Variant(body, "metal", dtype, head_dim, head_dim, gqa, 32, True, True, pages)
    out, d = dtype if single else mx.float32, name_of(dtype)
    constants = (*decode_constants_of(variant, shape_for(variant)), ("SINGLE", single), ("O", out))
    inputs = [
        (n, size, "uint32" if bits and i in (1, 2) else kind)
        for i, (n, size, kind) in enumerate(decode_inputs(rows, d))
    ]
    return problems(body, constants, inputs, [name_of(out), "float32", "uint32"], edit)


def test_checker_catches_in_matrix_decode():
    assert matrix_problems(mx.bfloat16, edit=("const_cast<device T*>(k_pool)", "k_pool"))
    assert matrix_problems(mx.float16, edit=("static_cast<O>(o)", "o"))
    assert matrix_problems(mx.float16, bits=(8, 4), edit=("threadgroup T* const own_staged", "T* const own_staged"))


STORED = re.compile(r"const_cast<device \w+\*>\(([^)]*)\)")


@pytest.mark.parametrize("body", ["paged_decode", "quantized_decode", *MATRIX_BODIES, "latent_decode"])
def test_pointers_that_are_read_back_come_from_one_buffer(body):
    """Apple's compiler assumes that two buffer arguments do not overlap."""
    _, source = bodies.kernel_text(body, "metal")
    assert sorted(set(STORED.findall(source))) == ["k_pool", "v_pool"]
    if body in ("quantized_decode", *MATRIX_BODIES):  # the newest token is read back from its page
        assert source.count("k_pool") == source.count("v_pool") == 1


def latent_problems(dtype, rows=9, edit=None, gqa=10, single=True):
    variant = kernels.Variant("latent_decode", "metal", dtype, 576, 512, gqa, 32)
    out = dtype if single else mx.float32
    constants = (*decode_constants_of(variant, shape_for(variant)), ("SINGLE", single), ("O", out))
    outs = [name_of(out), "float32", "uint32"]
    return problems("latent_decode", constants, decode_inputs(rows, name_of(dtype)), outs, edit)


@pytest.mark.parametrize(
    ("dtype", "rows", "single"), quick(crossed(DTYPES, [2, 9], [True, False]), (mx.float32, 2, True),
    (mx.bfloat16, 9, True), (mx.float16, 9, False))
)  # fmt: skip
def test_latent_decode_is_clean(single, rows, dtype):
    assert latent_problems(dtype, rows, single=single) == []


def test_checker_catches_in_latent_decode():
    stored = ("const_cast<device T*>(v_pool)[at", "v_pool[at")
    assert latent_problems(mx.bfloat16, edit=stored)
    assert latent_problems(mx.float16, edit=("const int64_t slot", "const int slot"))
    assert latent_problems(mx.float32, edit=("const float key = packet", "const T4 key = packet"))


WORDS = [(4, 99999, "uint32"), (4, 99999, "uint32"), (1, 1, "uint32")]


def move_problems(body, dtype, rows, edit=None):
    own, d = body.startswith("quantized"), name_of(dtype)
    constants = quantized.page_constants if own else quantized.row_constants
    kind = d if own else "uint32"
    if body.endswith("gather") or body.startswith("gather"):
        inputs, outs = [*WORDS, (1, rows, "int32"), (1, 2, "int32")], [kind, kind, "uint32"]
    else:
        inputs, outs = [*WORDS, (4, 128 * rows, kind), (4, 128 * rows, kind), (1, rows, "int64")], ["uint32"]
    known = (*constants(page_shape(128, (8, 4), 64, dtype), 16), ("S", mx.int64))
    return problems(body, known, inputs, outs, edit)


@pytest.mark.parametrize(
    ("dtype", "rows", "body"),
    quick(crossed(DTYPES, [2, 9], ["quantized_write", "quantized_gather", "write_rows", "gather_rows"]),
    (mx.float32, 2, "quantized_write"), (mx.float16, 9, "quantized_gather"), (mx.bfloat16, 2, "write_rows"),
    (mx.float32, 2, "gather_rows"))
)  # fmt: skip
def test_moves_of_quantized_pages_are_clean(body, rows, dtype):
    assert move_problems(body, dtype, rows) == []


OTHERS = {
    "merge_partitions": lambda d, n: [(3, 9999, "float32"), (3, 99 * n, "float32"), (2, n, "int32"), (2, n, "int32"), (1, 2, "float32")],
    "write_slots": lambda d, n: [*pool(d), (4, 128 * n, d), (4, 128 * n, d), (1, n, "int64")],
    "gather_blocks": lambda d, n: [*pool(d), (1, n, "int32"), (1, 2, "int32")],
    "copy_blocks": lambda d, n: [*pool(d), (2, 2 * n, "int32")],
}  # fmt: skip


def other_problems(body, dtype, rows, edit=None):
    constants = [("T", dtype), ("D", 64), ("DV", 80), ("BS", 16), ("S", mx.int64)]
    if body == "merge_partitions":
        constants = [("T", dtype), ("DV", 80), ("SG", 4), ("SINKS", True)]
        constants += [("PART", 128), ("SPAN", 16), ("FIRST", 256)]
    d = name_of(dtype)
    outs = {"merge_partitions": [d], "gather_blocks": [d, d, "uint32"]}.get(body, ["uint32"])
    return problems(body, tuple(constants), OTHERS[body](d, rows), outs, edit)


@pytest.mark.parametrize(
    ("dtype", "rows", "body"), quick(crossed(DTYPES, [2, 9], list(OTHERS)), (mx.float32, 2, "merge_partitions"),
    (mx.float16, 9, "write_slots"), (mx.bfloat16, 2, "gather_blocks"), (mx.float32, 2, "copy_blocks"))
)  # fmt: skip
def test_others_are_clean(body, rows, dtype):
    assert other_problems(body, dtype, rows) == []


def draw_problems(dtype, rows, edit=None):
    inputs = [(2, rows * 999, name_of(dtype)), (2, rows * 8, "float32"), (2, rows * 8, "uint32"), (1, rows, "uint32")]
    return problems("draw_rows", draw_rows.kernel_key(dtype, "metal").constants, inputs, ["uint32"], edit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 9])
def test_draw_rows_is_clean(rows, dtype):
    assert draw_problems(dtype, rows) == []


def test_checker_catches_in_draw_rows():
    assert draw_problems(mx.bfloat16, 9, ("static_cast<float>(x[start + i]), LEAST", "x[start + i], LEAST"))
    assert draw_problems(mx.float16, 9, ("-static_cast<float>(place)", "-place"))
    assert draw_problems(mx.float32, 9, ("const int64_t start", "const int start"))


BAD = {
    "store through the const pool": ("write_slots", "const_cast<device T*>(k_pool)", "k_pool", "const|read-only"),
    "pointer without address space": ("write_slots", "auto k_target", "T* k_target", "cannot initialize|address space"),
    "64 to 32 bit offset": ("gather_blocks", "const int64_t from", "const int from", "loses integer precision"),
    "undeclared name": ("copy_blocks", "n_pairs + pair", "n_pair + pair", "undeclared"),
    "CUDA intrinsic": ("merge_partitions", "simd_max(top)", "__shfl_sync(0, top, 0)", "undeclared"),
    "float stored as T": ("merge_partitions", "static_cast<T>(n_live > 0 ? o[d] / denominator : 0.0f)", "o[d]", "loses floating-point"),
    "unsuffixed literal": ("merge_partitions", "o[d] = 0.0f;", "o[d] = 0.0;", "unsuffixed"),
    "mixed max": ("merge_partitions", "metal::max(top, sink)", "metal::max(top, 0)", "ambiguous"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_checker_catches(name):
    body, old, new, want = BAD[name]
    found = other_problems(body, mx.float16, 9, (old, new))
    assert any(re.search(want, p) for p in found), found


def test_checker_catches_in_quantized_texts():
    write, page = "quantized_write", "const_cast<device uint*>(is_value ? v_pool : k_pool)"
    assert move_problems(write, mx.bfloat16, 9, (page, "(is_value ? v_pool : k_pool)"))
    assert move_problems(write, mx.bfloat16, 9, ("static_cast<T>(affine.scale)", "affine.scale"))
    assert quantized_problems(mx.bfloat16, edit=("mem_flags::mem_device", "mem_flags::mem_global"))
    assert quantized_problems(
        mx.float16, edit=("reinterpret_cast<const device T*>(key_page", "reinterpret_cast<const T*>(key_page")
    )


def test_checker_catches_in_decode():
    assert decode_problems(mx.bfloat16, edit=("threadgroup_barrier(mem_flags::mem_threadgroup)", "__syncthreads()"))
    assert decode_problems(mx.bfloat16, edit=("static_cast<O>(o)", "o"))
    assert decode_problems(mx.float32, edit=("float l[R];", "float l[q_len];"))


DRIFT = """
import sys, mlx.core as mx
k = mx.fast.metal_kernel("probe", ["a", "b", "c"], ["x", "y"], sys.argv[1], "// header\\n")
def f(a, b, c):
    return tuple(k(inputs=[a, b, c], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(1,), (2,)],
                   output_dtypes=[mx.bfloat16, mx.uint32], verbose=True, stream=mx.gpu))
mx.export_function(sys.argv[2], f, mx.zeros((4, 9)), mx.zeros((3,), mx.int32), mx.zeros((8,), mx.int64))
"""


def test_signature_is_the_one_mlx_generates(tmp_path):
    body = "int i = thread_position_in_grid.x; int s = a_shape[0] + b_shape[0]; x[i] = a_strides[0] + c_ndim + s;\n"
    done = subprocess.run(
        [sys.executable, "-c", DRIFT, body, str(tmp_path / "f.mlxfn")], capture_output=True, text=True, timeout=120
    )
    match = re.search(r"```\n(.*?)```", done.stdout, re.S)
    if not match:
        pytest.skip(f"this MLX build does not print Metal source: {done.stderr[-300:]}")
    ours, _, _ = msl_source.mlx_source(
        "F", "", body, ["a", "b", "c"], [(2, 36, "float32"), (1, 3, "int32"), (1, 8, "int64")], ["x", "y"],
        ["bfloat16", "uint32"], [],
    )  # fmt: skip

    def signature(text):
        text = text[text.index("[[kernel]] void") :]
        return re.sub(r"void \w+", "void F", "".join(text[: text.index(") {")])).split()

    assert "".join(signature(match.group(1))) == "".join(signature(ours))
