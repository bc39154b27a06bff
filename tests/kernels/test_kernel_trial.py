"""Trials of texts: once each, and what is taken instead of a variant whose text does not compile."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_paged.kernels import availability
from mlx_paged.kernels import check as kernel_check
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels import trial as kernel_trial
from mlx_paged.kernels.build import KernelUnavailable
from mlx_paged.kernels.check import SelfCheck, self_check
from mlx_paged.kernels.launch_shape import Variant
from mlx_paged.kernels.products import narrow_matmul
from mlx_paged.kernels.trial import Text, failure_of, few_of
from mlx_paged.kv.storage.attention_params import QueryHeads
from mlx_paged.kv.storage.base import Geometry
from mlx_paged.kv.storage.choice import storage_choice
from mlx_paged.kv.storage.functional import FunctionalStorage
from mlx_paged.kv.storage.in_place import InPlaceStorage
from tests.support.kernels.broken_texts import Launched
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.kernels.pool_texts import pool_texts

VARIANT = Variant("paged_decode", "metal", mx.bfloat16, 64, 64, 4, 32)
WRITE_SLOTS = kernels.write_slots


def nothing(text: Text) -> bool:
    return False


@pytest.fixture
def launched() -> Iterator[Callable[..., Launched]]:
    """Makes the kernels' texts be launched by stand-ins, of which some raise."""
    kernels.variants_of.cache_clear()
    narrow_matmul.works.cache_clear()
    with (
        mock.patch.object(kernels, "build_kernel"),
        mock.patch.object(narrow_matmul, "build_kernel"),
        mock.patch.object(kernels, "backend"),
        mock.patch.dict(kernels._switched_off, clear=True),
        mock.patch.dict(kernel_trial._outcomes, clear=True),
        mock.patch.dict(kernel_check._results, clear=True),
    ):

        def begin(is_broken: Callable[[Text], bool] = nothing, dialect: str = "metal") -> Launched:
            stand_in = Launched(is_broken)
            kernels.build_kernel = narrow_matmul.build_kernel = stand_in
            kernels.backend = lambda: dialect
            return stand_in

        yield begin
    kernels.variants_of.cache_clear()
    narrow_matmul.works.cache_clear()


def prepare(rows: int, dtype: mx.Dtype = mx.float32, width: int = 16, **options: Any) -> kernels.DecodeLaunch:
    k_pool = v_pool = mx.zeros((3, 2, 16, 64), dtype)
    visible = mx.zeros((rows, width), mx.int32), mx.zeros((rows, 1), mx.int32), mx.zeros((rows, 1), mx.int32)
    return kernels.prepare_decode(k_pool, v_pool, visible, n_q_heads=8, scale=1.0, **options)


def test_a_text_is_tried_once(launched: Callable[..., Launched]) -> None:
    texts = launched().texts
    for rows in (1, 2, 7):
        for width in (16, 32, 64):
            prepare(rows, width=width)
    assert [text.body for text in texts] == ["paged_decode", "merge_partitions"]
    prepare(8)
    prepare(300)
    assert [text.body for text in texts[2:]] == ["paged_decode", "merge_partitions"]
    prepare(2, max_visible=32)
    assert [dict(text.constants)["SINGLE"] for text in texts[4:]] == [True]
    assert len(set(texts)) == len(texts)


def test_on_cuda_the_number_of_rows_is_no_other_text(launched: Callable[..., Launched]) -> None:
    texts = launched(dialect="cuda").texts
    for rows in (1, 2, 8, 9):
        prepare(rows)
        prepare(rows, mx.bfloat16)
    assert [text.body for text in texts] == ["paged_decode", "merge_partitions", "paged_decode_tensor"]
    assert few_of("cuda", ends=1) == () and few_of("metal", ends=7, sinks=8) == ("ends",)


def test_the_next_variant_is_taken_and_the_broken_one_never_again(launched: Callable[..., Launched]) -> None:
    texts = launched(lambda text: text.body == "paged_decode_tensor", "cuda").texts
    with pytest.warns(UserWarning, match=r"paged_decode_tensor\[.*\] is off: .*it does not compile"):
        launch = prepare(2, mx.float16)
    assert launch.merge is not None and not launch.counters
    prepare(3, mx.float16)  # warnings are errors
    assert [text.body for text in texts] == ["paged_decode_tensor", "paged_decode", "merge_partitions"]


def test_without_a_working_variant_new_pools_are_functional(
    launched: Callable[..., Launched],
) -> None:
    launched(lambda text: "ends" not in text.few and text.body == "paged_decode")
    geometry, heads = Geometry(2, 64, 64, mx.float32), QueryHeads(8)
    with (
        mock.patch.object(availability, "device_unsupported_reason", lambda: None),
        mock.patch.object(kernel_check, "self_check", lambda variant: SelfCheck(variant, True, 0.0, 0.1, "")),
    ):
        choose = storage_choice(None)
        assert choose(geometry, 16, heads, 0).form is InPlaceStorage
        prepare(1)
        with pytest.warns(UserWarning, match="is off"), pytest.raises(KernelUnavailable, match="does not compile"):
            prepare(9)
        with pytest.raises(KernelUnavailable, match="does not compile"):
            prepare(1)
        choice = choose(geometry, 16, heads, 0)
    assert choice.form is FunctionalStorage and "it does not compile" in choice.reason


