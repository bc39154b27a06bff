"""What an engine is given: proposers of drafts, peers over ranks, and the parts of mlx-lm that it uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx

from ..errors import RequestFailedError
from ..kv.pool import BlockPool
from .request import Request
from .scheduler import ScheduledStep

T = TypeVar("T")

MOST_TOKENS = 256  # most tokens of a step with drafts: with more, matrix products take longer


class Proposal(NamedTuple):
    """Tokens proposed to follow the next token of rows.

    Attributes:
        counts: drafts of each row of the batch, in order; 0 where there are none.
        tokens: the drafts, row by row; an array may not be computed yet.
    """

    counts: list[int]
    tokens: list[int] | mx.array


class Proposer(Protocol):
    """Proposes drafts for the rows of a decode batch. It only chooses which tokens the model verifies: what a row gets
    is sampled from the model's own logits.
    """

    @property
    def rows(self) -> Collection[Request]:
        """Return the rows that may get drafts."""

    @property
    def seconds_saved(self) -> float:
        """Seconds that drafts have saved, as far as measured; negative: lost."""

    def add(self, rows: Sequence[Request]) -> None:
        """Note that rows have joined the batch; those that want no drafts are ignored."""

    def remove(self, rows: Collection[Request]) -> None:
        """Note that rows have left, or get no more drafts; those that had none are ignored."""

    def propose(
        self, rows: Sequence[Request], inputs: mx.array, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """Return drafts for a step of the batch; None: the step goes without.

        Args:
            rows: rows of the batch.
            inputs: their next tokens, which the drafts follow, ``[B]``.
            vocab_size: size of the model's vocabulary; None: not known yet.
            is_alone: no prompt is computed in the step.
        """

    def note(
        self,
        rows: Sequence[Request],
        drafted: Sequence[int],
        accepted: Sequence[int],
        following: list[int],
        *,
        is_new: bool,
    ) -> None:
        """Note how many of each row's drafts a verification accepted; they are in ``row.source`` now.

        Args:
            rows: rows of the batch.
            drafted: number of drafts of each.
            accepted: how many of them were right, from the first on.
            following: the next token of each.
            is_new: a step of this shape was compiled in it, so its time is no measure of others.
        """


def most_drafts(row: Request) -> int:
    """Return how many drafts the row could use: the tokens that it may get after its next one."""
    is_delivered = row.logits is not None  # its next token, in this step
    return row.max_tokens - row.num_generated - is_delivered


def num_known(row: Request) -> int:
    """Return how many tokens of the row the host knows that come before its next one."""
    return len(row.history) + len(row.source) - (row.logits is None)


class TokenResponse(Protocol):
    """The response to the caller for one token."""

    uid: int
    token: int
    finish_reason: str | None
    all_tokens: list[int] | None

    def attach(self, request: Any) -> None:
        """Take ownership of the finished request and its cache."""

    def drop_cache(self) -> bool:
        """Release that cache unless it was read. Returns whether it was released."""


class Upstream(NamedTuple):
    """Classes and functions of mlx-lm, given by the patches, so that the engine imports none of it.

    Attributes:
        response: makes the response for a token, from uid, token, its :class:`.request.TokenLogits`, the finish
            reason or None, and ``num_cached``.
        prompt_response: makes the response for a prompt's progress, from uid, (tokens done, tokens in all), whether a
            segment ends there, and whether the prompt does.
        token_buffer: keeps a request's tokens for its logits processors.
        state_cache: class of the caches of layers that keep a state instead of keys and values.
    """

    response: Callable[..., TokenResponse]
    prompt_response: Callable[[int, tuple[int, int], bool, bool], Any]
    token_buffer: Callable[[Sequence[int]], Any]
    state_cache: type[Any]


class Peers:
    """Other processes that run the same engine over their parts of a model, and must decide alike. The methods here are
    those of a process that is alone.

    Attributes:
        is_alone: there are none. Otherwise nothing may depend on this process's own clock, devices or threads.
    """

    is_alone = True

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

    def note(self, what: str, *values: Iterable[int]) -> None:
        """Note a decision: its kind, and lists of integers."""

    def note_step(
        self,
        plan: ScheduledStep,
        generated: Sequence[TokenResponse],
        failures: Collection[RequestFailedError],
        pool: BlockPool | None,
    ) -> None:
        """Note what a step has done."""


ALONE = Peers()
