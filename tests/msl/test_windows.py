"""Windows that begin anywhere, on GPUs of any number of cores: the merge reads no unwritten partition."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.launch_shape import LaunchShape, shape_for
from mlx_paged.kernels.ops import variants_of
from tests.support.cases import crossed, quick
from tests.support.kernels.quantized_pages import page_shape
from tests.support.msl.emulator import EmuError
from tests.support.msl.harness import Case, emulated

CORES = (8, 10, 16, 20, 30, 32, 38, 40, 60, 64, 76, 80)
WINDOWS = (64, 128, 512, 1024)
LONG = 320  # more than one partition holds
STARTS = list(range(64))
PAGES = [None, page_shape(64, (8, 4), 32, mx.bfloat16, 0)]
IDS = ["dense", "quantized"]


def case_of(window: int, starts: list[int], pages: Any, **options: Any) -> Case:
    options = {"heads": (2, 1), "head_dim": 64, "dtype": mx.bfloat16, "block_size": 32, **options}
    return Case([start + window for start in starts], starts=starts, pages=pages, **options)


def check(case: Case, window: int, launch_shape: LaunchShape, edit: Any = None) -> None:
    with emulated(checked=False, orders=(0,), edit=edit):
        out, _ = case.run(launch_shape=launch_shape, max_visible=window)
    np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)


def launch_shapes(case: Case) -> dict[LaunchShape, list[int]]:
    """Return the launch shapes of all core counts, each with its counts."""
    shapes: dict[LaunchShape, list[int]] = {}
    for cores in CORES:
        shapes.setdefault(shape_for(case.variant(), cores), []).append(cores)
    return shapes


def test_every_core_count_has_a_shape() -> None:
    with emulated():
        shapes = launch_shapes(case_of(64, [0], None))
    assert {shape.partition: cores for shape, cores in shapes.items()} == {
        128: [8, 10, 16, 20],
        64: [30, 32],
        32: [38, 40, 60, 64, 76, 80],
    }


@pytest.mark.parametrize(("cores", "pages"), quick(crossed([20, 32, 38], PAGES), (38, PAGES[1])), ids=str)
def test_windows_that_begin_inside_a_partition(cores: int, pages: Any) -> None:
    for window in (128, LONG):
        case = case_of(window, [0, 31, 32, 40, 63], pages, sinks=True)
        with emulated():
            launch_shape = shape_for(case.variant(), cores)
        check(case, window, launch_shape)


def test_a_first_partition_without_a_visible_token_is_caught() -> None:
    edit = {body: [("PART < 64 ? PART : 64", "64")] for body in ("paged_decode", "merge_partitions")}
    case = case_of(LONG, [40], None)
    with emulated():
        launch_shape = shape_for(case.variant(), 38)
    with pytest.raises((EmuError, AssertionError)):
        check(case, LONG, launch_shape, edit)


@pytest.mark.parametrize(("gqa", "pages"), quick(crossed([4, 8], PAGES), (4, PAGES[0]), (8, PAGES[1])), ids=str)
def test_partitions_of_one_kv_head(gqa: int, pages: Any) -> None:
    """Rows of one partition, of several, and of several sizes, alone and behind a window."""
    contexts = [1, 64, 65, 300, 700]
    for starts in ([0] * 5, [0, 33, 40, 7, 500]):
        case = Case(contexts, starts=starts, pages=pages, heads=(gqa, 1), head_dim=64, dtype=mx.bfloat16, block_size=32)
        with emulated(checked=False, orders=(0,)) as fake:
            variant = variants_of(mx.bfloat16, 64, 64, gqa, 1, 32, False, False, pages)[0]
            out, _ = case.run(variant=variant, launch_shape=shape_for(variant, 10))
        np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)
        assert variant.groups == 1 and [body for body, _ in fake.calls][1:] == ["merge_partitions"]
    with emulated(checked=False, orders=(0,)) as fake:
        case = Case(contexts[:2], pages=pages, heads=(gqa, 1), head_dim=64, dtype=mx.bfloat16, block_size=32)
        out, _ = case.run(variant=variant, launch_shape=shape_for(variant, 10), max_visible=33)
    np.testing.assert_allclose(out, case.reference(), atol=2e-2, rtol=2e-2)
    assert len(fake.calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("pages", PAGES, ids=IDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_every_start_of_every_window(window: int, pages: Any) -> None:
    case = case_of(window, STARTS, pages)
    with emulated():
        shapes = launch_shapes(case)
    assert sum(map(len, shapes.values())) == len(CORES)
    for launch_shape in shapes:
        check(case, window, launch_shape)
