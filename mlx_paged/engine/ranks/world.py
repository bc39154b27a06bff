"""Which ranks a model is sharded over, and the one connection of this process to them."""

from __future__ import annotations

import os
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from ...errors import ConfigError
from .ranks import Ranks

RANK_TIMEOUT = 30.0
VARIABLE = "MLX_PAGED_RANK_TIMEOUT"
SHARDED = tuple(
    kind
    for kind in vars(distributed).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == distributed.__name__
)

_lock = threading.Lock()
_connected: dict[tuple[int, int], Ranks] = {}  # by rank and size


def parse_timeout(text: str | float) -> float:
    """Seconds, at least 1. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"rank timeout must be a number of seconds, not {text!r}") from None
    if not 1 <= value < float("inf"):
        raise ConfigError(f"rank timeout must be at least 1 second, not {text!r}")
    return value


def connect(group: Any, timeout: float | None = None) -> Ranks:
    """The connection of this process to the other ranks of a group; made at the first call, by all of them.

    Args:
        group: of MLX, of more than one rank.
        timeout: see :class:`Ranks`; None: what the variable says, or 30 seconds. The first call's counts.

    Raises:
        RankError: they have not found each other. ConfigError: the variable is unusable.
    """
    with _lock:
        key = (group.rank(), group.size())
        if key not in _connected:
            if timeout is None:
                timeout = parse_timeout(os.environ.get(VARIABLE) or RANK_TIMEOUT)
            _connected[key] = Ranks(group, timeout)
        return _connected[key]


def group_of(model: Any) -> Any | None:
    """The group that a model is sharded over; None: all of it is here, or its layers are in several places.

    A process may be one of several and compute a model of its own, as in an evaluation: the layers tell.
    """
    if not isinstance(model, nn.Module) or not mx.distributed.is_available():
        return None
    group: Any = next((vars(module)["group"] for module in model.modules() if isinstance(module, SHARDED)), None)
    return None if group is None or group.size() == 1 else group


def ranks_of(model: Any) -> Ranks | None:
    """The ranks that a model is sharded over; None if all of it is here. A collective call where it is sharded."""
    group = group_of(model)
    return None if group is None else connect(group)


def has_same_logits(model: Any) -> bool:
    """Whether each rank of a sharded model has the same bits of logits: they are gathered from all."""
    return isinstance(model, nn.Module) and any(getattr(module, "is_gathered", False) for module in model.modules())
