"""Warnings that are given once per reason, mostly of fallbacks to stock mlx-lm."""

from __future__ import annotations

import warnings

_given: set[str] = set()


class NotPagedWarning(UserWarning):
    """Something runs on stock mlx-lm instead of the paged cache; results are the same."""


def warn_once(reason: str, category: type[Warning] = NotPagedWarning) -> None:
    """Warn, if this reason was not given before in this process; by default of a fallback to stock mlx-lm."""
    if reason not in _given:
        _given.add(reason)
        warnings.warn(f"mlx_paged: {reason}", category, stacklevel=3)
