"""The output layer over ranks: each has a part of the vocabulary, and all get all logits.

mlx-lm shards the layers of a model and leaves its head whole on every rank: of an 8B Llama 1 GB of 16, which each step
reads.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear


class ShardedHead(nn.Module):
    """An output layer of which each rank has some rows of the weight.

    Args:
        head: the whole one, ``nn.Linear`` or ``nn.QuantizedLinear``, whose rows divide by the ranks.
        group: of MLX.

    Attributes:
        is_gathered: what it gives is; see :func:`.world.has_same_logits`.
    """

    is_gathered = True

    def __init__(self, head: nn.Module, group: Any) -> None:
        super().__init__()
        self.part = shard_linear(head, "all-to-sharded", group=group)

    def __call__(self, x: mx.array) -> mx.array:
        """Logits ``[..., vocab]`` of hidden states ``[..., hidden]``, the same bits on every rank."""
        mine = self.part(x)
        parts = mx.distributed.all_gather(mine[None], group=self.part.group)
        return mx.moveaxis(parts, 0, -2).reshape(*mine.shape[:-1], -1)


def shard_head(model: nn.Module, group: Any) -> bool:
    """Shard a model's ``lm_head``, where it has one of its own that divides; whether it has been.

    Not: heads that are the embedding too, those that the model has sharded itself or computes with in its own way.
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
