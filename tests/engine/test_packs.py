"""Prompts in packs: each request gets its solo tokens, whatever other requests do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import phi3

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import engine as engine_module
from mlx_paged.engine import prefill
from mlx_paged.engine.prefill import MOST_PAIRS, chunk_cap
from mlx_paged.engine.scheduler import ChunkCap
from mlx_paged.errors import RequestFailedError
from mlx_paged.kernels import fused_attention
from mlx_paged.kernels.build import NoKernelError
from mlx_paged.kernels.fused_attention import has_nax, least_fused_queries
from mlx_paged.kv import device_blocks
from mlx_paged.kv.geometry import Geometry, QueryHeads
from scripts.support import model_configs
from tests.fuzz.cases import PACKING_HYBRIDS
from tests.support.cases import crossed, quick
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import (
    assert_released,
    generator,
    model_of,
    run_all,
    run_requests,
)
from tests.support.models.builders import KINDS, VOCAB, build, greedy
from tests.support.models.packs import (
    assert_alike,
    insert,
    note_packs,
    packing,
    prompts_for,
)
from tests.support.models.toy_engine import ToyEngine, answer, make_pool
from tests.support.models.toy_engine import prompt_of as toy_prompt
from tests.support.scheduler_driver import Driver as SchedulerDriver

GENERIC = ("phi3", "olmo2", "qwen3_moe", "gpt_oss", "gemma3n", "gemma4_text", "gemma2")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable packs on a CPU too."""
    monkeypatch.setattr(engine_module, "packs_by_default", lambda pool: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    return note_packs(monkeypatch)


# The same tokens as alone -----------------------------------------------------------------------------------------


STORAGES = ("functional", "in place", "kernel")


@pytest.fixture(params=STORAGES)
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PagedConfig]:
    """Use functional blocks; blocks in place, read sequence by sequence; or the fake kernel."""
    if request.param == "functional":
        yield PagedConfig(block_size=8)
        return
    with fake_kernels(), monkeypatch.context() as own:  # undone before the fake kernels are
        if request.param == "in place":
            own.setattr(device_blocks, "prepare_prefill", no_kernel)
        yield PagedConfig(block_size=8, kernel="on")


def no_kernel(*_: object, **__: object) -> None:
    raise NoKernelError("not here")


def run_in_packs(model: Any, prompts: list[list[int]], config: PagedConfig | None = None, **options: int) -> Any:
    """Answer prompts with 8 tokens each in packs, as stock mlx-lm does alone. Return the generator."""
    expected = [greedy(model, mx.array(prompt, mx.uint32), 8) for prompt in prompts]
    mlx_paged.apply_patches(config or PagedConfig(block_size=8))
    gen = packing(model, **options)
    outcomes = insert(gen, prompts, 8)
    run_all(gen, outcomes)
    assert_alike(outcomes, expected)
    if mlx_paged.pool_of(model) is not None:
        assert_released(model)
    return gen


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize(
    ("kind", "config"),
    quick(crossed(KINDS, STORAGES), ("llama-sliding", "functional"), ("gemma3", "kernel")),
    indirect=["config"],
)
def test_requests_in_packs_get_their_solo_tokens(kind: str, config: PagedConfig, calls: list[list[int]]) -> None:
    run_in_packs(model_of(kind, head_dim=64), prompts_for(VOCAB), config)
    assert len(calls) > 3 and max(map(len, calls)) >= 4, "several parts of prompts came together"
    assert max(sum(call) for call in calls) <= 64


@pytest.mark.usefixtures("no_fall_through")
@pytest.mark.parametrize("name", quick((*GENERIC, *PACKING_HYBRIDS), "phi3", "qwen3_next"))
def test_models_without_an_adapter_or_with_states_pack_too(name: str, calls: list[list[int]]) -> None:
    gen = run_in_packs(model_configs.build(name), prompts_for(model_configs.VOCAB))
    assert gen._engine.prefill.packs and len(calls) > 3


# Who packs ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "packs"),
    [
        ("llama", {}, True),
        ("phi3", {}, True),
        ("qwen3", {"max_kv_size": 20}, False),  # mlx-lm's own caches
        ("deepseek_v3", {}, True),
        ("phi3small", {}, False),  # its attention computes with fetched keys
        ("gpt_bigcode", {}, False),  # one row after the other
        ("llama4", {}, True),
        ("minimax_m3_vl", {}, False),
        ("falcon_h1", {}, True),  # states beside keys and values
        ("mamba", {}, True),  # nothing but states
    ],
)
def test_which_models_pack(name: str, options: dict[str, Any], packs: bool) -> None:
    model = model_configs.build(name)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    engine = generator(model, **options)._engine
    assert engine.packs == engine.prefill.packs == packs


def test_packs_need_a_kernel_and_in_place_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "packs_by_default", prefill.packs_by_default)
    model = build("llama", head_dim=64)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    assert not generator(model)._engine.packs
    monkeypatch.setattr(prefill, "backend", lambda: "cuda")
    assert not generator(model)._engine.packs
    with fake_kernels():
        mlx_paged.remove_patches()
        mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
        assert generator(model)._engine.packs
        monkeypatch.setattr(prefill, "backend", lambda: None)
        assert not generator(model)._engine.packs


