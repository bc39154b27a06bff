"""A process of bench_ranks.py: its part of the model, and runs of it that are measured."""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import random
import statistics
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from host_time import HostTime, per_step
from support.bench_common import random_model

WARM = 16  # tokens of the run before one that is measured


class Rank:
    """This process: its part of the model, and where its figures go.

    Args:
        args: of the command line.
        preset: of the model; see scripts/support/bench_common.py.
        dtype: of its weights; None: the preset's.

    Attributes:
        host: what runs say of the host's time in decode steps comes from there; None: they say nothing.
    """

    def __init__(self, args: argparse.Namespace, preset: str, dtype: str | None) -> None:
        size = int(os.environ["BENCH_SIZE"])
        self.rank = int(os.environ.get("MLX_RANK", 0))
        backend = "nccl" if "NCCL_HOST_IP" in os.environ else "ring"
        self.group = mx.distributed.init(strict=True, backend=backend) if size > 1 else None
        self.model = random_model(preset, dtype)
        self.host: HostTime | None = None
        self._heads: dict[str, nn.Module] = {}  # the output layer, by side
        if self.group is not None:
            self.model.shard(self.group)
            mx.eval(self.model.parameters())
        gc.collect()
        mx.clear_cache()
        self.vocab = self.model.args.vocab_size
        self.folder, self.name = args.folder, f"{args.part}-{self.rank}"
        self.figures: dict[str, Any] = {"model_bytes": mx.get_active_memory()}
        self._generate = importlib.import_module("mlx_lm.generate")
        self.tell()

    def tell(self, **figures: Any) -> None:
        """Keep figures, whatever happens next."""
        self.figures.update(figures)
        (self.folder / f"{self.name}.json").write_text(json.dumps(self.figures))

    def prompts(self, rows: int, length: int) -> list[list[int]]:
        chosen = random.Random(rows)
        return [[chosen.randrange(self.vocab) for _ in range(length)] for _ in range(rows)]

    def generator(self, rows: int) -> Any:
        return self._generate.BatchGenerator(self.model, completion_batch_size=rows)

    def be(self, side: str, budget: int | None = None) -> None:
        """From now on ``stock`` or ``paged``, with a new pool. A head that is sharded as our loader does it takes the
        whole one's place, unless both are kept."""
        import mlx_paged
        from mlx_paged.patches.sharded_head import shard_head

        mlx_paged.remove_patches()
        if self._heads:
            self.model.lm_head = self._heads[side]
        elif side == "paged" and self.group is not None and shard_head(self.model, self.group):
            mx.eval(self.model.parameters())
            gc.collect()
            self.figures["model_bytes"] = mx.get_active_memory()
        gc.collect()
        if side == "paged":
            mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory=budget))

    def keep_both_heads(self) -> None:
        """Make the whole output layer again, of all ranks' parts, for :meth:`be` to change between the two."""
        if self.group is None or "lm_head" not in self.model:
            return
        sharded = self.model.lm_head
        whole = nn.Linear(1, 1, bias=False)
        whole.weight = mx.distributed.all_gather(sharded.part.weight, group=self.group)
        mx.eval(whole.parameters())
        self._heads = {"stock": whole.eval(), "paged": sharded}

    def measured(self, rows: int, length: int, answer: int) -> dict[str, Any]:
        """Figures of the second of two runs of a case."""
        self.run(rows, length, min(answer, WARM))
        return self.run(rows, length, answer)

    def run(self, rows: int, length: int, answer: int) -> dict[str, Any]:
        """Figures of so many prompts, from insertion to the last answer's end."""
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        gen = self.generator(rows)
        gen.insert(self.prompts(rows, length), [answer] * rows)
        begin = time.perf_counter()
        first: dict[int, float] = {}
        done = most = 0
        counted = 0
        times: list[float] = []
        host: list[dict[str, list[float]]] = []
        while done < rows:
            _, generated = gen.next()
            now = time.perf_counter() - begin
            for response in generated:
                first.setdefault(response.uid, now)
                done += response.finish_reason is not None
            most = max(most, len(generated))
            if len(first) == rows and not done:
                counted += len(generated) if times else 0
                times.append(now)
                host = [*host[:1], self.host.now()] if self.host is not None else []
        figures = {
            "decode_tokens_per_second": counted / (times[-1] - times[0]) if counted else None,
            "first_token": min(first.values()),
            "last_first_token": max(first.values()),
            "seconds": time.perf_counter() - begin,
            "peak_bytes": mx.get_peak_memory(),
            "most_rows_at_once": most,
            "preemptions": getattr(gen, "preemptions", None),
        }
        if len(times) > 1:
            steps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
            figures["median_step_ms"] = statistics.median(steps)
            if host:
                figures["host_ms_a_step"] = per_step(*host, len(steps))
        gen.close()
        return figures
