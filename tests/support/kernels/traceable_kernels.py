"""Fakes of the decode kernel that ``mx.compile`` can trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_paged.attention import gather
from mlx_paged.engine import compiled_step
from mlx_paged.kernels import ops as kernels
from mlx_paged.kv.geometry import AttentionParams
from tests.support.kernels.fake_kernels import FakeKernels, fake_kernels


@contextmanager
def traceable_kernels() -> Iterator[FakeKernels]:
    """Like :func:`fake_kernels`, with steps that are really compiled. A traced step computes the right attention but
    stores nothing, so only the first of a sequence's compiled steps sees all keys."""
    compile_function = compiled_step.compile_function
    written: dict[int, tuple[mx.array, tuple[mx.array, ...]]] = {}  # per traced layer, by the id of its keys
    with fake_kernels() as fake:
        stored = kernels.prepare_decode

        def prepare_decode(k_pool: mx.array, v_pool: mx.array, visible: Any, **options: Any) -> Any:
            try:
                return stored(k_pool, v_pool, visible, **options)
            except (ValueError, RuntimeError):  # in a trace: arrays have no values
                pass

            def launch(q: mx.array, keys: mx.array, values: mx.array, fence: mx.array, sinks: Any, *new: Any) -> Any:
                tables, ends, starts = visible
                if new[0] is not None:
                    written[id(keys)] = (keys, new[:2])
                new = written[id(keys)][1]  # a second attention sees what the first one would have written
                positions = mx.arange(tables.shape[1] * keys.shape[2])[None]
                seen = []
                for pool, newest in zip((keys, values), new, strict=True):
                    x = pool[tables].transpose(0, 2, 1, 3, 4).reshape(q.shape[0], pool.shape[1], -1, pool.shape[3])
                    seen.append(mx.where((positions == ends - 1)[:, None, :, None], newest, x))
                mask = ((positions < ends) & (positions >= starts))[:, None, None, :]
                assert options["sinks"] == (sinks is not None)
                how = {"softcap": options["softcap"], "sinks": sinks, "latent": options["latent"]}
                if options["softcap"] is not None:
                    mask = mask[:, None]
                params = AttentionParams(options["scale"], mask, **how)
                out = gather.attention(q, *seen, params)
                return out, fence + 1

            return launch

        with (
            mock.patch.object(compiled_step, "compile_function", compile_function),
            mock.patch.object(kernels, "prepare_decode", prepare_decode),
            mock.patch.object(fake, "_pass", lambda kernel, k_pool, v_pool, fence: fence + 1),
        ):
            yield fake
