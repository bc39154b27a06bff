"""Errors of the device: wherever MLX reports one, nothing of the batch is kept, and what follows is right."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine import decode_batch, prefill
from mlx_paged.engine import engine as engine_module
from mlx_paged.errors import DeviceError, check_device, without_frames
from mlx_paged.kv.pool import BlockPool
from mlx_paged.patches.cache.lru_prompt_cache import PagedPromptCache
from mlx_paged.patches.cache.pools import pool_of
from mlx_paged.prefix.disk import DiskTier
from mlx_paged.prefix.entry import SavedName
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from mlx_paged.prefix.shelf import Shelf
from tests.support.cases import slow
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.models.batch_runs import generator, mlx_lm_generate
from tests.support.models.builders import build, greedy, prompt_of
from tests.test_house import functions_of, modules_of_the_product

BLOCK, CHUNK, MOST = 8, 32, 6
LENGTHS = (75, 41, 12)
TEXTS = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTim"
    "eout).",
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) (00000004:kIOGPUCommand"
    "BufferCallbackErrorSubmissionsIgnored).",
    "cudaPeekAtLastError() failed: an illegal memory access was encountered",
    "cudaGraphLaunch(graph_exec, stream()) failed: unspecified launch failure",
    "cudaStreamSynchronize(stream_) failed: the launch timed out and was terminated",
    "cublasLtMatmul(handle_, matmul_desc_) failed with code: 13.",
)
PLACES = ("eval", "async_eval", "synchronize", "item")


class Device:
    """Counts the calls in which MLX may report an error of the device, by place, and fails one of them: the blocks of
    the pool then hold anything, as where stores did not happen, and MLX reports it once."""

    def __init__(self, place: str = "", number: int = 0) -> None:
        self.place, self.number = place, number
        self.counts = dict.fromkeys(PLACES, 0)
        self.pool: BlockPool | None = None

    def call(self, place: str, original: Callable[..., Any], *args: Any) -> Any:
        self.counts[place] += 1
        if (place, self.counts[place]) == (self.place, self.number):
            for group in [] if self.pool is None else self.pool.groups:
                for storage in group.blocks:
                    for tensor in storage.pending:
                        mx.eval(tensor)
                    spoil(storage)
            raise RuntimeError(TEXTS[self.number % len(TEXTS)])
        return original(*args)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Count calls, and fail one, in a ``with`` block."""
        real = {name: getattr(mx, name) for name in PLACES[:3]}
        ints = decode_batch._as_ints
        read = mock.patch.object(decode_batch, "_as_ints", lambda tokens: self.call("item", ints, tokens))
        with read, mock.patch.multiple(mx, **{k: lambda *a, k=k: self.call(k, real[k], *a) for k in real}):
            yield


def spoil(storage: Any) -> None:
    """Overwrite all blocks of a layer."""
    for name in ("_DeviceBlocks__keys", "_DeviceBlocks__values"):
        tensor = getattr(storage, name)
        tensor[:] = 7.0
        mx.eval(tensor)


@functools.cache
def expected() -> list[list[int]]:
    """Return stock mlx-lm's tokens for each prompt."""
    assert not mlx_paged.is_applied()
    return [greedy(build("llama", head_dim=64), mx.array(prompt), MOST)[0] for prompt in prompts()]


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Apply the patches and yield a model whose blocks are in place, as on Metal."""
    expected()
    for module in (engine_module, prefill):
        monkeypatch.setattr(module, "on_metal", lambda: True)
    monkeypatch.setattr(prefill, "METAL_GRID", CHUNK)
    with fake_kernels():
        mlx_paged.apply_patches(PagedConfig(block_size=BLOCK))
        yield build("llama", head_dim=64)


def prompts() -> list[list[int]]:
    return [prompt_of(length, seed=length).tolist() for length in LENGTHS]


def new_generator(model: Any) -> tuple[Any, PrefixCache]:
    """Return a generator with a prefix cache."""
    pool = mlx_lm_generate.make_prompt_cache(model)[0].pool
    tree = PrefixCache(pool)
    return generator(model, prefixes=SharedPrefixes(tree), prefill_step_size=CHUNK), tree


def run(gen: Any) -> list[list[int]]:
    """Return the tokens of all prompts. The last one begins with the first one's prefix."""
    uids = gen.insert(prompts(), [MOST] * len(LENGTHS))
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(answer := gen.next()):
        for response in answer[1]:
            found[response.uid].append(response.token)
    return list(found.values())


