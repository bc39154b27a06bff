"""Quantised layers under the patches for CUDA, run on any device: stock's results and gradients."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3_moe
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.tuner.lora import LoRALinear

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cuda import quantized_matmul
from mlx_paged.kernels.inference import Inference
from mlx_paged.patches import registry
from tests.support.cases import slow
from tests.support.kernels.gather_mm import gather_mm_of_16_bits
from tests.support.models.batch_runs import answers, generator
from tests.support.models.builders import build, prompt_of

NUM_TOKENS = 10
SYMBOLS: list[tuple[type, str]] = [
    (nn.QuantizedLinear, "__call__"), (nn.QuantizedEmbedding, "as_linear"), (QuantizedSwitchLinear, "__call__"),
]  # fmt: skip
TARGETS = [f"{owner.__module__}.{owner.__name__}.{name}" for owner, name in SYMBOLS]
IS_CPU = mx.default_device() == mx.Device(mx.cpu)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "backend", lambda: "cuda")


@pytest.fixture
def multiplied() -> Iterator[list[tuple[int, ...]]]:
    """Collect the shape of each x given to mx.quantized_matmul."""
    shapes: list[tuple[int, ...]] = []
    multiply = mx.quantized_matmul

    def quantized_matmul(x: mx.array, *args: Any, **options: Any) -> mx.array:
        shapes.append(x.shape)
        return multiply(x, *args, **options)

    with mock.patch.object(mx, "quantized_matmul", quantized_matmul):
        yield shapes


def moe() -> Any:
    mx.random.seed(0)
    args = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 320, "rms_norm_eps": 1e-5,
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 64, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "norm_topk_prob": True,
    }  # fmt: skip
    model = qwen3_moe.Model(qwen3_moe.ModelArgs(**args))
    mx.eval(model.parameters())
    return model.eval()


def batch(model: Any, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return greedy tokens of requests of these prompt lengths, all in one batch."""
    prompts = [prompt_of(length, seed=row).tolist() for row, length in enumerate(lengths)]
    gen = generator(model, completion_batch_size=len(lengths))
    return answers(gen, prompts, [NUM_TOKENS] * len(lengths))


def quantized(kind: str, bits: int, dtype: mx.Dtype = mx.float32) -> Any:
    model = moe() if kind == "qwen3_moe" else build(kind, head_dim=64)
    model.set_dtype(dtype)
    nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


# Which symbols -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["cuda", "metal", None])
def test_layers_are_replaced_only_on_cuda_and_restored(dialect: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "backend", lambda: dialect)
    before = [vars(owner)[name] for owner, name in SYMBOLS]
    report = mlx_paged.apply_patches(strict=True)
    assert {*report.applied, *report.skipped} & set(TARGETS) == (set(TARGETS) if dialect == "cuda" else set())
    changed = {vars(owner)[name] is not old for (owner, name), old in zip(SYMBOLS, before, strict=True)}
    assert changed == {dialect == "cuda"}
    mlx_paged.remove_patches()
    assert all(vars(owner)[name] is old for (owner, name), old in zip(SYMBOLS, before, strict=True))


# What layers compute -------------------------------------------------------------------------------------------------


def same(got: mx.array, want: mx.array) -> bool:
    return mx.array_equal(got, want).item() if IS_CPU else mx.allclose(got, want, 1e-4, 1e-4).item()


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("kind", ["linear", "linear with a bias", "embedding"])
@pytest.mark.parametrize("shape", [(96,), (3, 96), (3, 1, 96), (1, 3, 96), (2, 3, 96)])
def test_layers_give_the_same_results(kind: str, shape: tuple[int, ...]) -> None:
    layer: Any = nn.QuantizedEmbedding(40, 96, 32, 8)
    if kind != "embedding":
        layer = nn.QuantizedLinear(96, 40, bias=kind.endswith("bias"), group_size=32, bits=4)
    if "bias" in layer:
        layer.bias = mx.random.normal((40,))
    x = mx.random.normal(shape)

    def product() -> mx.array:
        return layer.as_linear(x) if kind == "embedding" else layer(x)

    want = product()
    mlx_paged.apply_patches()
    assert product().shape == want.shape and same(product(), want)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_experts_give_the_same_results(bias: bool, is_sorted: bool) -> None:
    mx.random.seed(0)
    layer = QuantizedSwitchLinear(64, 32, 4, bias, 32, 8)
    if bias:
        layer.bias = mx.random.normal((4, 32))
    layer.set_dtype(mx.bfloat16)
    x = mx.random.normal((100, 1, 64)).astype(mx.bfloat16)
    indices = mx.random.randint(0, 4, (100,)).astype(mx.uint32)
    indices = mx.sort(indices) if is_sorted else indices
    want = layer(x, indices, is_sorted)
    mlx_paged.apply_patches()
    with (
        Inference(),
        gather_mm_of_16_bits(),
        mock.patch.object(mx, "dequantize", wraps=mx.dequantize) as dequantize,
    ):
        got = layer(x, indices, sorted_indices=is_sorted)
    assert dequantize.call_count == is_sorted
    assert got.shape == want.shape and mx.allclose(got, want, 5e-2, 5e-2).item()


