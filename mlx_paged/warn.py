"""One warning per reason: what falls through to stock mlx-lm says why, once."""

from __future__ import annotations

import warnings

_given: set[str] = set()


class FallThroughWarning(UserWarning):
    """Something runs on stock mlx-lm instead of the paged cache; results are the same."""


def warn_once(reason: str) -> None:
    """Warn about a fall-through unless the same reason was given before in this process."""
    if reason not in _given:
        _given.add(reason)
        warnings.warn(f"mlx_paged: {reason}", FallThroughWarning, stacklevel=3)


def forget_warnings() -> None:
    """Give every reason again from now on."""
    _given.clear()
