"""Generation over an in-place pool and the fused kernel equals stock mlx-lm; on a CPU over stand-ins for kernels."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

import mlx_paged
from mlx_paged import KernelUnavailableError, PagedConfig
from mlx_paged.attention import dispatch
from mlx_paged.kv.geometry import AttentionParams
from tests.support.cases import crossed, quick, slow
from tests.support.models.builders import KINDS, WINDOW, build, greedy, perturbed, prompt_of, rms

pytestmark = pytest.mark.usefixtures("no_fall_through")
ON = {"kernel": "on"}
TOKENS = 24
MODELS = {kind: build(kind, head_dim=64) for kind in KINDS}
SINGLE = build("llama", head_dim=64, num_hidden_layers=1)  # its only layer's cache can be used by itself


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send more than a few new tokens to MLX's attention on every device; test_prefill.py tests the other choice."""
    monkeypatch.setattr(dispatch, "backend", lambda: None)


def paths() -> dict[str, int]:
    found: dict[str, int] = {}
    for choice, count in mlx_paged.dispatch_counts().items():
        found[choice.path] = found.get(choice.path, 0) + count
    return found


@pytest.mark.parametrize("kind", ["llama", *slow("qwen3")])
def test_speculative_verification_runs_in_the_kernel(kind: str, kernels: object) -> None:
    model, draft, prompt = MODELS[kind], perturbed(kind, 0.02), prompt_of(100)
    stock = [t for t, _, _ in speculative_generate_step(prompt, model, draft, num_draft_tokens=4, max_tokens=15)]
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    paged = [t for t, _, _ in speculative_generate_step(prompt, model, draft, num_draft_tokens=4, max_tokens=15)]
    assert paged == stock
    few = [c for c in mlx_paged.dispatch_counts() if c.path == "kernel" and c.reason.startswith("a few")]
    assert few
    if kernels is not None:
        assert kernels.max_q_len == 5
    mlx_paged.pool_of(model).check_integrity()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["llama-sliding", "gemma3"])
def test_chunks_past_a_window_attend_in_the_kernel_as_in_stock(kind: str) -> None:
    """Chunks of up to 8 tokens, masked by mlx-lm's array in stock and by their own start positions in the kernel."""
    model, prompt = MODELS[kind], prompt_of(WINDOW + 29)

    def run() -> list[np.ndarray]:
        cache, logits, start = make_prompt_cache(model), [], 0
        for size in (WINDOW + 5, 8, 3, 1, 5, 7):
            logits.append(np.array(model(prompt[None, start : start + size], cache=cache)))
            start += size
        return logits

    stock = run()
    mlx_paged.apply_patches(PagedConfig(block_size=8, **ON))
    paged = run()
    assert paths() == {"prefill": len(model.layers), "kernel": 5 * len(model.layers)}
    for a, b in zip(stock, paged, strict=True):
        assert rms(a, b) < 1e-3


@pytest.mark.usefixtures("kernels")
def test_forks_trims_and_growth_in_place_equal_stock() -> None:
    """Two continuations of one prompt share its blocks, and one is trimmed; the pool grows during both."""
    model, prompt = MODELS["llama"], prompt_of(70)

    def follow(cache: list, first: int, count: int) -> list[int]:
        steps = generate_step(mx.array([first]), model, max_tokens=count, prompt_cache=cache)
        return [token for token, _ in steps]

    def run() -> list[list[int]]:
        cache = make_prompt_cache(model)
        model(prompt[None], cache=cache)
        mx.eval([c.state for c in cache])
        fork = copy.deepcopy(cache)
        outputs = [follow(cache, 5, 40), follow(fork, 9, 40)]
        trim_prompt_cache(cache, 25)
        return [*outputs, follow(cache, 7, 20), follow(fork, 3, 30)]

    stock = run()
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    assert run() == stock
    pool = mlx_paged.pool_of(model)
    assert pool.stats().cow_forks >= 1
    pool.check_integrity()


