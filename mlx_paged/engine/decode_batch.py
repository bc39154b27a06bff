"""DecodeBatch: the rows that take one token each in every step."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.batch import Batch, FailedRow
from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..errors import check_device, without_frames
from .constraint import constrain
from .peers import ALONE, Peers
from .proposer import Proposer
from .request import Request
from .sampling.token_choice import Choice, Places, TokenChoice
from .step_logits import StepLogits, TokenLogits
from .upstream import Upstream

KEPT_STEPS = 2  # latest steps whose logits stay whole for tokens that callers hold; older tokens get a copied row


class Delivery(NamedTuple):
    """A token to deliver to the caller; ``logits`` holds its log-probabilities."""

    row: Request
    token: int
    logits: TokenLogits


class _Parts(NamedTuple):
    """The batch's caches, for its present members.

    Attributes:
        caches: one per layer, composite ones split into their parts.
        composed: as the model expects them.
        states: those of layers without blocks.
        of_arrays: those of ``states`` that hold arrays by row.
    """

    caches: list[Any]
    composed: list[Any]
    states: list[Any]
    of_arrays: list[Any]


_NOT_FOUND = _Parts([], [], [], [])


class DecodeBatch:
    """The rows that decode, in the order they joined. One step ahead of delivery, as in mlx-lm: while the caller
    handles a token, the next one is computed.

    Layers with a paged cache share the rows' block tables; joining and leaving moves references. Other layers (SSM
    states) use mlx-lm's own batch caches. Every row joins with its prompt computed, so none is padded.

    Args:
        model: called with tokens and ``cache``, a list.
        upstream: what the engine uses of mlx-lm.
        peers: processes that the model is sharded over.
    """

    takes_rows = True  # one model call computes all rows

    def __init__(self, model: Any, upstream: Upstream, peers: Peers = ALONE) -> None:
        self.model = model
        self.peers = peers
        self.call = peers.guarded(model)
        self.upstream = upstream
        self.rows: list[Request] = []
        self.members: set[Request] = set()
        self.failed: list[tuple[Request, Exception]] = []
        self.choice = TokenChoice(upstream)
        self.proposer: Proposer | None = None  # proposes drafts
        self._inputs: mx.array | None = None  # next token of each row, not delivered yet, [B]
        self._tables: Batch | None = None
        # One per layer, composite ones split into their parts; paged ones are rebuilt when members change.
        self._caches: list[Any] = []
        self._parts = _NOT_FOUND
        self._has_grammars = False
        self._changed = True
        self._delivered: deque[list[weakref.ref[TokenLogits]]] = deque()  # logits of the last steps' tokens

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def state_nbytes(self) -> int:
        """Bytes of the rows' states in layers without blocks."""
        return sum(cache.nbytes for cache in self._caches if not (cache is None or _is_paged(cache)))

    def state(self, place: int) -> Any:
        """Return the cache of a layer without blocks, by its place among the leaves of the rows' caches."""
        return self._caches[place]

    def set_state(self, place: int, arrays: Sequence[Any]) -> None:
        """Set the arrays of the cache of a layer without blocks, and start computing them."""
        self._caches[place].cache = list(arrays)
        mx.async_eval([x for x in arrays if x is not None])

    @property
    def inputs(self) -> mx.array:
        """Next token of each row, not delivered yet, ``[B]``."""
        assert self._inputs is not None
        return self._inputs

    @inputs.setter
    def inputs(self, tokens: mx.array) -> None:
        self._inputs = tokens

    # Members --------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[Request]) -> None:
        """Add rows whose prompt is computed except for its last token."""
        if not rows:
            return
        inputs = mx.array([row.next_input() for row in rows], mx.uint32)
        if self._inputs is not None:
            inputs = mx.concatenate([self._inputs, inputs])
        self._merge(rows)
        self.choice.add(rows)
        self._inputs = inputs
        self.rows = [*self.rows, *rows]
        self.members.update(rows)
        self._has_grammars = self._has_grammars or any(row.grammar is not None for row in rows)
        if self.proposer is not None:
            self.proposer.add(rows, self.choice)

    def _merge(self, rows: Sequence[Request]) -> None:
        """Merge the rows' states into the batch's caches."""
        self._drop_tables()
        caches = [leaves(row.caches) for row in rows if row.caches is not None]
        merged = [
            None if isinstance(layer[0], PagedKVCache) else layer[0].merge(layer) for layer in zip(*caches, strict=True)
        ]
        if not self._caches:
            self._caches = merged
        else:
            for cache, new in zip(self._caches, merged, strict=True):
                if new is not None:
                    cache.extend(new)

    def remove(self, rows: Sequence[Request], *, keep_caches: bool = True) -> None:
        """Remove rows. With ``keep_caches`` their own caches then hold all that was computed for them: states of layers
        without blocks are copied, so that they do not keep the batch's arrays alive.

        The step under way still uses the rows' blocks. They may be reused at once, because the next write to them
        depends on the pool's tensors, or on its fence, and so comes after that step.
        """
        leaving = self.members.intersection(rows)
        if not leaving:
            return
        keep = [index for index, row in enumerate(self.rows) if row not in leaving]
        self._drop_tables()
        if keep_caches:
            for index, row in enumerate(self.rows):
                if row in leaving:
                    self._extract_states(index, row)
        if not keep:
            self._clear()
            return
        assert self._inputs is not None
        inputs = _elements(self._inputs, keep)
        self._keep_states(keep)
        self._inputs = inputs
        self.choice.keep(keep)
        self.rows = [self.rows[index] for index in keep]
        self.members -= leaving
        if self.proposer is not None:
            self.proposer.remove(leaving)

    def _keep_states(self, keep: Sequence[int]) -> None:
        """Drop the states of all rows but these, ascending."""
        indices = mx.array(list(keep))
        for cache in self._caches:
            if not (cache is None or _is_paged(cache)):
                cache.filter(indices)

    def _clear(self) -> None:
        rows, self.rows, self._inputs, self._caches = self.rows, [], None, []
        self.members.clear()
        self.choice.clear()
        if self.proposer is not None:
            self.proposer.remove(rows)
        self._tables, self._changed, self._has_grammars = None, True, False
        self._parts = _NOT_FOUND

    def undo_reservation(self) -> None:
        """Undo a reservation that not all layers have written, so that the rows' own tables can be used."""
        if self._tables is not None and not self._tables.is_level():
            self._tables.undo_reserve()

    def _drop_tables(self) -> None:
        if self._tables is not None:
            self.undo_reservation()
            self._tables = None
            self._caches = [None if _is_paged(cache) else cache for cache in self._caches]
        self._parts = _NOT_FOUND
        self._changed = True

    def _extract_states(self, index: int, row: Request) -> None:
        assert row.caches is not None
        parts = leaves(row.caches)
        for place, cache in enumerate(self._caches):
            if not (cache is None or _is_paged(cache)):
                parts[place] = _extract(cache, index, self.upstream.state_cache)
        row.caches = with_leaves(row.caches, parts)

    def fork(self, row: Request) -> list[Any]:
        """Return a copy of the row's caches: references to its blocks, copies of other states."""
        self.undo_reservation()
        index = self.rows.index(row)
        assert row.caches is not None
        memo: dict[int, Any] = {}
        forked = []
        for place, cache in enumerate(leaves(row.caches)):
            paged = isinstance(cache, PagedKVCache)
            if paged:
                forked.append(copy.deepcopy(cache, memo))
            else:
                forked.append(_extract(self._caches[place], index, self.upstream.state_cache))
        return with_leaves(row.caches, forked)

    def suspend(self, row: Request) -> None:
        """Remove a row that will be recomputed later, and keep its undelivered token."""
        assert self._inputs is not None
        index = self.rows.index(row)
        self._remember(row, index, _as_ints(self._inputs[index : index + 1])[0])
        self.remove([row], keep_caches=False)

    def _remember(self, row: Request, index: int, token: int) -> None:
        """Keep the token that was computed for a row and not delivered yet."""
        if row.logits is not None:
            row.undelivered = token
            row.logits.detach()

    # Steps ----------------------------------------------------------------------------------------------------

    def reserve(self) -> FailedRow | None:
        """Reserve a block position for every row's next token; see :meth:`Batch.reserve`."""
        if self._changed:
            self._caches, self._tables = batch_of(self.rows, self._caches)
            self._changed = False
        return self._tables.reserve() if self._tables is not None else None

    def _current(self) -> _Parts:
        """Return the batch's caches; composed anew only when members change."""
        if self._parts.caches is not self._caches:
            states = [cache for cache in self._caches if not (cache is None or _is_paged(cache))]
            of_arrays = [cache for cache in states if isinstance(cache, self.upstream.state_cache)]
            composed = with_leaves(self.rows[0].caches or [], self._caches)
            self._parts = _Parts(self._caches, composed, states, of_arrays)
        return self._parts

    def _states(self) -> list[Any]:
        """Return the caches of layers without blocks."""
        return self._current().states

    def step(self) -> list[Delivery]:
        """Dispatch the next token of every row, then return the ones computed by the step before.

        :meth:`reserve` must have succeeded. A row whose computation, grammar, processor or sampler raises is in
        ``failed`` afterwards, for the caller to remove; the others go on.
        """
        self.detach_old_logits()
        logits = self._forward()
        if logits is None:
            return []
        inputs = self._inputs
        assert inputs is not None
        choice = self.choose(self.rows, logits, inputs)
        self._inputs = choice.tokens
        if choice.broken:
            self.failed += [(self.rows[index], error) for index, error in choice.broken.items()]
        return self.deliver(self.rows, choice.inputs or _as_ints(inputs), choice.step, range(len(self.rows)))

    def deliver(
        self, rows: Sequence[Request], tokens: Sequence[int], step: StepLogits, places: Sequence[int]
    ) -> list[Delivery]:
        """Deliver a step's input tokens, except the last tokens of prompts, and update the rows.

        Args:
            rows: the row of each token; one with drafts may come several times.
            tokens: the input tokens.
            step: logits that their next tokens are chosen from.
            places: index of each token in the step.
        """
        deliveries = []
        for row, token, place in zip(rows, tokens, places, strict=True):
            if (logits := row.logits) is not None:
                row.source.append(token)
                deliveries.append(Delivery(row, token, logits))
            row.logits = TokenLogits(step, place)
            row.undelivered = None
            row.confirmed, row.length = row.length, row.kept + len(row.source)
        self._delivered.append([weakref.ref(logits) for _, _, logits in deliveries])
        return deliveries

    def detach_old_logits(self, *, all_steps: bool = False) -> None:
        """Detach tokens of steps before the last one that callers still hold: each keeps a copy of its row of logits,
        and the rest is freed. (Tokens of the last step are often held by a loop that is about to drop them.)"""
        while len(self._delivered) >= (1 if all_steps else KEPT_STEPS):
            for reference in self._delivered.popleft():
                if (logits := reference()) is not None:
                    logits.detach()

    def choose(
        self, rows: Sequence[Request], logits: mx.array, inputs: mx.array, places: Places | None = None
    ) -> Choice:
        """Choose a token from each of the logits ``[T, vocab]``, and start computing them.

        Args:
            rows: the row of each of the logits; one with drafts may come several times.
            inputs: the tokens that the logits follow, ``[T]``.
            places: see :class:`Places`; None if each row comes once, in order.
        """
        tokens: list[int] = []
        unanswerable: dict[int, Exception] = {}
        if self._has_grammars:
            logits, tokens, unanswerable = self._constrain(rows, logits, inputs)
        choice = self.choice.choose(logits, inputs, places)
        choice = choice._replace(tokens=self.peers.agreed(choice.tokens))
        # States and offsets are evaluated, too: unread ones would grow their graphs by a few nodes each step.
        states = [cache.state for cache in self._states()]
        mx.async_eval(choice.tokens, choice.contexts, states)
        return choice._replace(broken=unanswerable | choice.broken, inputs=tokens)

    def _forward(self) -> mx.array | None:
        """Return logits ``[B, vocab]`` of the rows. If the call raises, all of them fail: returns None."""
        parts = self._current()
        try:
            logits: mx.array = self.call(self.inputs[:, None], cache=parts.composed)[:, -1, :]
        except Exception as error:
            self.fail_all(error)
            return None
        for cache in parts.of_arrays:
            if cache.left_padding is not None:
                cache.finalize()  # nothing is padded; the graph of the counter would grow by a node each step
        return logits

    def fail_all(self, error: Exception) -> None:
        """Fail and remove all rows: a step failed as a whole, so no row's state is known. Raises an error of the
        device."""
        check_device(error)
        self.failed += [(row, error) for row in self.rows]
        self._clear()

    def _constrain(
        self, rows: Sequence[Request], logits: mx.array, inputs: mx.array
    ) -> tuple[mx.array, list[int], dict[int, Exception]]:
        """Return logits masked by the rows' grammars; the inputs, if they had to be read; grammars' errors by index."""
        if all(row.grammar is None for row in rows):
            return logits, [], {}
        mx.async_eval(logits)  # computed while the host reads the inputs, which the step before chose
        tokens = _as_ints(inputs)
        logits, unanswerable = constrain(logits, rows, tokens, is_timed=self.peers.is_alone)
        return logits, tokens, unanswerable