def test_only_chunks_of_several_prompts_share_a_call_on_metal(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]
) -> None:
    monkeypatch.setattr(engine_module, "on_metal", lambda: True)
    monkeypatch.setattr(prefill, "on_metal", lambda: True)
    model, prompts = model_of("qwen3", head_dim=64), prompts_for(VOCAB)
    with fake_kernels(), monkeypatch.context() as own:
        own.setattr(device_blocks, "prepare_prefill", no_kernel)
        gen = run_in_packs(model, prompts, PagedConfig(block_size=8, kernel="on"))
        assert gen._engine.prefill.packs and calls and all(len(call) > 1 for call in calls)
        calls.clear()
        run_all(gen, insert(gen, prompts[-1:], 8))
        assert not calls


@pytest.mark.parametrize(
    ("dims", "heads", "without", "with_nax"),
    [
        *(((dim, dim), 8, 0, 0) for dim in (64, 72, 80, 96, 128)),
        ((96, 64), 8, 0, 0),
        *(((dim, dim), 8, None, None) for dim in (112, 192)),
        ((192, 128), 8, None, None),
        ((256, 256), 8, None, 1024),
        ((512, 512), 32, 1024, 1024),
        ((512, 512), 16, 1024, 2017),  # 64 groups of 32 queries for each head
        ((512, 512), 8, 1024, None),
        ((512, 64), 16, None, None),  # latents
    ],
)
def test_least_queries_of_fused_attention(
    dims: tuple[int, int], heads: int, without: int | None, with_nax: int | None
) -> None:
    assert least_fused_queries(*dims, heads, nax=False) == without
    assert least_fused_queries(*dims, heads, nax=True) == with_nax