def check_after(model: Any, gen: Any, tree: PrefixCache, pool: BlockPool) -> None:
    """Check that nothing that the failed generator has computed is served, and that a new one is right."""
    with pytest.raises(DeviceError, match="were lost"):
        gen.next()
    with pytest.raises(DeviceError, match="were lost"):
        gen.insert([prompts()[0]], [1])
    gen.remove(list(gen._engine.requests))
    gen.close()
    assert not gen._engine.requests
    with pytest.raises(DeviceError, match="were lost"):
        tree.adopt(prompts()[0])
    with pytest.raises(DeviceError, match="were lost"):
        generator(model, prefixes=SharedPrefixes(tree))
    again, _ = new_generator(model)
    assert pool_of(model) is not pool and run(again) == expected()
    again.close()


@pytest.mark.parametrize("stride", [2, *slow(1)])
def test_every_place_that_reports_an_error_loses_the_batch(stride: int, in_place: Any) -> None:
    for _ in range(2):  # the first run also chooses kernels
        device = Device()
        gen, _ = new_generator(in_place)
        with device.failing():
            assert run(gen) == expected()
        gen.close()
    assert all(device.counts[place] > 4 for place in ("eval", "async_eval", "item"))
    for place, count in device.counts.items():
        for number in range(1, count + 1, stride):
            device = Device(place, number)
            gen, tree = new_generator(in_place)
            device.pool = pool = tree.pool
            with device.failing(), pytest.raises(DeviceError, match="the device failed") as caught:
                run(gen)
            assert isinstance(caught.value.__cause__, RuntimeError)
            check_after(in_place, gen, tree, pool)


def test_chunk_that_fails_while_waited_for_is_not_kept(in_place: Any) -> None:
    """Whatever the text, an error in waiting concerns what was submitted before."""
    gen, tree = new_generator(in_place)
    pool, real = tree.pool, prefill.Prefill.wait

    def wait(self: prefill.Prefill) -> None:
        if self._under_way:
            with mock.patch.object(mx, "eval", side_effect=RuntimeError("something else")):
                real(self)

    with mock.patch.object(prefill.Prefill, "wait", wait), pytest.raises(DeviceError, match="something else"):
        run(gen)
    check_after(in_place, gen, tree, pool)


def test_error_of_a_cancelled_requests_last_step_is_raised(in_place: Any) -> None:
    gen, tree = new_generator(in_place)
    (uid,) = gen.insert([prompts()[0]], [50])
    gen.next()
    with Device("synchronize", 1).failing(), pytest.raises(DeviceError, match="the device failed"):
        gen.remove([uid])
    gen.remove([uid])
    assert tree.pool.is_lost and not gen._engine.requests


def test_generate_step_loses_its_prompt_cache_and_the_next_is_right(in_place: Any) -> None:
    cache = mlx_lm_generate.make_prompt_cache(in_place)
    prompt = mx.array(prompts()[0])
    with Device("async_eval", 3).failing(), pytest.raises(DeviceError, match="the device failed"):
        list(mlx_lm_generate.generate_step(prompt, in_place, max_tokens=MOST, prompt_cache=cache))
    with pytest.raises(DeviceError, match="were lost"):
        list(mlx_lm_generate.generate_step(prompt, in_place, max_tokens=MOST, prompt_cache=cache))
    fresh = mlx_lm_generate.make_prompt_cache(in_place)
    tokens = mlx_lm_generate.generate_step(prompt, in_place, max_tokens=MOST, prompt_cache=fresh)
    assert [int(token) for token, _ in tokens] == expected()[0]


def test_prompt_cache_of_a_script_goes_on_without_what_was_lost(in_place: Any) -> None:
    store, tokens = PagedPromptCache(), prompts()[0]

    def computed() -> list[Any]:
        cache = mlx_lm_generate.make_prompt_cache(in_place)
        in_place(mx.array([tokens]), cache=cache)
        return cache

    lost = computed()
    store.insert_cache("model", tokens, lost)
    assert store.fetch_nearest_cache("model", tokens)[0] is not None
    with pytest.raises(DeviceError):
        check_device(RuntimeError(TEXTS[0]))
    assert store.fetch_nearest_cache("model", tokens) == (None, tokens) and len(store) == 0
    with pytest.raises(DeviceError, match="were lost"):
        store.insert_cache("model", tokens, lost)
    store.insert_cache("model", tokens, computed())
    assert len(store.fetch_nearest_cache("model", tokens)[1]) <= BLOCK
    store.tidy()
    store.close()