def _elements(x: mx.array, indices: Sequence[int]) -> mx.array:
    """Return ``x[indices]``, indices ascending. Joins slices: for a gather MLX would have to compile a kernel."""
    ends = [i for i, index in enumerate(indices) if i + 1 == len(indices) or indices[i + 1] != index + 1]
    begins = [0, *(end + 1 for end in ends[:-1])]
    return mx.concatenate([x[indices[a] : indices[b] + 1] for a, b in zip(begins, ends, strict=True)])


def batch_of(rows: Sequence[Request], states: Sequence[Any]) -> tuple[list[Any], Batch | None]:
    """Return the layers' batch caches over the rows' block tables, and those tables; None: no layer is paged."""
    caches = leaves(rows[0].caches or [])
    sequences = [sequence for row in rows if (sequence := row.sequence) is not None]
    if not sequences:
        return list(states), None
    tables = Batch(sequences[0].pool, sequences)
    batch = [
        PagedBatchKVCache(tables, layer, type(cache)) if isinstance(cache, PagedKVCache) else state
        for layer, (cache, state) in enumerate(zip(caches, states, strict=True))
    ]
    return batch, tables


def _extract(cache: Any, index: int, state_cache: type[Any]) -> Any:
    """Return a copy of one row of a layer's state; a view would keep the whole batch's arrays alive."""
    extracted = cache.extract(index)
    for leaf in leaves([extracted]):
        if isinstance(leaf, state_cache):
            leaf.cache = [None if x is None else mx.contiguous(x) for x in leaf.cache]
            mx.async_eval([x for x in leaf.cache if x is not None])
    return extracted


