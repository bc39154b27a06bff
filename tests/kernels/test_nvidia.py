"""Nothing of mlx_paged/cuda/ is imported where MLX has no CUDA."""

import subprocess
import sys

import mlx.core as mx
import pytest

PROGRAM = """
import sys
import mlx_paged, mlx_paged.server.app, mlx_paged.engine.engine
mlx_paged.apply_patches()
mlx_paged.remove_patches()
print([name for name in sys.modules if name.startswith("mlx_paged.cuda")])
"""


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX has CUDA")
def test_nothing_of_cuda_is_imported_without_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr
