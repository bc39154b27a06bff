"""Checks of kernels on the user's machine: what is launched, what is compared, and what a failure switches off."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.errors import BlocksUnavailableError
from mlx_paged.kernels import build
from mlx_paged.kernels import check as kernel_check
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import CheckResult, self_check
from mlx_paged.kernels.launch_shape import Variant
from mlx_paged.kernels.quantized import PageShape, new_blocks
from mlx_paged.kv.blocks import BlocksChoice, without_kernel
from mlx_paged.kv.device_blocks import DeviceBlocks
from mlx_paged.kv.geometry import Geometry
from scripts.support.paged_decode import gather_blocks, write_slots
from tests.support.cases import crossed, quick, slow
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.kernels.quantized_pages import page_shape

VARIANT = Variant("paged_decode", "metal", mx.float32, 64, 64, 2, 16)
Launch = Callable[..., tuple[mx.array, mx.array]]


@pytest.fixture
def plant() -> Iterator[Callable[[Callable[[Launch], Launch]], None]]:
    """Wrap each decode launch of the fake kernels; call the fixture's value with the wrapper."""
    around: list[Callable[[Launch], Launch]] = []
    with fake_kernels() as fake:
        prepare = fake.prepare_decode

        def prepare_decode(
            *args: Any, variant: Variant, init_value: object, max_visible: int | None, **options: Any
        ) -> Launch:
            launch = prepare(*args, **options)  # the check chooses max_visible by the partitions, not by what rows see
            for wrap in around:
                launch = wrap(launch)
            return launch

        # Not by monkeypatch, which would outlive the fake kernels.
        with mock.patch.object(kernels, "prepare_decode", prepare_decode):
            yield around.append


PAGES = page_shape(64, (8, 4), 32)


@pytest.mark.parametrize("extras", [*slow({}, {"pages": PAGES}), {"softcap": True, "sinks": True}])
def test_correct_kernels_pass(plant: object, extras: dict[str, Any]) -> None:
    result = self_check(VARIANT._replace(**extras))
    assert result.ok and result.rms < 1e-5, result.reason


def wrong_rows(launch: Launch) -> Launch:
    def wrapped(*args: Any) -> tuple[mx.array, mx.array]:
        out, fence = launch(*args)
        return out * 1.1, fence

    return wrapped


def padding_has_results(launch: Launch) -> Launch:
    def wrapped(*args: Any) -> tuple[mx.array, mx.array]:
        out, fence = launch(*args)
        return mx.where(mx.isnan(args[0]), 1.0, out), fence

    return wrapped


def padding_is_written(launch: Launch) -> Launch:
    def wrapped(q: mx.array, k_pool: mx.array, *args: Any) -> tuple[mx.array, mx.array]:
        out, fence = launch(q, k_pool, *args)
        if mx.isnan(q).any().item():
            k_pool[1:, :, 0] = 7.0
        return out, fence

    return wrapped


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (wrong_rows, "is not below"),
        (padding_has_results, "is not below"),
        (padding_is_written, "read back differ"),
    ],
)
def test_wrong_kernels_are_found(plant: Callable[..., None], wrap: Callable[[Launch], Launch], reason: str) -> None:
    plant(wrap)
    result = self_check(VARIANT)
    assert not result.ok and reason in result.reason, result.reason


def test_rows_unlike_mlxs_quantisation_are_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = kernels.prepare_gather

    def other(*args: Any, stored: bool = False) -> Callable[..., tuple[mx.array, ...]]:
        launch = prepare(*args, stored=stored)

        def gather(*pools: mx.array) -> tuple[mx.array, ...]:
            k, v, fence = launch(*pools)
            return k, v + (mx.arange(v.shape[3]) == 3) * stored, fence

        return gather

    monkeypatch.setattr(kernels, "prepare_gather", other)
    result = self_check(VARIANT._replace(body="quantized_decode", pages=PAGES))
    assert not result.ok and "quantised rows differ from MLX's" in result.reason


