"""Fixtures and markers shared by all tests."""

import contextlib
import functools
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # on CUDA, f32 is compared with f32; read when MLX multiplies first
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's: its threads wait by turning, and references are small
if hasattr(os, "SCHED_BATCH"):
    # On a CPU, MLX wakes a thread for each operation. If that does not interrupt the one that wakes it, both need less
    # time. Threads and processes that are started inherit it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import mlx.core as mx
import pytest
from hypothesis import settings

import mlx_paged
from mlx_paged.engine import compiled_step
from mlx_paged.kernels import ops as gpu_kernels
from mlx_paged.patches import registry
from mlx_paged.warn import forget_warnings
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels
from tests.support.processes.precompiled import precompile_headers

# The same examples in every run; HYPOTHESIS_PROFILE=default draws new ones, as "make test-slow" does.
settings.register_profile("fixed", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Tests apply the patches some thousand times, and mlx-lm's sources stay as they are.
registry.fingerprint = functools.cache(registry.fingerprint)

precompile_headers()

gc.disable()  # until all tests are known: what their sources are made into stays, or goes by itself

REAL = gpu_kernels.prepare_decode, compiled_step.compile_function


@pytest.hookimpl(tryfirst=True)  # before "-m" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = mx.default_device() == mx.Device(mx.gpu)
    has_metal = mx.metal.is_available()
    items.sort(key=lambda item: "demo_model" not in item.keywords)  # the longest: not at the end, one after the other
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU that MLX can use"))
        if item.get_closest_marker("metal") and not has_metal:
            item.add_marker(pytest.mark.skip(reason="no Apple GPU"))


def pytest_collection_finish() -> None:
    """What is there by now stays to the end: each of the many collections that tests ask for would go through it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the file's fixtures have gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests have imported and built to keep stays, too: collections then go through what is new only."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test starts and ends with stock mlx-lm."""
    registry.remove_patches()
    forget_warnings()
    mlx_paged.reset_dispatch_counts()
    yield
    registry.remove_patches()
    # What a test puts in the place of a stand-in has to go before the stand-ins do, or it leaves one behind.
    assert (gpu_kernels.prepare_decode, compiled_step.compile_function) == REAL


@pytest.fixture
def no_fall_through() -> Iterator[None]:
    """Fail the test if anything falls through to stock mlx-lm."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", mlx_paged.NotPagedWarning)
        yield


@pytest.fixture
def unfused() -> Iterator[None]:
    """MLX runs the functions that mlx-lm has it fuse as they are written. On a CPU each is a call of g++ for each type
    and layout, which takes longer than the rest of a test of caches, and to these it makes no difference."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(params=["stand-ins", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Iterator[FakeKernels | None]:
    """In-place pools: over stand-ins for the kernels, and over the kernels (None) where there is a GPU."""
    if request.param == "gpu":
        yield None
    else:
        with fake_kernels() as fake:
            yield fake


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """The demo model's folder (see scripts/demo_model.py); fetched if it is not there."""
    from scripts.demo_model import ensure_demo_model

    return ensure_demo_model()
