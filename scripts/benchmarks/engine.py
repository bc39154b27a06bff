"""What a step of the engine takes of the host around its kernels: by rows and by what is cached.

    python scripts/bench.py engine --rows 1,32,128,256

On any machine: the model does nothing but attend, and kernels are stand-ins that compute nothing (but for the cases of
pools that MLX itself computes on, as on a CPU). Milliseconds of the thread for a step, the median of some steps.
Writes engine.json and engine.png.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_paged import config
from mlx_paged.attention import dispatch
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.cuda.compiled import cuda_source
from mlx_paged.cuda.launch import CompiledKernel
from mlx_paged.engine.decode_batch import DecodeBatch
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.interfaces import Upstream
from mlx_paged.engine.request import Request
from mlx_paged.kernels import availability, ops
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kv import blocks
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.geometry import AttentionParams
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.lock import HeldLocks
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes

from .report import Panel, add_out_argument, list_of, positive, table, write_results

PANELS: tuple[Panel, ...] = (("ms of a step, by rows", lambda r: r["ms"]),)
VOCAB, DIM, BLOCK, STEPS, ENDLESS = 64, 64, 32, 20, 1 << 30


class _Launched:
    """Stand-in for ``mx.fast.precompiled_cuda_kernel``: returns the same zeros for the same shapes."""

    def __init__(self) -> None:
        self._zeros: dict[Any, mx.array] = {}

    def __call__(self, *, output_shapes: Any, output_dtypes: Any, inputs: list[mx.array], **options: Any) -> Any:
        found = []
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            key = shape, dtype
            zeros = self._zeros.get(key)
            if zeros is None:
                zeros = self._zeros[key] = mx.zeros(shape, dtype)
                mx.eval(zeros)
            found.append(zeros.reshape(shape))  # a new array, as from a launch
        return found


@contextmanager
def stand_ins() -> Iterator[None]:
    """Make pools in place, and launch stand-ins for CUDA kernels, in the context."""
    known: dict[Any, Any] = {}

    def build_kernel(body: str, constants: Any) -> Any:
        kernel = known.get((body, constants))
        if kernel is None:
            source = cuda_source(body, constants)
            assert source is not None
            kernel = known[body, constants] = CompiledKernel(source, b"", kernel_build.TYPE_NAMES["cuda"])
        return kernel

    with ExitStack() as stack:
        for owner, name, value in (
            (ops, "build_kernel", build_kernel),
            (ops, "backend", lambda: "cuda"),
            (availability, "device_unsupported_reason", lambda: None),
            (config, "device_unsupported_reason", lambda: None),
            (blocks, "kernel_unsupported_reason", lambda *_: None),
            (dispatch, "kernel_unsupported_reason", lambda *_: None),
            (mx.fast, "precompiled_cuda_kernel", _Launched()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        ops.variants_of.cache_clear()
        stack.callback(ops.variants_of.cache_clear)
        yield


class Model:
    """Layers that only attend. A call is one turn at the pool, like that of a patched model."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows, length = tokens.shape
        queries = mx.zeros((rows, 1, length, DIM), mx.float16)
        with cache[0].pool.lock:
            for layer in cache:
                layer.attend(queries, queries, queries, AttentionParams(1.0, "causal" if length > 1 else None))
        return mx.zeros((rows, length, VOCAB))


class _Response:
    """A token that was delivered."""

    def __init__(self, uid: int, token: int, logits: Any, finish_reason: str | None, *, num_cached: int) -> None:
        self.uid, self.token, self.finish_reason, self.num_cached = uid, token, finish_reason, num_cached
        self.all_tokens: list[int] = []

    def attach(self, request: Request) -> None:
        request.release()

    def drop_cache(self) -> bool:
        return False


