"""From kernel text to something callable: which GPU there is, which dialect it speaks, and a cache of built kernels.

Nothing is compiled on import, and nothing at all where MLX has no GPU.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib import resources
from typing import Any

import mlx.core as mx
import numpy as np

from ..warn import warn_when_slow
from .cuda.cubins import cubins
from .cuda.launch import CompiledKernel, Source, source_of

# Compile-time constants of a kernel: (name, bool | int | dtype).
Constants = tuple[tuple[str, Any], ...]
Launch = Callable[[list[mx.array]], list[mx.array]]

_TYPE_NAMES = {
    "metal": {
        mx.float32: "float",
        mx.float16: "half",
        mx.bfloat16: "bfloat16_t",
        mx.int32: "int",
        mx.int64: "int64_t",
        mx.uint32: "uint32_t",
    },
    "cuda": {
        mx.float32: "float",
        mx.float16: "__half",
        mx.bfloat16: "__nv_bfloat16",
        mx.int32: "int",
        mx.int64: "int64_t",
        mx.uint32: "uint32_t",
    },
}
_POOL = ["k_pool", "v_pool", "fence"]
_DECODE = (
    ["q", *_POOL, "k_new", "v_new", "tables", "ends", "starts", "params", "sinks"],
    ["out", "stats", "fence_out"],
    False,
)
_FUSED = ([*_DECODE[0], "arrivals"], ["out", "partial", "fence_out"], False)
_PREFILL = (["q", *_POOL, "tables", "tiles", "params", "sinks"], ["out", "fence_out"], False)
# A matrix of affine quantisation.
_PACKED, _PACKED1, _PACKED2 = (["words" + n, "scales" + n, "biases" + n] for n in ("", "1", "2"))
# body -> (inputs, outputs, inputs may be strided)
SIGNATURES: dict[str, tuple[list[str], list[str], bool]] = {
    "paged_decode": _DECODE,
    "paged_decode_tensor": _FUSED,
    "paged_prefill_tensor": _PREFILL,
    "prefill_matrix": _PREFILL,
    "quantized_prefill_matrix": _PREFILL,
    "merge_partitions": (["partial", "stats", "ends", "starts", "sinks"], ["out"], False),
    "write_slots": ([*_POOL, "k", "v", "slots"], ["fence_out"], True),
    "gather_blocks": ([*_POOL, "blocks", "span"], ["k_out", "v_out", "fence_out"], False),
    "copy_blocks": ([*_POOL, "pairs"], ["fence_out"], False),
    "quantized_decode": _DECODE,
    "quantized_decode_tensor": _FUSED,
    "quantized_prefill_tensor": _PREFILL,
    "quantized_write": ([*_POOL, "k", "v", "slots"], ["fence_out"], True),
    "quantized_gather": ([*_POOL, "blocks", "span"], ["k_out", "v_out", "fence_out"], False),
    "matrix_decode": _DECODE,
    "quantized_matrix_decode": _DECODE,
    "latent_decode": _DECODE,
    "latent_decode_tensor": _DECODE,
    "latent_prefill_tensor": (
        ["q", "k_pool", "v_pool", "rotated", "fence", "tables", "tiles", "params", "sinks"],
        ["out", "fence_out"],
        False,
    ),
    "write_rows": ([*_POOL, "k", "v", "slots"], ["fence_out"], False),
    "gather_rows": ([*_POOL, "blocks", "span"], ["k_out", "v_out", "fence_out"], False),
    "narrow_matmul": (["x", "w"], ["out"], False),
    "narrow_matmul_bias": (["x", "w", "bias"], ["out"], False),
    "narrow_matmul_add": (["x", "w", "residual"], ["out"], False),
    "narrow_matmul_gate": (["x", "w", "w1"], ["out"], False),
    "narrow_matmul_group": (["x", "w", "w1", "w2"], ["out", "out1", "out2"], False),
    "silu_product": (["left", "right"], ["out"], False),
    "embedding_rows": (["table", "tokens"], ["out"], False),
    "draw_rows": (["x", "params", "keys", "positions"], ["out"], False),
    "penalise_rows": (
        ["x", "tokens", "places", "words", "counts", "spans", "penalties"],
        ["out", "words_out", "counts_out", "spans_out"],
        False,
    ),
    "narrow_quantized": (["x", *_PACKED], ["out"], False),
    "narrow_quantized_bias": (["x", *_PACKED, "bias"], ["out"], False),
    "narrow_quantized_add": (["x", *_PACKED, "residual"], ["out"], False),
    "narrow_quantized_gate": (["x", *_PACKED, *_PACKED1], ["out"], False),
    "narrow_quantized_group": (["x", *_PACKED, *_PACKED1, *_PACKED2], ["out", "out1", "out2"], False),
}
_SINGLE = ("narrow_matmul", "narrow_matmul_bias", "narrow_matmul_add", "narrow_matmul_gate")
_PRODUCTS = "products/narrow"
_SUMS = f"{_PRODUCTS}_matmul_sums"


def _gate(body: str) -> tuple[str, ...]:
    return ("layers/silu_gate",) if body.endswith("gate") else ()


def _decode_parts(newest: tuple[str, ...], loads: str, scores: str, values: str) -> tuple[str, ...]:
    """Return the files of a portable decode body."""
    return ("decode/begin", *newest, "decode/first_blocks", loads, scores, "decode/softmax", values, "decode/end")


def _matrix_parts(folder: str, pages: str, *begin: str) -> tuple[str, ...]:
    """Return the files of a body by 8 x 8 matrices; ``begin`` names those before its loop, of its folder or another."""
    steps = f"matrix/{pages}_keys", "matrix/softmax", f"matrix/{pages}_values"
    own = (part if "/" in part else f"{folder}/{part}" for part in (f"{pages}_pages", *begin))
    return (*own, *steps, f"{folder}/end")


# Pages of quantised values: the newest token is quantised into its slot.
_PAGES, _NEWEST = ("quantized/page_words", "quantized/page_sizes"), "quantized/quantized_newest"


# Files that the text of a body is made of, for those that are CUDA only.
_CUDA_PARTS = {
    **{
        body: (
            *(f"tensor_decode/{part}" for part in (f"{pages}_rows", "partition", f"{pages}_tile")),
            *(f"tensor_decode/{part}" for part in ("sums", f"{pages}_store", "join")),
        )
        for body, pages in (("paged_decode_tensor", "dense"), ("quantized_decode_tensor", "quantized"))
    },
    **{
        body: tuple(f"tensor_prefill/{part}" for part in ("tile", f"{pages}_pages", "lines", f"{pages}_loads", "steps"))
        for body, pages in (("paged_prefill_tensor", "dense"), ("quantized_prefill_tensor", "quantized"))
    },
    "latent_decode_tensor": ("latent/latent_tensor",),
    "latent_prefill_tensor": (
        *("tensor_prefill/tile", "latent/prompt_pages", "tensor_prefill/lines", "latent/prompt_loads"),
        "tensor_prefill/steps",
    ),
    "narrow_matmul_group": (f"{_PRODUCTS}_matmul_group", f"{_PRODUCTS}_matmul_tile", _SUMS),
    **{
        body: (*_gate(body), f"{_PRODUCTS}_matmul_single", f"products/{body}", f"{_PRODUCTS}_matmul_tile", _SUMS)
        for body in _SINGLE
    },
    "narrow_quantized_group": (f"{_PRODUCTS}_quantized_group", f"{_PRODUCTS}_quantized_tile", _SUMS),
    **{
        body.replace("matmul", "quantized"): (
            *_gate(body),
            f"{_PRODUCTS}_quantized_{'pair' if body.endswith('gate') else 'single'}",
            *(f"products/{body}", f"{_PRODUCTS}_quantized_tile", _SUMS),
        )
        for body in _SINGLE
    },
    "silu_product": ("layers/silu_gate", "layers/silu_product"),
    "embedding_rows": ("layers/embedding_rows",),
}
_QUANTIZED_HELPERS = ("tensor_loads.cuh", "groups.metal", "tensor_codes.cuh", "tensor_quantize.cuh")
# More of a CUDA header. The prelude makes the word device empty, with which __device__ is itself spelt.
_CUDA_HEADER = "#undef device\nnamespace mlx::core::cu {{\n{}}}\n#define device\n"
# Those of other bodies, where they are not one file of the body's name.
_PARTS = {
    "paged_decode": _decode_parts(("decode/paged_newest",), "decode/paged_loads", "decode/scores", "decode/values"),
    "quantized_decode": _decode_parts(
        (*_PAGES, "quantized/query_sums", _NEWEST),
        *(f"quantized/quantized_{part}" for part in ("loads", "scores", "values")),
    ),
    "latent_decode": _decode_parts(("latent/latent_newest",), "latent/latent_loads", "decode/scores", "decode/values"),
    "prefill_matrix": _matrix_parts("prefill_matrix", "dense", "begin"),
    "quantized_prefill_matrix": _matrix_parts("prefill_matrix", "quantized", "begin"),
    "matrix_decode": _matrix_parts("matrix_decode", "dense", "begin", "dense_newest", "loop"),
    "quantized_matrix_decode": _matrix_parts("matrix_decode", "quantized", "begin", _PAGES[1], _NEWEST, "loop"),
    **{body: (f"quantized/{body}",) for body in ("quantized_write", "quantized_gather", "write_rows", "gather_rows")},
}
# Bodies that cut what a row sees into partitions.
_PARTITIONED = (
    "paged_decode",
    "quantized_decode",
    "matrix_decode",
    "quantized_matrix_decode",
    "latent_decode",
    "merge_partitions",
)


class KernelUnavailable(RuntimeError):
    """There is no GPU, or every variant for a geometry is switched off."""


@lru_cache(maxsize=1)
def backend() -> str | None:
    """Return the GPU dialect, metal or cuda, or None where MLX has no GPU that runs kernels."""
    if mx.metal.is_available():
        return "metal"
    if mx.cuda.is_available():
        return "cuda"
    return None


@lru_cache(maxsize=1)
def gpu_cores() -> int | None:
    """Cores of an Apple GPU; None on other GPUs, or where macOS does not tell."""
    if backend() != "metal":
        return None
    command = ["ioreg", "-r", "-c", "AGXAccelerator", "-d", "1"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return cores_listed(listed)


def cores_listed(listed: str) -> int | None:
    """Return the number of GPU cores in what ``ioreg`` lists, or None."""
    found = re.search(r'"gpu-core-count"\s*=\s*(\d+)', listed)
    return int(found.group(1)) if found else None


@lru_cache(maxsize=32)
def kernel_text(body: str, dialect: str) -> tuple[str, str]:
    """(header, source) of a kernel in one dialect, "metal" or "cuda"."""
    folder = resources.files(__package__) / "text"
    suffix = "metal" if dialect == "metal" else "cuh"
    prelude = (folder / f"prelude.{suffix}").read_text()
    if body in _CUDA_PARTS:
        source = "".join((folder / f"{part}.cuh").read_text() for part in _CUDA_PARTS[body])
        header = (folder / "tensor.cuh").read_text() + prelude
        if body.startswith("quantized"):
            helpers = ((folder / f"quantized/{part}").read_text() for part in _QUANTIZED_HELPERS)
            header += _CUDA_HEADER.format("".join(helpers))
        if body == "latent_decode_tensor":
            header += _CUDA_HEADER.format(
                "".join((folder / f"latent/{part}.cuh").read_text() for part in ("flags", "boxes", "warpgroup"))
            )
        return header, source
    source = "".join((folder / f"{part}.metal").read_text() for part in _PARTS.get(body, (body,)))
    functions = "".join((folder / part).read_text() for part in _functions_of(body, suffix))
    if functions:
        prelude += functions if dialect == "metal" else _CUDA_HEADER.format(functions)
    return prelude, source


def _functions_of(body: str, suffix: str) -> tuple[str, ...]:
    """Files of functions that a portable body needs beyond the prelude."""
    pages = (f"quantized/codes.{suffix}", "quantized/groups.metal") if body.startswith("quantized") else ()
    partitions = ("decode/partitions.metal",) if body in _PARTITIONED else ()
    staged = ("matrix/stage.metal",) if body in ("quantized_prefill_matrix", "quantized_matrix_decode") else ()
    return (*pages, *partitions, *staged)


def _condense(text: str) -> str:
    """Without comments, indentation and empty lines."""
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def kernel_source(body: str, dialect: str, constants: Constants) -> tuple[str, str]:
    """(header, source) with the constants declared at the top of the body.

    Declared there and not passed as MLX templates: those are formatted and hashed anew at every call.
    """
    header, source = kernel_text(body, dialect)
    lines = []
    for name, value in constants:
        if isinstance(value, mx.Dtype):
            lines.append(f"typedef {_TYPE_NAMES[dialect][value]} {name};")
        else:
            kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", str(value))
            lines.append(f"constexpr {kind} {name} = {text};")
    return header, "\n".join(lines) + "\n" + source


@lru_cache(maxsize=1024)
def build_kernel(body: str, constants: Constants) -> Callable[..., list[mx.array]]:
    """Return what launches a kernel with these constants. Raises KernelUnavailable where MLX has no GPU."""
    dialect = backend()
    if dialect is None:
        raise KernelUnavailable("the paged kernels need a GPU that MLX can use")
    if dialect == "cuda" and (compiled := _compiled_kernel(body, constants)) is not None:
        return compiled
    # MLX handles the whole text at every call: give it no more than the compiler needs.
    header, source = (_condense(text) for text in kernel_source(body, dialect, constants))
    inputs, outputs, strided = SIGNATURES[body]
    # MLX keeps compiled kernels under their name alone, some versions on disk too, so the name has to follow the text.
    name = f"{body}_{hashlib.sha256((header + source).encode()).hexdigest()[:16]}"
    known = dict(constants)
    if "GROUPS" in known:
        # MLX writes the declaration, so the attribute has to come in by the kernel's name.
        symbol, bounds = f"custom_kernel_{name}", f"__launch_bounds__({32 * known['SG']}, {known['GROUPS']})"
        header += f"#define {symbol} {bounds} {symbol}\n"
        source += f"#undef {symbol}\n"
    make: Any = mx.fast.metal_kernel if dialect == "metal" else mx.fast.cuda_kernel
    # Only CUDA bodies have memory that is not declared in the text.
    memory = {"shared_memory": known["SHARED"]} if "SHARED" in known else {}
    return make(
        name=name,
        input_names=inputs,
        output_names=outputs,
        source=source,
        header=header,
        ensure_row_contiguous=not strided,
        **memory,
    )


# MLX on CUDA keeps arrays of up to 8 bytes in pages that it shares with the host, which kernels read slowly. With the
# ends and starts of one row there, attention to 4,096 tokens takes 26 us in place of 17 (docs/adr/0064).
_BESIDE_THE_HOST = 8


def rows_array(rows: np.ndarray) -> mx.array:
    """Return integers of a step's rows, ``[B, ...]``, as an array that kernels read fast: a small one is a part of a
    larger one on CUDA."""
    if rows.nbytes > _BESIDE_THE_HOST or rows.size == 0 or backend() != "cuda":
        return mx.array(rows)
    whole = np.zeros((2 * _BESIDE_THE_HOST * len(rows) // rows.nbytes, *rows.shape[1:]), rows.dtype)
    whole[: len(rows)] = rows
    return mx.array(whole)[: len(rows)]


def prepared(kernel: Callable[..., list[mx.array]], options: dict[str, Any]) -> Launch:
    """Return a kernel of :func:`build_kernel` with these keyword arguments, to be given inputs of the same shapes each
    time: the host computes once what follows from them."""
    if isinstance(kernel, CompiledKernel):
        return kernel.prepared(**options)
    return lambda inputs: kernel(inputs=inputs, **options)


@lru_cache(maxsize=1024)
def _cuda_source(body: str, constants: Constants) -> Source | None:
    """Return the source for the compiler of :func:`cubins`."""
    header, source = (_condense(text) for text in kernel_source(body, "cuda", constants))
    types = (resources.files(__package__) / "text" / "types.cuh").read_text()
    inputs, outputs, _ = SIGNATURES[body]
    return source_of(body, types + header, source, inputs, outputs, dict(constants), _TYPE_NAMES["cuda"])


def _compiled_kernel(body: str, constants: Constants) -> CompiledKernel | None:
    """Return what this package compiles itself: MLX would read all of its headers for each text, some 2 s, in each
    process anew (docs/adr/0025). None: MLX has to."""
    known, source = cubins(), _cuda_source(body, constants)
    if known is None or source is None:
        return None
    with warn_when_compiling():
        cubin = known.get(source)
    return None if cubin is None else CompiledKernel(source, cubin, _TYPE_NAMES["cuda"])


def compile_ahead(kernels: Iterable[tuple[str, Constants]]) -> None:
    """Begin to compile kernels, (body, constants) each, that are going to be built: all at the same time, by threads.
    Does nothing where MLX compiles."""
    known = cubins() if backend() == "cuda" else None
    if known is not None:
        for source in (_cuda_source(*kernel) for kernel in kernels):
            if source is not None:
                known.start(source)


def warn_when_compiling() -> AbstractContextManager[None]:
    """Around what may compile kernels: says so on a terminal, once, if it takes long."""
    known = cubins() if backend() == "cuda" else None
    is_kept = known is not None and known.folder is not None
    return warn_when_slow("compiling kernels, once per machine" if is_kept else "compiling kernels")


def compiled_by() -> str:
    """Return who compiles the kernels on this machine, for people."""
    known = cubins() if backend() == "cuda" else None
    if known is None:
        return "MLX"
    return f"NVRTC {known.version}, {'once per machine' if known.folder is not None else 'in each process'}"