@pytest.mark.parametrize(("place", "stride"), [*((place, 5) for place in PLACES[:3]), *slow(("eval", 1))])
def test_nothing_is_written_to_disk_before_the_device_has_confirmed_it(
    place: str, stride: int, in_place: Any, tmp_path: Path
) -> None:

    def filled(model: Any) -> tuple[Any, PrefixCache]:
        pool = mlx_lm_generate.make_prompt_cache(model)[0].pool
        tree = PrefixCache(pool)
        gen = generator(model, prefixes=SharedPrefixes(tree, SavedName("weights", 0)), prefill_step_size=CHUNK)
        run(gen)
        gen.close()
        return pool, tree  # the cache does not keep the pool alive

    def save_all(tree: PrefixCache, shelf: Shelf) -> None:
        for entry in list(tree.entries.values()):
            DiskTier(shelf).save(tree, entry, wait=True)

    pool, tree = filled(in_place)
    device, shelf = Device(), Shelf(tmp_path / "whole")
    with device.failing():
        save_all(tree, shelf)
    shelf.flush()
    assert len(shelf) > 1 and not pool.is_lost
    for number in range(1, device.counts[place] + 1, stride):
        shelf = Shelf(tmp_path / f"{place}-{number}")
        pool, tree = filled(in_place)
        with Device(place, number).failing(), pytest.raises(DeviceError):
            save_all(tree, shelf)
            pytest.fail("nothing was raised")
        shelf.flush()
        assert len(shelf) < number  # only blocks confirmed before the error
        with pytest.raises(DeviceError, match="were lost"):
            save_all(tree, Shelf(tmp_path / "other"))


def test_error_of_the_device_while_a_file_is_written_is_raised(in_place: Any, tmp_path: Path) -> None:
    gen, tree = new_generator(in_place)
    run(gen)
    shelf = Shelf(tmp_path)
    with mock.patch.object(shelf, "_write_file", side_effect=RuntimeError(TEXTS[0])), pytest.raises(DeviceError):
        for entry in tree.entries.values():
            entry.stays_in_memory = False
            DiskTier(shelf).save(tree, entry, wait=True)
            shelf.flush()
    assert not list(tmp_path.iterdir())
    gen.close()


@pytest.mark.parametrize("text", TEXTS)
def test_errors_of_the_device_are_recognised(text: str) -> None:
    before = DeviceError.count
    request = RuntimeError("a model call failed")
    request.__cause__ = RuntimeError(text)
    for error in (RuntimeError(text), request):
        with pytest.raises(DeviceError, match="the device failed"):
            check_device(error)
    with pytest.raises(DeviceError):
        without_frames(RuntimeError(text))
    assert DeviceError.count == before + 3


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size",
        "[malloc] Unable to allocate 9 bytes.",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "cublasLtMatmul(handle_, matmul_desc_) failed with code: 3.",
        "[metal::Device] Unable to build metal library from source",
        "a grammar failed: no such token",
    ],
)
def test_other_errors_are_not_the_devices(text: str) -> None:
    before = DeviceError.count
    check_device(RuntimeError(text))
    assert DeviceError.count == before


# Functions that call check_device with the error they are given, or end the process.
CHECKING = {
    "check_device", "device_failed", "without_frames", "_note", "_fail", "fail", "fail_all", "_warn",
    "_call_failed", "_die", "_fail_running",
}  # fmt: skip
# Functions that may catch what they like, and why.
FREE = {
    "prefix.shelf:save",  # starting a thread
    "prefix.shelf:_write",  # in it: the next call checks the error that it keeps
    "kv.lock:glance",  # reads numbers
    "kv.lock:__exit__",  # raises the first error once all locks are released
}
PARTS = ("kv.", "cache.", "attention.", "prefix.", "engine.", "server.engine_")
WIDE = {"Exception", "BaseException", "RuntimeError"}


def names_in(node: ast.AST | None) -> set[str]:
    return set() if node is None else {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node)}


def swallows(node: ast.AST) -> bool:
    """Return whether a handler, or ``suppress``, could drop an error of the device."""
    if isinstance(node, ast.Call) and names_in(node.func) == {"suppress"}:
        return any(names_in(each) & WIDE for each in node.args)
    if not isinstance(node, ast.ExceptHandler) or not names_in(node.type) & WIDE:
        return False
    return not names_in(node) & CHECKING and not any(isinstance(each, ast.Raise) for each in node.body)


def test_no_handler_of_the_engine_swallows_an_error_of_the_device() -> None:
    found = set()
    for name, path in modules_of_the_product().items():
        part = name.removeprefix("mlx_paged.")
        if part.startswith(PARTS):
            for function in functions_of(path):
                found |= {f"{part}:{function.name}" for node in ast.walk(function) if swallows(node)}
    assert found - FREE == set() and "prefix.shelf:_write" in found
