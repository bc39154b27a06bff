"""Compiled steps, by the real mx.compile, see a model's changed parts at the next step, and others after retrace()."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import compiled_step
from mlx_paged.engine.compiled_step import ModelState
from mlx_paged.patches.models import model_calls
from tests.support.cases import quick
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.builders import build, prompt_of

ON = {"kernel": "on"}


@pytest.fixture(params=["stand-ins", pytest.param("gpu", marks=pytest.mark.gpu)])
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile every step but a pool's first by mx.compile."""
    if request.param != "gpu" and mx.default_device() == mx.Device(mx.gpu):
        pytest.skip("the kernels themselves run here")
    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    with nullcontext() if request.param == "gpu" else traceable_kernels():
        yield


class Hooked(nn.Linear):
    """A layer whose result depends on its mode, and on a function it is given."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(*inner.weight.shape[::-1], bias=False)
        self.weight = inner.weight
        self.hook: Any = None

    def __call__(self, x: mx.array) -> mx.array:
        y = super().__call__(x)
        if self.hook is not None:
            y = self.hook(y)
        return 2 * y if self.training else y


class Negated(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return -super().__call__(x)


def add_adapter(model: Any, scale: float) -> None:
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    linear_to_lora_layers(model, 3, {"rank": 4, "scale": scale, "dropout": 0.0, "keys": keys})
    mx.random.seed(3)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.lora_b = mx.random.normal(module.lora_b.shape) * 0.05
    model.eval()


def adapted() -> Any:
    """A model with a LoRA adapter and a layer that depends on its mode."""
    model = build("llama", head_dim=64, num_hidden_layers=3)
    add_adapter(model, 20.0)
    mlp = model.layers[2].mlp
    mlp.down_proj = Hooked(mlp.down_proj)
    model.eval()
    mx.eval(model.parameters())
    return model


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def other_adapter(model: Any) -> None:
    remove_lora_layers(model)
    add_adapter(model, 2.0)


def swapped_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


# What the next step notices, and what needs retrace().
PARTS: dict[str, Callable[[Any], Any]] = {
    "adapter replaced": other_adapter,
    "adapter removed": remove_lora_layers,
    "class": lambda m: setattr(m.layers[1].mlp.down_proj, "__class__", Negated),
    "quantized": lambda m: nn.quantize(m, 32, 4, class_predicate=lambda name, each: is_linear(each) and "mlp" in name),
    "layers swapped": swapped_layers,
    "list": lambda m: setattr(m.model, "layers", [build("llama", seed=9, head_dim=64).layers[0], *m.layers[1:]]),
    "weights": lambda m: m.update({"lm_head": {"weight": m.lm_head.weight * -2}}),
}
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "scale": lambda m: [setattr(each, "scale", 0.0) for each in m.modules() if isinstance(each, LoRALinear)],
    "mode": lambda m: m.train(),
    "hook": lambda m: setattr(m.layers[2].mlp.down_proj, "hook", lambda y: -y),
}


def hold_tensors(model: Any) -> Any:
    """Return a cache that keeps the pool's tensors: what the fake kernel stored in an uncompiled step stays there."""
    cache = make_prompt_cache(model)
    mx.eval(model(prompt_of(2)[None], cache=cache))
    return cache


