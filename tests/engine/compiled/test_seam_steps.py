"""Compiled steps of models without an adapter give the logits and tokens of uncompiled steps, for every kind of
attention: alone, in ragged batches and in packs of look-up."""

import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.cache.composites import leaves
from mlx_paged.drafts import look_up
from mlx_paged.engine import compiled_step
from mlx_paged.engine.compiled_step import compiled_steps
from mlx_paged.engine.request import RequestOptions
from scripts import model_matrix
from scripts.model_matrix import NOT_COMPILED, alone, batched, difference, lines_of_page
from scripts.support import model_configs
from tests.support.caches import batch_over
from tests.support.cases import quick, slow
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.kernels.traceable_kernels import traceable_kernels
from tests.support.models.batch_runs import Outcome, generator, run_all
from tests.support.models.builders import greedy, prompt_of, rms, wide
from tests.support.models.compiled_steps import Taken, compiled_steps_taken
from tests.support.models.oracle import oracles

# One of each kind: plain, biases, fused projections, experts, windows, sinks, keys of two sizes, keys that several
# layers share, loops, layers that differ, positions that are added, a model in a model.
SAMPLE = (
    "qwen2", "starcoder2", "phi3", "qwen3_moe", "mixtral", "olmo3", "gpt_oss", "mimo_v2_flash", "gemma3n", "hunyuan",
    "iquestloopcoder", "nemotron-nas", "openelm", "gpt2", "cohere2", "glm4", "exaone4", "phixtral", "gemma2",
    "mistral3", "longcat_flash", "kimi_vl", "deepseek_v2",
    "falcon_h1", "qwen3_next", "recurrent_gemma", "lfm2",  # states
)  # fmt: skip
ON_GPU = ("qwen2", "qwen3_moe", "olmo3", "gpt_oss", "gemma3n", "exaone4", "phi3", "mixtral", "cohere2", "glm4")
PAGED = sorted(name for name, line in lines_of_page().items() if line.split(" | ")[1] in ("paged", "partly"))
TRACED = [name for name in PAGED if lines_of_page()[name].split(" | ")[4] != "one by one" or name in SAMPLE]
TOKENS = 10
LIMIT = 2e-3
FIRST = mx.array([[5], [9]], mx.uint32)


@pytest.fixture
def taken() -> Iterator[Taken]:
    with compiled_steps_taken() as taken:
        yield taken


@pytest.fixture
def traced() -> Iterator[None]:
    """Compile steps by the real mx.compile."""
    if mx.default_device() == mx.Device(mx.gpu):
        pytest.skip("stand-ins that a CPU computes")
    with traceable_kernels():
        yield


# Traced by MLX: one step after a prompt, as the traceable fake kernels store nothing --------------------------


def prefilled(model: Any, length: int) -> list[Any]:
    cache, prompt = make_prompt_cache(model), prompt_of(length) % model_configs.VOCAB
    for begin in range(0, length, model_configs.CHUNK):
        mx.eval(model(prompt[None, begin : begin + model_configs.CHUNK], cache=cache))
    return cache


def next_logits(model: Any, *, batches: bool = True) -> list[np.ndarray]:
    """Return the logits of the step after each of two prompts, alone and then in a batch of both."""
    found = []
    for row, length in enumerate((7, 30)):
        logits = model(FIRST[row : row + 1], cache=prefilled(model, length))
        found.append(np.array(logits[0, -1]))
    if batches:
        rows = [prefilled(model, length) for length in (7, 30)]
        logits = model(FIRST, cache=batch_over(rows))
        found += [np.array(logits[0, -1]), np.array(logits[1, -1])]
    return found


