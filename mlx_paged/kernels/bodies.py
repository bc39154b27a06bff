"""BODIES: one record per kernel, with its inputs, its outputs and the parts that its source is made of."""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache
from importlib import resources
from typing import NamedTuple


class Family(Enum):
    """Kernels grouped by the form of their launch."""

    DECODE = auto()
    FUSED_DECODE = auto()  # merges its partial results itself
    PREFILL = auto()
    MERGE = auto()
    WRITE = auto()
    GATHER = auto()
    COPY = auto()
    PRODUCT = auto()
    DRAW = auto()


class Body(NamedTuple):
    """A kernel.

    Attributes:
        family: how it is launched.
        parts: the parts of its source in order, each ``file:part``; the file is in text/, without its suffix.
        inputs, outputs: names, in order.
        helpers: parts with functions that it needs besides the prelude; "quantized.*" is the file of either dialect.
        cuda_only: runs on NVIDIA GPUs only.
        strided: inputs may be strided.
    """

    family: Family
    parts: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    cuda_only: bool = False
    strided: bool = False


def _parts(file: str, names: str) -> tuple[str, ...]:
    """Return ``file:part`` for each of the names, separated by spaces; a name with a colon keeps its own file."""
    return tuple(name if ":" in name else f"{file}:{name}" for name in names.split())


_POOL = ("k_pool", "v_pool", "fence")
_BOUNDS = ("tables", "ends", "starts", "params", "sinks")
_CODES = ("quantized.*:codes", "quantized.metal:groups")
_PARTITIONS = ("decode.metal:partitions",)
_TENSOR_CODES = (
    *("quantized.cuh:tensor_loads", "quantized.metal:groups"),
    *("quantized.cuh:tensor_codes", "quantized.cuh:tensor_quantize"),
)


def _decode(names: str, helpers: tuple[str, ...] = _PARTITIONS, file: str = "decode") -> Body:
    """Return a portable decode kernel, or one with Metal's 8 x 8 matrices."""
    inputs = ("q", *_POOL, "k_new", "v_new", *_BOUNDS)
    return Body(Family.DECODE, _parts(file, names), inputs, ("out", "stats", "fence_out"), helpers)


def _fused(names: str, helpers: tuple[str, ...] = ()) -> Body:
    """Return a decode kernel for tensor cores that merges its partial results itself."""
    return Body(
        Family.FUSED_DECODE,
        _parts("tensor_decode", names),
        ("q", *_POOL, "k_new", "v_new", *_BOUNDS, "arrivals"),
        ("out", "partial", "fence_out"),
        helpers,
        cuda_only=True,
    )


def _shared(names: str, helpers: tuple[str, ...] = ()) -> Body:
    """Return a decode kernel for tensor cores and rows with common blocks."""
    inputs = ("q", *_POOL, "k_new", "v_new", *_BOUNDS, "items")
    parts = _parts("tensor_decode", names)
    return Body(Family.DECODE, parts, inputs, ("partial", "stats", "fence_out"), helpers, cuda_only=True)


def _prefill(names: str, helpers: tuple[str, ...] = ()) -> Body:
    inputs = ("q", *_POOL, "tables", "tiles", "params", "sinks")
    parts = _parts("tensor_prefill", names)
    return Body(Family.PREFILL, parts, inputs, ("out", "fence_out"), helpers, cuda_only=True)


def _write(text: str, helpers: tuple[str, ...] = (), *, strided: bool = True) -> Body:
    return Body(Family.WRITE, (text,), (*_POOL, "k", "v", "slots"), ("fence_out",), helpers, strided=strided)


def _gather(text: str, helpers: tuple[str, ...] = ()) -> Body:
    return Body(Family.GATHER, (text,), (*_POOL, "blocks", "span"), ("k_out", "v_out", "fence_out"), helpers)


def _products(kind: str) -> dict[str, Body]:
    """Return the kernels that multiply a few rows by matrices. ``kind`` is "matmul", or "quantized" for weights in
    affine quantisation."""

    def weights(number: str) -> tuple[str, ...]:
        return (f"w{number}",) if kind == "matmul" else tuple(name + number for name in ("words", "scales", "biases"))

    def body(
        begin: str, inputs: tuple[str, ...], outputs: tuple[str, ...] = ("out",), columns: str = "columns"
    ) -> Body:
        text = _parts("products", f"{begin} {columns} rows {kind}_tile sums")
        return Body(Family.PRODUCT, text, ("x", *inputs), outputs, cuda_only=True)

    bodies, name = {}, f"narrow_{kind}"
    for extra, given in (("", ()), ("_bias", ("bias",)), ("_add", ("residual",))):
        bodies[name + extra] = body(f"{kind}_single store{extra}", (*weights(""), *given))
    pair = f"silu_gate {kind}_{'pair' if kind == 'quantized' else 'single'} store_gate"
    three = (*weights(""), *weights("1"), *weights("2"))
    bodies[f"{name}_gate"] = body(pair, (*weights(""), *weights("1")))
    results = ("out", "out1", "out2")
    bodies[f"{name}_group"] = body(f"{kind}_group", three, results)
    turned = (*three, "offsets", "frequencies")
    bodies[f"{name}_group_turn"] = body(f"{kind}_group", turned, results, "columns_rotated")
    return bodies


