"""Write all Metal texts as MLX generates them, for a compiler that needs no GPU.

    python scripts/dump_kernels.py FOLDER    # one .metal file for each text, and mlx_include.txt beside them

Kernels for the shapes of popular models are launched over scratch arrays, and what MLX would be given is written down
in place of being run. So it works wherever MLX does.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_paged.cli.doctor_kernels import Shape, popular_shapes
from mlx_paged.kernels import bodies, draw_rows
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.build import Constants
from mlx_paged.kernels.decode_spec import spec_of
from mlx_paged.kernels.launch_shape import DTYPES, Variant, shape_for
from mlx_paged.kernels.quantized import PageShape, QuantizedRows
from tests.support.kernels.scratch import MIN_DEVICE_ELEMENTS, launch_alone
from tests.support.msl.msl_source import mlx_source

PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n'  # MLX puts its text before every kernel
INCLUDE = "mlx_include.txt"  # names the folder that the preamble is in


class Recorder:
    """Stand-in for mx.fast.metal_kernel that records texts.

    Attributes:
        texts: translation units without MLX's preamble, by file name, which shows body and address spaces.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def __call__(
        self, *, name: str, input_names: list[str], output_names: list[str], source: str, header: str, **_: Any
    ) -> Callable[..., list[mx.array]]:
        def launch(
            *, inputs: Sequence[mx.array], output_shapes: Sequence[Any], output_dtypes: Sequence[mx.Dtype], **_: Any
        ) -> list[mx.array]:
            given = [(x.ndim, x.size, _name(x.dtype)) for x in inputs]
            dtypes = [_name(dtype) for dtype in output_dtypes]
            text, _, _ = mlx_source(
                f"custom_kernel_{name}", header, source, input_names, given, output_names, dtypes, []
            )
            spaces = "".join("c" if size < MIN_DEVICE_ELEMENTS else "d" for _, size, _ in given)
            label = f"{re.sub('_[0-9a-f]{16}$', '', name)}-{dtypes[0]}-{spaces}"
            self.texts[f"{label}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.metal"] = text
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


def quantized_pages(shape: Shape) -> list[PageShape]:
    """Return forms of quantised pages for a pool of this shape."""
    if shape.head_dim % 32:
        return []
    rows = {bits: QuantizedRows(shape.head_dim, bits, 32, shape.dtype) for bits in (8, 4)}
    return [PageShape(rows[8], rows[8]), PageShape(rows[4], rows[4]), PageShape(rows[8], rows[4])]


def launch(body: str, constants: Constants, num_rows: int = MIN_DEVICE_ELEMENTS) -> None:
    """Launch a kernel alone."""
    launch_alone(body, constants, kernel_build.build_kernel, num_rows)


def launch_shape(shape: Shape) -> None:
    """Launch the decode kernels for this shape, and those that write, read and copy its blocks, plain or quantised."""
    block, gqa, dim = shape.block_size, shape.gqa, shape.head_dim
    for pages in (None, *quantized_pages(shape)):
        variants = kernels.variants_of(shape.dtype, dim, dim, 8 * gqa, 8, block, shape.softcap, shape.sinks, pages)
        for variant in (*variants, *filter(None, map(kernels.shared_variant_of, variants))):
            launch_variant(variant, gqa)
        for text in kernels.pool_texts(shape.dtype, dim, dim, block, pages).values():
            launch(*text)


def launch_variant(variant: Variant, num_heads: int) -> None:
    """Launch every kernel of a decode variant's steps, of one partition and of several."""
    for partitions in (1, 2):
        for text in spec_of(variant, shape_for(variant, None), 1, num_heads, 1, partitions).texts:
            launch(*text)


def launch_others() -> None:
    """Launch the kernels over latents, and those that sample."""
    for dtype in DTYPES:
        for rank, rope, heads in ((512, 64, 16), (256, 64, 8)):
            for variant in kernels.variants_of(dtype, rank, rope, heads, 1, 32, use="latents"):
                launch_variant(variant, heads)
        for num_rows in (1, MIN_DEVICE_ELEMENTS):  # MLX puts inputs of fewer than 8 elements in another address space
            launch(*draw_rows.kernel_key(dtype, "metal"), num_rows)


def texts_of(shapes: Sequence[Shape]) -> dict[str, str]:
    """Return all texts for these shapes by file name, on a GPU with an unknown number of cores."""
    with recorded() as recorder:
        for shape in shapes:
            launch_shape(shape)
        launch_others()
    return recorder.texts


def dump(folder: Path, texts: Mapping[str, str]) -> None:
    """Write one file for each text; delete the old ones first."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.metal"):
        old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(PREAMBLE + text)
    (folder / INCLUDE).write_text(f"{Path(mx.__file__).resolve().parent / 'include'}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    shapes = list(popular_shapes(32))
    texts = texts_of(shapes)
    dump(folder, texts)
    print(f"{len(texts)} texts for {len(shapes)} shapes in {folder}")


if __name__ == "__main__":
    main()
