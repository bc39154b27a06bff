"""One model of each class with all that is built on caches: speculative decoding, prompt caches over turns and in
files, prefixes shared in a batch, and the server. Prompts are longer than windows unless stated otherwise."""

import gc
import importlib
import json
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm import stream_generate
from mlx_lm.models import cache as upstream

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache
from mlx_paged.cache.composites import leaves
from mlx_paged.engine.sharing import common_length
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from scripts.model_matrix import lines_of_page
from scripts.support import model_configs
from scripts.support.model_configs import CHUNK, WINDOW
from tests.support.cases import quick
from tests.support.models.batch_runs import generator
from tests.support.models.builders import greedy, rms
from tests.support.models.builders import prompt_of as random_prompt
from tests.support.models.tiny_model import VOCAB, copy_tokenizer
from tests.support.models.tokenizers import plain_tokenizer
from tests.support.processes.server_process import ServerProcess

MODELS = {
    "global": "qwen3",
    "sliding": "gemma3_text",
    "sinks": "gpt_oss",
    "hybrid": "falcon_h1",  # states beside attention in each layer
    "hybrid in turn": "qwen3_next",
    "experts": "qwen3_moe",
    "shared keys": "gemma4_text",
}
WINDOWED = ("sliding", "sinks", "shared keys")
BLOCK = 8
CONFIG = PagedConfig(block_size=BLOCK)


class Case(NamedTuple):
    """A class of models and its model."""

    kind: str
    model: Any

    @property
    def sharing(self) -> str:
        """How its prefixes are shared, by docs/models.md: "yes" or "checkpoints"."""
        return lines_of_page()[MODELS[self.kind]].split(" | ")[11]

    @property
    def has_windows(self) -> bool:
        return self.kind in WINDOWED

    @property
    def has_states(self) -> bool:
        return self.kind.startswith("hybrid")


def always(*kinds: str) -> pytest.MarkDecorator:
    """Run these classes in every run; the others take the same path here or are covered by other tests."""
    return pytest.mark.parametrize("case", quick(MODELS, *kinds), indirect=True)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Build the model of a class, and fail if anything falls through to stock mlx-lm."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", mlx_paged.NotPagedWarning)
        yield Case(request.param, model_configs.build(MODELS[request.param]))


def prompt_of(length: int, seed: int = 0) -> mx.array:
    return random_prompt(length, seed) % model_configs.VOCAB


def assert_paged_and_whole(model: Any, path: str = "gather") -> None:
    """Check that attention last took ``path``, and that all of the pool's blocks are free again."""
    assert mlx_paged.last_dispatch().path == path
    gc.collect()
    pool = mlx_paged.pool_of(model)
    pool.check_integrity()
    assert pool.stats().peak_live_blocks > 0 == pool.stats().live_blocks


# Speculative decoding ---------------------------------------------------------------------------------------------


def draft_of(case: Case) -> Any:
    """Return the model with noise on its weights: some of its drafts are accepted, and some are rejected."""
    draft = model_configs.build(MODELS[case.kind])
    scale = 0.05 if case.kind == "sliding" else 0.2
    mx.random.seed(2)
    draft.update(tree_map(lambda w: w + scale * mx.std(w) * mx.random.normal(w.shape), draft.parameters()))
    return draft


def speculate(case: Case, draft: Any, length: int, num_tokens: int, **options: Any) -> Any:
    """Return each token, whether it was drafted, and the log probabilities; or the error's type and text."""
    tokenizer, prompt = plain_tokenizer(), prompt_of(length)
    try:
        responses = list(
            stream_generate(case.model, tokenizer, prompt, num_tokens, draft, num_draft_tokens=2, **options)
        )
    except Exception as error:
        return type(error), str(error).split(" (got")[0]
    return [(r.token, r.from_draft) for r in responses], np.stack([np.array(r.logprobs) for r in responses])


