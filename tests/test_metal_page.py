"""The table of kernels in docs/metal.md matches the code; ``python -m tests.test_metal_page`` regenerates it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_paged.kernels import decode_spec, ops
from mlx_paged.kernels.decode_spec import spec_of
from mlx_paged.kernels.launch_shape import count_partitions, shape_for
from tests.support.kernels.quantized_pages import page_shape

PAGE = Path(__file__).parents[1] / "docs" / "metal.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
CORES = 40
# Name, dtype, head size, query heads and KV heads, bits of quantised pages.
SHAPES: list[tuple[str, mx.Dtype, int, int, int, int]] = [
    ("bf16, 4 query heads of 128 a KV head", mx.bfloat16, 128, 32, 8, 0),
    ("bf16, 8 of 128", mx.bfloat16, 128, 64, 8, 0),
    ("bf16, 16 of 256", mx.bfloat16, 256, 32, 2, 0),
    ("bf16, 2 of 512", mx.bfloat16, 512, 16, 8, 0),
    ("f32, 4 of 128", mx.float32, 128, 32, 8, 0),
    ("4-bit pages, 4 of 128", mx.bfloat16, 128, 32, 8, 4),
    ("4-bit pages, 8 of 128", mx.bfloat16, 128, 64, 8, 4),
    ("latents of 512 + 64, 16 heads", mx.bfloat16, 512, 16, 1, 0),
]
GATHER = "MLX's attention, over a copy of the context in each layer"


def decode_of(backend: str, shape: tuple[str, mx.Dtype, int, int, int, int]) -> str:
    """Return the kernel that decodes, and its launches in a layer at 200 and 8,192 tokens."""
    name, dtype, dim, n_q, n_kv, bits = shape
    pages = page_shape(dim, (bits, bits), 64, dtype) if bits else None
    if name.startswith("latents"):
        variant = ops.variants_of(dtype, dim, 64, n_q, n_kv, 32, use="latents")[0]
    else:
        variant = ops.variants_of(dtype, dim, dim, n_q, n_kv, 32, False, False, pages)[0]
    own = shape_for(variant, CORES if backend == "metal" else None)
    table = {200: 8 if backend == "metal" else 16, 8192: 256}  # blocks (kv/step.py)
    specs = [spec_of(variant, own, 1, n_q, 1, count_partitions(32 * width, own)) for width in table.values()]
    return f"`{variant.body}`: " + ", ".join(str(len(spec.launches)) for spec in specs)


def prompts_of(shape: tuple[str, mx.Dtype, int, int, int, int]) -> str:
    """Return what attends for new tokens after a prefix."""
    name, dtype, dim, n_q, n_kv, bits = shape
    if name.startswith("latents"):
        return "see ADR 0033"
    pages = page_shape(dim, (bits, bits), 64, dtype) if bits else None
    try:
        found = ops.variants_of(dtype, dim, dim, n_q, n_kv, 32, False, False, pages, "prefill")
    except ValueError:
        return GATHER
    return f"`{found[0].body}`: none" if found else GATHER


def table() -> str:
    rows = {shape[0]: [shape[0]] for shape in SHAPES}
    limits: Any = SimpleNamespace(multiprocessors=132, groups_together=lambda size: 2)
    caches = ops.variants_of, spec_of
    for backend in ("metal", "cuda"):
        for cached in caches:
            cached.cache_clear()
        with (
            mock.patch.multiple(ops, backend=lambda b=backend: b, cuda_limits=lambda: limits),
            mock.patch.multiple(decode_spec, cuda_limits=lambda: limits),
        ):
            for shape in SHAPES:
                rows[shape[0]] += [decode_of(backend, shape), prompts_of(shape)]
    for cached in caches:
        cached.cache_clear()
    names = (
        f"{gpu}: {what}" for gpu in ("Metal", "CUDA") for what in ("decode, launches", "after a prefix, extra memory")
    )
    head = " | ".join(("|", *names)) + " |"
    return "\n".join([head, "|---" * 5 + "|", *("| " + " | ".join(row) + " |" for row in rows.values())]) + "\n"


def test_table_of_kernels_matches_the_code() -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == table(), "python -m tests.test_metal_page"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
