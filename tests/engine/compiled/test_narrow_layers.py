"""Products of few rows in compiled decode steps: which layers and batches use them; the model is restored
afterwards."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cuda import narrow_matmul
from mlx_paged.cuda.narrow_layers import gated
from mlx_paged.cuda.narrow_matmul import BIASED, GATED, GROUPED, PLAIN
from mlx_paged.engine import compiled_step
from mlx_paged.kernels import nvidia
from mlx_paged.kernels.check import CheckResult
from mlx_paged.kernels.nvidia import narrow_layers, projected
from mlx_paged.patches import registry
from tests.support.cases import slow
from tests.support.models.batch_runs import mlx_lm_generate
from tests.support.models.builders import build, prompt_of

NUM_TOKENS = 12
# Per step of a model of three layers. The output layer of qwen3 is its embedding.
LAUNCHES = Counter({GROUPED: 3, PLAIN: 2 * 3 + 1, GATED: 3})


@pytest.fixture
def products(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Record body and rows of each product that went to the kernel or its fake."""
    monkeypatch.setattr(registry, "backend", lambda: "cuda")
    mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on"))
    taken: list[tuple[str, int]] = []
    launch = narrow_matmul.launch

    def count(body: str, x: mx.array, *args: Any) -> list[mx.array]:
        taken.append((body, x.shape[0]))
        return launch(body, x, *args)

    check = narrow_matmul.self_check

    def uncounted(*kernel: Any) -> CheckResult:
        with mock.patch.object(narrow_matmul, "launch", launch):
            return check(*kernel)

    # Not by monkeypatch, which may outlive the fake kernels.
    with (
        mock.patch.object(narrow_matmul, "launch", count),
        mock.patch.object(narrow_matmul, "self_check", uncounted),
        mock.patch.object(compiled_step, "PATIENCE", 0),
    ):
        yield taken


def model_of(kind: str, dtype: mx.Dtype) -> Any:
    model = build(kind, head_dim=64, num_hidden_layers=3)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def batch(model: Any, num_rows: int) -> list[list[int]]:
    """Return the tokens of ``num_rows`` requests of different lengths."""
    generator = mlx_lm_generate.BatchGenerator(model, completion_batch_size=num_rows)
    prompts = [prompt_of(5 + 7 * row % 40, seed=row).tolist() for row in range(num_rows)]
    uids = generator.insert(prompts, [NUM_TOKENS] * num_rows)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    finished = 0
    while finished < num_rows:
        for response in generator.next()[1]:
            tokens[response.uid].append(response.token)
            finished += response.finish_reason is not None
    return [tokens[uid] for uid in uids]


def steps_of(launches: Counter[str], products: list[tuple[str, int]], num_rows: int) -> int:
    """Check that all launches for ``num_rows`` rows are those of whole steps; return the number of steps."""
    bodies = Counter(body for body, rows in products if rows == num_rows)
    steps = bodies.total() // launches.total()
    assert steps and bodies == Counter({body: n * steps for body, n in launches.items()})
    return steps


def plain_batch(model: Any, num_rows: int) -> list[list[int]]:
    """Return the tokens of a batch without the kernel."""
    with mock.patch.object(narrow_matmul, "passes_check", lambda *choice: False):
        return batch(model, num_rows)


@pytest.mark.parametrize(
    ("kind", "bits", "sharded"),
    [
        ("qwen3", None, False),
        ("llama", 4, False),
        ("llama", None, True),
        *slow(
            ("llama", None, False), ("llama", 8, False), ("qwen3", 4, False), ("qwen3", 8, False), ("llama", 4, True)
        ),
    ],
)
def test_every_product_of_a_compiled_step_is_a_launch(
    kind: str, bits: int | None, sharded: bool, products: list[tuple[str, int]], kernels: Any
) -> None:
    """A sharded model is one rank's part, in a group of one. Products that are summed over ranks cannot add the
    residual."""
    model, launches = model_of(kind, mx.bfloat16), LAUNCHES
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    if sharded:
        model.shard(mx.distributed.init())
        launches = Counter({GROUPED: 3, PLAIN: 2 * 3 + 1, GATED: 3})
    classes = [type(module) for module in model.modules()]
    with mlx_dequantizes():  # MLX's own quantised products round differently
        got = batch(model, 5)
        steps = steps_of(launches, products, 8)  # padded; others are not compiled
        assert steps >= (1 if kernels is None else NUM_TOKENS - 2)  # on a GPU a step is traced once
        if kernels is not None:
            counted = len(products)
            assert plain_batch(model, 5) == got and len(products) == counted
    assert [type(module) for module in model.modules()] == classes


@contextmanager
def mlx_dequantizes() -> Iterator[None]:
    """Make MLX multiply with the dequantised weight."""

    def quantized_matmul(x: mx.array, w: mx.array, *, transpose: bool, **options: Any) -> mx.array:
        assert transpose
        return x @ mx.dequantize(w, **options).T

    with mock.patch.object(mx, "quantized_matmul", quantized_matmul):
        yield


