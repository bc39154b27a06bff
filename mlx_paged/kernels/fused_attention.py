"""Choice of the prefill path on Metal: MLX's fused attention over a copy, or our kernel over the blocks in place.

Where MLX's attention is not fused, it stores the scores of all queries and keys of a layer. The conditions here are
those of MLX 0.32.4 (docs/adr/0063) for more than 8 queries; for fewer it has another kernel. The choice: docs/adr/0067.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from typing import NamedTuple

import mlx.core as mx

from ..device import confirm
from . import ops
from .launch_shape import MAX_QUERY_LENGTH, Variant
from .prefill import prepare_prefill
from .quantized import new_blocks
from .trial import seconds_of

FUSED_DIMS = (64, 80, 128)  # head sizes fused for any number of queries
# The first generation of Apple GPUs with matrix units, and the first macOS whose wheels use them ("NAX" in MLX).
NAX_GENERATION, NAX_RELEASE = 17, 26


def least_fused_queries(head_dim: int, nax: bool) -> int:
    """Return the least number of queries for which MLX's attention is fused; 0 if the number does not matter: the head
    size is fused always, or never."""
    if head_dim == 512 or (head_dim == 256 and nax):
        return 1024
    return 2048 if head_dim == 256 else 0


def wheel_release() -> int | None:
    """Return the release of macOS that MLX's wheel was built for; None on other systems."""
    try:
        tags = metadata.distribution("mlx-metal").read_text("WHEEL") if platform.mac_ver()[0] else None
    except metadata.PackageNotFoundError:
        tags = None
    found = re.search(r"macosx_(\d+)_", tags or "")
    return int(found[1]) if found else None


@lru_cache(maxsize=1)
def has_nax() -> bool:
    """Return whether MLX uses an Apple GPU's matrix units."""
    found = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture", "")))
    return found is not None and int(found[1]) >= NAX_GENERATION and (wheel_release() or 0) >= NAX_RELEASE


class PromptPath(NamedTuple):
    """How a prompt's new tokens attend after a prefix.

    Attributes:
        in_place: our kernel reads the blocks; else MLX's attention reads a copy of the layer's context.
        reason: why, for reports.
    """

    in_place: bool
    reason: str


# New tokens and contexts that are measured. A chunk uses the largest of each that it reaches, else the smallest. Beyond
# them, longer contexts slow both paths equally.
TOKENS, CONTEXTS = (256, 1024), (2048, 8192)
QUERY_HEADS = 16  # at least, so that both paths fill a GPU
MOST_SECONDS = 0.3  # after which no further launch of a path is timed

_measured: dict[tuple[Variant, int, int], PromptPath] = {}


def prompt_path(variant: Variant, num_tokens: int, length: int, window: int | None = None) -> PromptPath:
    """Return the faster path on this machine. If it is not known in advance, both are timed, once per process.

    Args:
        variant: variant of the prefill kernel, which has passed its self-check.
        num_tokens: new tokens of a sequence.
        length: tokens of the sequence, the new ones included.
        window: number of tokens that each token sees.
    """
    known = _known_reason(variant, num_tokens, length, window)
    if known is not None:
        return PromptPath(True, known)
    tokens = max((n for n in TOKENS if n <= num_tokens), default=TOKENS[0])
    context = max((n for n in CONTEXTS if n <= length), default=CONTEXTS[0])
    found = _measured.get((variant, tokens, context))
    if found is None:
        found = _measured[variant, tokens, context] = _measure(variant, tokens, context)
    return found