class Bench:
    """An engine and requests for it.

    Args:
        layers: number of layers of the model.
        windows: one for each group of layers.
        blocks: memory budget in blocks; None: ample.
        caches_prefixes: whether there is a prefix cache.
        in_place: whether kernels write and read the blocks, instead of MLX's own functions.
    """

    def __init__(
        self,
        layers: int = 16,
        *,
        windows: Sequence[int | None] = (None,),
        blocks: int | None = None,
        caches_prefixes: bool = False,
        in_place: bool = True,
    ) -> None:
        each = layers // len(windows)
        groups = [
            LayerGroup(tuple(range(index * each, (index + 1) * each)), window, name=str(index))
            for index, window in enumerate(windows)
        ]
        block_bytes = BLOCK * 2 * DIM * 2 * layers
        budget = 1 << 50 if blocks is None else blocks * block_bytes
        self.pool = BlockPool(groups, block_size=BLOCK, memory_budget=budget, choose_blocks=blocks_choice(in_place))
        key = mx.zeros((1, 1, 1, DIM), mx.float16)
        for index in range(len(windows)):
            self.pool.set_geometry(index * each, key, key, batch=1)
        self.prefixes = PrefixCache(self.pool) if caches_prefixes else None
        self._layers, self._uid, self._random = layers, 0, random.Random(0)
        upstream = Upstream(
            response=_Response,
            prompt_response=lambda uid, *rest: (uid, *rest),
            token_buffer=list,
            state_cache=type("NoState", (), {}),
        )
        counters = SimpleNamespace(
            prompt_tokens=0, prompt_time=0.0, decode_time=0.0, generation_tokens=0, generation_steps=0
        )
        self.engine = Engine(
            DecodeBatch(Model(), upstream),
            counters,
            prefill_step_size=2048,
            completion_batch_size=1 << 10,
            prefill_batch_size=8,
            prefixes=None if self.prefixes is None else SharedPrefixes(self.prefixes),
            factory=self.fresh,
        )

    def fresh(self) -> list[Any]:
        sequence = SequenceTables(self.pool)
        return [PagedKVCache(sequence, layer) for layer in range(self._layers)]

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(50_000) for _ in range(length)]

    def add(self, count: int, length: int) -> None:
        empty = self.fresh()
        for _ in range(count):
            self._uid += 1
            request = Request(
                self._uid,
                [self.prompt(length + self._random.randrange(BLOCK) if length > 100 else length)],
                max_tokens=ENDLESS,
                caches=empty,
                history=(),
                sampler=None,
                processors=(),
                matcher=SimpleNamespace(advance=lambda token: False),
            )
            self.engine.add(request)

    def step(self) -> float:
        """Take a step. Return its CPU time on this thread in milliseconds."""
        begin = time.thread_time()
        with HeldLocks():
            self.engine._step()
        return (time.thread_time() - begin) * 1e3

    def start(self) -> None:
        """Compute all prompts."""
        while self.engine.scheduler.has_prompts:
            self.step()

    def steps(self, count: int = STEPS, before: Callable[[], None] = lambda: None) -> float:
        """Return the median milliseconds of ``count`` steps, after three that do not count."""
        found = []
        for _ in range(3):
            before()
            self.step()
        gc.collect()
        gc.disable()
        try:
            for _ in range(count):
                before()
                found.append(self.step())
        finally:
            gc.enable()
        return statistics.median(found)


def steady(rows: int, windows: Sequence[int | None] = (None,)) -> float:
    bench = Bench(windows=windows)
    bench.add(rows, 300)
    bench.start()
    return bench.steps()


def full(rows: int, nodes: int) -> float:
    """Measure steps with a full pool, in which each new block evicts a cached one."""
    bench = Bench(4, blocks=nodes + rows * 12 + 2, caches_prefixes=True)
    assert bench.prefixes is not None
    bench.add(rows, 300)
    bench.start()
    for _ in range(nodes):
        if not bench.pool.memory.room()[0]:
            break
        prefix = bench.pool.new_table()
        bench.pool.append_tokens(prefix, BLOCK)
        bench.prefixes.insert(bench.prompt(BLOCK), prefix)
        bench.pool.release_table(prefix)
    return bench.steps(2 * BLOCK)


def changing(layers: int, rows: int) -> float:
    """Measure steps in each of which one row leaves and one joins."""
    bench = Bench(layers)
    bench.add(rows, 33)
    bench.start()

    def change() -> None:
        running = bench.engine.scheduler.running
        leaving = running[len(running) // 2]
        leaving.max_tokens = leaving.num_generated + 1
        bench.add(1, 2)

    return bench.steps(before=change)


def on_host(rows: int) -> float:
    """Measure steps of one layer over blocks in host memory."""
    bench = Bench(1, in_place=False)
    bench.add(rows, 40)
    bench.start()
    return bench.steps()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=list_of(positive), default=[1, 32, 128, 256])
    parser.add_argument("--nodes", type=list_of(positive), default=[10_000], help="blocks in the prefix cache")
    add_out_argument(parser)


def run(args: argparse.Namespace, given: Sequence[str]) -> None:
    most = max(args.rows)
    results: list[dict[str, Any]] = []

    def note(case: str, milliseconds: float, **sizes: int) -> None:
        results.append({"case": case, **sizes, "ms": round(milliseconds, 3)})

    with stand_ins():
        for count in args.rows:
            note("decode", steady(count), rows=count)
            note("decode, two groups", steady(count, (None, 512)), rows=count)
        for count in args.rows:
            for number in args.nodes if count < most else ():
                note("pool full of prefixes", full(count, number), rows=count, nodes=number)
        note("one leaves, one joins, 64 layers", changing(64, most), rows=most)
    for count in args.rows:
        note("blocks on the host, one layer", on_host(count), rows=count)
    columns = ("case", "rows", "nodes", "ms")
    print(table(columns, [[str(each.get(name, "")) for name in columns] for each in results]))
    write_results(args.out, "engine", given, results, PANELS, "rows", "the host's time", side="case")
