"""Fixtures and markers shared by all tests."""

import contextlib
import functools
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA, compute f32 in full; MLX reads this at its first product
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads busy-wait, and references are small
if hasattr(os, "SCHED_BATCH"):
    # On a CPU, MLX wakes a thread for each operation. That is faster if it does not preempt the thread that wakes it.
    # New threads and processes inherit the policy.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import mlx.core as mx
import pytest
from hypothesis import settings

import mlx_paged
from mlx_paged import warn
from mlx_paged.engine import compiled_step
from mlx_paged.kernels import ops as gpu_kernels
from mlx_paged.patches import registry
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels
from tests.support.processes.precompiled import precompile_headers

# The same examples in every run; HYPOTHESIS_PROFILE=default draws new ones, as "make test-slow" does.
settings.register_profile("fixed", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Tests apply the patches about a thousand times, and mlx-lm's sources do not change.
registry.fingerprint = functools.cache(registry.fingerprint)

precompile_headers()

gc.disable()  # until collection ends: nearly all that it creates stays or is freed by reference counts

REAL = gpu_kernels.prepare_decode, compiled_step.compile_function


@pytest.hookimpl(tryfirst=True)  # before "-m" deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = mx.default_device() == mx.Device(mx.gpu)
    has_metal = mx.metal.is_available()
    items.sort(key=lambda item: "demo_model" not in item.keywords)  # the longest first, not alone at the end
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU that MLX can use"))
        if item.get_closest_marker("metal") and not has_metal:
            item.add_marker(pytest.mark.skip(reason="no Apple GPU"))


def pytest_collection_finish() -> None:
    """Freeze existing objects: they stay to the end, and each of the tests' many collections would scan them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the file's fixtures are torn down
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze what a file's tests imported and cached, so that later collections scan only new objects."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Start and end every test with stock mlx-lm."""
    registry.remove_patches()
    warn._given.clear()
    mlx_paged.reset_dispatch_counts()
    yield
    registry.remove_patches()
    # A test that replaces a stand-in must undo that before the stand-ins are removed, or one stays behind.
    assert (gpu_kernels.prepare_decode, compiled_step.compile_function) == REAL


@pytest.fixture
def no_fall_through() -> Iterator[None]:
    """Fail the test if anything falls through to stock mlx-lm."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", mlx_paged.NotPagedWarning)
        yield


@pytest.fixture
def unfused() -> Iterator[None]:
    """Disable mx.compile. On a CPU each function that mlx-lm compiles costs a g++ call per dtype and layout. That takes
    longer than the rest of a test of caches and does not affect it."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(params=["stand-ins", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Iterator[FakeKernels | None]:
    """Make pools in-place, over stand-ins for the kernels, and over the kernels (None) if there is a GPU."""
    if request.param == "gpu":
        yield None
    else:
        with fake_kernels() as fake:
            yield fake


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """Return the demo model's folder, fetched if it is missing (see scripts/demo_model.py)."""
    from scripts.demo_model import ensure_demo_model

    return ensure_demo_model()
