"""Public names of the package: help(), dir(), and the import without an MLX backend."""

import os
import pydoc
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models import cache as upstream

import mlx_paged
from tests.support.models.builders import build
from tests.support.processes.small_model import save_model

PACKAGE = Path(mlx_paged.__file__).parent
PATCHES = ("adopt_prompt_cache", "apply_patches", "is_applied", "pool_of", "remove_patches")


def test_help_and_dir_list_the_public_functions() -> None:
    text = pydoc.render_doc(mlx_paged, renderer=pydoc.plaintext)
    for name in PATCHES:
        assert name in dir(mlx_paged) and name in mlx_paged.__all__ and f"\n    {name}(" in text
    assert ">>> " in (mlx_paged.apply_patches.__doc__ or "") and ">>> " in (mlx_paged.pool_of.__doc__ or "")


def test_every_name_in_all_can_be_imported() -> None:
    for name in mlx_paged.__all__:
        assert getattr(mlx_paged, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'apply_patch'"):
        mlx_paged.apply_patch  # noqa: B018


def test_pool_of_returns_the_pool_that_generation_uses(tmp_path: Path) -> None:
    from mlx_lm import generate

    model, tokenizer = load(str(save_model(tmp_path / "model")))
    assert mlx_paged.pool_of(model) is None, "stock mlx-lm has no pools"
    mlx_paged.apply_patches()
    pool = mlx_paged.pool_of(model)
    assert pool is not None and pool.stats().live_blocks == 0 and pool.stats().budget_bytes > 0
    generate(model, tokenizer, prompt="w1 w2 w3", max_tokens=4)
    assert mlx_paged.pool_of(model) is pool and pool.stats().peak_live_blocks > 0
    mlx_paged.remove_patches()
    assert mlx_paged.pool_of(model) is None


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_pool_of_knows_the_geometry_and_follows_set_dtype(kind: str) -> None:
    mlx_paged.apply_patches()
    model = build(kind)
    pool = mlx_paged.pool_of(model)
    assert pool is not None and all(group.geometry.dtype == mx.float32 for group in pool.groups)
    model.set_dtype(mx.float16)
    other = upstream.make_prompt_cache(model)[0].pool
    assert all(group.geometry.dtype == mx.float16 for group in other.groups) and mlx_paged.pool_of(model) is other
    assert mlx_paged.pool_of(object()) is None


NO_BACKEND = 'raise ImportError("libmlx.so: cannot open shared object file: No such file or directory")'


def without_backend(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where MLX's library cannot be loaded."""
    (folder / "mlx").mkdir()
    (folder / "mlx" / "__init__.py").touch()
    (folder / "mlx" / "core.py").write_text(NO_BACKEND)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{PACKAGE.parent}"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=env, cwd=folder, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import mlx_paged"),
        ("-c", "from mlx_paged.generate import main; main()"),
        ("-c", "from mlx_paged.server import main; main()"),
        ("-m", "mlx_paged", "--help"),
        ("-m", "mlx_paged", "chat"),
        ("-m", "mlx_paged.generate", "--help"),
        ("-m", "mlx_paged.server", "--help"),
    ],
)
def test_missing_mlx_backend_is_reported_with_install_commands(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = without_backend(tmp_path, *command)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "libmlx.so" in run.stderr and 'pip install "mlx[cpu]"' in run.stderr and "mlx[cuda13]" in run.stderr


def test_missing_backend_error_can_be_caught(tmp_path: Path) -> None:
    code = "try:\n    import mlx_paged\nexcept ImportError as error:\n    print(type(error).__name__)\n1 / 0"
    run = without_backend(tmp_path, "-c", code)
    assert run.stdout == "MissingBackendError\n"
    assert "Traceback" in run.stderr and "ZeroDivisionError" in run.stderr, "other errors are still shown"
