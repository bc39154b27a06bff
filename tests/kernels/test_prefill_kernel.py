"""The prefill kernel: its check on the user's machine, and its results on a GPU."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import prefill
from mlx_paged.kernels.availability import backend
from mlx_paged.kernels.check import checked, self_check
from mlx_paged.kernels.launch_shape import BLOCK_SIZES, PREFILL_BODIES, Variant, shape_for
from mlx_paged.kernels.ops import variants_of
from tests.support.cases import slow
from tests.support.msl.prefill_harness import Pack, emulated_self_check


def on_cuda(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(backend() != "cuda", reason="MLX sees no GPU with CUDA")(test))


COUNTS, PREFIXES = [333, 1, 200, 77], [64, 500, 0, 129]


def pack_of(**options):
    return Pack(COUNTS, PREFIXES, **{"heads": (8, 2), "block_size": 32, **options})


def error(pack, **options):
    """Return the RMS of the differences from attention in float64."""
    return float(np.sqrt(np.square(pack.run(**options)[0] - pack.reference()).mean()))


CASES = [
    *({"head_dim": dim, "dtype": dtype} for dim in (64, 80, 128, 256) for dtype in (mx.float16, mx.bfloat16)),
    *({"block_size": n, "window": 90, "heads": (6, 2), "softcap": 5.0, "sinks": True} for n in BLOCK_SIZES),
    *({"head_dim": dim, "window": chunk, "stride": chunk} for dim in (64, 128, 256) for chunk in (64, 90)),
]


@on_cuda
@pytest.mark.parametrize("options", CASES, ids=str)
def test_matches_reference(options):
    assert error(pack_of(**options)) < 2e-3


@on_cuda
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_has_the_same_bits_alone_and_in_a_pack(head_dim):
    pack = pack_of(head_dim=head_dim)
    together, _ = pack.run()
    for s, count in enumerate(COUNTS):
        alone, _ = pack.alone(s).run()
        np.testing.assert_array_equal(alone, together[sum(COUNTS[:s]) :][:count])


@on_cuda
def test_launch_with_more_than_48_kb_of_shared_memory():
    assert shape_for(VARIANT._replace(head_dim=128, value_dim=128)).shared > 48 << 10
    assert error(pack_of(head_dim=128)) < 2e-3


@on_cuda
@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize(
    ("head_dim", "gqa", "extras"), [(64, 4, False), (128, 8, True), (256, 2, True), (96, 1, False)]
)
def test_self_check_passes(head_dim, gqa, extras, block):
    (variant,) = variants_of(mx.bfloat16, head_dim, head_dim, 2 * gqa, 2, block, extras, extras, use="prefill")
    assert variant.body == PREFILL_BODIES[0]
    result = self_check(variant)
    assert result.ok, result


VARIANT = Variant(PREFILL_BODIES[0], "cuda", mx.bfloat16, 64, 64, 8, 32)


@pytest.fixture
def emulated() -> Iterator[Callable[[tuple[str, str]], None]]:
    """Run the kernel on the emulator, with fake writes; calling the fixture's value plants a mutation."""
    with emulated_self_check() as plant:
        yield plant


@pytest.mark.parametrize(
    "change",
    [{}, *slow({"softcap": True, "sinks": True, "dtype": mx.float16}, {"gqa": 3, "head_dim": 80, "block_size": 8})],
)
def test_correct_kernel_passes_its_self_check(emulated: object, change: dict[str, object]) -> None:
    result = self_check(VARIANT._replace(**change))
    assert result.ok and result.rms < 2e-3, result.reason


@pytest.mark.parametrize(
    ("old", "new"), [("token > own ||", "token > own + 1 ||"), *slow(("token < from)", "token < from - 1)"),
    ("< static_cast<uint>(hi - lo);", "< static_cast<uint>(BS * 1000);"), ("n_kv + kv_head) * G", "n_kv + 0) * G"),
    ("l[i] = metal::fma(l[i], shrink[i], sum);", "l[i] += sum;"))]
)  # fmt: skip
def test_planted_defects_are_found(emulated: Callable[..., None], old: str, new: str) -> None:
    emulated((old, new))
    assert not self_check(VARIANT).ok


def test_a_failure_switches_the_variant_off_once(emulated: Callable[..., None]) -> None:
    emulated(("token > own ||", "token > own + 1 ||"))
    with pytest.warns(UserWarning, match="failed its self-check"):
        assert not checked(VARIANT).ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not checked(VARIANT).ok
    pools = [mx.zeros((3, 1, 32, 64), mx.bfloat16)] * 2
    with pytest.raises(kernel_build.NoKernelError, match=r"is not below|not finite"):
        prefill.prepare_prefill(*pools, mx.array([[1]], mx.int32), [3], [3], n_q_heads=8, scale=1.0)


def test_a_text_that_does_not_compile_fails_the_check(emulated: Callable[..., None]) -> None:
    def broken(body: str, constants: object) -> object:
        raise RuntimeError("does not compile")

    with mock.patch.object(kernel_build, "build_kernel", broken):
        result = self_check(VARIANT)
    assert not result.ok and "does not compile" in result.reason
