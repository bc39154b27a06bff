"""BODIES: one record per kernel, with its file, its inputs and its outputs; and the texts made from these files.

A file is a kernel, from top to bottom; those for tensor cores include their rows, partitions and joins. Where the
kernels of a family differ, it has ``#if`` with the names of their variants. :func:`kernel_text` resolves these, and
``#include`` of another file, so that MLX, which processes the whole text at each launch, gets no more than the compiler
needs.
"""

from __future__ import annotations

import re
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
        file: its text, in kernels/text/ (.metal, for both GPUs unless it uses Metal's matrices) or cuda/text/ (.cuh).
        inputs, outputs: names, in order; their types are those of cuda/launch.py.
        variants: names that are true in the file's ``#if``.
        helpers: files with functions that it needs besides the prelude; "codes" is the file of either dialect.
        strided: inputs may be strided.
    """

    family: Family
    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variants: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()
    strided: bool = False

    @property
    def cuda_only(self) -> bool:
        """Whether it runs on NVIDIA GPUs only."""
        return self.file.endswith(".cuh")


# Names of variants: pages not quantised and quantised; latents; a row's own blocks, blocks common to rows, and the
# merge of both; for products what is stored.
VARIANTS = ("PAGED", "QUANTIZED", "LATENT", "OWN", "COMMON", "JOIN", "PLAIN", "BIAS", "GATE", "GROUP")

_POOL = ("k_pool", "v_pool", "fence")
_BOUNDS = ("tables", "ends", "starts", "params", "sinks")
_DECODE = ("q", *_POOL, "k_new", "v_new", *_BOUNDS)
_PROMPT = ("q", *_POOL, "tables", "tiles", "params", "sinks")
_PARTIAL = ("partial", "stats", "ends", "starts", "sinks")
_RESULTS = ("out", "stats", "fence_out")
_CODES = ("codes", "groups.metal")
_TENSOR_CODES = ("tensor_loads.cuh", "groups.metal", "tensor_codes.cuh", "tensor_quantize.cuh")
_MATRICES = ("partitions.metal", "join.metal")


def _tensor_decode(family: Family, more: str, outputs: tuple[str, ...], *variants: str) -> Body:
    if "QUANTIZED" in variants:
        return Body(family, "quantized_tensor_decode.cuh", (*_DECODE, more), outputs, variants, _TENSOR_CODES)
    return Body(family, "tensor_decode.cuh", (*_DECODE, more), outputs, variants)


def _write(file: str, helpers: tuple[str, ...] = (), *, strided: bool = True) -> Body:
    return Body(Family.WRITE, file, (*_POOL, "k", "v", "slots"), ("fence_out",), (), helpers, strided)


def _gather(file: str, helpers: tuple[str, ...] = ()) -> Body:
    return Body(Family.GATHER, file, (*_POOL, "blocks", "span"), ("k_out", "v_out", "fence_out"), (), helpers)


def _products(kind: str) -> dict[str, Body]:
    """Return the kernels that multiply a few rows by matrices. ``kind`` is "matmul", or "quantized" for weights in
    affine quantisation."""
    names, form = (("w",), ()) if kind == "matmul" else (("w", "scales", "biases"), ("QUANTIZED",))
    one, two, three = (tuple(name + n for n in ("", "1", "2")[:count] for name in names) for count in (1, 2, 3))

    def body(inputs: tuple[str, ...], *variants: str, outputs: tuple[str, ...] = ("out",)) -> Body:
        return Body(Family.PRODUCT, "products.cuh", ("x", *inputs), outputs, (*variants, *form))

    return {
        f"narrow_{kind}": body(one, "PLAIN"),
        f"narrow_{kind}_bias": body((*one, "bias"), "BIAS"),
        f"narrow_{kind}_gate": body(two, "GATE"),
        f"narrow_{kind}_group": body(three, "GROUP", outputs=("out", "out1", "out2")),
    }


_FUSED_RESULTS = ("out", "partial", "fence_out")
_COMMON_RESULTS = ("partial", "stats", "fence_out")
BODIES: dict[str, Body] = {
    "paged_decode": Body(Family.DECODE, "decode.metal", _DECODE, _RESULTS, ("PAGED",), ("partitions.metal",)),
    "quantized_decode": Body(
        Family.DECODE, "decode.metal", _DECODE, _RESULTS, ("QUANTIZED",), (*_CODES, "partitions.metal")
    ),
    "latent_decode": Body(Family.DECODE, "decode.metal", _DECODE, _RESULTS, ("LATENT",), ("partitions.metal",)),
    "matrix_decode": Body(Family.DECODE, "matrix_decode.metal", _DECODE, _RESULTS, ("PAGED",), _MATRICES),
    "quantized_matrix_decode": Body(
        Family.DECODE,
        "matrix_decode.metal",
        _DECODE,
        _RESULTS,
        ("QUANTIZED",),
        (*_CODES, "partitions.metal", "stage.metal", "join.metal"),
    ),
    "paged_decode_tensor": _tensor_decode(Family.FUSED_DECODE, "arrivals", _FUSED_RESULTS, "OWN", "PAGED"),
    "quantized_decode_tensor": _tensor_decode(Family.FUSED_DECODE, "arrivals", _FUSED_RESULTS, "OWN", "QUANTIZED"),
    "shared_decode_tensor": _tensor_decode(Family.DECODE, "items", _COMMON_RESULTS, "COMMON", "PAGED"),
    "shared_quantized_decode_tensor": _tensor_decode(Family.DECODE, "items", _COMMON_RESULTS, "COMMON", "QUANTIZED"),
    "join_partitions": Body(Family.MERGE, "join_runs.cuh", _PARTIAL, ("out",), ("JOIN",)),
    "latent_decode_tensor": Body(
        Family.DECODE, "latent_decode.cuh", _DECODE, _RESULTS, helpers=("flags.cuh", "warpgroup.cuh")
    ),
    "merge_partitions": Body(Family.MERGE, "merge_partitions.metal", _PARTIAL, ("out",), helpers=("partitions.metal",)),
    "paged_prefill_tensor": Body(Family.PREFILL, "tensor_prefill.cuh", _PROMPT, ("out", "fence_out"), ("PAGED",)),
    "quantized_prefill_tensor": Body(
        Family.PREFILL, "tensor_prefill.cuh", _PROMPT, ("out", "fence_out"), ("QUANTIZED",), _TENSOR_CODES
    ),
    "write_slots": _write("write_slots.metal"),
    "quantized_write": _write("quantized_write.metal", _CODES),
    "write_rows": _write("write_rows.metal", strided=False),
    "gather_blocks": _gather("gather_blocks.metal"),
    "quantized_gather": _gather("quantized_gather.metal", _CODES),
    "gather_rows": _gather("gather_rows.metal"),
    "copy_blocks": Body(Family.COPY, "copy_blocks.metal", (*_POOL, "pairs"), ("fence_out",)),
    **_products("matmul"),
    **_products("quantized"),
    "draw_rows": Body(Family.DRAW, "draw_rows.metal", ("x", "params", "keys", "positions"), ("out",)),
}


@lru_cache(maxsize=64)
def text_of(file: str) -> str:
    """Return a file of kernels/text/, or of cuda/text/ if its name ends in .cuh."""
    folder = resources.files("mlx_paged") / ("cuda" if file.endswith(".cuh") else "kernels") / "text"
    return (folder / file).read_text()


def resolved(text: str, variants: tuple[str, ...]) -> str:
    """Return a text without the lines that belong to other variants, and with its included files. Conditions that name
    no variant are the compiler's and stay."""
    lines: list[str] = []
    # Conditions that enclose the line: whether it belongs to this kernel, and whether a branch before it did; None for
    # the compiler's.
    open_ones: list[tuple[bool, bool] | None] = []
    for line in text.splitlines(keepends=True):
        word, _, rest = line.strip().partition(" ")
        if word in ("#if", "#ifdef", "#ifndef"):
            own = word == "#if" and bool(set(re.findall(r"\w+", rest)) & set(VARIANTS))
            open_ones.append((_holds(rest, variants),) * 2 if own else None)
            if own:
                continue
        elif word in ("#elif", "#else", "#endif") and open_ones[-1] is not None:
            known = open_ones.pop()
            if known is not None and word != "#endif":
                holds = not known[1] and (word == "#else" or _holds(rest, variants))
                open_ones.append((holds, known[1] or holds))
            continue
        elif word == "#endif":
            open_ones.pop()
        if all(each is None or each[0] for each in open_ones):
            included = re.fullmatch(r'#include "([\w.]+)"', line.strip())
            lines.append(resolved(text_of(included[1]), variants) if included else line)
    return "".join(lines)


def _holds(condition: str, variants: tuple[str, ...]) -> bool:
    """Return whether a condition of names, ``!``, ``&&`` and ``||`` is true."""
    return any(
        all((name.strip().lstrip("!") in variants) != name.strip().startswith("!") for name in each.split("&&"))
        for each in condition.split("||")
    )


@lru_cache(maxsize=64)
def kernel_text(body: str, dialect: str) -> tuple[str, str]:
    """Return (header, source) of a kernel in one dialect, "metal" or "cuda"."""
    record, suffix = BODIES[body], "metal" if dialect == "metal" else "cuh"
    helpers = "".join(text_of(name if "." in name else f"{name}.{suffix}") for name in record.helpers)
    if helpers and (record.cuda_only or dialect == "cuda"):
        helpers = CUDA_HEADER.format(helpers)
    header = (text_of("tensor.cuh") if record.cuda_only else "") + text_of(f"prelude.{suffix}") + helpers
    return header, resolved(text_of(record.file), record.variants)


# Wraps helpers in a CUDA header. The prelude defines `device` as empty, but __device__ expands to that word.
CUDA_HEADER = "#undef device\nnamespace mlx::core::cu {{\n{}}}\n#define device\n"
