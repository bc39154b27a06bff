# ruff: noqa: E501
"""The kernels' text, type-checked as MLX would generate it for Metal; the emulator's signature is MLX's own."""

import re
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_paged.kernels import bodies, draw_rows, ops
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.launch_shape import HEAD_DIMS, MATRIX_BODIES, Variant, constants_of, shape_for
from tests.support.cases import crossed, quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl import msl_source

checker = pytest.importorskip("tests.support.msl.checker")

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
EXTRAS = {"paged_decode", "quantized_decode", *MATRIX_BODIES}  # with softcap and sinks


def pool(kind):
    return [(4, 99999, kind), (4, 99999, kind), (1, 1, "uint32")]


def name_of(dtype):
    return str(dtype).split(".")[-1]


def problems(body, constants, inputs, out_dtypes, edit=None):
    header, source = kernel_build.kernel_source(body, "metal", constants)
    if edit:
        assert edit[0] in header + source
        header, source = header.replace(*edit), source.replace(*edit)
    record = BODIES[body]
    return checker.check_kernel(record.inputs, record.outputs, source, header, [(inputs, out_dtypes, [])])


def decode_problems(body, dtype, rows=9, edit=None, *, head_dim=128, gqa=4, bits=(8, 4), single=True, **options):
    """Return the problems of a body that attends, over pages of ``bits`` if it reads quantised ones."""
    pages = page_shape(head_dim, bits, options.pop("group_size", 32), dtype) if body.startswith("quantized") else None
    dims = (576, 512) if body == "latent_decode" else (head_dim, head_dim)
    extras = options.get("extras", body in EXTRAS)
    variant = Variant(body, "metal", dtype, *dims, gqa, options.get("block", 32), extras, extras, pages)
    out, kind = dtype if single else mx.float32, name_of(dtype)
    constants = (*constants_of(variant, shape_for(variant)), ("SINGLE", single), ("O", out))
    small = [(2, rows * 4, "int32"), (2, rows, "int32"), (2, rows, "int32"), (1, 3, "float32"), (1, 2, "float32")]
    pools = pool("uint32" if pages else kind)
    inputs = [(4, 9999, kind), *pools, (4, 999, kind), (4, 999, kind), *small]
    return problems(body, constants, inputs, [name_of(out), "float32", "uint32"], edit)


DECODE = [  # body, and options of two texts
    ("paged_decode", {"single": True}, {"single": False}),
    ("quantized_decode", {"bits": (8, 8)}, {"bits": (4, 4), "single": False}),
    ("quantized_decode", {"bits": (8, 4)}, {"head_dim": 256, "gqa": 16, "group_size": 128}),
    ("latent_decode", {"gqa": 10}, {"gqa": 10, "single": False}),
    *((body, {"gqa": 5, "head_dim": 96}, {"gqa": 16, "single": False}) for body in MATRIX_BODIES),
]


@pytest.mark.parametrize("case", range(len(DECODE)), ids=lambda n: DECODE[n][0])
@pytest.mark.parametrize(
    ("dtype", "rows"), quick(crossed(DTYPES, [2, 9]), (mx.float32, 2), (mx.float16, 9), (mx.bfloat16, 2))
)
def test_decode_is_clean(case, dtype, rows):
    body, *texts = DECODE[case]
    if dtype != mx.float32 or body not in MATRIX_BODIES:
        for options in texts:
            assert decode_problems(body, dtype, rows, **options) == []


@pytest.mark.parametrize("head_dim", quick(HEAD_DIMS, 64, 112, 256))
def test_every_head_dim_is_clean(head_dim):
    assert decode_problems("paged_decode", mx.bfloat16, head_dim=head_dim, gqa=16, block=8, extras=False) == []


STORED = re.compile(r"const_cast<device \w+\*>\(([^)]*)\)")


@pytest.mark.parametrize("body", ["paged_decode", "quantized_decode", *MATRIX_BODIES, "latent_decode"])
def test_pointers_that_are_read_back_come_from_one_buffer(body):
    """Apple's compiler assumes that two buffer arguments do not overlap."""
    _, source = bodies.kernel_text(body, "metal")
    assert sorted(set(STORED.findall(source))) == ["k_pool", "v_pool"]
    if body in ("quantized_decode", *MATRIX_BODIES):  # the newest token is read back from its page
        assert source.count("k_pool") == source.count("v_pool") == 1


def move_problems(body, dtype, rows, edit=None):
    own, d = body.startswith("quantized"), name_of(dtype)
    kind = d if own else "uint32"
    if body.endswith("gather") or body.startswith("gather"):
        inputs, outs = [*pool("uint32"), (1, rows, "int32"), (1, 2, "int32")], [kind, kind, "uint32"]
    else:
        inputs, outs = [*pool("uint32"), (4, 128 * rows, kind), (4, 128 * rows, kind), (1, rows, "int32")], ["uint32"]
    texts = dict(ops.pool_texts(dtype, 128, 128, 16, page_shape(128, (8, 4), 64, dtype)).values())
    return problems(body, texts[body], inputs, outs, edit)


