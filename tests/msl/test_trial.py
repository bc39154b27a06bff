"""The scratch launches of trials on the emulator: they have the texts of real steps and stay in bounds."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.decode_spec import spec_of
from mlx_paged.kernels.launch_shape import Variant, shape_for
from mlx_paged.kernels.trial import MIN_DEVICE_ELEMENTS, KernelKey, launch_alone
from tests.support.cases import quick
from tests.support.kernels.pool_texts import pool_texts
from tests.support.msl.harness import Emulated, emulated


def few_inputs(call: dict) -> list[bool]:
    return [x.size < MIN_DEVICE_ELEMENTS for x in call["inputs"]]


def dtypes(call: dict) -> list[str]:
    return [str(x.dtype).removeprefix("mlx.core.") for x in call["inputs"]]


@pytest.mark.parametrize(
    ("partitions", "rows", "gqa", "sinks"),
    quick([(a, b, *c) for a in [1, 3] for b in [1, 9] for c in [(1, True), (2, False), (4, True)]], (1, 1, 1, True),
    (3, 9, 2, False))
)  # fmt: skip
def test_trial_of_a_decode_step_launches_its_texts(gqa: int, sinks: bool, rows: int, partitions: int) -> None:
    variant = Variant("paged_decode", "metal", mx.float16, 64, 80, gqa, 16, sinks=sinks)
    launch_shape, heads, dtype = shape_for(variant), 2 * gqa, mx.float16
    build = Emulated()
    spec = spec_of(variant, launch_shape, rows, heads, 1, partitions)
    for key in spec.keys:
        out, *_ = launch_alone(key, build)
        assert np.asarray(out).size
    with emulated() as real:
        k_pool, v_pool = (mx.zeros((9, 2, 16, dim), dtype) for dim in (64, 80))
        tables = mx.zeros((rows, partitions * launch_shape.partition // 16), mx.int32)
        ends = mx.ones((rows, 1), mx.int32)
        kernels.paged_decode(
            mx.zeros((rows, heads, 1, 64), dtype), k_pool, v_pool, kernels.new_fence(), tables, ends, 0 * ends,
            scale=1.0, sinks=mx.zeros((heads,)) if sinks else None, variant=variant, launch_shape=launch_shape,
        )  # fmt: skip
    assert [body for body, _ in real.calls] == [body for body, _ in build.calls]
    for (_, step), (_, trial) in zip(real.calls, build.calls, strict=True):
        assert few_inputs(step) == few_inputs(trial)
        assert step["output_dtypes"] == trial["output_dtypes"]
        assert dtypes(step) == dtypes(trial)


@pytest.mark.parametrize("few", [(), ("slots", "blocks", "pairs")])
def test_trials_of_writes_reads_and_copies_of_blocks(few: tuple[str, ...]) -> None:
    variant = Variant("paged_decode", "metal", mx.bfloat16, 64, 80, 2, 8)
    build = Emulated()
    for key in pool_texts(variant):
        *_, fence = launch_alone(KernelKey(key.body, key.constants, few), build)
        assert int(np.asarray(fence)[0]) == 1
    assert [few_inputs(call)[-1] for _, call in build.calls] == [bool(few), True, bool(few)]
