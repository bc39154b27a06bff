"""Whether Metal's kernel for common blocks is used: measured once, with and without it, at the least it is chosen
for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import shared_trial
from mlx_paged.kernels.build import NoKernelError
from mlx_paged.kernels.launch_shape import SHARED_MATRIX_BODY, Variant
from mlx_paged.kernels.shared_runs import HEADER, cut_of
from mlx_paged.kernels.shared_trial import ROWS, is_faster

VARIANT = Variant(SHARED_MATRIX_BODY, "metal", mx.float16, 64, 64, 8, 32, sinks=True)


class Machine:
    """Fake launches that take given seconds with the kernel and without. ``launched`` lists what was prepared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, together: float, alone: float | Exception) -> None:
        self.seconds = iter((together, alone))
        self.launched: list[dict[str, Any]] = []
        monkeypatch.setattr(shared_trial, "_measured", {})
        monkeypatch.setattr(shared_trial.kernels, "prepare_decode", self._prepare)
        monkeypatch.setattr(shared_trial, "seconds_of", self._seconds_of)

    def _prepare(self, k: mx.array, v: mx.array, visible: tuple[mx.array, ...], **options: Any) -> Any:
        self.launched.append({"heads": k.shape[1], "visible": visible, **options})
        return lambda q, k, v, fence, sinks: (q, fence)

    def _seconds_of(self, compute: Any, most: float) -> float:
        mx.eval(compute())
        seconds = next(self.seconds)
        if isinstance(seconds, Exception):
            raise seconds
        return seconds


@pytest.mark.parametrize(("together", "alone", "expected"), [(1.0, 1.1, True), (1.1, 1.0, False)])
def test_faster_kernel_is_used_and_measured_once(
    monkeypatch: pytest.MonkeyPatch, together: float, alone: float, expected: bool
) -> None:
    machine = Machine(monkeypatch, together, alone)
    for _ in range(2):
        assert is_faster(cut_of(VARIANT, 8)) is expected
    assert [launch["items"] is None for launch in machine.launched] == [False, True]


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 16])
def test_kernel_is_measured_at_the_least_savings_it_is_chosen_for(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int
) -> None:
    machine, cut = Machine(monkeypatch, 1.0, 2.0), cut_of(VARIANT, kv_heads)
    is_faster(cut)
    launch = machine.launched[0]
    tables, ends, _ = (np.array(x) for x in launch["visible"])
    assert launch["heads"] == kv_heads and tables.shape[0] == ROWS and (ends == tables.shape[1] * 32).all()
    items = np.array(launch["items"])
    assert (items[:, 1] == cut.shape.rows).any() and (np.sort(items[:, HEADER])[:1] == 0).all()
    common = int((tables == tables[0]).all(0).sum()) * 32
    saved = common * (ROWS - ROWS // cut.shape.rows) * kv_heads
    assert cut.least_saved <= saved < cut.least_saved + 2048 * ROWS * kv_heads


@pytest.mark.parametrize("error", [NoKernelError("off"), RuntimeError("no memory")])
def test_kernel_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    Machine(monkeypatch, 1.0, error)
    assert not is_faster(cut_of(VARIANT, 8))