OTHERS = {
    "merge_partitions": lambda d, n: [(3, 9999, "float32"), (3, 99 * n, "float32"), (2, n, "int32"), (2, n, "int32"), (1, 2, "float32")],
    "write_slots": lambda d, n: [*pool(d), (4, 128 * n, d), (4, 128 * n, d), (1, n, "int32")],
    "gather_blocks": lambda d, n: [*pool(d), (1, n, "int32"), (1, 2, "int32")],
}  # fmt: skip


def other_problems(body, dtype, rows, edit=None):
    constants = [("T", dtype), ("D", 64), ("DV", 80), ("BS", 16)]
    if body == "merge_partitions":
        constants = [("T", dtype), ("DV", 80), ("SG", 4), ("SINKS", True)]
        constants += [("PART", 128), ("SPAN", 16), ("FIRST", 256)]
    d = name_of(dtype)
    outs = {"merge_partitions": [d], "gather_blocks": [d, d, "uint32"]}.get(body, ["uint32"])
    return problems(body, tuple(constants), OTHERS[body](d, rows), outs, edit)


def draw_problems(body, dtype, rows, edit=None):
    inputs = [(2, rows * 999, name_of(dtype)), (2, rows * 8, "float32"), (2, rows * 8, "uint32"), (1, rows, "uint32")]
    return problems(body, draw_rows.kernel_key(dtype, "metal")[1], inputs, ["uint32"], edit)


FIND = {
    **dict.fromkeys(("quantized_write", "quantized_gather", "write_rows", "gather_rows"), move_problems),
    **dict.fromkeys(OTHERS, other_problems),
    "draw_rows": draw_problems,
}
ALWAYS = [(DTYPES[n % 3], (2, 9)[n % 2], body) for n, body in enumerate(FIND)]


@pytest.mark.parametrize(("dtype", "rows", "body"), quick(crossed(DTYPES, [2, 9], list(FIND)), *ALWAYS))
def test_other_bodies_are_clean(body, rows, dtype):
    assert FIND[body](body, dtype, rows) == []


BAD = {
    "store through the const pool": ("write_slots", "const_cast<device T*>(k_pool)", "k_pool", "const|read-only"),
    "pointer without address space": ("write_slots", "auto k_target", "T* k_target", "cannot initialize|address space"),
    "64 to 32 bit offset": ("gather_blocks", "const int64_t from", "const int from", "loses integer precision"),
    "undeclared name": ("gather_blocks", "span[0] + i", "spans[0] + i", "undeclared"),
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


BAD_ELSEWHERE = [  # what finds problems, its dtype, and the edit that makes one
    ("paged_decode", mx.bfloat16, "threadgroup_barrier(mem_flags::mem_threadgroup)", "__syncthreads()"),
    ("paged_decode", mx.bfloat16, "static_cast<O>(o)", "o"),
    ("paged_decode", mx.float32, "float l[R];", "float l[q_len];"),
    ("quantized_decode", mx.bfloat16, "mem_flags::mem_device", "mem_flags::mem_global"),
    ("quantized_decode", mx.float16, "<const device T*>(key_page", "<const T*>(key_page"),
    ("matrix_decode", mx.bfloat16, "const_cast<device T*>(k_pool)", "k_pool"),
    ("matrix_decode", mx.float16, "static_cast<O>(o)", "o"),
    ("quantized_matrix_decode", mx.float16, "threadgroup T* const own_staged", "T* const own_staged"),
    ("latent_decode", mx.bfloat16, "const_cast<device T*>(v_pool)[at", "v_pool[at"),
    ("latent_decode", mx.float16, "const int64_t slot", "const int slot"),
    ("latent_decode", mx.float32, "const float key = packet", "const T4 key = packet"),
    ("quantized_write", mx.bfloat16, "const_cast<device uint*>(k_pool)", "k_pool"),
    ("quantized_write", mx.bfloat16, "static_cast<T>(affine.scale)", "affine.scale"),
    ("draw_rows", mx.bfloat16, "static_cast<float>(x[start + i]), LEAST", "x[start + i], LEAST"),
    ("draw_rows", mx.float16, "-static_cast<float>(place)", "-place"),
    ("draw_rows", mx.float32, "const int64_t start", "const int start"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "dtype", "old", "new"), BAD_ELSEWHERE)
def test_checker_catches_in_other_bodies(body, dtype, old, new):
    assert FIND.get(body, decode_problems)(body, dtype, 9, (old, new))


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
