"""The prefill kernel: its check on the user's machine, and its results on a GPU."""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import ops, prefill
from mlx_paged.kernels.availability import backend
from mlx_paged.kernels.check import checked, self_check
from mlx_paged.kernels.launch_shape import BLOCK_SIZES, Variant
from mlx_paged.kernels.prefill import (
    PrefillShape,
    prefill_variants_of,
    prepare_prefill,
)
from scripts.support.paged_decode import write_slots
from tests.support.cases import slow
from tests.support.msl import prefill_harness


def on_cuda(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(backend() != "cuda", reason="MLX sees no GPU with CUDA")(test))


COUNTS, PREFIXES = [333, 1, 200, 77], [64, 500, 0, 129]


class Pack:
    """New tokens over a pool whose unseen slots are NaN."""

    def __init__(self, heads=(8, 2), head_dim=64, value_dim=None, block=32, dtype=mx.bfloat16, window=None, stride=1):
        mx.random.seed(0)
        self.n_q, n_kv = heads
        self.scale, self.window, self.stride = head_dim**-0.5, window, stride
        self.lengths = [n + p for n, p in zip(COUNTS, PREFIXES, strict=True)]
        used = [-(-n // block) for n in self.lengths]
        order = random.Random(0).sample(range(1, sum(used) + 1), sum(used))
        ids = [[order.pop() for _ in range(n)] for n in used]
        self.tables = mx.array([row + [0] * (max(used) - len(row)) for row in ids], mx.int32)
        slots = []
        for row, length, prefix in zip(ids, self.lengths, PREFIXES, strict=True):
            first = int(self.first_seen(prefix))
            slots += [row[t // block] * block + t % block if t >= first else -1 for t in range(length)]
        dims = head_dim, value_dim or head_dim
        self.rows = [mx.random.normal((len(slots), n_kv, dim)).astype(dtype) for dim in dims]
        self.pools = [mx.full((sum(used) + 1, n_kv, block, dim), float("nan"), dtype) for dim in dims]
        self.fence = write_slots(*self.pools, ops.new_fence(), *self.rows, mx.array(slots, mx.int32))
        self.q = mx.random.normal((sum(COUNTS), self.n_q, 1, head_dim)).astype(dtype)

    def first_seen(self, position):
        """Return the first token that a position sees."""
        if not self.window:
            return 0 * position
        return -(-np.maximum(position - self.window + 1, 0) // self.stride) * self.stride

    def run(self, sequences=(0, 1, 2, 3), sinks=None, **options):
        rows = [slice(sum(COUNTS[:s]), sum(COUNTS[: s + 1])) for s in sequences]
        launch = prepare_prefill(
            *self.pools,
            mx.concatenate([self.tables[s : s + 1] for s in sequences]),
            [COUNTS[s] for s in sequences],
            [self.lengths[s] for s in sequences],
            n_q_heads=self.n_q,
            scale=self.scale,
            sinks=sinks is not None,
            window=self.window,
            stride=self.stride,
            **options,
        )
        q = mx.concatenate([self.q[row] for row in rows])
        out, self.fence = launch(q, *self.pools, self.fence, sinks)
        return out

    def reference(self, softcap=None, sinks=None):
        """Return attention in float32 by NumPy."""
        q, k, v = (np.array(x.astype(mx.float32)) for x in (self.q, *self.rows))
        out, row, first = np.zeros((*q.shape[:3], v.shape[2]), np.float32), 0, 0
        for count, length in zip(COUNTS, self.lengths, strict=True):
            own, position = np.arange(length - count, length)[:, None], np.arange(length)
            seen = (position <= own) & (position >= self.first_seen(own))
            for h in range(self.n_q):
                keys, values = (x[first : first + length, h * k.shape[1] // self.n_q] for x in (k, v))
                s = q[row : row + count, h, 0] @ keys.T * self.scale
                s = np.where(seen, softcap * np.tanh(s / softcap) if softcap else s, -np.inf)
                sink = -np.inf if sinks is None else float(sinks[h].item())
                top = np.maximum(s.max(1, keepdims=True), sink)
                p = np.exp(s - top)
                out[row : row + count, h, 0] = p @ values / (p.sum(1, keepdims=True) + np.exp(sink - top))
            row, first = row + count, first + length
        return out


def rms(out, expected):
    return float(np.sqrt(np.square(np.array(out.astype(mx.float32)) - expected).mean()))


@on_cuda
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_matches_attention_in_float32(head_dim, dtype):
    pack = Pack(head_dim=head_dim, dtype=dtype)
    assert rms(pack.run(), pack.reference()) < 2e-3


@on_cuda
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_every_block_size_with_a_window(block):
    pack = Pack(block=block, window=90, heads=(6, 2))
    sinks = mx.random.normal((6,))
    assert rms(pack.run(softcap=5.0, sinks=sinks), pack.reference(5.0, sinks)) < 2e-3


@on_cuda
@pytest.mark.parametrize("chunk", [64, 90])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunked_attention_matches_the_reference(head_dim, chunk):
    pack = Pack(head_dim=head_dim, window=chunk, stride=chunk)
    assert rms(pack.run(), pack.reference()) < 2e-3


@on_cuda
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sequence_has_the_same_bits_alone_and_in_a_pack(head_dim):
    pack = Pack(head_dim=head_dim)
    together = np.array(pack.run().view(mx.uint16))
    for s, count in enumerate(COUNTS):
        first = sum(COUNTS[:s])
        alone = np.array(pack.run([s]).view(mx.uint16))
        np.testing.assert_array_equal(alone, together[first : first + count])
    backwards = np.array(pack.run([3, 0]).view(mx.uint16))
    np.testing.assert_array_equal(backwards[: COUNTS[3]], together[-COUNTS[3] :])


@on_cuda
def test_launch_with_more_than_48_kb_of_shared_memory():
    pack = Pack(head_dim=128)
    launch_shape = PrefillShape(4, 2, 64, 1, True, 1)
    assert launch_shape.shared_bytes(128, 128) > 48 << 10
    assert rms(pack.run(launch_shape=launch_shape), pack.reference()) < 2e-3


@on_cuda
@pytest.mark.parametrize("block", [8, 32, 128])
@pytest.mark.parametrize(
    ("head_dim", "gqa", "extras"), [(64, 4, False), (128, 8, True), (256, 2, True), (96, 1, False)]
)
def test_self_check_passes(head_dim, gqa, extras, block):
    (variant,) = prefill_variants_of(mx.bfloat16, head_dim, head_dim, 2 * gqa, 2, block, extras, extras)
    assert variant.body == prefill.BODY
    result = self_check(variant)
    assert result.ok, result


VARIANT = Variant(prefill.BODY, "cuda", mx.bfloat16, 64, 64, 8, 32)


@pytest.fixture
def emulated() -> Iterator[Callable[[tuple[str, str]], None]]:
    """Run the kernel on the emulator, with fake writes; calling the fixture's value plants a mutation."""

    def arrays_of(kernel: Any, options: dict[str, Any]) -> list[mx.array]:
        outs = zip(kernel(**options), options["output_dtypes"], strict=True)
        return [mx.array(np.asarray(out)).view(dtype) for out, dtype in outs]

    with prefill_harness.emulated_self_check(arrays_of) as plant:
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
    with pytest.raises(prefill.NoKernelError, match=r"is not below|not finite"):
        prefill.prepare_prefill(*pools, mx.array([[1]], mx.int32), [3], [3], n_q_heads=8, scale=1.0)


def test_a_text_that_does_not_compile_fails_the_check(emulated: Callable[..., None]) -> None:
    def broken(body: str, constants: object) -> object:
        raise RuntimeError("does not compile")

    with mock.patch.object(prefill, "build_kernel", broken):
        result = self_check(VARIANT)
    assert not result.ok and "does not compile" in result.reason
