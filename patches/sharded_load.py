"""sharded_load(): mlx-lm's, also where reductions are only had on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils

from ..engine.ranks.same_start import check_same, model_files
from ..engine.ranks.world import connect
from .replaced import replaced
from .sharded_head import shard_head


def sharded_load(
    repo: str, pipeline_group: Any = None, tensor_group: Any = None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """Load this rank's part of a model, with its part of the head. Takes and returns what mlx-lm's function does.

    Raises:
        ConfigError: the ranks have different files.
    """
    with replaced(mx.distributed, **_on_device()):
        loaded: tuple[Any, ...] = utils.sharded_load(repo, pipeline_group, tensor_group, *args, **options)
    group = tensor_group or mx.distributed.init()
    if group.size() > 1:
        folder = Path(repo) if Path(repo).exists() else utils.hf_repo_to_path(repo)
        # Stages of a pipeline download only the weights that they compute.
        are_parts = pipeline_group is not None
        check_same(connect(group), "the model's files", model_files(folder), are_optional=are_parts)
    if pipeline_group is None and group.size() > 1 and shard_head(loaded[0], group):
        mx.eval(loaded[0].parameters())
    return loaded


def _on_device() -> dict[str, Callable[..., mx.array]]:
    """mlx-lm waits for all ranks with a reduction on the CPU, which NCCL does not have."""
    if mx.default_device() != mx.Device(mx.gpu) or "NCCL_HOST_IP" not in os.environ:
        return {}
    original = mx.distributed.all_sum

    def all_sum(x: Any, *, group: Any = None, stream: Any = None) -> mx.array:
        return original(x, group=group)

    return {"all_sum": all_sum}
