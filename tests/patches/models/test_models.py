"""docs/models.md matches the code: a sample of families here, all of them with `make test-models`."""

from importlib import metadata

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from scripts import model_matrix
from scripts.model_matrix import Row, examine, line_of, lines_of_page
from scripts.support import model_configs
from tests.support.cases import quick
from tests.support.models.batch_runs import Outcome, generator, run_all
from tests.support.models.builders import greedy, prompt_of

# One of each kind of attention and of state.
SAMPLE = (
    "llama", "qwen3", "gemma3_text",  # adapters
    "qwen2", "gpt2",  # plain
    "smollm3", "olmo3", "exaone4", "ministral3", "gemma2",  # NoPE, windows, temperature, soft cap
    "gpt_oss", "mimo_v2_flash",  # sinks, keys and values of different sizes
    "gemma3n", "gemma4_text", "afm7", "iquestloopcoder",  # shared keys, loops
    "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",  # experts, latent attention, index keys
    "nemotron-nas", "openelm", "phi3small",  # layers that differ, block-sparse
    "mamba", "jamba", "falcon_h1", "qwen3_next", "rwkv7", "recurrent_gemma",  # states
    "stablelm", "plamo", "plamo2", "phi",  # keys that are cast or tiled
    "gpt_bigcode", "baichuan_m1",  # one by one, keys that are convolved
    "llama4", "longcat_flash", "pixtral", "deepseek_v41",  # chunks, composites, wrappers, caches of their own
)  # fmt: skip
# The classes that are tested with every feature.
CLASSES = {
    "global": "qwen2", "sliding": "olmo3", "sinks": "gpt_oss", "experts": "qwen3_moe", "shared keys": "gemma3n",
    "latent": "deepseek_v3", "soft cap": "gemma2",
}  # fmt: skip
# Fully paged: plain, latent, shared keys. Partly paged: states beside keys.
ROOMS = [
    "qwen2", "deepseek_v3", "falcon_h1", "afm7",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "jamba", "gpt_bigcode")),
]  # fmt: skip
TOKENS = 10  # past the window of the shortest prompt


def without_figures(line: str) -> list[str]:
    cells = line.split(" | ")
    return [*cells[:8], *cells[11:]]


def check(name: str, num_tokens: int) -> None:
    row = examine(name, num_tokens)
    assert row.agrees, f"{name}: alone {row.single}, batched {row.batched}"
    assert without_figures(line_of(row)) == without_figures(lines_of_page()[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", quick(SAMPLE, "iquestloopcoder", "qwen3_next")
)  # fmt: skip
def test_model_runs_as_models_md_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # One prompt leaves the window while it decodes, and one is longer than windows and chunks.
    monkeypatch.setattr(model_matrix, "PROMPTS", (5, 45))
    check(name, TOKENS)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(lines_of_page()) - {"olmo"}))
def test_every_model_runs_as_models_md_says(name: str) -> None:
    check(name, 64)


@pytest.mark.skipif(metadata.version("mlx-lm") == "0.32.1", reason="the page is of a later mlx-lm, which has others")
def test_models_md_lists_every_module() -> None:
    assert sorted(lines_of_page()) == model_configs.modules()
    assert set(SAMPLE) <= set(lines_of_page()) and len(SAMPLE) >= 25
    assert model_matrix.page_of(lines_of_page()) == model_matrix.PAGE.read_text()


def test_row_with_missing_or_different_results_does_not_agree() -> None:
    assert not Row("x", "paged", single=None, batched=0.0).agrees
    assert not Row("x", "paged", single=0.0, batched=1e-4).agrees
    assert not Row("x", "failed").agrees


def prompt(length: int, seed: int = 0) -> mx.array:
    return prompt_of(length, seed) % model_configs.VOCAB


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(CLASSES.values(), "qwen2"))
def test_speculative_decoding_equals_stock(name: str) -> None:
    """Some drafts are accepted and some rejected. Stock and paged caches both refuse it if a window is full."""
    model, draft = model_configs.build(name), model_configs.build(name)
    mx.random.seed(2)
    draft.update(tree_map(lambda w: w + 0.2 * mx.std(w) * mx.random.normal(w.shape), draft.parameters()))

    def run() -> list[tuple[int, bool]] | str:
        steps = speculative_generate_step(prompt(9), model, draft, num_draft_tokens=2, max_tokens=20)
        try:
            return [(int(token), from_draft) for token, _, from_draft in steps]
        except ValueError as error:
            return str(error)

    expected = run()
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert run() == expected
    mlx_paged.pool_of(model).check_integrity()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(CLASSES.values(), "gemma2"))
def test_prefixes_are_shared(name: str) -> None:
    """A second request with the same first tokens reuses their blocks and gives its solo tokens."""
    model = model_configs.build(name)
    first = prompt(10).tolist()
    second = [*first[:9], *prompt(6, seed=3).tolist()]
    expected = [greedy(model, mx.array(p, mx.uint32), 12)[0] for p in (first, second)]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    upstream.make_prompt_cache(model)
    pool = mlx_paged.pool_of(model)
    tree = PrefixCache(pool)
    got = []
    for tokens in (first, second):
        gen = generator(model, max_tokens=12, prefixes=SharedPrefixes(tree))
        outcomes = {uid: Outcome() for uid in gen.insert([tokens])}
        run_all(gen, outcomes)
        got += [outcome.tokens for outcome in outcomes.values()]
        gen.close()
    assert got == expected
    assert pool.stats().prefix_hit_tokens >= 8
    pool.check_integrity()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", quick(ROOMS, "qwen2"))
def test_preempted_requests_give_their_solo_tokens(name: str) -> None:
    """Rows that decode together or one by one, partly or fully paged, are recomputed; no token is delivered twice."""
    model = model_configs.build(name)
    prompts = [prompt(n, seed=n) for n in (20, 25, 30, 9)]
    expected = [greedy(model, p, 40)[0] for p in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    upstream.make_prompt_cache(model)
    groups = mlx_paged.pool_of(model).groups
    needed = sum(-(-75 // 8) * group.bytes_per_block for group in groups)  # the longest request alone
    mlx_paged.apply_patches(PagedConfig(block_size=8, kv_cache_memory=int(needed * 1.6)))
    gen = generator(model, max_tokens=40, prefill_step_size=16)
    uids = gen.insert([p.tolist() for p in prompts])
    outcomes = {uid: Outcome() for uid in uids}
    run_all(gen, outcomes)
    assert [outcomes[uid].tokens for uid in uids] == expected
    assert gen.preemptions > 0
    gen.close()
    del gen
    mlx_paged.pool_of(model).check_integrity()
