"""ModelCall: a model call for the new tokens of requests: next tokens, drafts and chunks of prompts alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..cache.batch import Batch, NoBlocksError, NotPackableError
from ..cache.batch_cache import PagedBatchKVCache
from ..cache.composites import leaves, with_leaves
from ..cache.packed_states import PackedStates
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.sequence import SequenceTables
from ..errors import without_frames


class Cached(Protocol):
    """A sequence and its caches: a request, or what a draft model holds for one."""

    @property
    def caches(self) -> list[Any] | None:
        """One cache per layer."""

    @property
    def sequence(self) -> SequenceTables | None:
        """The block table behind the caches; None if no layer is paged."""


class ModelCall:
    """Requests with new tokens, and the layers' caches of a model call for them. While the rows stay the same, one
    object serves step after step of decoding.

    Together, each token is a row of its own, ``[T, 1]`` (:class:`.batch.Batch`): nothing is padded. Layers without
    blocks take the requests' states side by side. One by one, there is a call ``[1, n]`` for each request, over its own
    caches.

    Args:
        requests: they run, and their block tables are at the end of all layers.
        counts: new tokens of each; None: one each, in every step that uses this object.
        states: caches of layers without blocks that hold the states of all requests, by the layer's place among the
            leaves of a request's caches; None: each request's own caches have its states.
        as_rows: see :class:`.batch.Batch`.
        together: compute all in one call.

    Attributes:
        layers: cache of each layer, composite ones split into their parts; None: one by one.
        caches: the same as the model expects them.
    """

    def __init__(
        self,
        requests: Sequence[Cached],
        counts: Sequence[int] | None = None,
        *,
        states: Sequence[Any] | None = None,
        as_rows: bool = False,
        together: bool = True,
    ) -> None:
        self.requests, self.counts = requests, counts
        self._sequences = [sequence for request in requests if (sequence := request.sequence) is not None]
        self._batch: Batch | None = None
        self._own: list[list[Any]] = []  # parts of the requests' own caches, as far as they are needed
        self.layers: list[Any] | None = None
        self.caches: list[Any] = []
        if together:
            self._own = [leaves(request.caches or []) for request in (requests if states is None else requests[:1])]
            if self._sequences:
                self._batch = Batch(self._sequences[0].pool, self._sequences, counts, as_rows=as_rows)
            layers = zip(*self._own, strict=True)
            self.layers = [self._layer(own, None if states is None else states[i]) for i, own in enumerate(layers)]
            self.caches = with_leaves(requests[0].caches or [], self.layers)

    def _layer(self, own: Sequence[Any], states: Any) -> Any:
        """Return the cache of a layer for the call."""
        if isinstance(own[0], PagedKVCache):
            assert self._batch is not None
            return PagedBatchKVCache(self._batch, own[0].layer)
        if self.counts is None:
            return states
        return PackedStates.of(own, self.counts) if states is None else PackedStates.over(states, self.counts)

    @property
    def states(self) -> dict[int, PackedStates]:
        """States of layers without blocks after a call of several tokens each, by the layer's place."""
        return {place: each for place, each in enumerate(self.layers or ()) if isinstance(each, PackedStates)}

    def keep_states(self) -> None:
        """Give each request its states after the call."""
        for place, states in self.states.items():
            for own, arrays in zip(self._own, states.of_each(), strict=True):
                own[place].cache = arrays

    def _reserve(self) -> None:
        """Reserve the block positions of all new tokens in every group.

        Raises:
            NoBlocksError: nothing is reserved, but one by one for the requests before, whose positions are found the
                next time.
        """
        if self._batch is not None:
            try:
                self._batch.reserve()
            except NoBlocksError:
                raise
            except Exception as error:  # of no row for certain: the one that joined last gives way
                raise NoBlocksError(len(self.requests) - 1, without_frames(error)) from None
        elif self.layers is None:
            counts = self.counts or [1] * len(self._sequences)
            for row, (sequence, count) in enumerate(zip(self._sequences, counts, strict=False)):
                try:
                    if sequence.is_level():  # else it has its positions, and another request had found none
                        sequence.reserve(count)
                except Exception as error:
                    raise NoBlocksError(row, without_frames(error)) from None

    def run(self, model: Callable[..., mx.array], tokens: mx.array) -> mx.array:
        """Reserve the positions of all new tokens in every group, and compute the tokens ``[T]``, request by request.

        Args:
            model: called with tokens and ``cache``, a list of the layers' caches. Its class is wrapped
                (patches/models/model_calls.py): on a GPU most decode steps run in :class:`.compiled_step.CompiledStep`.
            tokens: the new tokens.

        Returns:
            Logits ``[T, vocab]``; one by one ``[B, vocab]``, of each request's last token.

        Raises:
            NoBlocksError: a request found no block; nothing was computed.
            NotPackableError: the model does not take several tokens of a request as rows. Nothing has changed.
            Exception: the model's own. The requests must be failed: what their caches hold is not known.
        """
        self._reserve()
        if self.layers is None:
            found, begin = [], 0
            for request, count in zip(self.requests, self.counts or [1] * len(self.requests), strict=True):
                found.append(model(tokens[begin : begin + count][None], cache=request.caches)[:, -1, :])
                begin += count
            return found[0] if len(found) == 1 else mx.concatenate(found)
        try:
            logits: mx.array = model(tokens[:, None], cache=self.caches)[:, -1, :]
            if self.counts is not None and self._batch is not None:
                self._batch.commit()
        except NotPackableError:
            if self._batch is not None:
                self._batch.undo_reserve()  # what layers have written is dropped
            raise
        return logits