_STAGE = ("matrices.metal:stage",)
_JOIN = ("matrices.metal:join",)
_LATENT = ("latent_decode.cuh:flags", "latent_decode.cuh:warpgroup")
BODIES: dict[str, Body] = {
    "paged_decode": _decode("begin paged_newest first_blocks paged_loads scores softmax values end"),
    "quantized_decode": _decode(
        "begin quantized:page_words quantized:page_sizes query_sums quantized:newest first_blocks quantized_loads"
        " quantized_scores softmax quantized_values end",
        (*_CODES, *_PARTITIONS),
    ),
    "latent_decode": _decode("begin latent_newest first_blocks latent_loads scores softmax values end"),
    "matrix_decode": _decode(
        "decode_dense_pages decode_row decode_begin decode_dense_newest decode_loop dense_keys softmax dense_values"
        " decode_end",
        (*_PARTITIONS, *_JOIN),
        "matrices",
    ),
    "quantized_matrix_decode": _decode(
        "decode_quantized_pages decode_row decode_begin quantized:page_sizes quantized:newest decode_loop"
        " quantized_keys softmax quantized_values decode_end",
        (*_CODES, *_PARTITIONS, *_STAGE, *_JOIN),
        "matrices",
    ),
    "paged_decode_tensor": _fused(
        "own_heads dense_rows partition own_row sees bounds dense_dims finish own_end dense_tile sums dense_store join"
        " join_runs own_join nothing_seen"
    ),
    "quantized_decode_tensor": _fused(
        "own_heads quantized_rows partition own_row sees bounds quantized_dims finish own_end quantized_tile sums"
        " quantized_store join join_runs own_join nothing_seen",
        _TENSOR_CODES,
    ),
    "shared_decode_tensor": _shared(
        "common_heads dense_rows partition common_row sees bounds dense_dims common_end common_tile dense_tile sums"
        " dense_store join"
    ),
    "shared_quantized_decode_tensor": _shared(
        "common_columns quantized_rows partition common_row sees bounds quantized_dims common_end quantized_tile sums"
        " quantized_store join",
        _TENSOR_CODES,
    ),
    "join_partitions": Body(
        Family.MERGE,
        _parts("tensor_decode", "join_line sees join_runs join_end"),
        ("partial", "stats", "ends", "starts", "sinks"),
        ("out",),
        cuda_only=True,
    ),
    "latent_decode_tensor": _decode("decode", _LATENT, "latent_decode")._replace(cuda_only=True),
    "merge_partitions": Body(
        Family.MERGE,
        ("merge_partitions",),
        ("partial", "stats", "ends", "starts", "sinks"),
        ("out",),
        _PARTITIONS,
    ),
    "paged_prefill_tensor": _prefill("tile dense_pages lines dense_loads steps"),
    "quantized_prefill_tensor": _prefill("tile quantized_pages lines quantized_loads steps", _TENSOR_CODES),
    "write_slots": _write("write_slots"),
    "quantized_write": _write("quantized:quantized_write", _CODES),
    "write_rows": _write("quantized:write_rows", strided=False),
    "gather_blocks": _gather("gather_blocks"),
    "quantized_gather": _gather("quantized:quantized_gather", _CODES),
    "gather_rows": _gather("quantized:gather_rows"),
    "copy_blocks": Body(Family.COPY, ("copy_blocks",), (*_POOL, "pairs"), ("fence_out",)),
    **_products("matmul"),
    **_products("quantized"),
    "draw_rows": Body(Family.DRAW, ("draw_rows",), ("x", "params", "keys", "positions"), ("out",)),
}


@lru_cache(maxsize=64)
def text_parts(file: str) -> dict[str, str]:
    """Return the parts of a file in kernels/text/ or cuda/text/ by name. A part begins after a line ``//// name``;
    lines before the first such line, often the whole file, are the part named ""."""
    parts, name = {"": ""}, ""
    folder = resources.files("mlx_paged") / ("cuda" if file.endswith(".cuh") else "kernels") / "text"
    for line in (folder / file).read_text().splitlines(keepends=True):
        if line.startswith("//// "):
            name = line.removeprefix("//// ").strip()
            parts[name] = ""
        else:
            parts[name] += line
    return parts


def part_of(name: str) -> str:
    """Return the source of ``file:part``, or of a file without parts."""
    file, _, part = name.partition(":")
    return text_parts(file)[part]


@lru_cache(maxsize=64)
def kernel_text(body: str, dialect: str) -> tuple[str, str]:
    """Return (header, source) of a kernel in one dialect, "metal" or "cuda"."""
    record, suffix = BODIES[body], "metal" if dialect == "metal" else "cuh"
    own = "cuh" if record.cuda_only else "metal"
    source = "".join(
        part_of(f"{file}.{own}:{part}") for file, _, part in (name.partition(":") for name in record.parts)
    )
    helpers = "".join(part_of(name.replace("*", suffix)) for name in record.helpers)
    if helpers and (record.cuda_only or dialect == "cuda"):
        helpers = CUDA_HEADER.format(helpers)
    return (part_of("tensor.cuh") if record.cuda_only else "") + part_of(f"prelude.{suffix}") + helpers, source


# Wraps helpers in a CUDA header. The prelude defines `device` as empty, but __device__ expands to that word.
CUDA_HEADER = "#undef device\nnamespace mlx::core::cu {{\n{}}}\n#define device\n"
