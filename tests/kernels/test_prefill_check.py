"""The prefill kernel's self-check, over its text on the emulator: it passes, and finds what is planted.

With the kernel itself it runs on a GPU, in test_prefill_kernel.py.
"""

import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import check, ops, prefill
from mlx_paged.kernels.launch_shape import Variant
from mlx_paged.kernels.prefill import checked_prefill, self_check_prefill
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.msl import prefill_harness

VARIANT = Variant(prefill.BODY, "cuda", mx.bfloat16, 64, 64, 8, 32)
WRITE_SLOTS = ops.write_slots


@pytest.fixture
def emulated() -> Iterator[Callable[[tuple[str, str]], None]]:
    """The kernel runs on the emulator, and writes are stand-ins; calling the fixture's value plants a mutation."""
    edits: list[tuple[str, str]] = []
    with fake_kernels() as fake, prefill_harness.emulated(edits, orders=(0,), checked=False):
        build, launched = prefill.build_kernel, prefill.PrefillLaunch.__call__
        fake.calls["paged_prefill"] = 0

        def follow(launch: prefill.PrefillLaunch, q: mx.array, *pools_and_fence: mx.array) -> tuple[mx.array, mx.array]:
            # The stand-ins check that each use of a pool is given the fence of the one before.
            out, _ = launched(launch, q, *pools_and_fence)
            return out, fake._pass("paged_prefill", *pools_and_fence[:3])

        def build_arrays(body: str, constants: object) -> Callable[..., list[mx.array]]:
            kernel = build(body, constants)

            def launch(**options: object) -> list[mx.array]:
                outs = zip(kernel(**options), options["output_dtypes"], strict=True)
                return [mx.array(np.asarray(out)).view(dtype) for out, dtype in outs]

            return launch

        # write_slots calls the stand-in's prepare_write.
        with (
            mock.patch.object(ops, "write_slots", WRITE_SLOTS),
            mock.patch.object(prefill, "build_kernel", build_arrays),
            mock.patch.object(prefill.PrefillLaunch, "__call__", follow),
            mock.patch.dict(check._results, clear=True),
            mock.patch.dict(ops._switched_off, clear=True),
        ):
            yield edits.append


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "change", [{}, {"softcap": True, "sinks": True, "dtype": mx.float16}, {"gqa": 3, "head_dim": 80, "block_size": 8}]
)
def test_the_kernel_passes(emulated: object, change: dict[str, object]) -> None:
    result = self_check_prefill(VARIANT._replace(**change))
    assert result.ok and result.rms < 2e-3, result.reason


@pytest.mark.sample(every=6)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("token > own ||", "token > own + 1 ||"),
        ("token < from)", "token < from - 1)"),
        ("< static_cast<uint>(hi - lo);", "< static_cast<uint>(BS * 1000);"),
        ("n_kv + kv_head) * G", "n_kv + 0) * G"),
        ("l[i] = metal::fma(l[i], shrink[i], sum);", "l[i] += sum;"),
    ],
)
def test_planted_defects_are_found(emulated: Callable[..., None], old: str, new: str) -> None:
    emulated((old, new))
    assert not self_check_prefill(VARIANT).ok


def test_a_failure_switches_the_variant_off_once(emulated: Callable[..., None]) -> None:
    emulated(("token > own ||", "token > own + 1 ||"))
    with pytest.warns(UserWarning, match="failed its self-check"):
        assert not checked_prefill(VARIANT).ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not checked_prefill(VARIANT).ok
    pools = [mx.zeros((3, 1, 32, 64), mx.bfloat16)] * 2
    with pytest.raises(prefill.KernelUnavailable, match=r"is not below|not finite"):
        prefill.prepare_prefill(*pools, mx.array([[1]], mx.int32), [3], [3], n_q_heads=8, scale=1.0)


def test_a_text_that_does_not_compile_fails_the_check(emulated: Callable[..., None]) -> None:
    fails = mock.patch.object(prefill, "failure_of", lambda text, build: "does not compile")
    with fails, pytest.warns(UserWarning, match="is off: does not compile"):
        result = self_check_prefill(VARIANT)
    assert not result.ok and "does not compile" in result.reason