def _as_ints(tokens: mx.array | None) -> list[int]:
    return [] if tokens is None else tokens.tolist()  # type: ignore[return-value]


def _is_paged(cache: Any) -> bool:
    return isinstance(cache, PagedBatchKVCache)


class RowByRowBatch(DecodeBatch):
    """A DecodeBatch that calls the model once per row, with the row's own caches.

    Slower than one call for all rows, but correct for every model: nothing is padded, and offsets are numbers.
    """

    takes_rows = False

    def _merge(self, rows: Sequence[Request]) -> None:
        self._collect([*self.rows, *rows])

    def _collect(self, rows: Sequence[Request]) -> None:
        """Collect the caches without blocks, which are evaluated in each step and counted in :attr:`state_nbytes`."""
        self._caches = [c for row in rows for c in leaves(row.caches or []) if not isinstance(c, PagedKVCache)]

    def _states(self) -> list[Any]:
        return self._caches

    def _keep_states(self, keep: Sequence[int]) -> None:
        self._collect([self.rows[index] for index in keep])

    def _extract_states(self, index: int, row: Request) -> None:
        """Do nothing: each row's states are in its own caches."""

    def fork(self, row: Request) -> list[Any]:
        """Return copies of a row's caches over the same blocks."""
        assert row.caches is not None
        memo: dict[int, Any] = {}
        return [copy.deepcopy(cache, memo) for cache in row.caches]

    def reserve(self) -> FailedRow | None:
        """Reserve a block position for every row's next token in every group; layers take it in their calls."""
        done = []
        for index, row in enumerate(self.rows):
            sequence = row.sequence
            try:
                if sequence is not None and sequence.is_level():
                    sequence.reserve(1)
                    done.append(sequence)
            except Exception as error:
                for reserved in done:
                    reserved.cut(1)
                return FailedRow(index, without_frames(error))
        return None

    def _forward(self) -> mx.array | None:
        assert self._inputs is not None
        found: list[mx.array] = []
        broken: list[tuple[Request, Exception]] = []
        for index, row in enumerate(self.rows):
            try:
                found.append(self.call(self._inputs[index : index + 1, None], cache=row.caches)[:, -1, :])
            except Exception as error:
                check_device(error)
                broken.append((row, error))
        self.failed += broken
        self.remove([row for row, _ in broken], keep_caches=False)
        return mx.concatenate(found) if found else None