def assert_speculated_alike(got: Any, expected: Any) -> None:
    assert got[0] == expected[0]
    assert got[1] == expected[1] if isinstance(expected[1], str) else rms(got[1], expected[1]) <= 1e-6


@always("hybrid")
def test_speculative_decoding_equals_stock(case: Case) -> None:
    """Run within a window, across its edge, and beyond it, where mlx-lm cannot trim."""
    draft = draft_of(case)
    runs = ((5, WINDOW - 5), (9, 20), (2 * WINDOW + 6, 16))
    alone = greedy(case.model, prompt_of(5), WINDOW - 5)[0]
    expected = [speculate(case, draft, *run) for run in runs]
    if case.has_states:
        assert {error for error, _ in expected} == {ValueError}
    else:
        assert [token for token, _ in expected[0][0]] == alone
        from_draft = [is_drafts for tokens, _ in expected for _, is_drafts in tokens]
        assert any(from_draft) and not all(from_draft)
    mlx_paged.apply_patches(CONFIG)
    for run, run_expected in zip(runs, expected, strict=True):
        assert_speculated_alike(speculate(case, draft, *run), run_expected)
    if not case.has_states:
        for model in (case.model, draft):
            assert_paged_and_whole(model)


@always("global", "hybrid", "shared keys")
def test_speculative_decoding_on_a_prompt_cache_equals_stock(case: Case) -> None:
    """Refused, as by mlx-lm, if the cache cannot be trimmed: a full window, or states."""
    draft = draft_of(case)

    def run() -> Any:
        caches = [upstream.make_prompt_cache(model) for model in (case.model, draft)]
        for model, cache in zip((case.model, draft), caches, strict=True):
            model(prompt_of(WINDOW + 7, seed=1)[None], cache=cache)
        return speculate(case, draft, 6, 12, prompt_cache=caches[0] + caches[1])

    expected = run()
    assert (expected[0] is ValueError) == (case.has_windows or case.has_states)
    mlx_paged.apply_patches(CONFIG)
    assert_speculated_alike(run(), expected)
    assert_paged_and_whole(case.model, "prefill" if expected[0] is ValueError else "gather")


# Prompt caches ----------------------------------------------------------------------------------------------------


@always("sliding")
def test_prompt_cache_over_turns_and_files_equals_stock(case: Case, tmp_path: Path) -> None:
    files = {by: str(tmp_path / f"{by}.safetensors") for by in ("stock", "paged")}

    def turn(number: int, cache: list[Any]) -> tuple[list[int], np.ndarray]:
        prompt = prompt_of((3 * WINDOW + 4, 1, 7)[number], seed=number)
        return greedy(case.model, prompt, 10, prompt_cache=cache, prefill_step_size=CHUNK)

    def two_turns_and_save(by: str) -> tuple[list[Any], list[Any]]:
        cache = upstream.make_prompt_cache(case.model)
        results = [turn(0, cache), turn(1, cache)]
        upstream.save_prompt_cache(files[by], cache, {"by": by})
        return results, cache

    def assert_same(got: tuple[list[int], np.ndarray], wanted: tuple[list[int], np.ndarray]) -> None:
        # Past the window mlx-lm sums in the order of its ring, so the last bits differ.
        assert got[0] == wanted[0] and rms(got[1], wanted[1]) <= (1e-5 if case.has_windows else 1e-6)

    expected, _ = two_turns_and_save("stock")
    third = turn(2, upstream.load_prompt_cache(files["stock"]))
    forgotten = turn(2, upstream.make_prompt_cache(case.model))
    assert forgotten[0] != third[0]  # the cache affects the tokens

    mlx_paged.apply_patches(CONFIG)
    got, cache = two_turns_and_save("paged")
    for got_turn, expected_turn in zip(got, expected, strict=True):
        assert_same(got_turn, expected_turn)
    assert_same(turn(2, cache), third)
    for by, file in files.items():
        loaded, metadata = upstream.load_prompt_cache(file, return_metadata=True)
        assert metadata == {"by": by}
        adopted = mlx_paged.adopt_prompt_cache(case.model, loaded)
        is_paged = [isinstance(part, PagedKVCache) for part in leaves(adopted)]
        assert any(is_paged) and (all(is_paged) or case.has_states)
        assert_same(turn(2, adopted), third)
        assert_same(turn(2, upstream.load_prompt_cache(file)), third)
    del cache, adopted, loaded
    mlx_paged.reset_dispatch_counts()
    assert_same(turn(2, mlx_paged.adopt_prompt_cache(case.model, upstream.load_prompt_cache(files["paged"]))), third)
    assert_paged_and_whole(case.model)
    mlx_paged.remove_patches()
    assert_same(turn(2, upstream.load_prompt_cache(files["paged"])), third)


