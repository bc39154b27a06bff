"""Kernels that need too much shared memory are not chosen."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_paged.kernels import availability as device
from mlx_paged.kernels import ops
from mlx_paged.kernels.availability import HOPPER, CudaLimits, cuda_limits
from mlx_paged.kernels.decode_spec import spec_of
from mlx_paged.kernels.launch_shape import LATENT_BODIES, latent_run, run_length, shape_for

# Multiprocessors, opt-in shared memory per group, and that per multiprocessor; from NVIDIA's tables.
A100 = CudaLimits(108, 166_912, 167_936)
ADA = CudaLimits(128, 101_376, 102_400)  # sm_86, sm_89 and sm_120 have the same
CACHED = (
    cuda_limits,
    ops.variants_of,
    spec_of,
)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(ops, "backend", lambda: "cuda")
    for function in CACHED:
        function.cache_clear()
    yield monkeypatch
    for function in CACHED:
        function.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, limits: CudaLimits) -> None:
    monkeypatch.setattr(device, "_query_driver", lambda: limits)
    for function in CACHED:
        function.cache_clear()


def test_number_of_groups_that_fit_on_a_multiprocessor() -> None:
    assert HOPPER.groups_together(222_552) == 1 and A100.groups_together(222_552) == 0
    assert [limits.groups_together(68 * 1024) for limits in (HOPPER, A100, ADA)] == [3, 2, 1]
    assert ADA.groups_together(101_376) == 1 and ADA.groups_together(101_377) == 0


@pytest.mark.parametrize(("limits", "bodies"), [(HOPPER, LATENT_BODIES[::-1]), (A100, LATENT_BODIES[:1])])
def test_latents_on_smaller_gpus_take_the_portable_kernel(
    on_cuda: pytest.MonkeyPatch, limits: CudaLimits, bodies: tuple[str, ...]
) -> None:
    use(on_cuda, limits)
    found = ops.variants_of(mx.bfloat16, 512, 64, 128, 1, 64, use="latents")
    assert tuple(variant.body for variant in found) == bodies


def test_a_gpu_too_small_has_no_prefill_kernel(on_cuda: pytest.MonkeyPatch) -> None:
    use(on_cuda, CudaLimits(4, 48 * 1024, 64 * 1024))
    assert ops.variants_of(mx.bfloat16, 128, 128, 32, 8, 32, use="prefill") == ()


def test_runs_follow_multiprocessors(on_cuda: pytest.MonkeyPatch) -> None:
    assert [run_length(n, 132, 3) for n in (64, 256, 512, 1024, 2048, 4096, 8192)] == [1, 1, 2, 4, 2, 4, 4]
    # One partition more than the tokens need, for windows that begin inside one.
    assert [run_length(n, 132, 3) for n in (544, 1088)] == [2, 4] and run_length(512, 72, 3) == 4
    # Groups that run at the same time: 2 of heads of 256, 4 of heads of 64.
    assert [run_length(2176, 132, together) for together in (2, 3, 4)] == [4, 2, 4]
    assert [run_length(2560, 132, together) for together in (2, 3, 4)] == [4, 2, 2]
    assert latent_run(64, 64, 132) == 32 and latent_run(64, 64, 72) == 64  # 32 x 16k, 128 heads
    assert latent_run(1, 16, 132) == 1 and latent_run(2, 64, 132) == 1 and latent_run(1000, 5, 132) == 8
    use(on_cuda, HOPPER)
    (tensor, _) = ops.variants_of(mx.bfloat16, 512, 64, 128, 1, 64, use="latents")
    wide = spec_of(tensor, shape_for(tensor), 32, 128, 1, 64)
    use(on_cuda, HOPPER._replace(multiprocessors=72))
    assert spec_of(tensor, shape_for(tensor), 32, 128, 1, 64).run == 2 * wide.run
