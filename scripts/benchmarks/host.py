"""What Python takes to build a decode step's graph, stock mlx-lm against mlx_paged, where blocks are written in place.

    python scripts/bench.py host --models qwen2,llama --rows 1,4

On any machine: kernels are stand-ins that compute nothing, with all of Python that a launch has on CUDA. Models are
narrow and of random weights, and steps run uncompiled. Microseconds of the thread that a layer more takes, by the lower
quartile of some steps.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx

import mlx_paged
from mlx_paged import config
from mlx_paged.attention import dispatch
from mlx_paged.cache.composites import leaves, with_leaves
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.engine.decode_batch import batch_of
from mlx_paged.engine.request import sequence_of
from mlx_paged.kernels import availability, ops
from mlx_paged.kernels import build as kernel_build
from mlx_paged.kernels.cuda.launch import CompiledKernel
from mlx_paged.kv.storage import choice
from mlx_paged.kv.turn import Stepwise
from mlx_paged.patches import registry
from scripts.support import model_configs

from .report import add_out_argument, list_of, positive, table, write_results

NUM_LAYERS, PROMPT = (2, 26), 300
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers")


class _Launched:
    """Called as ``mx.fast.precompiled_cuda_kernel`` is; gives the same zeros for the same shapes again."""

    def __init__(self) -> None:
        self._zeros: dict[Any, mx.array] = {}
        self.launches = 0

    def __call__(self, *, output_shapes: Any, output_dtypes: Any, inputs: list[mx.array], **options: Any) -> Any:
        self.launches += 1
        found = []
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            key = shape, dtype
            zeros = self._zeros.get(key)
            if zeros is None:
                zeros = self._zeros[key] = mx.zeros(shape, dtype)
                mx.eval(zeros)
            found.append(zeros.reshape(shape))  # another array, as a launch gives
        return found


@contextmanager
def stand_ins() -> Iterator[_Launched]:
    """Within, pools are in place, and kernels are launched as on CUDA."""
    launched = _Launched()
    known: dict[Any, Any] = {}

    def build_kernel(body: str, constants: Any) -> Any:
        kernel = known.get((body, constants))
        if kernel is None:
            source = kernel_build._cuda_source(body, constants)
            assert source is not None
            kernel = known[body, constants] = CompiledKernel(source, b"", kernel_build._TYPE_NAMES["cuda"])
        return kernel

    with ExitStack() as stack:
        for owner, name, value in (
            (ops, "build_kernel", build_kernel),
            (ops, "backend", lambda: "cuda"),
            (ops, "failure_of", lambda text, build: None),
            (availability, "device_unsupported_reason", lambda: None),
            (config, "device_unsupported_reason", lambda: None),
            (choice, "kernel_unsupported_reason", lambda *_: None),
            (dispatch, "kernel_unsupported_reason", lambda *_: None),
            (mx.fast, "precompiled_cuda_kernel", launched),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        ops.variants_of.cache_clear()
        stack.callback(ops.variants_of.cache_clear)
        yield launched


def build(name: str, num_layers: int) -> Any:
    """A model of the module with so many layers."""
    own = dict(model_configs.OVERRIDES.get(name, {}))
    if "layer_types" in own:
        own["layer_types"] = (own["layer_types"] * num_layers)[:num_layers]
    fields = {**dict.fromkeys(_LAYERS, num_layers), "hidden_size": 128, "head_dim": 64}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    own.update({key: num_layers for key in _LAYERS if key in own})
    with (
        mock.patch.dict(model_configs.COMMON, fields),
        mock.patch.dict(model_configs.OVERRIDES, {name: own}),
    ):
        model = model_configs.build(name)
    model.set_dtype(mx.float32 if "moe" in name else mx.bfloat16)  # gather_mm of a CPU takes no other
    mx.eval(model.parameters())
    return model


def caches_of(model: Any, rows: int) -> tuple[list[Any], Any]:
    """Those of a step of so many rows, each with a prompt; and the block tables, where there are any."""
    cache = importlib.import_module("mlx_lm.models.cache")
    each = [cache.make_prompt_cache(model) for _ in range(rows)]
    for index, own in enumerate(each):
        with Stepwise():
            mx.eval(model(mx.arange(PROMPT + index)[None] % model_configs.VOCAB, cache=own))
    if rows == 1:
        return each[0], None
    parts = [leaves(own) for own in each]
    states = [
        None if isinstance(layer[0], PagedKVCache) else layer[0].merge(list(layer))
        for layer in zip(*parts, strict=True)
    ]
    requests: Any = [SimpleNamespace(caches=own, sequence=sequence_of(own)) for own in each]
    batch, tables = batch_of(requests, states)
    return with_leaves(each[0], batch), tables


def seconds(model: Any, rows: int, num_steps: int) -> float:
    """To build a step's graph: the lower quartile."""
    caches, tables = caches_of(model, rows)
    tokens = mx.zeros((rows, 1), mx.int32)
    found = []
    for _ in range(num_steps):
        with Stepwise():
            begin = time.thread_time()
            if tables is not None:
                tables.reserve()
            logits = model(tokens, cache=caches)
            found.append(time.thread_time() - begin)
            mx.eval(logits, [cache.state for cache in leaves(caches)])
    return statistics.quantiles(found[num_steps // 4 :], n=4)[0]


def measure(name: str, rows: int, num_steps: int) -> tuple[float, float]:
    """Stock's and ours, microseconds of a layer: what a step of many layers takes beyond one of few."""
    found: dict[int, list[float]] = {}
    for layers in NUM_LAYERS:
        model = build(name, layers)
        best = found[layers] = [1.0, 1.0]
        for _ in range(3):
            best[0] = min(best[0], seconds(model, rows, num_steps))
            with stand_ins(), mock.patch.object(registry, "_patches", _uncompiled):
                mlx_paged.apply_patches(mlx_paged.PagedConfig())
                try:
                    best[1] = min(best[1], seconds(model, rows, num_steps))
                finally:
                    mlx_paged.remove_patches()
    few, many = NUM_LAYERS
    stock, paged = (1e6 * (after - before) / (many - few) for before, after in zip(*found.values(), strict=True))
    return stock, paged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=list_of(str), default="llama,qwen2,qwen3_moe,olmo3,falcon_h1")
    parser.add_argument("--rows", type=list_of(positive), default=[1, 4])
    parser.add_argument("--steps", type=positive, default=60)
    add_out_argument(parser)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measure each model and number of rows, print the table and write the file."""
    mx.set_default_device(mx.cpu)
    results = []
    for name in args.models:
        for rows in args.rows:
            stock, paged = measure(name, rows, args.steps)
            results.append({"model": name, "rows": rows, "stock_us": stock, "paged_us": paged})
    cells = [
        (
            r["model"],
            str(r["rows"]),
            *(f"{us:.1f}" for us in (r["stock_us"], r["paged_us"], r["paged_us"] - r["stock_us"])),
        )
        for r in results
    ]
    print(table(("model", "rows", "stock us a layer", "paged", "over"), cells))
    write_results(args.out, "host", argv, results)


def _uncompiled() -> list[registry.Patch]:
    return [patch for patch in _all_patches() if not patch.adapter.startswith("models.compiled")]


_all_patches = registry._patches
