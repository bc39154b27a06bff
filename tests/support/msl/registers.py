"""Registers that a Metal body needs, estimated by NVIDIA's compiler, limited to the registers of an Apple GPU.

M1 and M2 give a thread 128 registers of 32 bits at full occupancy, and a body that needs more keeps values in memory.
Apple's compiler runs only on a Mac; this one is similar enough that code that spills a lot in one spills in the other.
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
_TYPES = kernel_build.TYPE_NAMES["cuda"]
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
    "scales",
)
_HEAD = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <cstring>
struct Shape { int data[8]; __device__ int operator[](int i) const { return data[i]; } };
"""


class Registers(NamedTuple):
    """The compiler's report on one kernel: registers per thread, and bytes that a thread spills and loads again."""

    used: int
    stored: int
    loaded: int


def compiler() -> str | None:
    """Return the path of nvcc, or None."""
    return shutil.which("nvcc")


def registers_of(body: str, constants: Constants, most: int | None = REGISTERS, arch: str = "sm_80") -> Registers:
    """Compile one instance of a body for CUDA; ``most`` None: with the registers that its GROUPS leave per thread.
    Raises RuntimeError if it does not compile."""
    return registers_of_each(((body, constants),), most, arch)[0]


@functools.cache
def registers_of_each(
    instances: tuple[tuple[str, Constants], ...], most: int | None = REGISTERS, arch: str = "sm_80"
) -> list[Registers]:
    """Compile several instances at once, each as by :func:`registers_of`: most of the time goes to CUDA's headers,
    which nvcc then reads once."""
    options = [f"-arch={arch}", "-std=c++17", "-cubin", "-Xptxas", "-v"]
    if most is not None:
        options.append(f"-maxrregcount={most}")
    text = _HEAD
    for number, (body, constants) in enumerate(instances):
        kernel = kernel_of(body, constants, *kernel_build.kernel_source(body, "cuda", constants))
        # One macro has the name of a CUDA attribute and would break the next kernel's header.
        ends = "".join(f"#undef {name}\n" for name in re.findall(r"^#define (\w+)", kernel, re.MULTILINE))
        text += f"namespace instance{number}_ {{\n{kernel}}}\n{ends}"
    found = _parse(_said_of(text, options))
    return [found[number] for number in range(len(instances))]


def kernel_of(body: str, constants: Constants, header: str, source: str) -> str:
    """Return a kernel with its parameters, without the headers that all kernels need."""
    known = dict(constants)
    record, parameters = BODIES[body], []
    for name in (*record.inputs, *record.outputs):
        kind = record.type_of(name, known)
        kind = _TYPES[known[kind]] if kind in known else kind
        parameters.append(f"{'const ' * (name in record.inputs)}{kind}* {name}")
        if name in record.inputs and name in _SHAPES:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
    bounds = f"__launch_bounds__({32 * known['SG']}, {known['GROUPS']})" if "GROUPS" in known else ""
    return (
        f"{header}namespace mlx::core::cu {{\n"
        f"__global__ void {bounds} kernel({', '.join(parameters)}) {{\n{source}\n}}\n}}\n"
    )


def _said_of(text: str, options: list[str]) -> str:
    """Compile a text and return nvcc's report, cached on disk as the emulator's programs are."""
    emulator.skip_unless_linux()
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
        own = kept.with_suffix(f".{os.getpid()}")  # several test processes may do this at once
        own.write_text(run.stderr)
        own.replace(kept)
    return kept.read_text()


def _parse(report: str) -> dict[int, Registers]:
    """Return the report on each instance, by its number: the compiler reports in its own order."""
    found = {}
    for told in report.split("Compiling entry function")[1:]:
        stored, loaded = (
            int(n) for n in re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told).groups()
        )
        used = int(re.search(r"Used (\d+) registers", told).group(1))
        found[int(re.search(r"instance(\d+)_", told).group(1))] = Registers(used, stored, loaded)
    return found
