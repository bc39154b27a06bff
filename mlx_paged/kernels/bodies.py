"""BODIES: one record per kernel, with its file, its inputs and its outputs; their types; and the texts made from these
files.

A file holds a family of kernels, from top to bottom: its functions, then, after ``#pragma kernel``, the statements of
its kernels, which MLX makes a function of. Where the kernels differ, it has ``#if`` with the names of their variants.
:func:`kernel_text` resolves these, and ``#include`` of another file, so that MLX, which processes the whole text at
each launch, gets no more than the compiler needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple


class Body(NamedTuple):
    """A kernel.

    Attributes:
        file: its text, in kernels/text/ (.metal, for both GPUs unless it uses Metal's matrices) or cuda/text/ (.cuh).
        inputs, outputs: names, in order; :meth:`type_of` tells their types.
        variants: names that are true in the ``#if`` of the file and of the prelude.
    """

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variants: tuple[str, ...] = ()

    @property
    def cuda_only(self) -> bool:
        """Whether it runs on NVIDIA GPUs only."""
        return self.file.endswith(".cuh")

    def type_of(self, name: str, constants: Mapping[str, Any]) -> str:
        """Return the element type of an input or output in a text with these constants: T or O, which a constant
        defines, or a type of C."""
        if (name in _PAGES and "QUANTIZED" in self.variants) or (name in _MATRICES and "PACKED" in self.variants):
            return "uint32_t"
        return "O" if name == "out" and "O" in constants else _TYPES.get(name, "T")


_PAGES, _MATRICES = ("k_pool", "v_pool"), ("w", "w1", "w2")
_TYPES = {  # those that are not T
    **dict.fromkeys(("fence", "fence_out", "arrivals", "keys", "positions"), "uint32_t"),
    **dict.fromkeys(("tables", "ends", "starts", "blocks", "span", "slots", "tiles", "items"), "int"),
    **dict.fromkeys(("params", "sinks", "stats", "partial"), "float"),
}
# Inputs and outputs that several kernels have.
_POOL = (*_PAGES, "fence")
_DECODE = ("q", *_POOL, "k_new", "v_new", "tables", "ends", "starts", "params", "sinks")
_OWN, _COMMON = (*_DECODE, "arrivals"), (*_DECODE, "items")
_PARTIAL = ("partial", "stats", "ends", "starts", "sinks")
_PROMPT = ("q", *_POOL, "tables", "tiles", "params", "sinks")
_ROWS, _BLOCKS = (*_POOL, "k", "v", "slots"), (*_POOL, "blocks", "span")
_PACKED, _PACKED_1, _PACKED_2 = (
    tuple(name + number for name in ("w", "scales", "biases")) for number in ("", "1", "2")
)
_OUT, _GROUP_OUT = ("out",), ("out", "out1", "out2")
_FENCE = ("fence_out",)
_DECODE_OUT = ("out", "stats", *_FENCE)
_OWN_OUT = ("out", "partial", *_FENCE)
_COMMON_OUT = ("partial", "stats", *_FENCE)
_PROMPT_OUT = ("out", *_FENCE)
_BLOCKS_OUT = ("k_out", "v_out", *_FENCE)

BODIES: dict[str, Body] = {
    "paged_decode": Body("decode.metal", _DECODE, _DECODE_OUT, ("PARTITIONS", "PAGED")),
    "quantized_decode": Body("decode.metal", _DECODE, _DECODE_OUT, ("PARTITIONS", "QUANTIZED")),
    "latent_decode": Body("decode.metal", _DECODE, _DECODE_OUT, ("PARTITIONS", "LATENT")),
    "matrix_decode": Body("matrix_decode.metal", _DECODE, _DECODE_OUT, ("PARTITIONS", "PAGED")),
    "quantized_matrix_decode": Body("matrix_decode.metal", _DECODE, _DECODE_OUT, ("PARTITIONS", "QUANTIZED")),
    "merge_partitions": Body("merge_partitions.metal", _PARTIAL, _OUT, ("PARTITIONS",)),
    "paged_decode_tensor": Body("tensor_decode.cuh", _OWN, _OWN_OUT, ("OWN", "PAGED")),
    "quantized_decode_tensor": Body("tensor_decode.cuh", _OWN, _OWN_OUT, ("OWN", "QUANTIZED")),
    "shared_decode_tensor": Body("tensor_decode.cuh", _COMMON, _COMMON_OUT, ("COMMON", "PAGED")),
    "shared_quantized_decode_tensor": Body("tensor_decode.cuh", _COMMON, _COMMON_OUT, ("COMMON", "QUANTIZED")),
    "join_partitions": Body("tensor_decode.cuh", _PARTIAL, _OUT, ("JOIN",)),
    "latent_decode_tensor": Body("latent_decode.cuh", _DECODE, _DECODE_OUT, ("LATENT",)),
    "paged_prefill_tensor": Body("tensor_prefill.cuh", _PROMPT, _PROMPT_OUT, ("PAGED",)),
    "quantized_prefill_tensor": Body("tensor_prefill.cuh", _PROMPT, _PROMPT_OUT, ("QUANTIZED",)),
    "write_slots": Body("write.metal", _ROWS, _FENCE, ("PAGED",)),
    "quantized_write": Body("write.metal", _ROWS, _FENCE, ("QUANTIZED",)),
    "write_rows": Body("write.metal", _ROWS, _FENCE, ("ROWS",)),
    "gather_blocks": Body("gather.metal", _BLOCKS, _BLOCKS_OUT, ("PAGED",)),
    "quantized_gather": Body("gather.metal", _BLOCKS, _BLOCKS_OUT, ("QUANTIZED",)),
    "gather_rows": Body("gather.metal", _BLOCKS, _BLOCKS_OUT, ("ROWS",)),
    "narrow_matmul": Body("products.cuh", ("x", "w"), _OUT, ("PLAIN",)),
    "narrow_matmul_bias": Body("products.cuh", ("x", "w", "bias"), _OUT, ("BIAS",)),
    "narrow_matmul_gate": Body("products.cuh", ("x", "w", "w1"), _OUT, ("GATE",)),
    "narrow_matmul_group": Body("products.cuh", ("x", "w", "w1", "w2"), _GROUP_OUT, ("GROUP",)),
    "narrow_quantized": Body("products.cuh", ("x", *_PACKED), _OUT, ("PLAIN", "PACKED")),
    "narrow_quantized_bias": Body("products.cuh", ("x", *_PACKED, "bias"), _OUT, ("BIAS", "PACKED")),
    "narrow_quantized_gate": Body("products.cuh", ("x", *_PACKED, *_PACKED_1), _OUT, ("GATE", "PACKED")),
    "narrow_quantized_group": Body(
        "products.cuh", ("x", *_PACKED, *_PACKED_1, *_PACKED_2), _GROUP_OUT, ("GROUP", "PACKED")
    ),
    "draw_rows": Body("draw_rows.metal", ("x", "params", "keys", "positions"), _OUT),
}
# Names of variants: the dialect, tensor cores, and those of the bodies: portable kernels that attend by partitions;
# pages not quantised, quantised, and their rows unchanged; latents; a row's own blocks, blocks common to rows, and the
# merge of both; for products what is stored, and packed matrices.
VARIANTS = {"METAL", "TENSOR", *(name for body in BODIES.values() for name in body.variants)}


@lru_cache(maxsize=64)
def text_of(file: str) -> str:
    """Return a file of kernels/text/, or of cuda/text/ if its name ends in .cuh."""
    folder = resources.files("mlx_paged") / ("cuda" if file.endswith(".cuh") else "kernels") / "text"
    return (folder / file).read_text()


def resolved(text: str, variants: tuple[str, ...]) -> str:
    """Return a text without the lines that belong to other variants, and with its included files. Conditions that name
    no variant are the compiler's and stay."""
    lines: list[str] = []
    # Conditions that enclose the line: whether it names variants, whether this branch holds, and whether one has held.
    branches: list[tuple[bool, bool, bool]] = []
    for line in text.splitlines(keepends=True):
        word, _, rest = line.strip().partition(" ")
        holds = any(set(each.split(" && ")) <= set(variants) for each in rest.split(" || "))
        if word in ("#if", "#ifdef", "#ifndef"):
            is_own = word == "#if" and not VARIANTS.isdisjoint(rest.split())
            branches.append((is_own, holds or not is_own, holds))
        is_own = word in ("#if", "#elif", "#else", "#endif") and branches[-1][0]
        if word in ("#elif", "#else") and is_own:
            _, _, has_held = branches.pop()
            holds = not has_held and (word == "#else" or holds)
            branches.append((True, holds, has_held or holds))
        elif word == "#endif":
            branches.pop()
        if not is_own and all(holds for _, holds, _ in branches):
            included = re.fullmatch(r'#include "([\w.]+)"', line.strip())
            lines.append(resolved(text_of(included[1]), variants) if included else line)
    return "".join(lines)


@lru_cache(maxsize=64)
def kernel_text(body: str, dialect: str) -> tuple[str, str]:
    """Return (header, source) of a kernel in one dialect, "metal" or "cuda"."""
    record, (functions, source) = BODIES[body], parts_of(body)
    if dialect == "metal":
        return resolved(text_of("prelude.metal"), (*record.variants, "METAL")) + functions, source
    functions = resolved(text_of("prelude.metal"), record.variants) + functions
    words = resolved(text_of("prelude.cuh"), (*record.variants, "TENSOR") if record.cuda_only else record.variants)
    return words + CUDA_FUNCTIONS.format(functions), source


def parts_of(body: str) -> tuple[str, str]:
    """Return the functions and the statements of a kernel's file, resolved."""
    record = BODIES[body]
    functions, _, source = resolved(text_of(record.file), record.variants).rpartition("#pragma kernel\n")
    return functions, source


# Wraps a file's functions. The prelude defines `device` as empty, but __device__ expands to that word.
CUDA_FUNCTIONS = "#undef device\nnamespace mlx::core::cu {{\n{}}}\n#define device\n"