def test_a_trial_is_evaluated(launched: Callable[..., Launched]) -> None:
    """Only then does MLX compile the text."""
    build = launched()
    (text,) = (text for text in pool_texts(VARIANT) if text.body == "copy_blocks")
    with mock.patch.object(mx, "eval", side_effect=RuntimeError("no such symbol")) as evaluated:
        assert "RuntimeError: no such symbol" in (failure_of(text, build) or "")
    evaluated.assert_called_once()


@pytest.mark.parametrize("block", [8, 32, 128])
def test_the_self_check_runs_every_text_that_a_pool_cannot_do_without(
    launched: Callable[..., Launched], block: int
) -> None:
    """Writes, gathers and copies, of few blocks or tokens and of many."""
    texts = launched().texts
    with mock.patch.object(mx, "array_equal", lambda *_, **__: mx.array(True)):
        self_check(VARIANT._replace(block_size=block))
    checked = {text for text in texts if "decode" not in text.body and text.body != "merge_partitions"}
    texts.clear()
    pools = [mx.zeros((20, 2, block, 64), mx.bfloat16) for _ in "kv"]
    fence = kernels.new_fence()
    for count in (1, 2, 3, 4, 7, 8, 9):
        ids, rows = list(range(1, count + 1)), [mx.zeros((1, 2, count, 64), mx.bfloat16) for _ in "kv"]
        kernels.write_slots(*pools, fence, *rows, mx.array(ids, mx.int32))
        kernels.gather_blocks(*pools, fence, ids, 0, 1)
        kernels.copy_blocks(*pools, fence, ids, [10 + i for i in ids])
    assert set(texts) == checked and len(checked) == 6


def test_wrong_copies_fail_the_self_check(launched: Callable[..., Launched]) -> None:
    """Those of several blocks do not happen."""
    with fake_kernels() as fake:
        prepare_decode, copy_blocks = fake.prepare_decode, fake.copy_blocks

        def copy(k: mx.array, v: mx.array, fence: mx.array, source: list[int], target: list[int]) -> mx.array:
            return copy_blocks(k, v, fence, source[:1], target[:1])

        def prepared(
            *args: Any, variant: Variant, launch_shape: object, max_visible: int | None, **options: Any
        ) -> Any:
            return prepare_decode(*args, **options)

        with mock.patch.multiple(kernels, prepare_decode=prepared, copy_blocks=copy, write_slots=WRITE_SLOTS):
            result = self_check(VARIANT._replace(dtype=mx.float32))
    assert not result.ok and "copies of blocks differ" in result.reason


def test_products_of_other_dimensions_are_tried_before_they_are_taken(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = launched(lambda text: dict(text.constants).get("XD") == 4, "cuda").texts
    monkeypatch.setattr(narrow_matmul, "backend", lambda: "cuda")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(
        narrow_matmul, "self_check", lambda *kernel: narrow_matmul.TileCheck(*kernel, True, 0.0, 0.1, "")
    )
    x, residual = mx.zeros((4, 1, 32), mx.bfloat16), mx.zeros((4, 1, 16), mx.bfloat16)
    weight = mx.zeros((16, 32), mx.bfloat16)
    assert narrow_matmul.covers_sum(x, weight, residual)
    with pytest.warns(UserWarning, match="is off, MLX multiplies: .*it does not compile"):
        assert not narrow_matmul.covers_sum(x.reshape(4, 2, 1, 16), weight, residual)
    assert not narrow_matmul.covers_sum(x.reshape(4, 2, 1, 16), weight, residual)
    assert narrow_matmul.covers_sum(x, weight, residual) and narrow_matmul.covers(x.reshape(4, 32), [weight])
    assert [dict(text.constants)["XD"] for text in texts] == [4, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_every_trial_passes_on_a_gpu(dtype: mx.Dtype) -> None:
    for rows in (1, 9):
        for options in ({}, {"max_visible": 16}, {"softcap": 5.0, "sinks": True}):
            prepare(rows, dtype, **options)
    variant = VARIANT._replace(dtype=dtype, backend=str(kernels.backend()))
    for text in pool_texts(variant):
        for few in ((), ("slots", "blocks", "pairs")):
            assert failure_of(Text(text.body, text.constants, few), kernels.build_kernel) is None
    if kernels.backend() == "cuda" and dtype in narrow_matmul.DTYPES:
        for body in narrow_matmul.BODIES:
            for dims in (2, 3, 4):
                text = narrow_matmul.text_of(body, dtype, narrow_matmul.SMALL, dims)
                assert failure_of(text, kernels.build_kernel) is None
