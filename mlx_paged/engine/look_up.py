"""LookUp: the steps of a decode batch in which rows take several tokens, because they repeat what they had before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.packed_states import PackedStates
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.rows import NotPackableError, Rows
from ..errors import PoolExhaustedError
from ..kv.pool import BlockPool
from ..warn import warn_once
from .decode_batch import DecodeBatch, Delivery
from .proposer import CPU_PRICE, PRICE
from .request import Request
from .sampling.token_choice import Places
from .scheduler import Growth

# What a step with drafts costs beyond one without and beyond the drafts' own price, in tokens of each row: the host
# waits for it (docs/adr/0031).
LEAST_GAIN = 0.75
MOST_TOKENS = 256  # of a step: with more, matrix products take longer
WHY_NOT = "a layer pins tokens, or computes with keys and values by itself, or none is paged"
# Tokens of context that a step reads again for drafts: the kernel reads the row's for each.
MOST_READS = 1 << 18


class LookUp:
    """Proposes what rows are going to repeat and has the model verify it: a call takes each row's next token and its
    drafts, and each row keeps the drafts that it would have chosen itself.

    A token is sampled at every position with the row's own sampler. In order, those that equal the next draft are
    taken, and so is the first that does not; it was sampled behind nothing but tokens of the row, as without drafts.

    Args:
        batch: of the rows; their layers are paged or keep states, and the model packs.
        pool: of their blocks.
        has_room: whether rows can grow by so many tokens, nobody making room for them.
    """

    def __init__(self, batch: DecodeBatch, pool: BlockPool, has_room: Callable[[Growth], bool]) -> None:
        self.batch = batch
        batch.looks_up = True
        self.pool = pool
        self._has_room = has_room
        # The rows' next tokens, if they are known on the host: the batch's array, and what it holds.
        self._known: tuple[mx.array | None, list[int]] = (None, [])
        # States of the step's rows by layer, and how many of its tokens each row has kept, until :meth:`finish`.
        self._states: dict[int, PackedStates] = {}
        self._kept: list[int] = []

    def step(self, others: Growth) -> list[Delivery] | None:
        """Return a step of the batch with drafts, in the place of :meth:`DecodeBatch.reserve` and
        :meth:`DecodeBatch.step`.

        Args:
            others: what else is going to grow before the next step.

        Returns:
            The tokens, several of a row in order. None if the rows are to take a step without: nothing that is worth
            it is expected, there are no blocks for it, or the call has failed, and nothing has changed.
        """
        self._states = {}
        drafts = self._propose()
        if not drafts:
            return None
        rows = self.batch.rows
        counts = [1 + len(drafts.get(row, ())) for row in rows]
        if not self._has_room([*zip(rows, counts, strict=True), *others]):
            return None
        found = self._logits(drafts, counts)
        return None if found is None else self._deliver(*found, drafts, counts)

    def finish(self, unwanted: Mapping[Request, int]) -> None:
        """Have the states of rows end before their last tokens, when what a step gave was delivered and all rows are
        still in the batch. Block tables are cut apart from that."""
        if self._states and unwanted:
            for index, row in enumerate(self.batch.rows):
                self._kept[index] -= unwanted.get(row, 0)
            self._keep_states()
        self._states = {}

    def _keep_states(self) -> None:
        for place, states in self._states.items():
            self.batch.set_state(place, states.batch(self._kept))

    # Proposing ------------------------------------------------------------------------------------------------

    def _propose(self) -> dict[Request, list[int]]:
        """Drafts of the rows that have some, if together they are worth a step."""
        proposers, num_rows = self.batch.proposers, len(self.batch.rows)
        price = PRICE if self.pool.groups[0].in_place else CPU_PRICE
        share = None
        drafts: dict[Request, list[int]] = {}
        gain = 0.0
        for row, proposer in proposers.items():
            proposer.follow(row)
            if not proposer.expects:
                continue
            if share is None:
                share = (MOST_TOKENS - num_rows) // len(proposers)
                share = min(share, MOST_READS // max(1, sum(each.length for each in proposers)))
            is_delivered = row.logits is not None  # with this step, its next token
            most = min(share, row.max_tokens - row.num_generated - is_delivered)
            known = len(row.history) + len(row.source)
            found = proposer.drafts(known + is_delivered - proposer.num_tokens, most, price)
            if found is not None:
                drafts[row] = found.tokens
                gain += found.gain
        return drafts if gain >= LEAST_GAIN * num_rows else {}

    # Verifying ------------------------------------------------------------------------------------------------

    def _logits(self, drafts: dict[Request, list[int]], counts: Sequence[int]) -> tuple[mx.array, mx.array] | None:
        """Return the tokens of the call ``[T]``, row by row, and their logits ``[T, vocab]``, with the rows' caches
        behind all of them; None if that cannot be had, and nothing has changed."""
        batch = self.batch
        batch.settle_tables()
        sequences = [sequence for row in batch.rows if (sequence := row.sequence) is not None]
        rows = Rows(self.pool, sequences, counts, as_rows=True)
        try:
            failed = rows.reserve()
            if failed is not None:
                raise failed.error
            inputs = self._inputs(drafts)
            caches = batch.rows[0].caches or []
            layers: list[Any] = []
            for place, cache in enumerate(leaves(caches)):
                if isinstance(cache, PagedKVCache):
                    layers.append(PagedBatchKVCache(rows, cache.layer, type(cache)))
                else:
                    layers.append(PackedStates.over(batch.state(place), counts))
            logits: mx.array = batch.call(inputs[:, None], cache=with_leaves(caches, layers))[:, -1, :]
            rows.commit()
            self._states = {place: each for place, each in enumerate(layers) if isinstance(each, PackedStates)}
        except Exception as error:  # a step without drafts says whose fault it is
            rows.take_back()
            if isinstance(error, NotPackableError):
                batch.looks_up = False
                batch.proposers.clear()
                warn_once(f"tokens are not looked up in models of {type(batch.model).__module__}: {error}")
            elif not isinstance(error, PoolExhaustedError):  # it may be for a draft, which nobody has to compute
                for row in drafts:
                    del batch.proposers[row]
            return None
        return inputs, logits

    def _inputs(self, drafts: dict[Request, list[int]]) -> mx.array:
        inputs, rows = self.batch.inputs, self.batch.rows
        known, tokens = self._known
        if inputs is known:
            flat = [each for row, token in zip(rows, tokens, strict=True) for each in (token, *drafts.get(row, ()))]
            return mx.array(flat, inputs.dtype)
        parts, begin = [], 0
        for index, row in enumerate(rows):
            if row in drafts:
                parts += [inputs[begin : index + 1], mx.array(drafts[row], inputs.dtype)]
                begin = index + 1
        return mx.concatenate([*parts, inputs[begin:]])

    def _deliver(
        self, inputs: mx.array, logits: mx.array, drafts: dict[Request, list[int]], counts: Sequence[int]
    ) -> list[Delivery]:
        batch, rows = self.batch, self.batch.rows
        batch.let_go()
        places = Places(
            [index for index, count in enumerate(counts) for _ in range(count)],
            [ahead for count in counts for ahead in range(count)],
        )
        owners = [rows[index] for index in places.rows]
        choice = batch.choose(owners, logits, inputs, places)
        given: list[int] = choice.inputs or inputs.tolist()  # type: ignore[assignment]
        chosen: list[int] = choice.tokens.tolist()  # type: ignore[assignment]
        deliveries: list[Delivery] = []
        following = []
        taken = []  # drafts of each row
        first = 0
        for row, count in zip(rows, counts, strict=True):
            accepted = 0
            while accepted < count - 1 and chosen[first + accepted] == given[first + accepted + 1]:
                accepted += 1
            assert row.sequence is not None
            row.sequence.cut(count - 1 - accepted)
            for place in range(first, first + accepted + 1):
                batch.accept(row, given[place], deliveries)
                row.logits = (choice.step, place)
            row.undelivered = None
            following.append(chosen[first + accepted])
            if row in batch.proposers:
                self._tell(row, following[-1])
            self.pool.drafted += count - 1
            self.pool.accepted += accepted
            taken.append(accepted)
            first += count
        self._kept = [1 + accepted for accepted in taken]
        self._keep_states()
        batch.choice.sampler.skip(taken)
        batch.note_told(deliveries)
        batch.failed += {owners[index]: error for index, error in choice.broken.items()}.items()
        batch.inputs = mx.array(following, choice.tokens.dtype)
        self._known = (batch.inputs, following)
        return deliveries

    def _tell(self, row: Request, following: int) -> None:
        """Tell the proposer what the row has taken, and its next token: the next drafts come behind that."""
        proposer = self.batch.proposers[row]
        proposer.follow(row)
        proposer.add(following)