def largest_difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    same = [a == b for a, b in zip(found, expected, strict=True)]  # minus infinity included
    return max(float(np.where(s, 0, a - b).max()) for s, a, b in zip(same, found, expected, strict=True))


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(TRACED, "qwen2", "gpt_oss", "dbrx"))
def test_compiled_step_gives_the_logits_of_mlx_lm(name: str, taken: Taken) -> None:
    """A model that is not compiled warns at most once."""
    model = model_configs.build(name)
    expected = next_logits(model, batches=False) * 2
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next_logits(model)  # runs uncompiled
        taken.clear()
        assert largest_difference(next_logits(model), expected) < LIMIT
    told = [str(warning.message) for warning in caught if "are not compiled" in str(warning.message)]
    if name in NOT_COMPILED:
        assert not taken and len(told) <= 1
    else:
        assert sorted(kind for kind, _ in taken) == ["alone", "alone", "rows"] and not told


def states_behind(model: Any) -> list[np.ndarray]:
    """Return the states of two rows after a step."""
    rows = batch_over([prefilled(model, length) for length in (7, 30)])
    mx.eval(model(FIRST, cache=rows))
    return [np.array(x) for cache in leaves(rows) for x in getattr(cache, "cache", ())]


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["falcon_h1", *slow("qwen3_next", "lfm2", "recurrent_gemma", "kimi_linear")])
def test_states_equal_those_of_an_uncompiled_step(name: str, taken: Taken) -> None:
    model = model_configs.build(name)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    expected = states_behind(model)
    assert not taken
    for got, wanted in zip(states_behind(model), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert taken == [("rows", 2)]


def test_page_names_all_models_that_are_not_compiled() -> None:
    assert set(NOT_COMPILED) <= set(PAGED)
    (line,) = [line for line in model_matrix.PAGE.read_text().split("\n- ") if line.startswith("**Compiled**")]
    assert all(name in line for name in NOT_COMPILED)


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unfused")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    quick(SAMPLE, "qwen3_moe", "gpt_oss", "gemma3n", "nemotron-nas", "qwen3_next"),
)  # fmt: skip
def test_tokens_alone_and_in_batches_are_those_of_mlx_lm(
    name: str, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake kernels store keys; steps are not really traced."""
    model = model_configs.build(name)
    monkeypatch.setattr(model_matrix, "PROMPTS", (5, 30))
    expected = [alone(model, length, TOKENS) for length in model_matrix.PROMPTS]
    with fake_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
        found = [alone(model, length, TOKENS) for length in model_matrix.PROMPTS]
        assert difference(found, expected) < 1e-5
        assert taken == [("alone", 1)] * (2 * TOKENS + 1)
        assert difference(batched(model, TOKENS)[0], expected) < 1e-5
        assert taken.count_of("rows") >= TOKENS - 2
        assert {choice.path for choice in mlx_paged.dispatch_counts()} <= {"kernel", "prefill", "gather"}
        assert mlx_paged.last_dispatch() == ("kernel", "one new token per sequence")
        mlx_paged.pool_of(model).check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_tokens_on_a_gpu_are_those_of_mlx_lm(name: str, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX traces the steps, which use the real kernels."""
    model = wide(name)
    monkeypatch.setattr(model_matrix, "PROMPTS", (5, 45))
    expected = [alone(model, length, 40) for length in model_matrix.PROMPTS]
    mlx_paged.apply_patches(PagedConfig(block_size=16))
    found = [*(alone(model, length, 40) for length in model_matrix.PROMPTS), *batched(model, 40)[0]]
    for (tokens, logprobs), (stock_tokens, stock_logprobs) in zip(found, 2 * expected, strict=True):
        assert tokens == stock_tokens
        assert rms(logprobs, stock_logprobs) < 5e-3
    assert taken.count_of("alone") >= 80 and taken.count_of("rows") >= 30
    assert compiled_steps.get(mlx_paged.pool_of(model)).failure is None
    mlx_paged.pool_of(model).check_integrity()


@pytest.mark.parametrize("name", ["qwen3_moe", *slow("qwen2", "olmo3", "gpt_oss")])
def test_packs_of_look_up_are_compiled_and_give_the_same_tokens(name: str, kernels: Any, taken: Taken) -> None:
    model, most = wide(name), 4
    prompts = [(prompt_of(length, seed=length) % model_configs.VOCAB).tolist() for length in (3, 37, 12)]
    solos = [greedy(model, mx.array(prompt, mx.uint32), TOKENS + most) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    with oracles(model_configs.VOCAB) as oracle:
        assert look_up.Predictor is oracle
        oracle.answers.update({tuple(prompt): tokens for prompt, (tokens, _) in zip(prompts, solos, strict=True)})
        gen = generator(model)
        asked = [RequestOptions(prompt_lookup=most)] * len(prompts)
        uids = gen.insert_segments([[prompt] for prompt in prompts], [TOKENS] * len(prompts), options=asked)
        outcomes = {uid: Outcome() for uid in uids}
        run_all(gen, outcomes)
    for outcome, (tokens, logprobs) in zip(outcomes.values(), solos, strict=True):
        assert outcome.tokens == tokens[:TOKENS]
        assert rms(np.stack(outcome.logprobs), logprobs[:TOKENS]) < 5e-3
    assert taken.count_of("pack") > 0
    mlx_paged.pool_of(model).check_integrity()


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", [*slow("gemma3n"), "gpt_oss"])
def test_compiled_steps_over_quantised_pages_equal_uncompiled_ones(
    name: str, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers attend to the keys of another layer."""
    model, prompt = wide(name), prompt_of(30) % model_configs.VOCAB
    runs = []
    for patience in (1 << 30, 0):
        monkeypatch.setattr(compiled_step, "PATIENCE", patience)
        with fake_kernels():
            mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on", kv_bits=8, kv_group_size=32))
            runs.append(greedy(model, prompt, 4, prefill_step_size=16))
            assert all(group.is_quantized for group in mlx_paged.pool_of(model).groups)
            mlx_paged.remove_patches()
    assert runs[0][0] == runs[1][0] and rms(runs[0][1], runs[1][1]) < 1e-6
    assert taken == [("alone", 1)] * 4


@pytest.mark.usefixtures("traced", "unfused")
def test_steps_work_with_mlx_compilation_disabled(taken: Taken) -> None:
    """The function runs in Python at each step, as with MLX_DISABLE_COMPILE."""
    test_compiled_step_gives_the_logits_of_mlx_lm("qwen2", taken)


# What is seen, and what is left alone ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
def test_calls_with_other_arguments_are_not_compiled(taken: Taken) -> None:
    model = model_configs.build("qwen2")
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    for _ in range(2):
        next_logits(model, batches=False)
    taken.clear()
    token, cache = FIRST[:1], prefilled(model, 9)
    expected = model(token, cache=copy.deepcopy(cache))
    taken.clear()
    embedded = model(token, cache=cache, input_embeddings=model.model.embed_tokens(token))
    assert not taken
    np.testing.assert_allclose(embedded, expected, atol=LIMIT)
    assert model(token, cache, None).shape == expected.shape  # positional
    assert taken == [("alone", 1)]
    assert model(FIRST).shape == (2, 1, model_configs.VOCAB) and taken == [("alone", 1)]


@pytest.mark.usefixtures("traced")
def test_model_with_a_replaced_call_is_not_compiled(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement may have effects at each step, which a trace would have only once."""
    original, calls = qwen2.Model.__call__, []

    @functools.wraps(original)
    def counting(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        calls.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(qwen2.Model, "__call__", counting)
    model = model_configs.build("qwen2")
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    greedy(model, prompt_of(5) % model_configs.VOCAB, 8)
    made = len(calls)
    greedy(model, prompt_of(5) % model_configs.VOCAB, 8)
    assert not taken and len(calls) - made == 10  # the prompt but its last token, that, and eight tokens
    mlx_paged.remove_patches()
    assert qwen2.Model.__call__ is counting
