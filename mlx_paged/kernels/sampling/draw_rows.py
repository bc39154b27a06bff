"""A word of each row of a batch, drawn in one launch whatever the rows' temperature, top-p, min-p and top-k are.

The kernel draws and rejects (docs/adr/0029). Its numbers are a function of the row's key and of the token's position,
so a row's word does not depend on the rows beside it.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from ..availability import device_decline
from ..build import backend, build_kernel
from ..trial import Text
from .draw_model import drawn_word
from .drawn_row import DrawnRow
from .self_check import passes

BODY = "draw_rows"
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
# Simdgroups of a row. What is drawn depends on it.
_GROUPS = {"cuda": 32, "metal": 16}
# Logits that a lane loads at a time: as many as its registers hold, as a pass waits for them.
_AHEAD = {"cuda": 16, "metal": 8}
_WORDS_OF_GROUP = 32**3


def draw_rows(x: mx.array, params: mx.array, keys: mx.array, positions: mx.array) -> mx.array:
    """A word of each row.

    Args:
        x: logits ``[R, vocab]``, of which :func:`serves` is true. What is -inf is not drawn, unless all is.
        params: ``[R, 8]`` float32, of :meth:`DrawnRow.params`.
        keys: ``[R, 8]`` uint32, of :meth:`DrawnRow.key_words`.
        positions: ``[R]`` uint32.

    Returns:
        ``[R]``, uint32.
    """
    text = text_of(x.dtype, backend() or "")
    threads = 32 * dict(text.constants)["SG"]
    (out,) = build_kernel(text.body, text.constants)(
        inputs=[x, params, keys, positions],
        grid=(x.shape[0] * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(x.shape[0],)],
        output_dtypes=[mx.uint32],
    )
    return out


def text_of(dtype: mx.Dtype, dialect: str) -> Text:
    """The text for logits of a dtype."""
    bounds = (("GROUPS", 1),) if dialect == "cuda" else ()
    return Text(BODY, (("T", dtype), ("O", mx.uint32), ("SG", _GROUPS[dialect]), ("AHEAD", _AHEAD[dialect]), *bounds))


def serves(x: mx.array) -> bool:
    """Whether the kernel draws from such logits ``[R, vocab]`` here. The first call for a dtype checks it."""
    most = _WORDS_OF_GROUP * min(_GROUPS.values())
    return x.dtype in DTYPES and 0 < x.shape[-1] <= most and device_decline() is None and works(x.dtype)


@lru_cache(maxsize=8)
def works(dtype: mx.Dtype) -> bool:
    """Whether the kernel passes its self-check. One that does not, or does not compile, warns once and is not used."""
    return passes(BODY, dtype, _difference, "MLX's operations draw")


# Of the self-check.
_ROWS = (
    DrawnRow(0.0),
    DrawnRow(1.0),
    DrawnRow(0.7, top_p=0.8),
    DrawnRow(3.0, top_k=1),
    DrawnRow(1.5, min_p=0.2),
    DrawnRow(2.0, min_p=1.0, min_kept=3),
    DrawnRow(5.0, top_p=0.3, top_k=40),
    DrawnRow(1.3, top_p=0.95, min_p=0.01, top_k=2),
    DrawnRow(30.0, top_k=5),
)
_VOCAB = 3001  # words; several of each lane of a CUDA group


def _difference(dtype: mx.Dtype) -> float:
    """Part of the rows whose word is another one than the model's. Two launches, of few rows and of more: on Metal
    these are two texts (kernels/trial.py)."""
    groups, wrong, num_rows = _GROUPS[backend() or ""], 0, 0
    rng = np.random.default_rng(29)
    for count in (2, 45):
        rows = [_ROWS[i % len(_ROWS)]._replace(key=int(rng.integers(1 << 63))) for i in range(count)]
        # Steps of 1/8 are the same in every dtype, and there are many equal ones.
        x = np.round(rng.normal(size=(count, _VOCAB)) * 16).clip(-56, 56) / 8
        x[:, 5:9], x[:, 1500:1700] = 7.25, -np.inf
        positions = rng.integers(1 << 32, size=count, dtype=np.uint32)
        got = draw_rows(
            mx.array(x.astype(np.float32)).astype(dtype),
            mx.array([row.params() for row in rows]),
            mx.array(np.array([row.key_words() for row in rows], np.uint32)),
            mx.array(positions),
        )
        known = np.array(got).tolist()
        for row, logits, position, word in zip(rows, x, positions.tolist(), known, strict=True):
            wrong += word != drawn_word(logits, row, position, groups)
        num_rows += count
    return wrong / num_rows