def logits_around(model: Any, change: Callable[[Any], None], *, steps: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of the last step before a change in the middle of a generation, and of the step after it."""
    cache = make_prompt_cache(model)
    mx.eval(model(prompt_of(40)[None], cache=cache))
    token = mx.array([[5]], mx.uint32)
    before = [model(token, cache=cache) for _ in range(steps)][-1]
    mx.eval(before)
    change(model)
    after = model(token, cache=cache)
    mx.eval(after)
    return np.array(before[0, -1]), np.array(after[0, -1])


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", quick([*PARTS, *ATTRIBUTES], "weights", "class", "hook"))
def test_a_change_between_two_steps_is_seen_by_the_next(name: str) -> None:
    change = {**PARTS, **ATTRIBUTES}[name]
    # The fake kernel stores nothing in a compiled step, so the change comes after the first one.
    expected = logits_around(adapted(), change, steps=1)
    unchanged = logits_around(adapted(), lambda model: None, steps=1)
    effect = np.abs(expected[1] - unchanged[1]).max()
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    model = adapted()
    held = hold_tensors(model)
    for _ in range(3):  # the very first step is not compiled
        again = logits_around(model, lambda model: None, steps=1)
    step = model_calls.step_of(mlx_paged.pool_of(model), None)
    assert step._functions and step.failure is None
    np.testing.assert_allclose(again[0], unchanged[0], atol=2e-3)

    def change_and_tell(model: Any) -> None:
        change(model)
        if name in ATTRIBUTES:
            mlx_paged.retrace(model)

    got = logits_around(model, change_and_tell, steps=1)
    assert effect > 0.02
    np.testing.assert_allclose(got[0], expected[0], atol=2e-3)
    np.testing.assert_allclose(got[1], expected[1], atol=2e-3)
    logits_around(model, lambda model: None)
    assert step._functions and step.failure is None and held  # the changed model has been traced


@pytest.mark.usefixtures("traced")
def test_unchanged_model_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []
    original = compiled_step.CompiledStep._trace

    def trace(self: Any, *args: Any) -> Any:
        traces.append(1)
        return original(self, *args)

    monkeypatch.setattr(compiled_step.CompiledStep, "_trace", trace)
    model = adapted()
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    for _ in range(4):
        logits_around(model, lambda model: None)
    assert len(traces) == 1
    for change in (lambda model: model.freeze(), lambda model: model.unfreeze()):
        logits_around(model, change)
    assert len(traces) == 1
    for again, change in enumerate((PARTS["weights"], mlx_paged.retrace), 2):
        change(model)
        logits_around(model, lambda model: None)
        logits_around(model, lambda model: None)
        assert len(traces) == again


class Clipped(nn.Linear):
    """A layer that assigns its weight in each step, as one of Gemma 3n does."""

    def __call__(self, x: mx.array) -> mx.array:
        self.weight = mx.clip(self.weight, -9, 9)
        return super().__call__(x)


@pytest.mark.usefixtures("traced")
def test_a_model_may_assign_its_arrays_in_a_step() -> None:
    model = build("llama", head_dim=64)
    model.layers[0].mlp.down_proj.__class__ = Clipped
    unchanged = [logits_around(model, lambda model: None, steps=1) for _ in range(3)]
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    held = hold_tensors(model)
    for expected in unchanged:
        np.testing.assert_allclose(logits_around(model, lambda model: None, steps=1), expected, atol=2e-3)
    step = model_calls.step_of(mlx_paged.pool_of(model), None)
    assert step.failure is None and step._functions and held
    mx.eval(model.parameters())  # nothing of the trace is left in the model


# ModelState itself ----------------------------------------------------------------------------------------------------


def test_model_state_keeps_no_module_alive() -> None:
    model = build("llama")
    state = ModelState(model)
    assert len(state.arrays) == len(tree_flatten(model.parameters()))
    layer = weakref.ref(model.layers[0].mlp.down_proj)
    gc.disable()
    try:
        model.layers[0].mlp.down_proj = nn.Linear(160, 96)
        assert layer() is None and not state.is_of(model)
        gone = [weakref.ref(module) for module in model.modules()]
        del model
        assert {ref() for ref in gone} == {None}
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.model.layers.append(nn.ReLU()),
        lambda m: m["options"]["scales"].append(2),
        lambda m: m.update_modules({"extra": nn.RoPE(4)}),
        lambda m: m.layers[0].__setitem__("extra", nn.ReLU()),
        lambda m: m.pop("options"),
        lambda m: setattr(m.lm_head, "weight", m.lm_head.weight * 2),
        lambda m: setattr(m.layers[1], "__class__", nn.ReLU),
    ],
)
def test_model_state_detects_changes_in_place(change: Callable[[Any], None]) -> None:
    """The model holds one layer twice and one array in two places."""
    model = build("llama")
    model.options = {"depth": 3, "scales": [1, 2.0]}
    model.extra = nn.RoPE(4)
    model.again = model.layers[0]
    model.lm_head.weight = model.model.embed_tokens.weight
    state = ModelState(model)
    assert state.is_of(model) and not state.is_of(build("llama"))
    change(model)
    assert not state.is_of(model) and ModelState(model).is_of(model)