def gradients(layer: Callable[[mx.array], mx.array], x: mx.array) -> tuple[mx.array, mx.array]:
    return mx.value_and_grad(lambda x: mx.square(layer(x)).mean())(x)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("length", [1, 9])
def test_gradients_flow_through_an_adapter_over_quantised_weights(length: int) -> None:
    layer = nn.QuantizedLinear(96, 40, bias=False, group_size=32, bits=4)
    adapter = LoRALinear.from_base(layer, r=4)
    adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
    x = mx.random.normal((40, length, 96))  # so many rows that a model call would dequantise the weights

    def loss(adapter: Any) -> mx.array:
        return mx.square(adapter(x)).mean()

    want_value, want_of_x = gradients(adapter, x)
    want = nn.value_and_grad(adapter, loss)(adapter)
    mlx_paged.apply_patches()
    with mock.patch.object(mx, "dequantize") as dequantize:
        value, of_x = gradients(adapter, x)
        got = nn.value_and_grad(adapter, loss)(adapter)
    assert not dequantize.called
    assert mx.allclose(value, want_value).item() and mx.allclose(of_x, want_of_x, 1e-4, 1e-6).item()
    assert float(mx.abs(of_x).max()) > 0
    for name in ("lora_a", "lora_b"):
        assert mx.allclose(got[1][name], want[1][name], 1e-4, 1e-6).item()


# Whole models --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_on_cuda", "no_fall_through")
@pytest.mark.parametrize("kind", ["llama", "gemma3", *slow("qwen3", "qwen3_moe")])
def test_batches_give_the_same_tokens_as_with_mlxs_layers(
    kind: str, multiplied: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lengths = quantized(kind, 4), (5, 40, 12)
    mlx_paged.apply_patches(PagedConfig(kernel="off"))
    got = batch(model, lengths)
    assert (3, 1) not in [shape[:2] for shape in multiplied] and 3 in [shape[0] for shape in multiplied]
    mlx_paged.remove_patches()
    monkeypatch.setattr(registry, "backend", lambda: None)
    mlx_paged.apply_patches(PagedConfig(kernel="off"))
    multiplied.clear()
    assert batch(model, lengths) == got
    assert (3, 1) in [shape[:2] for shape in multiplied]


@pytest.mark.usefixtures("as_on_cuda", "kernels")
@pytest.mark.parametrize(("kind", "per_layer"), [("llama", 7), ("qwen3_moe", 4 + 1 + 3)])
def test_long_prompt_dequantises_the_weights(kind: str, per_layer: int) -> None:
    model = quantized(kind, 8, mx.bfloat16)
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on"))
    first = batch(model, (5,))  # creates the pool
    with (
        gather_mm_of_16_bits(),
        mock.patch.object(mx, "dequantize", wraps=mx.dequantize) as dequantize,
    ):
        batch(model, (quantized_matmul.DEQUANTIZED_ROWS + 1,))
        products = dequantize.call_count
        assert batch(model, (5,)) == first
    # Embeddings dequantise their rows in every model call, without a dtype.
    weights = [call for call in dequantize.call_args_list[:products] if "dtype" in call.kwargs]
    assert len(weights) == per_layer * len(model.layers) + 1  # and the output layer, whose result is never evaluated
