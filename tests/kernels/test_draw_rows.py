"""draw_rows: when its kernel is used, what happens if it does not work, and its results on a GPU.

Its text is tested on the emulator in tests/msl/sampling.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.sampling.batch_sampler import BatchSampler, SampledRow
from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels import draw_rows as module
from mlx_paged.kernels.draw_rows import DTYPES, DrawnRow, draw_rows, is_supported, passes_check
from tests.support import sampling_model
from tests.support.kernels.drawn import reference_draw


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    passes_check.cache_clear()
    yield
    passes_check.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[mx.Dtype]:
    """Use a kernel that computes what its NumPy model does. Returns the dtypes of its launches."""
    launches: list[mx.Dtype] = []

    def build(body: str, constants: Any) -> Any:
        def launch(inputs: list[mx.array], **_: Any) -> list[mx.array]:
            launches.append(inputs[0].dtype)
            x, params, keys = (np.array(each.astype(mx.float32)) for each in inputs[:3])
            keys = np.array(inputs[2])
            words = []
            for logits, param, key, position in zip(x, params, keys, inputs[3].tolist(), strict=True):
                scale, top_p, log_min_p, top_k, min_kept = param[:5].tolist()
                row = DrawnRow(
                    1.4426950408889634 / scale if scale else 0.0,
                    *(top_p, float(np.exp(log_min_p)), None if top_k == np.inf else int(top_k), int(min_kept)),
                    (int(key[0]) << 32) + int(key[1]),
                )
                words.append(reference_draw(logits.astype(np.float64), row, position, dict(constants)["SG"]))
            return [mx.array(words, mx.uint32)]

        return launch

    monkeypatch.setattr(module, "device_unsupported_reason", lambda: None)
    monkeypatch.setattr(module, "backend", lambda: "cuda")
    monkeypatch.setattr(kernel_build, "build_kernel", build)
    return launches


def test_kernel_is_used_for_supported_dtypes_and_sizes(gpu: list[mx.Dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in DTYPES:
        assert is_supported(mx.zeros((2, 50), dtype))
    assert len(gpu) == 2 * len(DTYPES), "each dtype is checked"
    assert is_supported(mx.zeros((9, 151_936)))
    assert len(gpu) == 2 * len(DTYPES), "each dtype is checked only once"
    assert not is_supported(mx.zeros((2, 50), mx.int32)) and not is_supported(mx.zeros((2, (1 << 19) + 1)))
    monkeypatch.setattr(module, "device_unsupported_reason", lambda: "MLX has no GPU here")
    assert not is_supported(mx.zeros((2, 50)))


@pytest.mark.parametrize("num_groups", [16, 32])
def test_expected_tokens_are_those_of_the_model(num_groups: int) -> None:
    rows, x, positions = module.checked_rows()
    found = [
        reference_draw(logits.astype(np.float64), row, position, num_groups)
        for logits, row, position in zip(x, rows, positions.tolist(), strict=True)
    ]
    assert tuple(found) == module._EXPECTED[num_groups] and len(set(found)) > 5


@pytest.mark.skipif(kernel_build.backend() is not None, reason="a GPU is here")
def test_without_a_gpu_mlxs_operations_draw() -> None:
    assert not is_supported(mx.zeros((2, 50)))


@pytest.mark.parametrize("trouble", ["another word", "does not compile"])
def test_a_kernel_that_fails_its_check_is_not_used(
    gpu: list[mx.Dtype], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    right = kernel_build.build_kernel

    def wrong(body: str, constants: Any) -> Any:
        if trouble == "does not compile":
            raise RuntimeError("no such function")
        return lambda **call: [mx.maximum(right(body, constants)(**call)[0], 30)]

    monkeypatch.setattr(kernel_build, "build_kernel", wrong)
    sampler = BatchSampler()
    sampler.add([SampledRow(SamplingParams(1.0, top_k=2, seed=1), (), 0)])
    logits = mx.arange(20, dtype=mx.float32)[None]
    with pytest.warns(UserWarning, match="draw_rows .* is off, using MLX's operations: ") as told:
        for _ in range(3):
            token = sampler.sample(sampler.penalised(logits, mx.zeros((1,), mx.uint32)))
            assert token.item() in (18, 19)
    assert len(told) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_on_a_gpu_are_drawn_with_their_probabilities(dtype: mx.Dtype) -> None:
    if kernel_build.backend() is None:
        pytest.skip("needs a GPU")
    vocab, count = 500, 20_000
    assert passes_check(dtype)
    x = (mx.random.normal((1, vocab), key=mx.random.key(3)) * 2).astype(dtype)
    wide = np.array(x[0].astype(mx.float32)).astype(np.float64)
    for params in (SamplingParams(1.0), SamplingParams(0.8, top_p=0.8), SamplingParams(2.0, min_p=0.05, top_k=20)):
        row = DrawnRow(params.temperature, params.top_p or 1.0, params.min_p, params.top_k or None)
        rows = [row._replace(key=key) for key in range(count)]
        words = draw_rows(
            mx.contiguous(mx.broadcast_to(x, (count, vocab))),
            mx.array([each.params() for each in rows]),
            mx.array(np.array([each.key_words() for each in rows], np.uint32)),
            mx.zeros((count,), mx.uint32),
        )
        sampling_model.assert_drawn_as(np.array(words), wide, params, 6)
