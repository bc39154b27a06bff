"""However MLX cuts kernels into command buffers, and whatever streams they are on, blocks are read after they are
written and written after they are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_paged.attention import kernel_build

ROOT = Path(__file__).parent.parent
STEPS = 200


def tokens_with(seed: int, steps: int, **variables: str) -> dict[str, list[int]]:
    """Of tests/ordering.py in a process of its own."""
    command = [sys.executable, str(ROOT / "tests" / "ordering.py"), str(seed), str(steps)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    tokens: dict[str, list[int]] = json.loads(run.stdout)
    return tokens


def test_two_streams_give_what_gather_gives() -> None:
    """On a GPU the kernels' tokens are those of gathered blocks; elsewhere both are gathered."""
    assert tokens_with(0, 60) == tokens_with(0, 60, MLX_PAGED_KERNEL="off")


@pytest.mark.gpu
@pytest.mark.skipif(kernel_build.backend() is None, reason="MLX sees no GPU")
@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_command_buffers(seed: int) -> None:
    expected = tokens_with(seed, STEPS, MLX_PAGED_KERNEL="off")
    assert sum(map(len, expected.values())) > 200
    for most in ("1", "1000"):
        assert tokens_with(seed, STEPS, MLX_MAX_OPS_PER_BUFFER=most) == expected, f"{most} operations in a buffer"
