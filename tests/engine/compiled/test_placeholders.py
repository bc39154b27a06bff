"""In a traced step a model may only attend over the fetched keys. A model that does anything else with them is not
compiled and gives the tokens of uncompiled steps."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base, qwen2
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.batch import NotCompilable, NotPackableError
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.layer_cache import lazy_kv_of
from mlx_paged.cache.placeholders import Placeholder, PlaceholderBatch, PlaceholderTokens
from mlx_paged.engine import compiled_step
from mlx_paged.engine.compiled_step import compiled_steps
from mlx_paged.errors import GeometryError, PromptCacheError
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.geometry import AttentionParams, QueryHeads, Window
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from scripts.support import model_configs
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.builders import prompt_of

Attend = Callable[[mx.array, Any, Any, float, Any], mx.array]
STEPS = 6


def attention(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
    """Call mlx-lm's attention by its current binding."""
    return base.scaled_dot_product_attention(q, k, v, cache=None, scale=scale, mask=mask)


# Each attends over the pair as it should, so that decode steps run in the kernel, and does something else as well.


def multiplies(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
    k, v = (mx.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k * 1.5, v))
    return mx.softmax(q @ k.swapaxes(-1, -2) * scale, axis=-1) @ v


def looks_who_it_is(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
    out = attention(q, k, v, scale, mask)
    try:
        return out + mx.max(mx.abs(k))
    except (TypeError, ValueError):
        return attention(-q, k, v, scale, mask)


def masks_some(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
    if q.shape[2] > 1:
        return attention(q, k, v, scale, mask)
    return attention(q, k, v, scale, None) + attention(q, k, v, scale, mx.arange(1)[None] >= 0)


def asks_twice_at_once(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
    if q.shape[2] > 1:
        return attention(q, k, v, scale, mask)
    out = attention(mx.concatenate([q, -q], axis=2), k, v, scale, None)
    return attention(q, k, v, scale, mask) + out.sum(axis=2, keepdims=True)


MISUSES: dict[str, Attend] = {
    "adds keys": lambda q, k, v, scale, mask: attention(q, k, v, scale, mask) + k.mean(),
    "scales by length": lambda q, k, v, scale, mask: attention(q, k, v, scale * float(np.log(k.shape[2])), mask),
    "exchanges": lambda q, k, v, scale, mask: attention(q, k, v, scale, mask) + attention(q, v, k, scale, mask),
    "compares": lambda q, k, v, scale, mask: attention(q, k, v, scale, mask) * (1 + mx.array(k == v).mean()),
    "looks who it is": looks_who_it_is,
    "masks some": masks_some,
    "asks twice at once": asks_twice_at_once,
}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile every step but a pool's first by the real mx.compile."""
    if mx.default_device() == mx.Device(mx.gpu):
        pytest.skip("stand-ins that a CPU computes")
    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    with traceable_kernels():
        yield


def plant(monkeypatch: pytest.MonkeyPatch, attend: Attend) -> None:
    """Make Qwen 2 use this attention."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        q, k, v = (
            layer(x).reshape(batch, length, n, -1).transpose(0, 2, 1, 3)
            for layer, n in zip((self.q_proj, self.k_proj, self.v_proj), heads, strict=True)
        )
        q, k = self.rope(q, offset=cache.offset), self.rope(k, offset=cache.offset)
        k, v = cache.update_and_fetch(k, v)
        out = attend(q, k, v, self.scale, mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))

    monkeypatch.setattr(qwen2.Attention, "__call__", __call__)


def logits_of(model: Any, steps: int = STEPS) -> list[np.ndarray]:
    """Return the logits of a prompt's last token and of ``steps`` steps after it."""
    cache = make_prompt_cache(model)
    out = [model((prompt_of(21) % model_configs.VOCAB)[None], cache=cache)]
    for token in range(steps):
        out.append(model(mx.array([[token + 3]], mx.uint32), cache=cache))
        mx.eval(out)
    return [np.array(logits[0, -1]) for logits in out]


def run(model: Any, steps: int = STEPS) -> tuple[list[np.ndarray], compiled_step.CompiledStep, list[str]]:
    """Run twice under the patches. Returns the logits of the second run, the compiled step and the warnings."""
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits_of(model, steps)
        found = logits_of(model, steps)
    mlx_paged.pool_of(model).check_integrity()
    return found, compiled_steps.get(mlx_paged.pool_of(model)), [str(warning.message) for warning in caught]


def run_planted(monkeypatch: pytest.MonkeyPatch, attend: Attend) -> tuple[compiled_step.CompiledStep, list[str]]:
    """Return the compiled step and the warnings of a model with this attention; its logits must be stock's."""
    plant(monkeypatch, attend)
    model = model_configs.build("qwen2")
    expected = logits_of(model)
    found, step, told = run(model)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    return step, told


@pytest.mark.parametrize("misuse", MISUSES)
def test_model_that_misuses_fetched_keys_is_not_compiled(misuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, told = run_planted(monkeypatch, MISUSES[misuse])
    assert step.failure is not None
    assert len(told) == 1 and "decode steps of mlx_lm.models.qwen2 are not compiled" in told[0]
    assert "\n" not in told[0]


def test_model_that_never_attends_over_blocks_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gathers at each step."""
    step, told = run_planted(monkeypatch, multiplies)
    assert not step._functions and step.failure is None and not told


@pytest.mark.parametrize(
    "attend",
    [
        attention,
        lambda q, k, v, scale, mask: (
            attention(q, k, v, scale, mask) - 0.5 * attention(2 * q[..., ::-1], k, v, scale, mask)
        ),
    ],
    ids=["once", "twice"],
)
def test_model_that_only_attends_is_compiled(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake kernels store nothing, so only one step is compared."""
    plant(monkeypatch, attend)
    model = model_configs.build("qwen2")
    expected = logits_of(model, steps=1)
    found, step, told = run(model, steps=1)
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert step.failure is None and step._functions and not told


def test_attention_over_keys_kept_from_a_trace_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def keeps(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
        kept.append((k, v))
        return attention(q, k, v, scale, mask)

    plant(monkeypatch, keeps)
    assert run(model_configs.build("qwen2"), steps=1)[1].failure is None
    pair = next((k, v) for k, v in kept if isinstance(k, Placeholder))
    with pytest.raises(NotPackableError, match="do not match the pack"):
        attention(mx.ones((1, 4, 1, 16)), *pair, 1.0, None)


def traced_layers(window: Window | None = None) -> tuple[PlaceholderBatch, list[PagedBatchKVCache]]:
    """Return a traced step of two rows of 5 and 3 tokens, and one of padding: its batch, and the caches of 2 layers."""
    pool = BlockPool(
        [LayerGroup((0, 1), window and window.size, stride=window.stride if window else 1)],
        block_size=8,
        choose_blocks=blocks_choice(True),
    )
    pool.set_geometry(0, *keys_and_values(), batch=3, heads=QueryHeads(4))
    pool.allocate(0, 1)  # tensors live as long as a block is held
    ends = mx.array([[5], [3], [0]])
    starts = mx.zeros_like(ends) if window is None else mx.maximum(ends - window.size, 0)
    visible = mx.zeros((3, 1), mx.int32), ends, starts
    tokens = PlaceholderTokens((visible, ends[:, 0] - 1, (), ()), window, pool.groups[0].epoch)
    batch = PlaceholderBatch(pool, [tokens])
    return batch, [PagedBatchKVCache(batch, layer) for layer in (0, 1)]


def keys_and_values(length: int = 1, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return mx.ones((3, 2, length, 64), dtype), mx.ones((3, 2, length, 64), dtype)


def queries(length: int = 1, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.ones((3, 4, length, 64), dtype)


def attend_lazily(keys: Any, values: Any) -> None:
    lazy = lazy_kv_of(keys, values)
    assert lazy is not None and lazy.can_attend(queries(), None)
    lazy.attend(queries(), keys, values, AttentionParams(1.0))


def test_a_layer_writes_once_and_is_read_after_it_has_written() -> None:
    _, (cache, other) = traced_layers()
    cache.update_and_fetch(*keys_and_values())
    with pytest.raises(NotPackableError, match="writes twice"):
        cache.update_and_fetch(*keys_and_values())
    with pytest.raises(PromptCacheError, match="has not written"):
        other.keys_and_values()


USES: list[Callable[[Any], Any]] = [
    lambda x: x.shape, lambda x: x.ndim, lambda x: x.size, lambda x: x.T, lambda x: len(x), lambda x: x[0],
    lambda x: x + 1, lambda x: 1 + x, lambda x: x @ x, lambda x: mx.ones(2) * x, lambda x: mx.ones((2, 2)) @ x,
    lambda x: -x, lambda x: x < 0, lambda x: x == x, lambda x: x != x, lambda x: bool(x), lambda x: list(x),
    lambda x: float(x), lambda x: np.asarray(x) + 1, lambda x: mx.array(x), lambda x: mx.array([x]),
    lambda x: mx.sum(x), lambda x: mx.repeat(x, 2, axis=1), lambda x: mx.concatenate([x, x]), lambda x: mx.stack([x]),
    lambda x: mx.expand_dims(x, 2), lambda x: mx.broadcast_to(x, (2, 2)), lambda x: mx.zeros_like(x),
    lambda x: mx.where(mx.array([True]), x, 0.0), lambda x: mx.depends(x, mx.ones(1)), lambda x: x.astype(mx.float16),
    lambda x: mx.fast.scaled_dot_product_attention(queries(), x, x, scale=1.0), lambda x: mx.quantize(x),
]  # fmt: skip


def test_computing_with_a_placeholder_raises() -> None:
    placeholder = Placeholder([], mx.float32)
    for place, use in enumerate(USES):
        with pytest.raises((NotCompilable, TypeError, ValueError, RuntimeError)):
            pytest.fail(f"use {place} gives {use(placeholder)!r}", pytrace=False)
    assert placeholder is not None and {placeholder} and placeholder.dtype == mx.float32


def test_misuse_is_noticed_even_if_its_error_is_caught() -> None:
    """MLX compares an array with any other object as unequal, and its errors may be caught."""
    for misuse in (lambda x: mx.ones(2) == x, lambda x: hasattr(x, "shape"), lambda x: mx.abs(x), lambda x: x == x):
        batch, caches = traced_layers()
        for cache in caches:
            keys, values = cache.update_and_fetch(*keys_and_values())
            attend_lazily(keys, values)
        batch.commit()
        with contextlib.suppress(NotCompilable, ValueError):
            misuse(keys)
        with pytest.raises(NotCompilable, match="a placeholder"):
            batch.commit()


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "kv", "mask"),
    [
        (queries(2), keys_and_values(), None),
        (queries()[:2], keys_and_values(), None),
        (queries(dtype=mx.float16), keys_and_values(), None),
        (queries(), keys_and_values(dtype=mx.float16), None),
        (queries(), keys_and_values(2), None),
        (queries(), keys_and_values(), mx.ones((3, 1, 1, 5), mx.bool_)),
    ],
)
def test_attention_unsupported_by_the_kernel_is_refused(q: mx.array, kv: Any, mask: Any) -> None:
    _, (cache, _) = traced_layers()
    with pytest.raises((NotCompilable, NotPackableError, GeometryError)):
        cache.attend(q, *kv, AttentionParams(1.0, mask))


def test_masks_of_several_tokens_are_refused() -> None:
    _, (cache, _) = traced_layers(Window(4))
    with pytest.raises(NotPackableError):
        cache.make_mask(2)
    _, (chunked, _) = traced_layers(Window(9, 9))
    with pytest.raises(GeometryError, match="cannot have a window"):
        chunked.make_mask(1, window_size=4)
