"""DraftSteps: steps of a decode batch that verify drafts, so that rows may take several tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from ..cache.batch import NoBlocksError, NotPackableError
from ..cache.packed_states import PackedStates
from ..kv.pool import BlockPool
from ..warn import warn_once
from .decode_batch import DecodeBatch, Delivery
from .interfaces import Proposal, Proposer
from .model_call import ModelCall
from .request import Request
from .sampling.token_choice import Places
from .scheduler import Growth

NO_DRAFTS_REASON = (
    "no layer is paged, a layer's cache is neither paged nor a state (as with max_kv_size), the model's attention may "
    "bypass mlx-lm's attention function, or its rows are computed one by one"
)


class DraftSteps:
    """Steps that verify a proposer's drafts: a model call takes each row's next token and its drafts, and each row
    keeps the drafts that it would have chosen itself.

    A token is sampled at every position with the row's own sampler, from logits with the row's penalties and grammar
    mask at that position. Sampled tokens are taken in order, up to and including the first that differs from its draft:
    that one was sampled after tokens of the row only, as without drafts.

    Args:
        batch: the decode batch; its layers are paged or keep states, and the model packs.
        pool: pool of its blocks.
        has_room: returns whether rows can grow by these tokens without anything being preempted.
        proposer: proposes the drafts.
    """

    def __init__(
        self, batch: DecodeBatch, pool: BlockPool, has_room: Callable[[Growth], bool], proposer: Proposer
    ) -> None:
        self.batch = batch
        self.proposer = batch.proposer = proposer
        self.pool = pool
        self._has_room = has_room
        # States of the step's rows by layer, and how many of its tokens each row has kept, until :meth:`finish`.
        self._states: dict[int, PackedStates] = {}
        self._kept: list[int] = []

    def step(self, others: Growth) -> list[Delivery] | None:
        """Take a step with drafts, in place of :meth:`DecodeBatch.step`.

        Args:
            others: growth of other requests before the next step.

        Returns:
            The tokens to deliver, those of a row in order. None if the rows have to take a plain step, as no drafts are
            proposed, or blocks are missing; nothing has changed then.

        Raises:
            Exception: the model's own. The rows must be failed.
        """
        self._states = {}
        batch = self.batch
        if batch.proposer is None or not batch.proposer.rows:
            return None
        self.pool.draft_depth = 0
        try:
            proposal = self.proposer.propose(batch.rows, batch.inputs, batch.choice.vocab_size, is_alone=not others)
            self.pool.draft_ms_saved = round(1000 * self.proposer.seconds_saved)
            if proposal is None or not any(proposal.counts):
                return None
            counts = [1 + count for count in proposal.counts]
            if not self._has_room([*zip(batch.rows, counts, strict=True), *others]):
                return None
            call, tokens = ModelCall(batch.rows, counts, states=batch.states, as_rows=True), self._inputs(proposal)
            traces = self.pool.traces
            logits = call.run(batch.forward, tokens)
        except NoBlocksError:
            return None
        except NotPackableError as error:
            self.proposer.remove(list(self.proposer.rows))
            batch.proposer = None
            warn_once(f"drafts are switched off for models of {type(batch.model).__module__}: {error}")
            return None
        self._states = call.states
        return self._deliver(tokens, logits, counts, is_new=self.pool.traces > traces)

    def finish(self, unwanted: Mapping[Request, int]) -> None:
        """Drop ``unwanted`` last tokens of rows from their states, once a step is delivered and while all its rows are
        still in the batch. Block tables are cut separately."""
        if self._states and unwanted:
            for index, row in enumerate(self.batch.rows):
                self._kept[index] -= unwanted.get(row, 0)
            self._keep_states()
        self._states = {}

    def _keep_states(self) -> None:
        for place, states in self._states.items():
            arrays = states.batch(self._kept)
            self.batch.states[place].cache = arrays
            mx.async_eval([x for x in arrays if x is not None])

    # Verifying ------------------------------------------------------------------------------------------------

    def _inputs(self, proposal: Proposal) -> mx.array:
        """Return each row's next token and its drafts, row by row."""
        inputs, (counts, drafts) = self.batch.inputs, proposal
        drafts = mx.array(drafts) if isinstance(drafts, list) else drafts
        return mx.concatenate([inputs, drafts.astype(inputs.dtype)])[_order(tuple(counts))]

    def _deliver(self, inputs: mx.array, logits: mx.array, counts: Sequence[int], *, is_new: bool) -> list[Delivery]:
        """Return the tokens that rows keep of those ``[T]`` that were verified, and set their next ones."""
        batch, rows = self.batch, self.batch.rows
        batch.detach_old_logits()
        places = Places(
            [index for index, count in enumerate(counts) for _ in range(count)],
            [ahead for count in counts for ahead in range(count)],
        )
        owners = [rows[index] for index in places.rows]
        choice = batch.choose(owners, logits, inputs, places)
        given: list[int] = choice.inputs or inputs.tolist()  # type: ignore[assignment]
        chosen: list[int] = choice.tokens.tolist()  # type: ignore[assignment]
        following: list[int] = []
        places_kept: list[int] = []
        taken: list[int] = []  # accepted drafts of each row
        first = 0
        for row, count in zip(rows, counts, strict=True):
            accepted = 0
            while accepted < count - 1 and chosen[first + accepted] == given[first + accepted + 1]:
                accepted += 1
            assert row.sequence is not None
            row.sequence.cut(count - 1 - accepted)
            kept = range(first, first + accepted + 1)
            places_kept += kept
            batch.failed += [(row, choice.broken[place]) for place in kept if place in choice.broken]
            following.append(chosen[first + accepted])
            taken.append(accepted)
            first += count
        deliveries = batch.deliver(
            [owners[place] for place in places_kept],
            [given[place] for place in places_kept],
            choice.logits,
            places_kept,
        )
        self._kept = [1 + accepted for accepted in taken]
        self._keep_states()
        drafted = [count - 1 for count in counts]
        self.pool.drafted += sum(drafted)
        self.pool.accepted += sum(taken)
        self.pool.draft_steps += 1
        self.pool.draft_depth = max(drafted)
        self.proposer.note(rows, drafted, taken, following, is_new=is_new)
        batch.choice.sampler.note_accepted(taken)
        batch.inputs = mx.array(following, choice.tokens.dtype)
        return deliveries


@functools.lru_cache(maxsize=32)
def _order(counts: tuple[int, ...]) -> mx.array:
    """Return the index that takes the tokens of a call (each row's next token, then its drafts) from the next tokens of
    all rows followed by the drafts of all rows."""
    order, draft = [], len(counts)
    for index, count in enumerate(counts):
        order += [index, *range(draft, draft + count)]
        draft += count
    places = mx.array(order, mx.int32)
    mx.eval(places)
    return places