def test_kernels_of_a_pool_are_checked_until_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry(2, 64, 64, mx.float32, None)
    results = [CheckResult(reason == "", 0.0, 0.1, reason) for reason in ("no memory", "")]
    monkeypatch.setattr(kernel_check, "outcome_of", lambda difference: results.pop(0))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    kernel_check.check_pool.cache_clear()
    try:
        with pytest.raises(BlocksUnavailableError, match="write and gather blocks do not work here: no memory"):
            without_kernel(geometry, 16, "")
        for _ in range(2):
            assert without_kernel(geometry, 16, "kernel=off") == BlocksChoice(DeviceBlocks, "kernel=off")
        assert not results
    finally:
        kernel_check.check_pool.cache_clear()


class Texts:
    """A fake build.build_kernel, which records the texts that are built and returns zeros.

    A text is a body, its constants, and which inputs have fewer than 8 elements, which MLX puts into another address
    space on Metal.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    def __call__(self, body: str, constants: object) -> Callable[..., list[mx.array]]:
        def launch(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            self.seen.add((body, constants, tuple(x.size < 8 for x in inputs)))
            shapes, dtypes = options["output_shapes"], options["output_dtypes"]
            return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

        return launch


@contextmanager
def built_by(texts: Texts) -> Iterator[None]:
    with mock.patch.object(build, "build_kernel", texts), mock.patch.object(build, "backend", lambda: "metal"):
        yield


HALF_PAGES = page_shape(64, (8, 4), 32, mx.bfloat16)


@pytest.mark.parametrize(
    ("pages", "sinks", "gqa"),
    quick(
        crossed([None, HALF_PAGES], [False, True], [1, 4, 8]), (None, False, 1), (HALF_PAGES, True, 4), (None, False, 8)
    ),
)
def test_every_text_of_a_decode_step_is_checked(gqa: int, sinks: bool, pages: PageShape | None) -> None:
    body = "paged_decode" if pages is None else "quantized_decode"
    variant = Variant(body, "metal", mx.bfloat16, 64, 64, gqa, 32, sinks=sinks, pages=pages)
    checked, real = Texts(), Texts()
    equal = mock.patch.object(mx, "array_equal", lambda *_, **__: mx.array(True))
    with built_by(checked), equal, mock.patch.object(kernel_check, "MAX_RMS", float("inf")):
        self_check(variant)
    n_q_heads, n_kv_heads = 8 * gqa, 8
    k_pool, v_pool = new_blocks(40, n_kv_heads, 32, (64, 64), mx.bfloat16, pages)
    with built_by(real):
        for rows, q_len, window in itertools.product(range(1, 12), (1, 2, 5, 8), (None, 64, 128)):
            ends = mx.array(build.padded_for_metal(np.zeros((rows, q_len), np.int32)))
            visible = mx.zeros((rows, 16), mx.int32), ends, ends
            launch = kernels.prepare_decode(
                k_pool,
                v_pool,
                visible,
                n_q_heads=n_q_heads,
                scale=1.0,
                sinks=sinks,
                max_visible=window,
                append=q_len == 1,
                variant=variant,
                pages=pages,
            )
            q = mx.zeros((rows, n_q_heads, q_len, 64), mx.bfloat16)
            new = mx.zeros((rows, n_kv_heads, 1, 64), mx.bfloat16)
            logits = mx.zeros((n_q_heads,)) if sinks else None
            launch(q, k_pool, v_pool, kernels.new_fence(), logits, *((new, new) if q_len == 1 else ()))
            ids = list(range(rows))
            slots = mx.array(build.padded_for_metal(np.array(ids, np.int32), -1))
            write_slots(k_pool, v_pool, kernels.new_fence(), new, new, slots, pages)
            gather_blocks(k_pool, v_pool, kernels.new_fence(), ids, 0, 1, pages)
            kernels.copy_blocks(k_pool, v_pool, kernels.new_fence(), ids, [20 + i for i in ids], pages)
            if pages is not None:
                moved = [mx.zeros((rows, n_kv_heads, 1, form.num_words), mx.uint32) for form in pages]
                pools = k_pool, v_pool, kernels.new_fence()
                kernels.prepare_gather(k_pool, v_pool, ids, 0, 1, pages, stored=True)(*pools)
                kernels.prepare_write(k_pool, v_pool, slots, pages, stored=True)(*pools, *moved)
    moved_by = {body for body, _ in kernels.pool_texts(mx.bfloat16, 64, 64, 32, pages).values()}
    assert {text[0] for text in real.seen} == {body, "merge_partitions", *moved_by}
    assert real.seen <= checked.seen
