"""The emulator's simdgroup_matrix: products and moves against NumPy; races, wild loads and divergence are caught."""

import numpy as np
import pytest

from tests.support.msl.emulator import EmuError, metal_kernel

BODY = """
const int lane = thread_index_in_simdgroup;
threadgroup float shared[64];
simdgroup_matrix<half, 8, 8> left, right;
simdgroup_matrix<float, 8, 8> sums = make_filled_simdgroup_matrix<float, 8, 8>(1.0f), moved;
simdgroup_load(left, a + 3, 12);
simdgroup_load(right, b, 10, ulong2(0), true);
simdgroup_multiply_accumulate(sums, left, right, sums);
simdgroup_store(sums, shared, 8);
simdgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_load(moved, shared, 8, ulong2(0), true);
simdgroup_multiply(sums, moved, moved);
simdgroup_store(sums, out, 8);
"""


def run(body: str = BODY) -> tuple[np.ndarray, np.ndarray]:
    """Return the body's result for two matrices, and the expected one."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(96).astype(np.float16) for _ in "ab")
    kernel = metal_kernel("matrices", ["a", "b"], ["out"], body)
    (out,) = kernel(
        inputs=[a, b],
        output_shapes=[(8, 8)],
        output_dtypes=[np.float32],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        checked=True,
        orders=(0, 1, 2),
    )
    left, right = (
        np.stack([x[i * stride :][:8] for i in range(8)]).astype(np.float32) for x, stride in ((a[3:], 12), (b, 10))
    )
    moved = (left @ right.T + 1).T
    return out, moved @ moved


def test_products_and_moves_equal_numpys() -> None:
    out, expected = run()
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("simdgroup_barrier(mem_flags::mem_threadgroup);", "", "race"),
        ("simdgroup_barrier(mem_flags::mem_threadgroup);", "simdgroup_barrier(mem_flags::mem_none);", "race"),
        ("ulong2(0), true", "ulong2(1, 0), true", "origin"),
        ("a + 3, 12", "a + 13, 12", "out-of-bounds"),
        ("simdgroup_load(left, a", "if (lane < 16) simdgroup_load(left, a", "divergence"),
        ("simdgroup_store(sums, out, 8);", "simdgroup_store(sums, out, 4);", "race|never written"),
    ],
)
def test_defects_are_caught(old: str, new: str, why: str) -> None:
    assert old in BODY
    with pytest.raises(EmuError, match=why):
        run(BODY.replace(old, new))
