"""docs/models.md matches the code: a sample of families here, all of them with `make test-models`."""

from importlib import metadata

import pytest

from scripts import model_matrix
from scripts.model_matrix import examine, line_of, lines_of_page
from scripts.support import model_configs
from tests.support.cases import quick

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
