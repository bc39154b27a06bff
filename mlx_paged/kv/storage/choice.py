"""The choice of a group's storage, in place with the fused kernel or functional, and its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import KernelUnavailableError
from ...kernels import availability
from ...kernels import ops as kernels
from ...kernels.check import checked
from ...kernels.latent_prompts import prompt_variant_of, unsupported_prompts
from ...kernels.launch_shape import Variant, unsupported
from ...kernels.ops import latent_variants_of, unsupported_latent
from ...kernels.prefill import prefill_variants_of, unsupported_prefill
from .attention_params import LatentHeads, QueryHeads
from .base import ChooseStorage, Geometry, StorageChoice
from .functional import functional_form
from .in_place import InPlaceStorage, pages_of


def kernel_unsupported_reason(geometry: Geometry, block_size: int, heads: QueryHeads) -> str | None:
    """Return why the decode kernel cannot serve these blocks and queries, or None. The first call self-checks it."""
    parts: tuple[Any, ...] = unsupported, kernels.variants_of
    if heads.latent:
        parts = unsupported_latent, latent_variants_of
    return availability.device_unsupported_reason() or _variant_unsupported_reason(geometry, block_size, heads, *parts)


def _variant_unsupported_reason(
    geometry: Geometry,
    block_size: int,
    heads: QueryHeads,
    unsupported_reason: Callable[..., str | None],
    variants_of: Callable[..., Sequence[Variant]],
) -> str | None:
    """Return why no variant of a kernel serves these, or None. Checks variants, fastest first, until one passes."""
    num_kv_heads, k_dim, v_dim, dtype, _ = geometry
    pages = pages_of(geometry)
    gqa, rest = divmod(heads.num_q_heads, num_kv_heads)
    if rest:
        return f"{heads.num_q_heads} query heads are not a multiple of {num_kv_heads} KV heads"
    why = unsupported_reason(dtype, k_dim, v_dim, gqa, block_size)
    if why:
        return why
    reasons = []
    for variant in variants_of(
        dtype, k_dim, v_dim, heads.num_q_heads, num_kv_heads, block_size, heads.softcap, heads.sinks, pages
    ):
        result = checked(variant)
        if result.ok:
            return None
        reasons.append(result.reason)
    if not reasons:
        return f"no kernel for head size {k_dim} (pages: {pages or 'not quantised'}) fits this GPU"
    return f"the kernel failed its self-check: {'; '.join(reasons)}"


def prefill_unsupported_reason(geometry: Geometry, block_size: int, heads: QueryHeads) -> str | None:
    """Return why the prefill kernel cannot serve these blocks and queries, or None. The first call self-checks it."""
    if availability.on_metal():
        return "on Metal prompts take MLX's attention"
    return availability.device_unsupported_reason() or _variant_unsupported_reason(
        geometry, block_size, heads, unsupported_prefill, prefill_variants_of
    )


def latent_prefill_unsupported_reason(geometry: Geometry, block_size: int, heads: LatentHeads) -> str | None:
    """Return why the kernel over keys and values expanded from latents cannot serve these blocks and heads, or None.
    The first call self-checks it, with all launches of its steps."""
    why = availability.device_unsupported_reason()
    if why is not None or not availability.prepares_plans():
        return why or "the kernel for prompts over latents requires CUDA"
    num_kv_heads, _, rope, dtype, page_format = geometry
    if num_kv_heads != 1 or page_format is not None:
        return "latent pages must have one KV head and cannot be quantised"
    refused = unsupported_prompts(dtype, heads.head_dim, heads.value_dim, rope, block_size)
    if refused:
        return refused
    variant = prompt_variant_of(dtype, heads.head_dim, heads.value_dim, rope, block_size)
    if variant is None:
        return "this GPU has too little shared memory for the kernel for prompts over latents"
    result = checked(variant)
    return None if result.ok else f"the kernel failed its self-check: {result.reason}"


def storage_choice(use_kernel: bool | None) -> ChooseStorage:
    """Return a pool's function that chooses storage: True demands the kernel, False forbids it, None uses it where it
    works."""

    def choose(geometry: Geometry, block_size: int, heads: QueryHeads | None) -> StorageChoice:
        if use_kernel is False:
            return StorageChoice(functional_form(geometry), "kernel=off")
        why = kernel_unsupported_reason(geometry, block_size, heads or QueryHeads(geometry.num_kv_heads))
        if why is None:
            return StorageChoice(InPlaceStorage, "the fused kernel works here")
        if use_kernel:
            raise KernelUnavailableError(f"kernel=on, but {why}; use auto or off (gather-then-SDPA)")
        return StorageChoice(functional_form(geometry), why)

    return choose