# Prefixes ---------------------------------------------------------------------------------------------------------


def answers_of(gen: Any, requests: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each request, and how many tokens of its prompt were cached."""
    tokens: dict[int, list[int]] = {uid: [] for uid in gen.insert(requests)}
    cached: dict[int, int] = {}
    while any(answer := gen.next()):
        for response in answer[1]:
            tokens[response.uid].append(response.token)
            cached[response.uid] = response.num_cached
    return list(tokens.values()), [cached[uid] for uid in tokens]


@always("hybrid in turn")
def test_prefixes_are_shared_in_a_burst_and_later(case: Case) -> None:
    """Shared by the requests of a burst, by the first one repeated, and by a chat that continues it."""
    system, new = prompt_of(3 * WINDOW + 9, seed=1).tolist(), 12
    prompts = [[*system, n, *prompt_of(5, seed=n).tolist()] for n in (2, 3, 4)]
    expected = [greedy(case.model, mx.array(p), new, prefill_step_size=CHUNK)[0] for p in prompts]
    later = [*prompts[0], *expected[0], 5, 6, 7]
    expected_later = greedy(case.model, mx.array(later), new, prefill_step_size=CHUNK)[0]

    mlx_paged.apply_patches(CONFIG)
    upstream.make_prompt_cache(case.model)
    pool = mlx_paged.pool_of(case.model)
    tree = PrefixCache(pool)
    gen = generator(case.model, max_tokens=new, prefill_step_size=CHUNK, prefixes=SharedPrefixes(tree))
    assert ("yes" if gen._engine.all_paged else "checkpoints") == case.sharing

    got, num_cached = answers_of(gen, prompts)
    assert got == expected
    slack = BLOCK  # prefixes are whole blocks
    assert num_cached[0] == 0 and all(len(system) - slack <= found <= len(system) for found in num_cached[1:])
    got, num_cached = answers_of(gen, prompts[:1])
    assert got == expected[:1] and num_cached[0] >= len(prompts[0]) - 1 - BLOCK
    got, num_cached = answers_of(gen, [later])
    assert got == [expected_later]
    assert num_cached[0] >= len(prompts[0]) + new - 1 - BLOCK
    tree.check_integrity()
    if not case.has_states:
        assert pool.stats().live_blocks == pool.stats().cached_blocks > 0
    gen.close()
    tree.clear()
    del gen, tree
    assert_paged_and_whole(case.model)


# The server -------------------------------------------------------------------------------------------------------

SYSTEM = "You answer in rhyme, always in the language of the question, and never with more than a line. " * 2
QUESTIONS = ("Who are you?", "Name the sea.")
TOKENS = 16


def make_folder(name: str, tokenizer: Path, folder: Path) -> Path:
    """Write a model folder with random weights of the module and the tokenizer of another folder."""
    eos = json.loads((tokenizer / "config.json").read_text())["eos_token_id"]
    config = {**model_configs.config_of(name), "model_type": name, "eos_token_id": eos}
    sized = {key: VOCAB for key in config if key in ("vocab_size", "vocab_size_per_layer_input")}
    config |= sized
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(6)
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    # Random models of this size repeat one token. Larger embeddings vary their tokens, unless the model scales them.
    larger = 1 if name == "gemma4_text" else 4
    weights = {key: (larger * w if "embed_tokens" in key else w).astype(mx.float32) for key, w in weights.items()}
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    copy_tokenizer(tokenizer, folder)
    return folder


@pytest.mark.demo_model
@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS, indirect=True)
def test_server_gives_stock_answers_with_prefixes_and_drafts(
    case: Case, demo_model_folder: Path, tmp_path: Path
) -> None:
    """Two concurrent chats share a system prompt; then the first again, one with a draft model, and the first again."""
    mlx_lm = importlib.import_module("mlx_lm")
    folder = make_folder(MODELS[case.kind], demo_model_folder, tmp_path / "model")
    model, tokenizer = mlx_lm.load(str(folder))
    system = {"role": "system", "content": SYSTEM}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    common = common_length(*prompts)
    expected = [mlx_lm.generate(model, tokenizer, prompt, max_tokens=TOKENS) for prompt in prompts]
    assert expected[0] != expected[1] and common > 3 * WINDOW
    try:
        drafted = stream_generate(model, tokenizer, prompts[1], TOKENS, model)
        expected_drafted = "".join(response.text for response in drafted)
    except ValueError:
        expected_drafted = None
    assert (expected_drafted is None) == case.has_states

    options = ("--kv-block-size", str(BLOCK), "--kv-cache-memory", "16MB", "--allow-any-model")
    server = ServerProcess(folder, tmp_path, *options)

    def ask(chat: list[dict[str, str]], **options: Any) -> tuple[str, int]:
        body = server.chat(chat, max_tokens=TOKENS, temperature=0, **options)
        usage = body["usage"]
        return body["choices"][0]["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(ask, chats))
    assert [text for text, _ in answers] == expected
    assert sorted(num_cached for _, num_cached in answers) == [0, common // BLOCK * BLOCK]
    text, num_cached = ask(chats[0])
    assert text == expected[0] and num_cached >= len(prompts[0]) - 1 - BLOCK
    check_figures(server, case, most_tokens=sum(map(len, prompts)) + 2 * TOKENS)
    assert "Traceback" not in server.log
    assert "NotPagedWarning" not in server.log

    if expected_drafted is None:
        refused = {"messages": chats[1], "max_tokens": TOKENS, "draft_model": str(folder)}
        answer = server.post("/v1/chat/completions", refused)
        assert answer.status == 400 and "trimmable" in answer.json["error"]["message"]
    else:
        assert ask(chats[1], draft_model=str(folder)) == (expected_drafted, 0)
        assert "Traceback" not in server.log
    assert ask(chats[0]) == (expected[0], 0)  # the model was loaded again
    assert server.stop() == 0, server.log


def check_figures(server: ServerProcess, case: Case, most_tokens: int) -> None:
    """Check that nothing runs, and that only the prefix cache holds blocks and states."""
    server.wait_until(lambda: server.stats()["server"]["requests"]["ok"] == 3)  # counted after the answer is sent
    server.wait_until(lambda: not any(server.stats()["running"].values()))
    stats = server.stats()
    pool = stats["pool"]
    assert pool["live_blocks"] + pool["free_blocks"] == pool["total_blocks"] and not stats["sequences"]
    assert 0 < pool["live_blocks"] <= len(stats["blocks"]) * -(-most_tokens // BLOCK)
    # Only nodes of the prefix cache hold blocks, and beside them the checkpoints of models with states.
    assert pool["cached_blocks"] == pool["live_blocks"]
    checkpoints = stats["prefix_cache"]["checkpoints"]
    assert pool["checkpoint_bytes"] == checkpoints["bytes"]
    assert (checkpoints["number"] > 0) == (checkpoints["bytes"] > 0) == case.has_states
    assert stats["server"]["requests"] == {"ok": 3, "refused": 0, "failed": 0, "cancelled": 0}
    assert "gather" in {choice["path"] for choice in stats["dispatch"]}