def test_steps_not_yet_compiled_use_the_same_products(products: list[tuple[str, int]], kernels: Any) -> None:
    """Otherwise a repeated prompt could get another answer once its steps are compiled."""
    model = model_of("llama", mx.bfloat16)
    with mock.patch.object(compiled_step, "PATIENCE", NUM_TOKENS):
        uncompiled = batch(model, 1)
    bodies = Counter(body for body, _ in products)
    steps = bodies[GATED] // 3
    assert steps >= NUM_TOKENS - 2 and bodies == Counter({body: n * steps for body, n in LAUNCHES.items()})
    assert batch(model, 1) == uncompiled


def test_layers_of_other_classes_are_left_alone(products: list[tuple[str, int]], kernels: Any) -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    model = model_of("llama", mx.bfloat16)
    for layer, name in ((model.layers[0].self_attn, "o_proj"), (model.layers[1].mlp, "gate_proj")):
        weight = layer[name].weight
        layer[name] = Doubled(*weight.shape[::-1], bias=False)
        layer[name].weight = weight
    nn.quantize(model.layers[2].self_attn, mode="mxfp4")
    got = batch(model, 3)
    # Without the first layer's o_proj, with the second's up_proj alone, without the third's attention.
    expected = LAUNCHES - Counter({PLAIN: 2, GATED: 1, GROUPED: 1}) + Counter({PLAIN: 1})
    bodies = Counter(body for body, _ in products)
    steps = bodies[GATED] // expected[GATED]
    assert steps and bodies == Counter({body: n * steps for body, n in expected.items()})
    if kernels is not None:
        assert plain_batch(model, 3) == got


def test_layer_classes_are_restored_after_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3", num_hidden_layers=3)
    classes = [type(module) for module in model.modules()]
    with narrow_layers(model, 4):
        assert [type(module) for module in model.modules()] == classes, "there is no CUDA"
    monkeypatch.setattr(nvidia, "backend", lambda: "cuda")
    monkeypatch.setattr(narrow_matmul, "is_available", lambda: True)
    with narrow_layers(model, 4):
        changed = [new for new, old in zip(model.modules(), classes, strict=True) if type(new) is not old]
        assert sum(isinstance(module, nn.Linear) for module in changed) == 3 * 7
    assert [type(module) for module in model.modules()] == classes
    with pytest.raises(RuntimeError, match="while"), narrow_layers(model, 4):
        raise RuntimeError("while tracing")
    assert [type(module) for module in model.modules()] == classes
    with narrow_layers(model, narrow_matmul.MAX_PACKED_ROWS + 1):
        assert [type(module) for module in model.modules()] == classes
    with narrow_layers(lambda tokens: tokens, 4):  # not a module
        pass


def model_and_x(*widths: int, bias: bool = False) -> tuple[nn.Sequential, mx.array]:
    mx.random.seed(0)
    model = nn.Sequential(*(nn.Linear(64, width, bias=bias) for width in widths))
    model.set_dtype(mx.bfloat16)
    return model, mx.random.normal((6, 1, 64)).astype(mx.bfloat16)


def close(got: mx.array, expected: mx.array) -> bool:
    return got.shape == expected.shape and mx.allclose(got, expected, atol=5e-2).item()


@pytest.mark.parametrize(("bias", "launches"), [(False, [(GROUPED, 6)]), (True, [(BIASED, 6)] * 3)])
def test_projections_share_a_launch_and_have_the_shape_of_heads(
    bias: bool, launches: list[tuple[str, int]], products: list[tuple[str, int]]
) -> None:
    model, x = model_and_x(96, 32, 32, bias=bias)
    expected = [layer(x).reshape(6, n, 1, 32) for layer, n in zip(model.layers, (3, 1, 1), strict=True)]
    assert all(map(close, projected(model.layers, x, (3, 1, 1)), expected)) and products == []
    with narrow_layers(model, 6):
        assert all(map(close, projected(model.layers, x, (3, 1, 1)), expected)) and products == launches
        assert [y.shape for y in projected(model.layers, x)] == [(6, 1, 96), (6, 1, 32), (6, 1, 32)]


@pytest.mark.parametrize(("widths", "bias"), [((40, 40), False), ((40, 40), True), ((40, 1), False)])
def test_a_gate_is_applied(widths: tuple[int, int], bias: bool, products: list[tuple[str, int]]) -> None:
    model, x = model_and_x(*widths, bias=bias)
    gate, up = model.layers
    assert gated(gate, up, x) is None
    with narrow_layers(model, 6):
        got = gated(gate, up, x)
    if bias or widths[1] == 1:
        assert got is None and products == []
    else:
        assert got is not None and close(got, nn.silu(gate(x)) * up(x)) and products == [(GATED, 6)]
