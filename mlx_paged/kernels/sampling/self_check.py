"""passes(): the verdict on a kernel of sampling, told once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import mlx.core as mx

from ..build import told_when_compiling
from ..check import outcome_of


def passes(body: str, dtype: mx.Dtype, difference: Callable[[mx.Dtype], float], instead: str) -> bool:
    """Whether a kernel passes its self-check. One that does not, or does not compile, is warned of.

    Args:
        body: the kernel's.
        dtype: of logits.
        difference: of the kernel from its model.
        instead: what is done without it, for people.
    """
    with told_when_compiling():
        *_, reason = outcome_of(lambda: difference(dtype))
    if reason:
        warnings.warn(f"mlx_paged: {body} ({dtype}) is off, {instead}: {reason}", stacklevel=3)
    return not reason
