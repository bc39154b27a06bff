"""Write all Metal texts as MLX generates them, for a compiler that needs no GPU.

    python scripts/dump_kernels.py FOLDER          # one .metal file for each text, and mlx_include.txt beside them
    python scripts/dump_kernels.py FOLDER --all    # every dtype, head dimension and ratio (takes long to compile)

The launch code is the real one: kernels are called over small arrays, and what MLX would be given is written down in
place of being run. So it works wherever MLX does. MLX makes two texts of a body, for inputs of less than 8 elements are
in the ``constant`` address space, so each body is called for few rows and for many.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_paged.cli.doctor.shapes import Shape, all_shapes, popular_shapes
from mlx_paged.kernels import bodies, draw_rows, quantized
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.decode_spec import spec_of
from mlx_paged.kernels.launch_shape import DTYPES, Variant, shape_for
from mlx_paged.kernels.quantized import PageShape, QuantizedRows
from scripts.support.paged_decode import gather_blocks, paged_decode, write_slots
from tests.support.kernels.scratch import MIN_DEVICE_ELEMENTS, KernelKey, launch_alone, small_inputs_of
from tests.support.msl.msl_source import mlx_source

PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n'  # MLX puts its text before every kernel
INCLUDE = "mlx_include.txt"  # names the folder that the preamble is in
ROWS = {"constant": 2, "device": 9}  # ends and starts have fewer than 8 elements, or more
TABLE_WIDTHS = (1, 16)  # one partition; several, and a merge


class Text(NamedTuple):
    """A text that MLX would compile.

    Attributes:
        label: body and address spaces, as file names show them.
        source: the translation unit without MLX's preamble.
    """

    label: str
    source: str

    @property
    def file_name(self) -> str:
        return f"{self.label}-{hashlib.sha256(self.source.encode()).hexdigest()[:12]}.metal"


class Recorder:
    """Stand-in for mx.fast.metal_kernel that records texts.

    Attributes:
        texts: in the order of the calls, each once.
    """

    def __init__(self) -> None:
        self.texts: list[Text] = []

    def __call__(
        self,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
    ) -> Callable[..., list[mx.array]]:
        def launch(
            *,
            inputs: Sequence[mx.array],
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[mx.Dtype],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
        ) -> list[mx.array]:
            given = [(x.ndim, x.size, _name(x.dtype)) for x in inputs]
            dtypes = [_name(dtype) for dtype in output_dtypes]
            text, _, _ = mlx_source(
                f"custom_kernel_{name}", header, source, input_names, given, output_names, dtypes, []
            )
            # MLX puts inputs of fewer than 8 elements in the constant address space, others in device.
            spaces = "".join("c" if size < 8 else "d" for _, size, _ in given)
            recorded = Text(f"{re.sub('_[0-9a-f]{16}$', '', name)}-{dtypes[0]}-{spaces}", text)
            if recorded not in self.texts:
                self.texts.append(recorded)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Make the kernels' launch code record texts for Metal; nothing is compiled or run."""
    recorder = Recorder()

    def forget() -> None:
        for function in (
            kernel_build.build_kernel,
            kernels.variants_of,
            kernels.latent_variants_of,
            bodies.kernel_text,
        ):
            function.cache_clear()

    forget()
    try:
        with (
            mock.patch.object(kernel_build, "backend", lambda: "metal"),
            mock.patch.object(kernels, "backend", lambda: "metal"),
            mock.patch.object(mx.fast, "metal_kernel", recorder),
        ):
            yield recorder
    finally:
        forget()


def launch_all(shape: Shape, cores: int | None = None) -> None:
    """Make every launch of decoding over a pool of this shape: appends, writes, gathers, copies."""
    n_kv, block, dtype = 2, shape.block_size, shape.dtype
    pools = [mx.zeros((4, n_kv, block, shape.head_dim), dtype) for _ in "kv"]
    variant = Variant(
        "paged_decode", "metal", dtype, shape.head_dim, shape.head_dim, shape.gqa, block, shape.softcap, shape.sinks
    )
    n_q = n_kv * shape.gqa
    fence = kernels.new_fence()
    for rows in ROWS.values():
        q = mx.zeros((rows, n_q, 1, shape.head_dim), dtype)
        new = mx.zeros((rows, n_kv, 1, shape.head_dim), dtype)
        for width in TABLE_WIDTHS:
            _, fence = paged_decode(
                q,
                *pools,
                fence,
                mx.zeros((rows, width), mx.int32),
                mx.ones((rows, 1), mx.int32),
                mx.zeros((rows, 1), mx.int32),
                scale=1.0,
                softcap=10.0 if shape.softcap else None,
                sinks=mx.zeros((n_q,)) if shape.sinks else None,
                append=(new, new),
                variant=variant,
                launch_shape=shape_for(variant, cores),
            )
        for kind in (mx.int32, mx.int64):
            fence = write_slots(*pools, fence, new, new, mx.arange(rows).astype(kind))
        _, _, fence = gather_blocks(*pools, fence, mx.zeros((rows,), mx.int32), 0, 1)
        ids = mx.arange(rows, dtype=mx.int32)
        fence = kernels.copy_blocks(*pools, fence, ids, ids + rows)


