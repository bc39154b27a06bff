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
        """Return the element type of an input or output in a text with these constants: T, S or O, which a constant
        defines, or a type of C."""
        if (name in _PAGES and "QUANTIZED" in self.variants) or (name in _MATRICES and "PACKED" in self.variants):
            return "uint32_t"
        return "O" if name == "out" and "O" in constants else _TYPES.get(name, "T")


# Names of variants: the dialect; portable kernels that attend by partitions; pages not quantised, quantised, and their
# rows as they are; latents; a row's own blocks, blocks common to rows, and the merge of both; for products what is
# stored, and packed matrices; and tensor cores.
VARIANTS = (
    "METAL",
    "PARTITIONS",
    "PAGED",
    "QUANTIZED",
    "ROWS",
    "LATENT",
    "OWN",
    "COMMON",
    "JOIN",
    "PLAIN",
    "BIAS",
    "GATE",
    "GROUP",
    "PACKED",
    "TENSOR",
)

_PAGES, _MATRICES = ("k_pool", "v_pool"), ("w", "w1", "w2")
_TYPES = {  # those that are not T
    **dict.fromkeys(("fence", "fence_out", "arrivals", "keys", "positions"), "uint32_t"),
    **dict.fromkeys(("tables", "ends", "starts", "blocks", "span", "pairs", "tiles", "items"), "int"),
    **dict.fromkeys(("params", "sinks", "stats", "partial"), "float"),
    "slots": "S",
}
_POOL = (*_PAGES, "fence")
_DECODE = ("q", *_POOL, "k_new", "v_new", "tables", "ends", "starts", "params", "sinks")
_PARTIAL = ("partial", "stats", "ends", "starts", "sinks")
_PROMPT = ("q", *_POOL, "tables", "tiles", "params", "sinks")


def _decode(file: str, variant: str) -> Body:
    variants = (variant,) if file.endswith(".cuh") else ("PARTITIONS", variant)
    return Body(file, _DECODE, ("out", "stats", "fence_out"), variants)


def _own(variant: str) -> Body:
    outputs = ("out", "partial", "fence_out")
    return Body("tensor_decode.cuh", (*_DECODE, "arrivals"), outputs, ("OWN", variant))


def _common(variant: str) -> Body:
    outputs = ("partial", "stats", "fence_out")
    return Body("tensor_decode.cuh", (*_DECODE, "items"), outputs, ("COMMON", variant))


def _prefill(variant: str) -> Body:
    return Body("tensor_prefill.cuh", _PROMPT, ("out", "fence_out"), (variant,))


def _write(variant: str) -> Body:
    return Body("write.metal", (*_POOL, "k", "v", "slots"), ("fence_out",), (variant,))


def _gather(variant: str) -> Body:
    inputs = (*_POOL, "blocks", "span")
    return Body("gather.metal", inputs, ("k_out", "v_out", "fence_out"), (variant,))


def _products(kind: str) -> dict[str, Body]:
    """Return the kernels that multiply a few rows by matrices. ``kind`` is "matmul", or "quantized" for weights in
    affine quantisation."""
    names, form = (("w",), ()) if kind == "matmul" else (("w", "scales", "biases"), ("PACKED",))
    one, two, three = (tuple(name + n for n in ("", "1", "2")[:count] for name in names) for count in (1, 2, 3))

    def body(inputs: tuple[str, ...], *variants: str, outputs: tuple[str, ...] = ("out",)) -> Body:
        return Body("products.cuh", ("x", *inputs), outputs, (*variants, *form))

    return {
        f"narrow_{kind}": body(one, "PLAIN"),
        f"narrow_{kind}_bias": body((*one, "bias"), "BIAS"),
        f"narrow_{kind}_gate": body(two, "GATE"),
        f"narrow_{kind}_group": body(three, "GROUP", outputs=("out", "out1", "out2")),
    }


BODIES: dict[str, Body] = {
    "paged_decode": _decode("decode.metal", "PAGED"),
    "quantized_decode": _decode("decode.metal", "QUANTIZED"),
    "latent_decode": _decode("decode.metal", "LATENT"),
    "matrix_decode": _decode("matrix_decode.metal", "PAGED"),
    "quantized_matrix_decode": _decode("matrix_decode.metal", "QUANTIZED"),
    "merge_partitions": Body("merge_partitions.metal", _PARTIAL, ("out",), ("PARTITIONS",)),
    "paged_decode_tensor": _own("PAGED"),
    "quantized_decode_tensor": _own("QUANTIZED"),
    "shared_decode_tensor": _common("PAGED"),
    "shared_quantized_decode_tensor": _common("QUANTIZED"),
    "join_partitions": Body("tensor_decode.cuh", _PARTIAL, ("out",), ("JOIN",)),
    "latent_decode_tensor": _decode("latent_decode.cuh", "LATENT"),
    "paged_prefill_tensor": _prefill("PAGED"),
    "quantized_prefill_tensor": _prefill("QUANTIZED"),
    "write_slots": _write("PAGED"),
    "quantized_write": _write("QUANTIZED"),
    "write_rows": _write("ROWS"),
    "gather_blocks": _gather("PAGED"),
    "quantized_gather": _gather("QUANTIZED"),
    "gather_rows": _gather("ROWS"),
    "copy_blocks": Body("copy_blocks.metal", (*_POOL, "pairs"), ("fence_out",)),
    **_products("matmul"),
    **_products("quantized"),
    "draw_rows": Body("draw_rows.metal", ("x", "params", "keys", "positions"), ("out",)),
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
