"""Multi-head latent attention (MLA) of DeepSeek V3 and its relatives: a decode step attends over pages of latents.

A token's cache is a latent and a part of a key that is rotated by its position, of one head. mlx-lm gives the one as
keys and the other as values to the cache, fetches both, and multiplies for itself. Where a kernel attends over the
blocks, one new token per row does what mlx-lm's code does for one token (the absorbed form), but for the fetching.
Everything else goes through mlx-lm's own code: prompts, and blocks that no kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import mlx.core as mx

from ...attention import dispatch
from ...cache.batch_cache import PagedBatchKVCache
from ...engine.compiled.compiled_step import StepLayer
from ...kv.storage.scoring import Scoring
from ..cache.layer_cache import PagedLayerCache
from .attention import AttentionCall, takes


class Projected(NamedTuple):
    """What attention is given for one token of each row.

    Attributes:
        nope: part of the queries that is not rotated, ``[B, n_heads, 1, qk_nope_head_dim]``.
        rope: part that is, ``[B, n_heads, 1, qk_rope_head_dim]``.
        latent: ``[B, 1, 1, kv_lora_rank]``.
        rotated: part of the key, ``[B, 1, 1, qk_rope_head_dim]``.
    """

    nope: mx.array
    rope: mx.array
    latent: mx.array
    rotated: mx.array


def project(self: Any, x: mx.array, offset: Any) -> Projected:
    """Of x ``[B, 1, hidden]``, in the operations of mlx-lm's modules."""
    batch, heads = x.shape[0], _heads_of(self)
    if getattr(self, "q_lora_rank", None) is None:
        q = self.q_proj(x)
    else:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
    q = q.reshape(batch, heads, 1, -1)
    if getattr(self, "mla_scale_q_lora", None) is not None:
        q = q * self.mla_scale_q_lora
    latent, rotated = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
    latent = self.kv_a_layernorm(latent)
    if getattr(self, "mla_scale_kv_lora", None) is not None:
        latent = latent * self.mla_scale_kv_lora
    nope, rope = mx.split(q, [self.qk_nope_head_dim], axis=-1)
    rotated = mx.expand_dims(rotated, axis=1)
    if "rope" in self:
        rope, rotated = self.rope(rope, offset), self.rope(rotated, offset)
    return Projected(nope, rope, mx.expand_dims(latent, axis=1), rotated)


def finish(self: Any, out: mx.array, x: mx.array) -> mx.array:
    """From heads ``[B, n_heads, 1, v_head_dim]`` to ``[B, 1, hidden]``."""
    return (self.dense if "dense" in self else self.o_proj)(out.reshape(x.shape[0], 1, -1))


def finish_gated(self: Any, out: mx.array, x: mx.array) -> mx.array:
    """As :func:`finish`, where values of heads may be gated (Kimi K3)."""
    out = out.reshape(x.shape[0], 1, -1)
    return self.o_proj(out * mx.sigmoid(self.g_proj(x)) if self.use_gate else out)


def finish_heads_gated(self: Any, out: mx.array, x: mx.array) -> mx.array:
    """As :func:`finish`, where heads are gated (Bailing V3)."""
    gate = mx.sigmoid(self.g_proj(x).astype(mx.float32)).astype(out.dtype)
    return self.dense((out.reshape(*gate.shape, -1) * gate[..., None]).reshape(x.shape[0], 1, -1))


def latent_call(finish: Callable[[Any, mx.array, mx.array], mx.array]) -> Callable[[AttentionCall], AttentionCall]:
    """Makes the adapter of an attention module whose queries, latents and keys :func:`project` makes.

    Args:
        finish: from the module, the heads' outputs and x to its result.

    Returns:
        A function from upstream's ``__call__`` to its replacement.
    """

    def adapt(original: AttentionCall) -> AttentionCall:
        def __call__(self: Any, x: mx.array, mask: mx.array | str | None = None, cache: Any | None = None) -> mx.array:
            if x.shape[1] != 1 or not _serves(cache, self, x.shape[0]):
                return original(self, x, mask, cache)
            return finish(self, _attended(self, project(self, x, cache.offset), mask, cache), x)

        return _marked(__call__)

    return adapt


adapt = latent_call(finish)
adapt_gated = latent_call(finish_gated)
adapt_heads_gated = latent_call(finish_heads_gated)


def adapt_scaled(original: AttentionCall) -> AttentionCall:
    """The adapter of Mistral 4, whose queries are scaled by their positions."""

    def __call__(
        self: Any, x: mx.array, attn_scale: mx.array, mask: mx.array | str | None = None, cache: Any | None = None
    ) -> mx.array:
        if x.shape[1] != 1 or not _serves(cache, self, x.shape[0]):
            return original(self, x, attn_scale, mask, cache)
        made = project(self, x, cache.offset)
        made = made._replace(nope=made.nope * attn_scale, rope=made.rope * attn_scale)
        return finish(self, _attended(self, made, mask, cache), x)

    return _marked(__call__)


def attends_latents(module: Any) -> bool:
    """Whether a module's attention is replaced by an adapter of this file."""
    return getattr(type(module).__call__, "attends_latents", False)


def _marked(call: AttentionCall) -> AttentionCall:
    call.attends_latents = True  # type: ignore[attr-defined]
    return call


def _attended(self: Any, made: Projected, mask: mx.array | str | None, cache: Any) -> mx.array:
    """``[B, n_heads, 1, v_head_dim]``"""
    queries = mx.concatenate([self.embed_q(made.nope), made.rope], axis=-1)
    return self.unembed_out(cache.attend(queries, made.latent, made.rotated, Scoring(self.scale, mask, latent=True)))


def _heads_of(self: Any) -> int:
    heads: int = self.num_attention_heads if hasattr(self, "num_attention_heads") else self.num_heads
    return heads


def _serves(cache: Any, module: Any, batch: int) -> TypeGuard[PagedLayerCache | PagedBatchKVCache | StepLayer]:
    """Whether a kernel attends over this cache's latents, for one new token of each of so many rows."""
    if not isinstance(cache, PagedLayerCache | PagedBatchKVCache | StepLayer) or not takes(cache, batch):
        return False
    if isinstance(cache, StepLayer):
        return True
    if isinstance(cache, PagedBatchKVCache) and cache.is_padded:
        return False
    return dispatch.serves_latents(_heads_of(module), cache.pool, cache.layer)
