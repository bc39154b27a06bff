"""RequestOptions: what a caller may say of one request beyond what mlx-lm has a place for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class RequestOptions(NamedTuple):
    """Of one request.

    Attributes:
        salt: only requests with the same one share prefixes.
    """

    salt: Hashable = None
