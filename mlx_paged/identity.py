"""weights_identity(): what tells a model's weights from any others, across processes."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

SAMPLE_BYTES = 1024


def weights_identity(model: Any) -> str:
    """A hash of every parameter's name, dtype and shape, a checksum of all its bytes and a sample of them.

    Reads all weights once, on the device.

    Args:
        model: a module; adapters are part of its parameters.
    """
    digest = hashlib.sha256()
    for name, x in sorted(tree_flatten(model.parameters()), key=lambda item: item[0]):
        flat = x.reshape(-1)
        raw = flat.view(mx.uint8)
        words = raw[: raw.size // 4 * 4].view(mx.uint32) if raw.size >= 4 else raw.astype(mx.uint32)
        checksum = mx.sum(words)
        sample = b"".join(np.array(part).tobytes() for part in (raw[:SAMPLE_BYTES], raw[-SAMPLE_BYTES:]))
        digest.update(f"{name} {x.dtype} {x.shape} {checksum.item()}".encode() + sample)
    return digest.hexdigest()