def quantized_pages(shape: Shape) -> list[PageShape]:
    """Return forms of quantised pages for a pool of this shape."""
    if shape.head_dim % 32:
        return []
    rows = {bits: QuantizedRows(shape.head_dim, bits, 32, shape.dtype) for bits in (8, 4)}
    return [PageShape(rows[8], rows[8]), PageShape(rows[4], rows[4]), PageShape(rows[8], rows[4])]


def launch_decode(shape: Shape, cores: int | None) -> None:
    """Launch the other decode kernels for this shape, and those that write and read quantised pages, each alone."""
    block, gqa = shape.block_size, shape.gqa
    for pages in (None, *quantized_pages(shape)):
        variants = kernels.variants_of(
            shape.dtype, shape.head_dim, shape.head_dim, 8 * gqa, 8, block, shape.softcap, shape.sinks, pages
        )
        for variant in (*variants, *filter(None, map(kernels.shared_variant_of, variants))):
            launch_variant(variant, gqa, cores)
        for body, constants in () if pages is None else quantized.texts_of(pages, block):
            for few in ((), ("slots", "blocks")):
                launch_alone(KernelKey(body, constants, few), kernel_build.build_kernel)


def launch_variant(variant: Variant, num_heads: int, cores: int | None) -> None:
    """Launch every kernel of a decode variant's steps: few rows and many, one partition and several."""
    for rows in ROWS.values():
        for partitions in (1, 2):
            spec = spec_of(variant, shape_for(variant, cores), rows, num_heads, 1, partitions)
            for text in spec.texts(variant):
                for tables in ((), ("tables",)) if rows < MIN_DEVICE_ELEMENTS and partitions == 1 else ((),):
                    sizes = {"stats": rows * num_heads * partitions * 2, "ends": rows, "sinks": num_heads}
                    small = (*tables, *small_inputs_of(variant, sizes))
                    launch_alone(KernelKey(*text, small), kernel_build.build_kernel)


def launch_others(cores: int | None) -> None:
    """Launch the kernels over latents, and those that sample."""
    for dtype in DTYPES:
        for rank, rope, heads in ((512, 64, 16), (256, 64, 8)):
            for variant in kernels.latent_variants_of(dtype, rank, rope, heads, 1, 32):
                launch_variant(variant, heads, cores)
        for small_inputs in ((), ("positions",)):
            key = KernelKey(*draw_rows.kernel_key(dtype, "metal"), small_inputs)
            launch_alone(key, kernel_build.build_kernel)


def texts_of(shapes: Sequence[Shape], cores: int | None = None) -> list[Text]:
    """Return all texts for these shapes, each once, on a GPU with ``cores`` (None: unknown)."""
    with recorded() as recorder:
        for shape in shapes:
            launch_all(shape, cores)
            launch_decode(shape, cores)
        launch_others(cores)
    return recorder.texts


def mlx_include() -> Path:
    """Return the folder of MLX's headers."""
    return Path(mx.__file__).resolve().parent / "include"


def dump(folder: Path, texts: Sequence[Text]) -> None:
    """Write one file for each text; delete the old ones first."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.metal"):
        old.unlink()
    for text in texts:
        (folder / text.file_name).write_text(PREAMBLE + text.source)
    (folder / INCLUDE).write_text(f"{mlx_include()}\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="every shape, not only those of popular models")
    parser.add_argument("--block-size", type=int, default=32, help="of the popular shapes (default: 32)")
    parser.add_argument("--cores", type=int, help="GPU cores, which the size of a partition follows")
    args = parser.parse_args(argv)
    shapes = list(popular_shapes(args.block_size))
    if args.all:
        shapes += [shape for shape in all_shapes(args.block_size) if shape not in shapes]
    assert {shape.dtype for shape in shapes} == set(DTYPES)
    texts = texts_of(shapes, args.cores)
    dump(args.folder, texts)
    print(f"{len(texts)} texts for {len(shapes)} shapes in {args.folder}")


if __name__ == "__main__":
    main()
