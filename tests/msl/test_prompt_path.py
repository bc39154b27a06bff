"""Both paths of a prompt after a prefix give the same result on the emulator: over the blocks in place, and over a
copy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from mlx_paged.attention import dispatch
from mlx_paged.attention.dispatch import attend
from mlx_paged.kernels import prefill
from mlx_paged.kernels.fused_attention import PromptPath
from mlx_paged.kv.attention_params import AttentionParams
from mlx_paged.kv.blocks import BlocksChoice
from mlx_paged.kv.device_blocks import DeviceBlocks
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.msl import prefill_harness
from tests.support.msl.harness import emulated, to_float, to_mlx

PREFIX, NEW, HEADS, KV_HEADS, DIM = 70, 20, 6, 2, 64


def outputs(*edit: tuple[str, str]) -> list[np.ndarray]:
    """Return attention of a chunk after a prefix, in place and over a copy; ``edit``: mutations of the kernel's
    text."""
    rng = np.random.default_rng(0)
    q, k, v = (
        mx.array(rng.standard_normal((1, heads, n, DIM)).astype(np.float32)).astype(mx.float16)
        for heads, n in ((HEADS, NEW), (KV_HEADS, PREFIX + NEW), (KV_HEADS, PREFIX + NEW))
    )
    found = []
    with (
        emulated(checked=False, orders=(0,), in_place=True) as fake,
        prefill_harness.emulated(edit, orders=(0,), checked=False, backend="metal"),
    ):
        build = prefill.build_kernel

        def build_arrays(body: str, constants: Any) -> Any:
            kernel = build(body, constants)
            return lambda **options: [to_mlx(out) for out in kernel(strict=False, **options)]

        for in_place in (True, False):
            with (
                mock.patch.object(prefill, "build_kernel", build_arrays),
                mock.patch.object(dispatch, "on_metal", lambda: True),
                mock.patch.object(dispatch, "prefill_unsupported_reason", lambda *of: None),
                mock.patch.object(dispatch, "prefill_path", lambda *of, chosen=in_place: PromptPath(chosen, "chosen")),
            ):
                pool = BlockPool(
                    [LayerGroup((0,))], block_size=16, choose_blocks=lambda *of: BlocksChoice(DeviceBlocks, "", True)
                )
                pool.set_geometry(0, k, v, batch=1)
                table = pool.new_table()
                pool.append_tokens(table, PREFIX + NEW)
                pool.write_prefill(table, 0, k, v)
                step = pool.layer(0).step([table], NEW)
                out = attend(
                    q, None, pool.layer(0), [table], step, AttentionParams(DIM**-0.5, "causal"), is_written=True
                )
                found.append(to_float(out))
        gathers = [body for body, _ in fake.calls if body == "gather_blocks"]
    assert len(gathers) == 1
    return found


def test_both_paths_give_the_same_result() -> None:
    in_place, copy = outputs()
    np.testing.assert_allclose(in_place, copy, atol=2e-3, rtol=2e-3)


def test_a_planted_defect_in_one_path_is_seen() -> None:
    in_place, copy = outputs(("token > own ||", "token > own + 1 ||"))
    assert not np.allclose(in_place, copy, atol=4e-3)
