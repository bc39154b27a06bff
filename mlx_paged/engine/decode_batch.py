"""DecodeBatch: the rows that take one token each in every step."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.composites import leaves, with_leaves
from ..cache.paged_kv_cache import PagedKVCache
from .constraint import constrain
from .interfaces import ALONE, Peers, Proposer, Upstream
from .model_call import ModelCall
from .request import Request, TokenLogits
from .sampling.token_choice import Choice, Places, TokenChoice

KEPT_STEPS = 2  # latest steps whose logits stay whole for tokens that callers hold; older tokens get a copied row


class Delivery(NamedTuple):
    """A token to deliver to the caller; ``logits`` holds its log-probabilities."""

    row: Request
    token: int
    logits: TokenLogits


class DecodeBatch:
    """The rows that decode, in the order they joined. One step ahead of delivery, as in mlx-lm: while the caller
    handles a token, the next one is computed.

    Layers with a paged cache share the rows' block tables; joining and leaving moves references. Other layers (SSM
    states) use mlx-lm's own batch caches. Every row joins with its prompt computed, so none is padded.

    Args:
        model: called with tokens and ``cache``, a list.
        upstream: what the engine uses of mlx-lm.
        peers: processes that the model is sharded over.
        takes_rows: one model call computes all rows. Otherwise there is a call per row with the row's own caches,
            slower, but correct for every model: offsets are numbers.

    Attributes:
        forward: the model, whose errors end all peers.
        inputs: next token of each row, not delivered yet, ``[B]``.
        failed: errors of rows' grammars, processors and samplers.
        proposer: proposes drafts; None: there are none.
        states: the rows' states by layer, composite caches split into their parts; None where a layer is paged. Empty
            if rows are computed one by one: each row's own caches have its states.
    """

    def __init__(self, model: Any, upstream: Upstream, peers: Peers = ALONE, *, takes_rows: bool = True) -> None:
        self.model = model
        self.peers = peers
        self.upstream = upstream
        self.takes_rows = takes_rows
        self.forward = peers.guarded(model)
        self.rows: list[Request] = []
        self.members: set[Request] = set()
        self.failed: list[tuple[Request, Exception]] = []
        self.choice = TokenChoice(upstream.token_buffer)
        self.proposer: Proposer | None = None
        self.inputs = mx.zeros(0, mx.uint32)
        self.states: list[Any] = []
        self._call: ModelCall | None = None  # of the present rows
        self._unpaged: list[Any] = []  # all caches without blocks, which each step changes
        self._has_grammars = False
        self._delivered: deque[list[weakref.ref[TokenLogits]]] = deque()  # logits of the last steps' tokens

    @property
    def state_nbytes(self) -> int:
        """Bytes of the rows' states in layers without blocks."""
        return sum(cache.nbytes for cache in self._unpaged)

    # Members --------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[Request]) -> None:
        """Add rows whose prompt is computed except for its last token."""
        inputs = mx.array([row.next_input() for row in rows], mx.uint32)
        if self.rows:
            inputs = mx.concatenate([self.inputs, inputs])
        if self.takes_rows:
            self._merge(rows)
        self.choice.add(rows)
        self.members.update(rows)
        self._set_rows([*self.rows, *rows], inputs)
        self._has_grammars = self._has_grammars or any(row.grammar is not None for row in rows)
        if self.proposer is not None:
            self.proposer.add(rows)

    def _set_rows(self, rows: list[Request], inputs: mx.array) -> None:
        self.rows, self.inputs, self._call = rows, inputs, None
        if self.takes_rows:
            self._unpaged = [cache for cache in self.states if cache is not None]
        else:
            self._unpaged = [c for row in rows for c in leaves(row.caches or []) if not isinstance(c, PagedKVCache)]

    def _merge(self, rows: Sequence[Request]) -> None:
        """Merge the rows' states into the batch's."""
        caches = [leaves(row.caches or []) for row in rows]
        merged = [
            None if isinstance(layer[0], PagedKVCache) else layer[0].merge(layer) for layer in zip(*caches, strict=True)
        ]
        if not self.states:
            self.states = merged
        else:
            for cache, new in zip(self.states, merged, strict=True):
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
        if keep_caches and self.takes_rows:
            for index, row in enumerate(self.rows):
                if row in leaving:
                    row.caches = self._with_states(row, index, leaves(row.caches or []))
        if not keep:
            self.clear()
            return
        for cache in self.states:
            if cache is not None:
                cache.filter(mx.array(keep))
        self.choice.keep(keep)
        self.members -= leaving
        self._set_rows([self.rows[index] for index in keep], _elements(self.inputs, keep))
        if self.proposer is not None:
            self.proposer.remove(leaving)

    def clear(self) -> None:
        """Remove all rows, whose caches then hold their blocks only."""
        rows, self.states, self.failed = self.rows, [], []
        self._set_rows([], mx.zeros(0, mx.uint32))
        self.members.clear()
        self.choice.clear()
        self._has_grammars = False
        if self.proposer is not None:
            self.proposer.remove(rows)

    def _with_states(self, row: Request, index: int, own: Sequence[Any]) -> list[Any]:
        """Return a row's caches with these parts, and copies of its states in layers without blocks."""
        state_cache = self.upstream.state_cache
        parts = [
            cache if states is None else _extract(states, index, state_cache)
            for cache, states in zip(own, self.states, strict=True)
        ]
        return with_leaves(row.caches or [], parts)

    def fork(self, row: Request) -> list[Any]:
        """Return a copy of the row's caches: references to its blocks, copies of other states."""
        memo: dict[int, Any] = {}
        if not self.takes_rows:
            return [copy.deepcopy(cache, memo) for cache in row.caches or ()]
        own = leaves(row.caches or [])
        forked = [copy.deepcopy(c, memo) if isinstance(c, PagedKVCache) else None for c in own]
        return self._with_states(row, self.rows.index(row), forked)

    def suspend(self, row: Request) -> None:
        """Remove a row that will be recomputed later, and keep its undelivered token."""
        index = self.rows.index(row)
        token = _as_ints(self.inputs[index : index + 1])[0]
        if row.logits is not None:
            row.undelivered = token
            row.logits.detach()
        self.remove([row], keep_caches=False)

    # Steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Delivery]:
        """Dispatch the next token of every row, then return the ones computed by the step before. A row whose grammar,
        processor or sampler raises is in ``failed`` afterwards, for the caller to remove; the others go on.

        Raises:
            NoBlocksError: a row found no block for its next token. Nothing has changed.
            Exception: the model's own. The rows must be failed.
        """
        self.detach_old_logits()
        if self._call is None:
            self._call = ModelCall(self.rows, states=self.states, together=self.takes_rows)
        inputs = self.inputs
        logits = self._call.run(self.forward, inputs)
        for cache in self.states:
            if isinstance(cache, self.upstream.state_cache) and cache.left_padding is not None:
                cache.finalize()  # nothing is padded; the graph of the counter would grow by a node each step
        choice = self.choose(self.rows, logits, inputs)
        self.inputs = choice.tokens
        self.failed += [(self.rows[index], error) for index, error in choice.broken.items()]
        return self.deliver(self.rows, choice.inputs or _as_ints(inputs), choice.logits, range(len(self.rows)))

    def deliver(
        self, rows: Sequence[Request], tokens: Sequence[int], logits: mx.array, places: Sequence[int]
    ) -> list[Delivery]:
        """Deliver a step's input tokens, except the last tokens of prompts, and update the rows.

        Args:
            rows: the row of each token; one with drafts may come several times.
            tokens: the input tokens.
            logits: those that their next tokens are chosen from.
            places: index of each token's logits.
        """
        deliveries = []
        for row, token, place in zip(rows, tokens, places, strict=True):
            if row.logits is not None:
                row.source.append(token)
                deliveries.append(Delivery(row, token, row.logits))
            row.logits = TokenLogits(logits, place)
            row.undelivered = None
            row.length = row.kept + len(row.source)
        self._delivered.append([weakref.ref(each.logits) for each in deliveries])
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
        states = [cache.state for cache in self._unpaged]
        mx.async_eval(choice.tokens, choice.contexts, states)
        return choice._replace(broken=unanswerable | choice.broken, inputs=tokens)

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


def _extract(cache: Any, index: int, state_cache: type[Any]) -> Any:
    """Return a copy of one row of a layer's state; a view would keep the whole batch's arrays alive."""
    extracted = cache.extract(index)
    for leaf in leaves([extracted]):
        if isinstance(leaf, state_cache):
            leaf.cache = [None if x is None else mx.contiguous(x) for x in leaf.cache]
            mx.async_eval([x for x in leaf.cache if x is not None])
    return extracted


def _as_ints(tokens: mx.array) -> list[int]:
    return tokens.tolist()  # type: ignore[return-value]