@pytest.mark.usefixtures("kernels")
def test_custom_mask_is_not_given_to_the_kernel() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
    cache = make_prompt_cache(SINGLE)
    rng = np.random.default_rng(0)
    q, k, v = (mx.array(rng.standard_normal((1, h, 20, 64)).astype(np.float32)) for h in (6, 2, 2))
    cache[0].attend(q, k, v, AttentionParams(0.1, "causal"))
    one = [x[:, :, :1] for x in (q, k, v)]
    mask = mx.array([i % 3 != 1 for i in range(21)])
    got = cache[0].attend(*one, AttentionParams(0.1, mask))
    assert mlx_paged.last_dispatch() == ("gather", "the mask is more than causality and a window")
    dense = [mx.concatenate([x, x[:, :, :1]], axis=2) for x in (k, v)]
    expected = mx.fast.scaled_dot_product_attention(one[0], *dense, scale=0.1, mask=mask)
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=5e-3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("sinks", "softcap", "tokens"), quick(crossed([False, True], [None, 5.0], [1, 4]), (False, None, 1), (True, 5.0, 4))
)  # fmt: skip
def test_softcap_and_sinks_agree_with_the_fallback(softcap: float | None, sinks: bool, tokens: int) -> None:
    rng = np.random.default_rng(1)
    logits = mx.array(rng.standard_normal(6).astype(np.float32)) if sinks else None
    outputs = []
    for use_kernel in (True, False):
        mlx_paged.apply_patches(PagedConfig(block_size=16, kernel="on" if use_kernel else "off"))
        cache = make_prompt_cache(SINGLE)
        rng = np.random.default_rng(2)
        for n in (50, tokens):
            q, k, v = (mx.array(3 * rng.standard_normal((1, h, n, 64)).astype(np.float32)) for h in (6, 2, 2))
            mask = cache[0].make_mask(n)
            out = cache[0].attend(q, k, v, AttentionParams(0.1, mask, softcap=softcap, sinks=logits))
        assert mlx_paged.last_dispatch().path == ("kernel" if use_kernel else "gather")
        outputs.append(np.array(out))
        mlx_paged.remove_patches()
    np.testing.assert_allclose(*outputs, atol=2e-5 if mx.default_device() == mx.Device(mx.cpu) else 1e-2)


@pytest.mark.usefixtures("kernels")
def test_kernel_on_with_an_unsupported_model_raises_before_any_change() -> None:
    model = build("llama", num_attention_heads=3, num_key_value_heads=1, head_dim=24)
    with pytest.MonkeyPatch.context() as patch:
        reason = "head_dim 24/24 is not one of the kernel's"
        patch.setattr("mlx_paged.kv.blocks.kernel_unsupported_reason", lambda *_: reason)
        mlx_paged.apply_patches(PagedConfig(block_size=16, **ON))
        with pytest.raises(KernelUnavailableError, match=f"kernel=on, but {reason}"):
            greedy(model, prompt_of(9), 2)
        with pytest.raises(KernelUnavailableError, match=f"kernel=on, but {reason}"):
            mlx_paged.pool_of(model)
        mlx_paged.remove_patches()
        mlx_paged.apply_patches(PagedConfig(block_size=16))
        tokens = greedy(model, prompt_of(9), 2)[0]
        assert mlx_paged.last_dispatch() == ("gather", reason)
    mlx_paged.remove_patches()
    assert greedy(model, prompt_of(9), 2)[0] == tokens


def test_kernel_auto_without_a_gpu_gathers_and_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_paged.kernels.availability.device_unsupported_reason", lambda: "MLX has no GPU here")
    for name in ("build.build_kernel", "ops.variants_of"):
        monkeypatch.setattr(f"mlx_paged.kernels.{name}", lambda *_: pytest.fail("built"))
    mlx_paged.apply_patches()
    greedy(MODELS["llama"], prompt_of(9), 2)
    assert mlx_paged.last_dispatch() == ("gather", "MLX has no GPU here")