@pytest.mark.parametrize(
    ("architecture", "mac", "wheel", "expected"),
    [
        ("applegpu_g17s", "26.2", 26, True),
        ("applegpu_g18d", "27.0.1", 27, True),
        ("applegpu_g16s", "26.2", 26, False),
        ("applegpu_g17s", "26.1", 26, False),
        ("applegpu_g17s", "26.2", 15, False),
        ("", "", None, False),
    ],
)
def test_matrix_units_need_an_m5_macos_26_2_and_its_wheel(
    monkeypatch: pytest.MonkeyPatch, architecture: str, mac: str, wheel: int | None, expected: bool
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": architecture})
    monkeypatch.setattr(fused_attention.platform, "mac_ver", lambda: (mac, ("", "", ""), "arm64"))
    monkeypatch.setattr(fused_attention, "wheel_release", lambda: wheel)
    assert has_nax.__wrapped__() is expected


@pytest.mark.parametrize(
    ("head_dim", "heads", "nax", "least"),
    [
        (128, {}, False, 256),
        (256, {}, False, 128),
        (128, {"softcap": True}, False, 128),
        (512, {}, False, 1152),
        (256, {}, True, 1152),
    ],
)
def test_chunks_get_shorter_with_the_context_on_metal(
    head_dim: int, heads: dict[str, bool], nax: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never beyond what keeps MLX's attention fused, wherever between two multiples of the grid a chunk begins."""
    assert chunk_cap(make_pool()) is None
    monkeypatch.setattr(prefill, "on_metal", lambda: True)
    monkeypatch.setattr(prefill, "has_nax", lambda: nax)
    geometry = Geometry(2, head_dim, head_dim, mx.bfloat16)
    group = SimpleNamespace(geometry=geometry, heads=QueryHeads(16, **heads), in_place=True)
    cap = chunk_cap(SimpleNamespace(groups=[group]))  # type: ignore[arg-type]
    driver = SchedulerDriver(60_000, token_budget=2048, grid=128, chunk=2048, cap=cap)
    request = driver.insert(180_001, 1)
    taken = []
    while not request.is_prefilled:
        (chunk,) = driver.step().chunks
        taken.append(chunk.num_tokens)
        assert chunk.num_tokens * request.length <= cap.most_pairs or chunk.num_tokens <= cap.least
    del taken[-1]  # the end of the prompt
    assert taken[:15] == [2048] * 15 or least != 256
    assert min(taken) == least and sorted(taken, reverse=True) == taken


def test_prefill_latency_limits_steps_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ranks no latency limits a step; it is short instead."""
    for module in (engine_module, prefill):
        monkeypatch.setattr(module, "on_metal", lambda: True)
    with fake_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on", prefill_latency=100))
        gen = generator(model_of("qwen3", head_dim=64))
        engine = gen._engine
        assert engine.in_place and engine.prefill.pace is not None and engine.prefill.pace.latency == 0.1
        assert (engine.scheduler.grid, engine.scheduler.chunk) == (128, 2048)
        assert engine.scheduler.cap == ChunkCap(MOST_PAIRS, 128)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "peers", SimpleNamespace(is_alone=False))
            scheduler = engine._new_scheduler(2048, 32, 8)
            assert (scheduler.token_budget, scheduler.chunk, scheduler.cap) == (512, 512, None)
        engine.prefill.pace.tokens = 256
        monkeypatch.setattr(engine, "_uncut_tokens", lambda: 0)
        found = run_requests(gen, [[1 + i % 50 for i in range(700)], [2 + i % 40 for i in range(300)]], [4, 4])
        ends = sorted({0, *(done for outcome in found for done, _ in outcome.progress)})
        assert max(b - a for a, b in pairwise(ends)) <= 256
        gen.close()


@pytest.mark.parametrize(
    ("metal", "packs", "step", "limits"),
    [
        (False, True, 2048, (512, 4096, 2048)),
        (False, True, 3000, (512, 4096, 3000)),
        (False, True, 10000, (512, 4096, 4096)),
        (False, True, 600, (512, 600, 600)),
        (False, True, 64, (64, 64, 64)),
        (True, True, 2048, (128, 2048, 2048)),
        (False, False, 2048, (None, 2048, None)),
    ],
)
def test_prefill_step_size_limits_steps(
    metal: bool, packs: bool, step: int, limits: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "on_metal", lambda: metal)
    monkeypatch.setattr(engine_module, "packs_by_default", lambda pool: packs)
    scheduler = ToyEngine(make_pool(), prefill_step_size=step).engine.scheduler
    assert (scheduler.grid, scheduler.token_budget, scheduler.chunk) == limits


@pytest.mark.parametrize(("most", "expected"), [(64, [[16], [16], [7]]), (20, [[16]]), (0, [])])
def test_single_chunk_runs_as_a_pack_while_its_context_is_short(
    calls: list[list[int]], monkeypatch: pytest.MonkeyPatch, most: int, expected: list[list[int]]
) -> None:
    monkeypatch.setattr(prefill, "MOST_ALONE", most)
    engine = ToyEngine(make_pool())
    uid = engine.add(toy_prompt(40), max_tokens=3)
    engine.run()
    assert engine.tokens(uid) == answer(toy_prompt(40), 3)
    assert calls == expected


def test_request_without_blocks_is_left_out_of_the_pack(
    monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]
) -> None:
    model = build("llama-sliding")  # two groups
    prompts = prompts_for(320, (40, 25, 61, 30))
    expected = [greedy(model, mx.array(prompt, mx.uint32), 6) for prompt in prompts]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = packing(model)
    outcomes = insert(gen, prompts, 6)
    uids = list(outcomes)
    pool = mlx_paged.pool_of(model)
    original = pool.append_tokens

    def fails_once(table: Any, num_tokens: int) -> None:
        row = gen._engine.requests.get(uids[1])
        if row is not None and table is row.table:
            raise OSError("injected: no block")
        original(table, num_tokens)

    pool.append_tokens = fails_once
    with pytest.raises(RequestFailedError) as failed:
        run_all(gen, outcomes)
    run_all(gen, outcomes)
    assert failed.value.uid == uids[1]
    assert len(calls[0]) == 3, "the pack starts without it"
    del outcomes[uids[1]], failed
    assert_alike(outcomes, [one for i, one in enumerate(expected) if i != 1])
    del pool.append_tokens
    assert_released(model)


def test_model_that_cannot_pack_is_computed_one_by_one(monkeypatch: pytest.MonkeyPatch, calls: list[list[int]]) -> None:
    """Its attention changes the fetched keys in calls of 8 rows or more, which no probe has seen."""
    original = phi3.Attention.__call__

    class Copying:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def __getattr__(self, name: str) -> Any:
            return getattr(self.cache, name)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = self.cache.update_and_fetch(keys, values)
            return keys + 0, values

    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return original(self, x, mask, cache if cache is None or x.shape[0] < 8 else Copying(cache))

    monkeypatch.setattr(phi3.Attention, "__call__", attention)
    model = model_configs.build("phi3")
    with pytest.warns(mlx_paged.NotPagedWarning, match="prefilled one at a time for models of mlx_lm.models.phi3"):
        gen = run_in_packs(model, prompts_for(model_configs.VOCAB, (20, 30, 9)))
    assert len(calls) == 1 and not gen._engine.prefill.packs
    assert not packing(model)._engine.prefill.packs, "that is remembered"


@pytest.mark.parametrize("lengths", [(20, 30, 9), (20,)], ids=["together", "alone"])
def test_chunks_that_see_more_than_caches_keep_run_one_by_one(calls: list[list[int]], lengths: tuple[int, ...]) -> None:
    prompts = prompts_for(model_configs.VOCAB, lengths)
    with pytest.warns(mlx_paged.NotPagedWarning, match="prefilled one at a time for models of mlx_lm.models.plamo3"):
        gen = run_in_packs(model_configs.build("plamo3"), prompts, most=128, prefill_step_size=128)
    assert len(calls) == 1 and not gen._engine.prefill.packs
