"""model_identity(): what distinguishes a model's keys and values from any other model's, across processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from operator import itemgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

# Increment it when this package computes other keys and values of the same model: what is on disk is not used then.
FORMAT = 1
PIECE_WORDS = 4 << 20  # words of 4 bytes summed at a time


def model_identity(model: nn.Module) -> str:
    """Return a hash of everything that a model's keys and values depend on, except tokens.

    It covers each array's name, dtype and shape, and a checksum of its bytes, computed on the device, since fine-tuned
    models share shapes; each module's class and plain attributes, such as a norm's ``eps``, an adapter's ``scale`` or
    the model's arguments; the versions of MLX and mlx-lm; and :data:`FORMAT`.

    Args:
        model: a loaded model, adapters included.

    Returns:
        64 hex digits.
    """
    texts = [f"format {FORMAT}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"]
    for path, module in sorted(model.named_modules(), key=lambda named: named[0]):
        texts.append(f"{path}: {type(module).__module__}.{type(module).__qualname__} {_as_json(_plain(module))}")
    for name, x in sorted(tree_flatten(model), key=itemgetter(0)):
        texts.append(f"{name}: {x.dtype} {x.shape} {_checksum(x)}" if isinstance(x, mx.array) else f"{name}: {x!r}")
    return digest_of(texts)


def digest_of(parts: Iterable[str]) -> str:
    """Return a hash of texts, 64 hex digits; their order and their boundaries count."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(raw) + raw)
    return digest.hexdigest()


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return a module's numbers, strings and arguments, except private ones, which only concern training."""
    values = {name: asdict(value) if is_dataclass(value) else value for name, value in vars(module).items()}  # type: ignore[arg-type]
    kinds = bool | int | float | str | dict
    return {name: value for name, value in values.items() if isinstance(value, kinds) and not name.startswith("_")}


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__qualname__)


def _checksum(x: mx.array) -> list[int]:
    """Return two sums of the array's words, each mixed with its position, so that their order counts."""
    raw = x.reshape(-1).view(mx.uint8)
    words = mx.pad(raw, (0, -raw.size % 4)).view(mx.uint32) if raw.size % 4 else raw.view(mx.uint32)
    positions = mx.arange(min(words.size, PIECE_WORDS), dtype=mx.uint32) * 0x9E3779B1
    sums = mx.zeros(2, mx.uint32)
    for start in range(0, words.size, PIECE_WORDS):
        piece = words[start : start + PIECE_WORDS]
        mixed = (piece ^ (positions[: piece.size] + start)) * 0x85EBCA6B
        mixed = mixed ^ (mixed >> 15)
        sums = sums + mx.stack([mixed.sum(), (mixed * mixed).sum()])
        mx.eval(sums)  # piece by piece: temporary arrays are as large as the piece
    return sums.tolist()  # type: ignore[return-value]


def identity_of(models: Sequence[Any]) -> str:
    """Return the identity of models, a target and perhaps its draft, on disk (see :func:`model_identity`). Not cached:
    another model may have been saved under the same name since."""
    return digest_of(map(model_identity, models))
