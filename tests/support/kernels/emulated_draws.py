"""The draw kernel, launched on the emulator as if on a GPU."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.kernels import build as build_module
from mlx_paged.kernels import draw_rows
from tests.support.msl.harness import Emulated


def use_emulator(
    monkeypatch: pytest.MonkeyPatch, groups: int = 2, *, checked: bool = False, orders: Any = (0,), edit: Any = None
) -> None:
    """Launch the kernel on the emulator, with ``groups`` simdgroups per row."""
    build = Emulated(checked=checked, orders=orders, edit=edit)

    def build_kernel(body: str, constants: Any) -> Any:
        return lambda **call: [mx.array(out) for out in build(body, constants)(**call)]

    monkeypatch.setattr(build_module, "build_kernel", build_kernel)
    monkeypatch.setattr(draw_rows, "backend", lambda: "metal")
    monkeypatch.setattr(draw_rows, "_GROUPS", {"metal": groups})
