"""The attention path of prompts after a prefix: known or measured, remembered, and reported by the doctor."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_paged.cli.doctor import jobs
from mlx_paged.config import PagedConfig
from mlx_paged.kernels import fused_attention, trial
from mlx_paged.kernels.check import SelfCheck
from mlx_paged.kernels.fused_attention import CONTEXTS, COPY, IN_PLACE, TOKENS, PromptPath, prompt_path
from mlx_paged.kernels.launch_shape import Variant
from mlx_paged.kernels.prefill import MATRIX_BODY, QUANTIZED_MATRIX_BODY
from mlx_paged.kernels.quantized import PageShape

VARIANT = Variant(MATRIX_BODY, "metal", mx.bfloat16, 128, 128, 4, 32)
LONG = TOKENS[1], CONTEXTS[1]


class Paths:
    """Fake paths that take given seconds or fail. ``prepared`` lists what was measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: dict[str, float | Exception] = {}
        self.prepared: list[tuple[str, Variant, int, int]] = []
        monkeypatch.setattr(fused_attention, "has_nax", lambda: True)
        monkeypatch.setattr(fused_attention, "_measured", {})
        monkeypatch.setattr(fused_attention, "PATHS", {path: self._prepare(path) for path in (IN_PLACE, COPY)})
        monkeypatch.setattr(fused_attention, "seconds_of", lambda compute, most: compute())

    def _prepare(self, path: str) -> Callable[[Variant, int, int], Callable[[], float]]:
        def prepare(variant: Variant, tokens: int, context: int) -> Callable[[], float]:
            self.prepared.append((path, variant, tokens, context))
            seconds = self.seconds[path]
            if isinstance(seconds, Exception):
                raise seconds
            return lambda: seconds

        return prepare


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    return Paths(monkeypatch)


@pytest.mark.parametrize(("in_place", "copy", "expected"), [(2e-3, 3e-3, True), (3e-3, 2e-3, False), (1.0, 1.0, True)])
def test_faster_path_is_used_and_remembered(paths: Paths, in_place: float, copy: float, expected: bool) -> None:
    paths.seconds = {IN_PLACE: in_place, COPY: copy}
    path = prompt_path(VARIANT, 2048, 30_000)
    assert path.in_place is expected
    assert (
        path.reason == f"measured, 1024 tokens of 8192: {1e3 * in_place:.2f} ms {IN_PLACE}, {1e3 * copy:.2f} ms {COPY}"
    )
    paths.seconds = {IN_PLACE: copy, COPY: in_place}
    assert prompt_path(VARIANT, 1024, 8192) is path
    assert [name for name, *_ in paths.prepared] == [IN_PLACE, COPY]


def test_each_variant_and_size_of_chunk_is_measured_once(paths: Paths) -> None:
    paths.seconds = {IN_PLACE: 1.0, COPY: 2.0}
    other = VARIANT._replace(dtype=mx.float16)
    for num_tokens, length in ((9, 20), (256, 2048), (1023, 8191), (1024, 8192), (5000, 90_000), (300, 9000)):
        prompt_path(VARIANT, num_tokens, length)
    prompt_path(other, 1024, 8192)
    measured = [(variant, *sizes) for name, variant, *sizes in paths.prepared if name == COPY]
    assert measured == [(VARIANT, 256, 2048), (VARIANT, *LONG), (VARIANT, 256, 8192), (other, *LONG)]


@pytest.mark.parametrize(
    ("seconds", "in_place", "told"),
    [
        ({IN_PLACE: RuntimeError("no memory"), COPY: 1.0}, False, f"{IN_PLACE} failed: RuntimeError: no memory"),
        ({IN_PLACE: 1.0, COPY: RuntimeError("no memory")}, True, f"{COPY} failed: RuntimeError: no memory"),
        ({IN_PLACE: ValueError("a"), COPY: ValueError("b")}, True, "failed: ValueError: b"),
    ],
)
def test_path_that_fails_is_not_used(
    paths: Paths, seconds: dict[str, float | Exception], in_place: bool, told: str
) -> None:
    paths.seconds = seconds
    path = prompt_path(VARIANT, *LONG)
    assert path.in_place is in_place and told in path.reason


