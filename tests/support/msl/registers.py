"""Registers that a Metal body needs, by a stand-in: NVIDIA's compiler, held to the registers of an Apple GPU.

M1 and M2 give a thread 128 registers of 32 bits at full occupancy, and a body that needs more keeps values in memory.
Apple's compiler runs on a Mac only; this one is alike enough that what spills by a lot in one spills in the other.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels.bodies import BODIES
from mlx_paged.kernels.build import Constants
from tests.support.msl import emulator

REGISTERS = 128
_TYPES = kernel_build._TYPE_NAMES["cuda"]
_INT_INPUTS = ("items", "offsets", "tables", "ends", "starts", "tiles", "places", "counts", "spans", "blocks", "span")
_FLOAT_INPUTS = ("frequencies", "params", "sinks", "stats", "partial", "penalties")
_WORDS = ("fence", "fence_out", "arrivals", "words", "words1", "words2", "keys", "positions", "tokens")
_OUTPUTS = {"stats": "float", "partial": "float", "fence_out": "uint32_t", "words_out": "uint32_t"}
_OUTPUTS |= {"counts_out": "int", "spans_out": "int"}
_POOLS = ("k_pool", "v_pool")
_SHAPES = (
    "q",
    "partial",
    "stats",
    "k_pool",
    "tables",
    "tiles",
    "ends",
    "x",
    "w",
    "w1",
    "w2",
    "words",
    "words1",
    "words2",
    "scales",
)
_HEAD = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <cstring>
struct Shape { int data[8]; __device__ int operator[](int i) const { return data[i]; } };
"""


class Registers(NamedTuple):
    """What the compiler says of one kernel: registers of a thread, and bytes a thread spills and loads again."""

    used: int
    stored: int
    loaded: int


def compiler() -> str | None:
    """Path of nvcc, or None."""
    return shutil.which("nvcc")


@functools.cache
def registers_of(body: str, constants: Constants, most: int | None = REGISTERS, arch: str = "sm_80") -> Registers:
    """Compile one instance of a body for CUDA; ``most`` None: with the registers that its GROUPS leave a thread. Raises
    RuntimeError if it does not compile."""
    options = [f"-arch={arch}", "-std=c++17", "-cubin", "-Xptxas", "-v"]
    if most is not None:
        options.append(f"-maxrregcount={most}")
    return _parse(_said_of(program_of(body, constants, *kernel_build.kernel_source(body, "cuda", constants)), options))


def program_of(body: str, constants: Constants, header: str, source: str) -> str:
    """What nvcc compiles: the kernel with its parameters."""
    known = dict(constants)
    inputs, outputs = BODIES[body].inputs, BODIES[body].outputs
    parameters = []
    for name in inputs:
        kind = "int" if name in _INT_INPUTS else "float" if name in _FLOAT_INPUTS else _TYPES[known["T"]]
        is_words = name in _WORDS or (name in _POOLS and "KBITS" in known)
        parameters.append(f"const {'uint32_t' if is_words else kind}* {name}")
        parameters += [f"const __grid_constant__ Shape {name}_shape"] if name in _SHAPES else []
    for name in outputs:
        kind = _OUTPUTS.get(name) or _TYPES[known.get("O", known["T"])]
        parameters.append(f"{kind}* {name}")
    bounds = f"__launch_bounds__({32 * known['SG']}, {known['GROUPS']})" if "GROUPS" in known else ""
    return (
        f"{_HEAD}{header}namespace mlx::core::cu {{\n"
        f"__global__ void {bounds} kernel({', '.join(parameters)}) {{\n{source}\n}}\n}}\n"
    )


def _said_of(text: str, options: list[str]) -> str:
    """What nvcc says of a text that compiles; kept on disk, as the emulator's programs are."""
    nvcc = compiler()
    assert nvcc is not None
    key = hashlib.sha256("\0".join([text, *options, nvcc, str(os.stat(nvcc).st_mtime)]).encode()).hexdigest()[:24]
    kept = Path(emulator.CACHE) / f"nvcc_{key}.txt"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.cu"
            file.write_text(text)
            command = [nvcc, *options, "-o", f"{file}bin", str(file)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if run.returncode:
            raise RuntimeError(run.stderr[:4000])
        kept.parent.mkdir(parents=True, exist_ok=True)
        own = kept.with_suffix(f".{os.getpid()}")  # several test processes may be at it
        own.write_text(run.stderr)
        own.replace(kept)
    return kept.read_text()


def _parse(report: str) -> Registers:
    stored, loaded = (int(n) for n in re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report).groups())
    return Registers(int(re.search(r"Used (\d+) registers", report).group(1)), stored, loaded)
