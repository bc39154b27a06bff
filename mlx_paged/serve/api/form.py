"""Form: how an answer looks to a kind of client, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..refusal import RequestRefused
from .pieces import Piece, Usage


class Event(NamedTuple):
    """One of a stream; ``data`` is JSON, or text as it is."""

    data: Any
    name: str | None = None


class Form(Protocol):
    """Of one request."""

    def begin(self, usage: Usage) -> list[Event]:
        """What a stream begins with; of the usage, what is known by then."""
        ...

    def piece(self, piece: Piece) -> list[Event]:
        """A part of a stream; the last one of each answer says why it ends."""
        ...

    def end(self, usage: Usage) -> list[Event]:
        """What a stream ends with, behind the last pieces."""
        ...

    def failed(self, refusal: RequestRefused) -> list[Event]:
        """What a stream ends with if it fails."""
        ...

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answers without a stream, in the order of their indices."""
        ...
