"""Peers: the other processes that compute an engine's model, if there are any."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import mlx.core as mx

from ..errors import RequestFailedError
from ..kv.pool import BlockPool

if TYPE_CHECKING:
    from .scheduler import ScheduledStep
    from .upstream import TokenResponse

T = TypeVar("T")


class Peers(Protocol):
    """Processes that run the same engine over their parts of a model, and must decide alike. The bodies are those of
    :class:`Alone`.

    Attributes:
        is_alone: there are none. Otherwise nothing may depend on this process's own clock, devices or threads.
    """

    is_alone: bool

    def guarded(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model, with calls that end all processes if they raise in one."""
        return model

    def agreed(self, tokens: mx.array) -> mx.array:
        """Return the tokens that the first process has chosen, given this one's."""
        return tokens

    def broadcast(self, value: T) -> T:
        """Return the first process's value."""
        return value

    def begin_step(self) -> None:
        """Compare all decisions so far. Raises RankError: another process has ended."""
        return None

    def note(self, what: str, *values: Iterable[int]) -> None:
        """Note a decision: its kind, and lists of integers."""
        return None

    def note_step(
        self,
        plan: ScheduledStep,
        generated: Sequence[TokenResponse],
        failures: Collection[RequestFailedError],
        pool: BlockPool | None,
    ) -> None:
        """Note what a step has done."""
        return None


class Alone(Peers):
    """No other processes: this one has all of the model."""

    is_alone = True


ALONE = Alone()
