"""Find the ranks that a model is sharded over, and check that all of them start alike."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from ..engine.interfaces import ALONE, Peers
from ..errors import ConfigError
from ..kernels.availability import backend
from .ranks import Ranks

RANK_TIMEOUT = 30.0
VARIABLE = "MLX_PAGED_RANK_TIMEOUT"
SHARDED = tuple(
    kind
    for kind in vars(distributed).values()
    if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == distributed.__name__
)

_lock = threading.Lock()
_connected: list[Ranks] = []  # at most one: there is one group of all processes


def parse_timeout(text: str | float) -> float:
    """Return a timeout in seconds, at least 1. Raises ConfigError."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"rank timeout must be a number of seconds, got {text!r}") from None
    if not 1 <= value < float("inf"):
        raise ConfigError(f"rank timeout must be at least 1 second and finite, got {text!r}")
    return value


def connect(group: Any, timeout: float | None = None) -> Ranks:
    """Return this process's connection to the other ranks of a group. The first call makes it, and is collective.

    Args:
        group: MLX's group, of more than one rank.
        timeout: see :class:`Ranks`; None: the environment variable, or 30 seconds. Only the first call's counts.

    Raises:
        RankError: the ranks could not connect. ConfigError: the variable is invalid.
    """
    with _lock:
        if not _connected:
            if timeout is None:
                timeout = parse_timeout(os.environ.get(VARIABLE) or RANK_TIMEOUT)
            _connected.append(Ranks(group, timeout))
        return _connected[0]


def group_of(model: Any) -> Any | None:
    """Return the group that a model's layers are sharded over; None: it has no sharded layers.

    The layers decide, since one of several processes may compute a whole model by itself, as in an evaluation.
    """
    if not isinstance(model, nn.Module) or not mx.distributed.is_available():
        return None
    group: Any = next((vars(module)["group"] for module in model.modules() if isinstance(module, SHARDED)), None)
    return None if group is None or group.size() == 1 else group


def ranks_of(model: Any) -> Ranks | None:
    """Return the ranks that a model is sharded over; None if it is not. A collective call if it is."""
    group = group_of(model)
    return None if group is None else connect(group)


def peers_of(model: Any) -> Peers:
    """Return the ranks that a model is sharded over, for its engine. A collective call if there are any."""
    return ranks_of(model) or ALONE


def check_heads(model: Any) -> None:
    """Raise ConfigError if a sharded model's key and value heads cannot be split over its ranks: mlx-lm cuts them."""
    group, heads = group_of(model), getattr(getattr(model, "args", None), "num_key_value_heads", None)
    if group is not None and isinstance(heads, int) and heads % group.size():
        raise ConfigError(f"{heads} key and value heads cannot be split over {group.size()} ranks")


# What must be the same ------------------------------------------------------------------------------------------------


def agreed_budget(model: Any, num_bytes: int, options: Mapping[str, Any]) -> int:
    """Return the smallest budget in bytes that a rank has for its part of a model's pool; ``num_bytes`` if the model is
    not sharded.

    Args:
        model: as loaded by mlx-lm.
        num_bytes: this rank's budget.
        options: the pool's, by name.

    Raises:
        ConfigError: the options, or the backends of kernels, differ.
    """
    ranks = ranks_of(model)
    if ranks is None:
        return num_bytes
    named = {name: repr(value) for name, value in options.items()}
    check_same(ranks, "the configuration", {**named, "backend": backend() or "the CPU"})
    return min(ranks.exchange(num_bytes))


# Suffixes of the files that mlx-lm reads from a model's folder.
SUFFIXES = (".json", ".jinja", ".jsonl", ".model", ".py", ".safetensors", ".tiktoken", ".txt")
SAMPLE_BYTES = 1 << 16  # read at the start, in the middle and at the end of a file
MOST_SHOWN = 60  # characters of a value that differs


def check_same(ranks: Ranks, what: str, mine: Mapping[str, Any], *, are_optional: bool = False) -> None:
    """Compare values by name. A collective call.

    Args:
        ranks: the ranks to compare.
        what: name of the values, for the message.
        mine: this rank's values, JSON-serialisable. They are sent to other ranks: no secrets.
        are_optional: compare only names that both ranks have.

    Raises:
        ConfigError: values differ; raised on all ranks alike, naming what differs.
    """
    first, *others = ranks.exchange(dict(mine))
    for rank, theirs in enumerate(others, 1):
        names = set(first) & set(theirs) if are_optional else set(first) | set(theirs)
        for name in sorted(names):
            if first.get(name) != theirs.get(name):
                shown = " and ".join(str(values.get(name, "missing"))[-MOST_SHOWN:] for values in (first, theirs))
                raise ConfigError(f"{what} of rank 0 and rank {rank} differ: {name}: {shown}")


def versions() -> dict[str, str]:
    """Return the versions of MLX, mlx-lm and this package."""
    return {name: version(name) for name in ("mlx", "mlx-lm", "mlx-paged")}


def model_files(folder: Path) -> dict[str, str]:
    """Return a digest of each file of a model's folder that mlx-lm reads: of its size, and of samples of its bytes."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and path.is_file():
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest = hashlib.sha256(str(size).encode())
                for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE_BYTES))
            found[path.name] = digest.hexdigest()[:16]
    return found
