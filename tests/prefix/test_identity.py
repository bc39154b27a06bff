"""model_identity() covers all that keys and values depend on, and nothing that differs between processes."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_paged.prefix import identity
from mlx_paged.prefix.identity import model_identity
from tests.support.cases import slow
from tests.support.models.builders import build


def adapted() -> Any:
    model = build("llama", head_dim=64)
    linear_to_lora_layers(model, 3, {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]})
    model.eval()
    mx.random.seed(0)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.lora_a, module.lora_b = (mx.random.normal(x.shape) for x in (module.lora_a, module.lora_b))
    return model


def weight(model: Any, change: Callable[[np.ndarray], np.ndarray]) -> None:
    layer = model.layers[1].self_attn.k_proj
    layer.weight = mx.array(np.ascontiguousarray(change(np.array(layer.weight))))


def rope_rows(w: np.ndarray) -> np.ndarray:
    """Permute them as converters do between interleaved and split-half rotary embeddings."""
    return w.reshape(2, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def one_bit(w: np.ndarray) -> np.ndarray:
    bits = w.view(np.uint32).copy()
    bits[3, 7] ^= 1
    return bits.view(np.float32)


def set_scale(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.scale = 2.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "rows permuted": lambda m: weight(m, rope_rows),
    "pairs of signs flipped": lambda m: weight(m, lambda w: np.concatenate([w[:4], -w[4:-4], w[-4:]])),
    "two rows exchanged": lambda m: weight(m, lambda w: np.concatenate([w[:50], w[51:52], w[50:51], w[52:]])),
    "one bit": lambda m: weight(m, one_bit),
    "transposed in shape alone": lambda m: weight(m, lambda w: w.reshape(w.shape[1], w.shape[0])),
    "dtype": lambda m: m.set_dtype(mx.float16),
    "layers exchanged": lambda m: m.model.layers.insert(0, m.model.layers.pop(1)),
    "adapter's scale": set_scale,
    "norm's eps": lambda m: setattr(m.model.norm, "eps", 1e-4),
    "rope": lambda m: setattr(m.layers[0].self_attn, "rope", nn.RoPE(64, base=1e6)),
    "rope's frequencies": lambda m: setattr(m.layers[0].self_attn.rope, "_freqs", mx.ones(32)),
    "an argument": lambda m: setattr(m.args, "rope_theta", 1e6),
    "class": lambda m: setattr(m.layers[0].mlp.down_proj, "__class__", type("Linear", (nn.Linear,), {})),
    "quantized": lambda m: nn.quantize(m.layers[1].mlp, 32, 4),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_affect_keys_change_the_identity(change: str) -> None:
    model = adapted()
    before = model_identity(model)
    assert before == model_identity(adapted())
    CHANGES[change](model)
    assert model_identity(model) not in (before, "")


def test_format_and_versions_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before, known = model_identity(model), identity.version
    with monkeypatch.context() as patch:
        patch.setattr(identity, "FORMAT", identity.FORMAT + 1)
        assert model_identity(model) != before
    for package in ("mlx", "mlx-lm"):
        with monkeypatch.context() as patch:
            patch.setattr(identity, "version", lambda name, other=package: "0.0.0" if name == other else known(name))
            assert model_identity(model) != before
    assert model_identity(model) == before


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32, mx.int8, *slow(mx.float16, mx.uint32, mx.bool_)])
def test_every_byte_counts_in_any_dtype_and_layout(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "PIECE_WORDS", 25)  # several pieces, the last one short

    def identity_of(x: mx.array) -> str:
        module = nn.Module()
        module.x = x
        return model_identity(module)

    base = (mx.random.normal((7, 33)) * 9).astype(dtype)
    whole = identity_of(base)
    assert whole == identity_of(mx.array(base)) == identity_of(mx.concatenate([base, base])[:7])
    assert whole == identity_of(mx.contiguous(base.T).T)  # the same values, laid out otherwise
    for place in ((0, 0), (3, 17), (6, 32)):
        other = mx.array(base)
        other[place] = mx.logical_not(other[place]) if dtype == mx.bool_ else other[place] + 1
        assert identity_of(other) != whole
    assert identity_of(base.reshape(33, 7)) != whole
    assert len({whole, identity_of(mx.zeros((0, 33), dtype)), identity_of(base[0, 0])}) == 3


@pytest.mark.gpu
def test_identity_does_not_move_the_weights_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, a buffer that the host reads moves to memory that the host can read, for good."""
    monkeypatch.setattr(identity, "PIECE_WORDS", 1 << 16)  # memory freed late is less than the weights
    x = mx.random.normal((1024, 4096)).astype(mx.bfloat16)
    module = nn.Module()
    module.x = x
    mx.eval(x)
    found = model_identity(module)
    active = mx.get_active_memory()
    assert model_identity(module) == found
    assert mx.get_active_memory() < active + x.nbytes // 2
    module.x = mx.array(np.array(x.view(mx.uint16))).view(mx.bfloat16)
    assert model_identity(module) == found
