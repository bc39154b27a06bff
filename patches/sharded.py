"""Models over ranks: sharded_load(), and an output layer that is sharded over the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear
from mlx_lm import utils

from ..ranks.world import agreed_budget as agreed_budget
from ..ranks.world import check_heads as check_heads
from ..ranks.world import check_same, connect, model_files
from ..ranks.world import group_of as group_of
from ..ranks.world import peers_of as peers_of
from .patch import replaced


def sharded_load(
    repo: str, pipeline_group: Any = None, tensor_group: Any = None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """Load this rank's part of a model, including the output layer. Has the signature of mlx-lm's function.

    Raises:
        ConfigError: the ranks have different files.
    """
    with replaced(mx.distributed, **_nccl_replacements()):
        loaded: tuple[Any, ...] = utils.sharded_load(repo, pipeline_group, tensor_group, *args, **options)
    group = tensor_group or mx.distributed.init()
    if group.size() > 1:
        folder = Path(repo) if Path(repo).exists() else utils.hf_repo_to_path(repo)
        # Stages of a pipeline download only the weights that they use.
        are_parts = pipeline_group is not None
        check_same(connect(group), "the model's files", model_files(folder), are_optional=are_parts)
    if pipeline_group is None and group.size() > 1 and shard_head(loaded[0], group):
        mx.eval(loaded[0].parameters())
    return loaded


def _nccl_replacements() -> dict[str, Callable[..., mx.array]]:
    """Return what to replace in ``mx.distributed``: with NCCL, ``all_sum`` on the default stream. mlx-lm waits for all
    ranks by a reduction on the CPU, which NCCL does not have."""
    if mx.default_device() != mx.Device(mx.gpu) or "NCCL_HOST_IP" not in os.environ:
        return {}
    original = mx.distributed.all_sum

    def all_sum(x: Any, *, group: Any = None, stream: Any = None) -> mx.array:
        return original(x, group=group)

    return {"all_sum": all_sum}


class ShardedHead(nn.Module):
    """An output layer of which each rank has some rows of the weight.

    Args:
        head: the whole layer, ``nn.Linear`` or ``nn.QuantizedLinear``; its rows must divide by the number of ranks.
        group: MLX's group of the ranks.
    """

    def __init__(self, head: nn.Module, group: Any) -> None:
        super().__init__()
        self.part = shard_linear(head, "all-to-sharded", group=group)

    def __call__(self, x: mx.array) -> mx.array:
        """Return logits ``[..., vocab]`` of hidden states ``[..., hidden]``, with the same bits on every rank."""
        mine = self.part(x)
        parts = mx.distributed.all_gather(mine[None], group=self.part.group)
        return mx.moveaxis(parts, 0, -2).reshape(*mine.shape[:-1], -1)


def shard_head(model: nn.Module, group: Any) -> bool:
    """Shard a model's ``lm_head`` if its rows divide by the number of ranks. Returns whether it was sharded.

    Heads are left unchanged if they are tied to the embedding, sharded by the model already, or of another class.
    """
    owner = next(
        (owner for owner in (model, model.get("language_model")) if owner is not None and "lm_head" in owner), None
    )
    if owner is None:
        return False
    head = owner["lm_head"]
    if type(head) not in (nn.Linear, nn.QuantizedLinear) or head["weight"].shape[0] % group.size():
        return False
    owner["lm_head"] = ShardedHead(head, group)
    return True