def _known_reason(variant: Variant, num_tokens: int, length: int, window: int | None) -> str | None:
    """Return why our kernel serves without a measurement; None if MLX's attention may be faster."""
    if not has_nax():
        return "MLX uses no matrix units here"
    if num_tokens <= MAX_QUERY_LENGTH:
        return f"at most {MAX_QUERY_LENGTH} tokens"
    if variant.softcap:
        return "MLX's attention has no soft cap"
    if window is not None and window < length:
        return "MLX's attention needs a mask array for the window"
    dim = variant.head_dim
    least = 0 if dim in FUSED_DIMS else least_fused_queries(dim, nax=True)
    if dim != variant.value_dim or (dim not in FUSED_DIMS and not least):
        return f"MLX's attention is not fused for head_dim {dim}/{variant.value_dim}"
    return f"MLX's attention is fused from {least} tokens on" if num_tokens < least else None


def _measure(variant: Variant, tokens: int, context: int) -> PromptPath:
    """Time both paths. One that fails is not chosen; if both fail, our kernel is, and its launch raises the error."""
    confirm()  # what fails from here on is a kernel's fault
    seconds, failures = {}, {}
    for path, prepare in PATHS.items():
        try:
            seconds[path] = seconds_of(prepare(variant, tokens, context), MOST_SECONDS)
        except (RuntimeError, ValueError) as error:
            failures[path] = f"{path} failed: {type(error).__name__}: {str(error)[:200]}"
    timings = [f"{1e3 * seconds[path]:.2f} ms {path}" if path in seconds else failures[path] for path in PATHS]
    copied = seconds.get(COPY, float("inf"))
    in_place = seconds.get(IN_PLACE, float("inf")) <= copied
    return PromptPath(in_place, f"measured, {tokens} tokens of {context}: {', '.join(timings)}")


def paths_of(variant: Variant) -> str:
    """Return the paths for all measured sizes of chunks, and why, for reports."""
    found = dict.fromkeys(prompt_path(variant, tokens, context) for tokens in TOKENS for context in CONTEXTS)
    return "; ".join(f"{IN_PLACE if path.in_place else COPY} ({path.reason})" for path in found)


def _blocks(variant: Variant, context: int) -> tuple[mx.array, mx.array, mx.array, int]:
    """Return keys and values of one sequence, the ids of its blocks, and the number of query heads."""
    kv_heads, num_blocks = -(-QUERY_HEADS // variant.gqa), context // variant.block_size
    dims = variant.head_dim, variant.value_dim
    k_pool, v_pool = new_blocks(num_blocks, kv_heads, variant.block_size, dims, variant.dtype, variant.pages)
    return k_pool, v_pool, mx.arange(num_blocks, dtype=mx.int32), kv_heads * variant.gqa


def _in_place(variant: Variant, tokens: int, context: int) -> Callable[[], list[mx.array]]:
    k_pool, v_pool, ids, n_q_heads = _blocks(variant, context)
    q = mx.zeros((tokens, n_q_heads, 1, variant.head_dim), variant.dtype)
    sinks = mx.zeros((n_q_heads,)) if variant.sinks else None
    launch = prepare_prefill(
        k_pool, v_pool, ids[None], [tokens], [context], n_q_heads=n_q_heads, scale=1.0, sinks=variant.sinks,
        variant=variant, pages=variant.pages,
    )  # fmt: skip
    mx.eval(q, k_pool, v_pool, ids)
    return lambda: list(launch(q, k_pool, v_pool, ops.new_fence(), sinks))


def _over_copy(variant: Variant, tokens: int, context: int) -> Callable[[], list[mx.array]]:
    k_pool, v_pool, ids, n_q_heads = _blocks(variant, context)
    q = mx.zeros((1, n_q_heads, tokens, variant.head_dim), variant.dtype)
    sinks = mx.zeros((n_q_heads,), variant.dtype) if variant.sinks else None
    gather = ops.prepare_gather(k_pool, v_pool, ids, 0, context, variant.pages)
    mx.eval(q, k_pool, v_pool, ids)

    def attend() -> list[mx.array]:
        k, v, _ = gather(k_pool, v_pool, ops.new_fence())
        return [mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal", sinks=sinks)]

    return attend


IN_PLACE, COPY = "in place", "by MLX's attention over a copy"
PATHS = {IN_PLACE: _in_place, COPY: _over_copy}
