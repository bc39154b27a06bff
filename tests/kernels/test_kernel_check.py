"""The self-check, over stand-ins for the kernels: it passes if they are right and finds what they do wrong.

With the kernels themselves it runs on a GPU, in test_kernels.py.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_paged.kernels import ops as kernels
from mlx_paged.kernels.check import self_check
from mlx_paged.kernels.launch_shape import Variant
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels

VARIANT = Variant("paged_decode", "metal", mx.float32, 64, 64, 2, 16)
WRITE_SLOTS = kernels.write_slots
Launch = Callable[..., tuple[mx.array, mx.array]]


@pytest.fixture
def plant() -> Iterator[Callable[[Callable[[Launch], Launch]], None]]:
    """Puts something around each decode launch of the stand-ins; calling the fixture's value says what."""
    around: list[Callable[[Launch], Launch]] = []
    with fake_kernels() as fake:
        prepare = fake.prepare_decode

        def prepare_decode(*args: Any, variant: Variant, launch_shape: object, **options: Any) -> Launch:
            launch = prepare(*args, **options)
            for wrap in around:
                launch = wrap(launch)
            return launch

        # write_slots calls the stand-in's prepare_write. Not by monkeypatch, which would outlive the stand-ins.
        with mock.patch.multiple(kernels, prepare_decode=prepare_decode, write_slots=WRITE_SLOTS):
            yield around.append


@pytest.mark.parametrize("extras", [{}, {"softcap": True, "sinks": True}])
def test_right_kernels_pass(plant: object, extras: dict[str, bool]) -> None:
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


def padding_changes_rows(launch: Launch) -> Launch:
    def wrapped(q: mx.array, *args: Any) -> tuple[mx.array, mx.array]:
        out, fence = launch(q, *args)
        return mx.where(mx.isnan(q).any() & ~mx.isnan(q), out * 1.0001, out), fence

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
        (padding_has_results, "rows of padding have a result"),
        (padding_changes_rows, "differs with rows of padding"),
        (padding_is_written, "read back differ"),
    ],
)
def test_wrong_kernels_are_found(plant: Callable[..., None], wrap: Callable[[Launch], Launch], reason: str) -> None:
    plant(wrap)
    result = self_check(VARIANT)
    assert not result.ok and reason in result.reason, result.reason


def test_fences_are_followed(monkeypatch: pytest.MonkeyPatch, plant: object) -> None:
    passed = []
    follow = FakeKernels._pass
    monkeypatch.setattr(FakeKernels, "_pass", lambda self, *args: passed.append(args[0]) or follow(self, *args))
    assert self_check(VARIANT).ok
    assert passed.count("paged_decode") == 3 * 2 and passed.count("write_slots") == 2 * 2


class Texts:
    """Stands in for kernels.build_kernel: which texts are built, and zeros for results.

    A text is a body, its constants, and which inputs have less than 8 elements: those MLX puts into another address
    space on Metal, so that each such set is compiled by itself.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[object, ...]] = set()

    def __call__(self, body: str, constants: object) -> Callable[..., list[mx.array]]:
        def launch(*, inputs: list[mx.array], **options: Any) -> list[mx.array]:
            self.seen.add((body, constants, tuple(x.size < 8 for x in inputs)))
            shapes, dtypes = options["output_shapes"], options["output_dtypes"]
            return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

        return launch


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("gqa", [1, 4, 8])
def test_every_text_of_a_decode_step_is_checked(gqa: int, sinks: bool) -> None:
    variant = Variant("paged_decode", "metal", mx.bfloat16, 64, 64, gqa, 32, sinks=sinks)
    checked, real = Texts(), Texts()
    equal = mock.patch.object(mx, "array_equal", lambda *_, **__: mx.array(True))
    with mock.patch.object(kernels, "build_kernel", checked), equal:
        self_check(variant)
    n_q_heads, n_kv_heads = 8 * gqa, 8
    k_pool = v_pool = mx.zeros((40, n_kv_heads, 32, 64), mx.bfloat16)
    with mock.patch.object(kernels, "build_kernel", real):
        for rows in range(1, 12):
            visible = tuple(mx.zeros(shape, mx.int32) for shape in ((rows, 16), (rows, 1), (rows, 1)))
            launch = kernels.prepare_decode(
                k_pool, v_pool, visible, n_q_heads=n_q_heads, scale=1.0, sinks=sinks, append=True, variant=variant
            )
            q, new = (mx.zeros((rows, heads, 1, 64), mx.bfloat16) for heads in (n_q_heads, n_kv_heads))
            launch(q, k_pool, v_pool, kernels.new_fence(), mx.zeros((n_q_heads,)) if sinks else None, new, new)
    assert {text[0] for text in real.seen} == {"paged_decode", "merge_partitions"}
    assert real.seen <= checked.seen
