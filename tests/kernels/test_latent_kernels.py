"""The kernels over latents on a real GPU (skipped elsewhere; tests/msl/test_latent.py has them on the emulator)."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.latent.check import self_check_latent
from mlx_paged.kernels.latent.variants import latent_variants_of

needs_gpu = pytest.mark.skipif(kernel_build.backend() is None, reason="MLX sees no GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize(("dtype", "rank", "heads"), [(mx.bfloat16, 512, 128), (mx.float16, 256, 20)])
def test_self_check_passes(dtype, rank, heads, block):
    for variant in latent_variants_of(dtype, rank, 64, heads, 1, block):
        result = self_check_latent(variant)
        assert result.ok, result


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_prepared_launch_serves_a_pool_that_has_grown(dtype):
    """What is captured of a pool when a launch is prepared does not bound what it reads later."""
    block, rank, rope, heads, context = 32, 512, 64, 20, 700
    mx.random.seed(0)
    tables = mx.array([list(range(40, 40 + -(-context // block)))], mx.int32)
    ends, starts = mx.array([[context]], mx.int32), mx.zeros((1, 1), mx.int32)
    small = [mx.zeros((4, 1, block, dim), dtype) for dim in (rank, rope)]
    grown = [mx.random.normal((80, 1, block, dim)).astype(dtype) for dim in (rank, rope)]
    q = mx.random.normal((1, heads, 1, rank + rope)).astype(dtype)

    def launch(pools):
        return kernels.prepare_decode(*pools, (tables, ends, starts), n_q_heads=heads, scale=0.05, latent=True)

    early = launch(small)
    # Launches know the shapes of their first call.
    mx.eval(early._replace(visible=(mx.zeros_like(tables), ends, starts))(q, *small, kernels.new_fence()))
    (again, _), (fresh, _) = (prepared(q, *grown, kernels.new_fence()) for prepared in (early, launch(grown)))
    assert fresh.abs().max().item() > 0
    np.testing.assert_array_equal(np.array(again.astype(mx.float32)), np.array(fresh.astype(mx.float32)))


@pytest.mark.gpu
@needs_gpu
def test_layers_of_other_pools_whose_results_share_memory_read_their_own():
    """Each launch leaves maps of its own pool where its results go, and later launches get the same memory."""
    block, rank, rope, heads, contexts = 32, 512, 64, 128, [4000, 64, 1000]
    mx.random.seed(1)
    blocks = [-(-n // block) for n in contexts]
    width = max(blocks)
    ids = iter(mx.random.permutation(sum(blocks)).tolist())
    tables = mx.array([[next(ids) for _ in range(n)] + [0] * (width - n) for n in blocks], mx.int32)
    ends, starts = mx.array(contexts, mx.int32)[:, None], mx.zeros((3, 1), mx.int32)
    pools = [
        [mx.random.normal((sum(blocks), 1, block, dim)).astype(mx.bfloat16) for dim in (rank, rope)] for _ in range(8)
    ]
    q = mx.random.normal((3, heads, 1, rank + rope)).astype(mx.bfloat16)
    tensor, portable = (
        kernels.prepare_decode(
            *pools[0], (tables, ends, starts), n_q_heads=heads, scale=0.05, latent=True, variant=variant
        )
        for variant in latent_variants_of(mx.bfloat16, rank, rope, heads, 1, block)
    )
    expected = [portable(q, *pool, kernels.new_fence())[0].astype(mx.float32) for pool in pools]
    mx.eval(expected)
    fence, worst = kernels.new_fence(), mx.array(0.0)
    for i in range(200):
        out, fence = tensor(q, *pools[i % 8], fence)
        worst = mx.maximum(worst, mx.abs(out.astype(mx.float32) - expected[i % 8]).max())
    size = mx.sqrt(mx.square(expected[0]).mean()).item()
    assert worst.item() < 0.1 * max(size, 0.1)
    assert mx.abs(expected[0] - expected[1]).max().item() > 0.1 * max(size, 0.1)
