"""Instructions of Metal's attention kernels per token of context, as compiled by NVIDIA's compiler.

    python -m tests.support.msl.instructions      # a table; needs nvcc and nvdisasm on PATH

Counts the loop over tokens in the machine code (SASS, of an A100), compiled with 255 registers. A product of 8 x 8
matrices counts as 16, the number of its multiplications on each of 32 lanes. Texts by matrices are compiled with
substitutes for ``simdgroup_matrix`` (matrix_cuda.cuh). Code that a step runs only for a larger score or at the edge of
a context is left out, and a quarter of the rescaling is added, as in docs/adr/0018.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels.bodies import CUDA_HEADER
from mlx_paged.kernels.bodies import text_of as file_text
from mlx_paged.kernels.build import Constants
from mlx_paged.kernels.decode_spec import decode_constants_of, pool_constants_of, spec_of
from mlx_paged.kernels.launch_shape import MATRIX_BODIES, Variant, shape_for
from mlx_paged.kernels.quantized import PageShape
from tests.support.msl import emulator, registers

PRODUCT = 16
_STAGED = re.compile(r"for \(int i = lane; i < (KEYS \* \(DV? / 8\)); i \+= 32\) {")
_ROUND = r"UNROLL for (int n = 0; n < \1 / 32; n++) { const int i = lane + n * 32;"
# Metal's words that CUDA does not have.
_PLAIN = (
    (r"threadgroup (\w+)\*", r"\1*"),
    (r"part\[0\]\[j\]", "part[j]"),
    (r"\binline void stage", "__device__ inline void stage"),
    (r"const device (uint|T)\*", r"const \1*"),
)


class Loop(NamedTuple):
    """Instructions of a part of the code, a product of matrices as one, and the number of such products."""

    instructions: int
    products: int

    @property
    def issued(self) -> int:
        """Return the instructions, counting a product as 16."""
        return self.instructions + (PRODUCT - 1) * self.products


def tools() -> bool:
    """Return whether machine code can be made and read here."""
    return registers.compiler() is not None and shutil.which("nvdisasm") is not None


def text_of(body: str, constants: Constants, *, rescales: bool = False) -> tuple[str, str]:
    """Return (header, source) for nvcc."""
    header, source = kernel_build.kernel_source(body, "cuda", constants)
    if body not in MATRIX_BODIES:
        return header, source
    prelude = file_text("prelude.cuh")
    stand_ins = CUDA_HEADER.format((Path(__file__).parent / "matrix_cuda.cuh").read_text())
    assert header.startswith(prelude)
    header = prelude + stand_ins + header.removeprefix(prelude)
    source = _STAGED.sub(_ROUND, source)
    for old, new in (("if (whole) {", "if (true) {"), ("if (simd_any(grows)) {", f"if ({str(rescales).lower()}) {{")):
        source = source.replace(old, new)
    for old, new in _PLAIN:
        header, source = header.removeprefix(prelude), re.sub(old, new, source)
        header = prelude + re.sub(old, new, header)
    return header, source


def listing_of(body: str, constants: Constants, *, rescales: bool = False) -> list[str]:
    """Return the kernel's machine code, one instruction or label per line."""
    emulator.skip_unless_linux()
    text = registers.program_of(body, constants, *text_of(body, constants, rescales=rescales))
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.cu", f"{folder}/kernel.cubin"
        source.write_text(text)
        options = ["-arch=sm_80", "-std=c++17", "-cubin", "-maxrregcount=255"]
        command = [str(registers.compiler()), *options, "-o", cubin, str(source)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(run.stderr[:4000])
        listed = subprocess.run(["nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    lines = (re.match(r"\s*(?:/\*[0-9a-f]{4,}\*/\s+(.*?);|(\.L_x_\d+):)", line) for line in listed.splitlines())
    return [found[1] or f"{found[2]}:" for found in lines if found]


def counted(code: Sequence[str]) -> Loop:
    """Count instructions, except padding and moves between registers, which only the substitutes' operands need."""
    names = [re.sub(r"^@!?U?P\w+\s+", "", line).split()[0] for line in code if not line.startswith(".")]
    kept = [name for name in names if not re.match(r"(IMAD\.MOV|MOV|CS2R|NOP)\b", name)]
    return Loop(len(kept), sum(name.startswith("HMMA") for name in kept))


def token_loop(code: Sequence[str]) -> list[str]:
    """Return the loop over tokens: the shortest that loads, multiplies and computes weights. Blocks outside of it also
    branch back into it and form longer ones."""
    labels = {line[:-1]: at for at, line in enumerate(code) if line.startswith(".")}
    needed = ("LDG", "MUFU.EX2", "HMMA" if any("HMMA" in line for line in code) else "FFMA")
    loops = []
    for at, line in enumerate(code):
        target = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", line)
        if target and labels[target[1]] < at:
            loop = list(code[labels[target[1]] : at + 1])
            if all(any(name in one for one in loop) for name in needed):
                loops.append(loop)
    return min(loops, key=len)


@functools.cache
def per_token(variant: Variant) -> float:
    """Return a simdgroup's instructions per token and KV head."""
    launch = shape_for(variant)
    constants = (*decode_constants_of(variant, launch), ("SINGLE", False), ("O", mx.float32))
    tokens, share = launch.keys or launch.unroll * 32 // launch.lanes, launch.head_split
    still = counted(token_loop(listing_of(variant.body, constants))).issued
    if variant.body in MATRIX_BODIES:
        rescaled = counted(token_loop(listing_of(variant.body, constants, rescales=True))).issued
        still += (rescaled - still) / 4
    return share * still / tokens


def variants(gqa: int, bits: int, head_dim: int = 128) -> tuple[Variant, Variant]:
    """Return the decode variants by lanes and by matrices; ``bits`` 0 means pages that are not quantised."""
    pages = PageShape.of(head_dim, (bits, bits), 64, mx.bfloat16) if bits else None
    bodies = ("quantized_decode" if bits else "paged_decode"), MATRIX_BODIES[bool(bits)]
    lanes, matrices = (Variant(body, "metal", mx.bfloat16, head_dim, head_dim, gqa, 32, pages=pages) for body in bodies)
    return lanes, matrices


def main() -> None:
    """Print the tables of docs/benchmarks.md."""
    print("| query heads | 16 bits: by lanes, by matrices | 8 bits | 4 bits |\n|---|---|---|---|")
    for gqa in (4, 5, 6, 7, 8, 16):
        cells = (", ".join(f"{per_token(variant):.0f}" for variant in variants(gqa, bits)) for bits in (0, 8, 4))
        print(f"| {gqa} | {' | '.join(cells)} |", flush=True)
    dense, quantized = variants(4, 0)[0], variants(4, 4)[0]
    print("\n| prompts | 16 bits | 4 bits |\n|---|---|---|")
    copied = []
    for body, pages in (("gather_blocks", None), ("quantized_gather", quantized.pages)):
        constants = (*pool_constants_of(mx.bfloat16, 128, 128, 32), *(() if pages is None else pages.constants))
        copied.append(f"{counted(listing_of(body, constants)).instructions}")
    print(f"| the copy of a token | {' | '.join(copied)} |")
    print("\n| a decode step's texts in all, 4 query heads | instructions |\n|---|---|")
    launch = shape_for(dense)
    for name, single in (("of several partitions", False), ("of one", True)):
        own = (("SINGLE", single), ("O", mx.bfloat16 if single else mx.float32))
        total = counted(listing_of(dense.body, (*decode_constants_of(dense, launch), *own))).instructions
        print(f"| {dense.body}, {name} | {total} |")
    merge = spec_of(dense, launch, 1, 32, 1, 2).merge_constants
    print(f"| merge_partitions | {counted(listing_of('merge_partitions', merge)).instructions} |")


if __name__ == "__main__":
    main()
