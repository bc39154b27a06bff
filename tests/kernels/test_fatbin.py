"""Fat binaries: what is packed can be unpacked by LZ4's rules, in the container that NVIDIA's tool writes."""

import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from mlx_paged.kernels.cuda.cubins import fat_binary, lz4_block

HEADERS = 16 + 64


def unpacked(block: bytes) -> bytes:
    """What an LZ4 block holds; fails for one that breaks the rules for its end."""
    out, at, last_match = bytearray(), 0, 0

    def count(base: int) -> int:
        nonlocal at
        while base >= 15 and base % 255 == 15:
            base, at = base + block[at], at + 1
            if block[at - 1] < 255:
                break
        return base

    while True:
        token, at = block[at], at + 1
        literals = count(token >> 4)
        out += block[at : at + literals]
        at += literals
        if at == len(block):
            assert not last_match or (literals >= 5 and len(out) - last_match >= 12), "the end is not literals"
            return bytes(out)
        distance, at = struct.unpack_from("<H", block, at)[0], at + 2
        assert 0 < distance <= len(out)
        last_match = len(out)
        for _ in range(count(token & 15) + 4):
            out.append(out[-distance])


@pytest.mark.parametrize("kinds", [1, 2, 4, 256])
def test_blocks_hold_what_was_packed(kinds: int) -> None:
    numbers = random.Random(kinds)
    for length in (*range(40), 270, 300, 4000):
        data = bytes(numbers.randrange(kinds) for _ in range(length))
        assert unpacked(lz4_block(data)) == data, length


def test_far_and_long_repetitions_are_found_and_too_far_ones_are_not_used() -> None:
    numbers = random.Random(0)
    part = numbers.randbytes(3000)
    near, far = part + numbers.randbytes(60_000) + part, part + numbers.randbytes(65_000) + part
    assert unpacked(lz4_block(near)) == near and len(lz4_block(near)) < len(near) - 2600
    assert unpacked(lz4_block(far)) == far


@pytest.mark.parametrize("architecture", ["sm_90", "sm_90a"])
def test_the_container_is_the_one_that_nvidias_tool_writes(tmp_path: Path, architecture: str) -> None:
    nvcc, tool = shutil.which("nvcc"), shutil.which("fatbinary")
    if nvcc is None or tool is None:
        pytest.skip("needs CUDA's compilers")
    (tmp_path / "kernel.cu").write_text('extern "C" __global__ void k(float* a) { a[threadIdx.x] *= 2; }')
    for command in (
        [nvcc, f"-arch={architecture}", "-cubin", "-o", "kernel.cubin", "kernel.cu"],
        [
            tool,
            "--create=fat",
            "--64",
            "--compress-all",
            "--compress-mode=speed",
            f"--image3=kind=elf,sm={architecture[3:]},file=kernel.cubin",
        ],
    ):
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        if run.returncode:
            pytest.skip(f"another version of CUDA's compilers: {run.stderr[:200]}")
    cubin, theirs = (tmp_path / "kernel.cubin").read_bytes(), (tmp_path / "fat").read_bytes()
    ours = fat_binary(cubin, architecture)
    assert len(ours) % 8 == 0
    sizes = [range(8, 16), range(24, 36)]  # of what follows: they may pack better or worse
    for data in (ours, theirs):
        size, packed = struct.unpack_from("<QI", data, 24)
        assert struct.unpack_from("<Q", data, 8)[0] == len(data) - 16 and size == len(data) - HEADERS
        assert unpacked(data[HEADERS : HEADERS + packed]) == cubin
    masked = [
        bytes(0 if any(i in part for part in sizes) else byte for i, byte in enumerate(x[:HEADERS]))
        for x in (ours, theirs)
    ]
    assert masked[0] == masked[1]


def test_an_architecture_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError):
        fat_binary(b"code", "gfx")