@pytest.mark.parametrize(
    ("change", "num_tokens", "window", "told"),
    [
        ({"softcap": True}, 2048, None, "no soft cap"),
        ({}, 2048, 1024, "a mask array for the window"),
        ({}, 8, None, "at most 8 tokens"),
        ({"head_dim": 96, "value_dim": 96}, 2048, None, "not fused for head_dim 96/96"),
        ({"value_dim": 64}, 2048, None, "not fused for head_dim 128/64"),
        ({"head_dim": 256, "value_dim": 256}, 1023, None, "fused from 1024 tokens on"),
    ],
)
def test_nothing_is_measured_where_mlx_materialises_all_scores(
    paths: Paths, change: dict[str, int], num_tokens: int, window: int | None, told: str
) -> None:
    path = prompt_path(VARIANT._replace(**change), num_tokens, 30_000, window)
    assert path.in_place and told in path.reason and not paths.prepared


def test_window_longer_than_the_sequence_is_ignored(paths: Paths) -> None:
    paths.seconds = {IN_PLACE: 2.0, COPY: 1.0}
    assert not prompt_path(VARIANT, 1024, 4096, 4096).in_place


def test_without_matrix_units_nothing_is_measured(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real paths, which need an M5
    monkeypatch.setattr(mx, "device_info", lambda *device: {"architecture": "applegpu_g15s"})
    fused_attention.has_nax.cache_clear()
    try:
        assert prompt_path(VARIANT, 2048, 30_000) == PromptPath(True, "MLX uses no matrix units here")
    finally:
        fused_attention.has_nax.cache_clear()


def test_measuring_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 13.0])
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(clock))
    calls: list[int] = []

    def compute() -> list[mx.array]:
        calls.append(1)
        return [mx.zeros(1)]

    assert trial.seconds_of(compute, 5.5) == 1.0
    assert len(calls) == 3, "one that does not count, and two that use up the time"


@pytest.mark.parametrize("pages", [None, PageShape.of(64, (8, 4), 64, mx.float16)])
def test_measured_copy_path_attends_over_the_copy(monkeypatch: pytest.MonkeyPatch, pages: PageShape | None) -> None:
    """The real path runs, except for the kernel that gathers."""
    body = MATRIX_BODY if pages is None else QUANTIZED_MATRIX_BODY
    variant = Variant(body, "metal", mx.float16, 64, 64, 3, 32, sinks=True, pages=pages)
    copied: list[tuple[int, ...]] = []

    def prepare_gather(
        k_pool: mx.array, v_pool: mx.array, ids: mx.array, start: int, length: int, form: object
    ) -> object:
        assert form is pages and start == 0 and length == 64 and ids.tolist() == [0, 1]
        copied.append(k_pool.shape)
        rows = mx.ones((1, k_pool.shape[1], length, 64), mx.float16)
        return lambda k, v, fence: (rows, rows, fence)

    monkeypatch.setattr(fused_attention.ops, "prepare_gather", prepare_gather)
    (out,) = fused_attention.PATHS[COPY](variant, 40, 64)()
    assert out.shape == (1, 18, 40, 64) and copied[0][:2] == (2, 6)


@pytest.mark.parametrize("passed", [True, False])
def test_doctor_reports_the_path_and_its_reason(paths: Paths, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    paths.seconds = {IN_PLACE: 3e-3, COPY: 2e-3}
    monkeypatch.setattr(jobs, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(jobs.ShapeJob, "prefill_variants", lambda job: (VARIANT,))
    monkeypatch.setattr(jobs, "variants_of", lambda *shape: ())
    monkeypatch.setattr(jobs, "self_check", lambda v: SelfCheck(v, passed, 1e-4, 0.5, "" if passed else "wrong"))
    (checked,) = jobs.ShapeJob(jobs.Shape(mx.bfloat16, 128, 4, 32), False).run(PagedConfig(kernel=False))
    told = f"packed prefill, {COPY} (measured, 256 tokens of 2048: 3.00 ms {IN_PLACE}, 2.00 ms {COPY})"
    assert checked.row.use.startswith(told) is passed
    assert len(paths.prepared) == (8 if passed else 0)
