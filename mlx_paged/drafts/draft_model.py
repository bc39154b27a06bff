"""DraftModel: drafts from a smaller model with the same vocabulary, whose caches are paged in a pool of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.batch import NoBlocksError
from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..cache.sequence import SequenceTables
from ..engine.interfaces import MOST_TOKENS, Proposal, most_drafts, num_known
from ..engine.model_call import ModelCall
from ..engine.request import Request, sequence_of
from ..errors import ConfigError, PoolExhaustedError
from ..kv.pool import BlockPool
from ..prefix.prefix_cache import SharedPrefixes
from .depth import TRIAL_CONTEXT, Acceptance, Candidate, Depth

# Most tokens of a row that its first draft step computes besides its next one: those since its last draft. Of more (a
# prompt, or tokens of plain steps) chunks are computed before, and timed separately.
MOST_BEHIND = 16
CHUNK = 512  # most tokens of prompts computed beside a decode step


def is_paged(caches: Sequence[Any]) -> bool:
    """Return whether all layers of a prompt cache are paged, as a draft model's must be."""
    return all(isinstance(cache, PagedKVCache) for cache in leaves(caches))


class Span(NamedTuple):
    """Consecutive tokens of a row, by their positions."""

    row: Request
    begin: int
    end: int


class DraftRow:
    """A row's tokens in the draft model's caches.

    Attributes:
        caches: one per layer.
        end: position after the last of the row's tokens in them; drafts do not count, earlier tokens may have been
            skipped.
        acceptance: acceptance of the row's drafts.
    """

    def __init__(self, caches: list[Any], acceptance: Acceptance) -> None:
        self.caches = caches
        self.end = 0
        self.acceptance = acceptance
        sequence = sequence_of(caches)
        assert sequence is not None
        self.sequence: SequenceTables = sequence

    def release(self) -> None:
        """Give the blocks back."""
        self.sequence.pool.release_table(self.sequence.table)


class DraftModel:
    """Proposes a draft model's most likely tokens. A :class:`mlx_paged.engine.interfaces.Proposer`.

    All rows take their draft steps together: the first computes, as a pack, the tokens that rows got since the last
    one; each later one computes a token of each row. Drafts are the most likely tokens whatever the row's sampler is.

    Nothing is computed for a row, not even its prompt, before ``depth`` gives it drafts. Requests never give way to
    drafts: a row that finds no block in the draft model's pool goes on without drafts.

    Args:
        model: called with tokens and ``cache``, a list.
        factory: makes its prompt caches, all of them paged.
        num_draft_tokens: most drafts of a row in a step, unless its request says otherwise.
        depth: decides how many drafts rows get.
        prefixes: a prefix cache over the draft model's pool.

    Attributes:
        rows: rows that can have drafts, and their draft model caches.

    Raises:
        ConfigError: not all of the model's layers are paged.
    """

    keeps_accepted = True  # keys and values of an accepted draft stay valid
    first_position = 0  # position of the first token that is in the caches

    def __init__(
        self,
        model: Any,
        factory: Callable[[], list[Any]],
        num_draft_tokens: int,
        depth: Depth,
        prefixes: SharedPrefixes,
    ) -> None:
        fresh = factory()
        sequence = sequence_of(fresh)
        if sequence is None or not is_paged(fresh):
            raise ConfigError(f"{type(model).__module__} cannot be a draft model: not all of its layers can be paged")
        self.model, self.depth, self.prefixes = model, depth, prefixes
        self.num_draft_tokens = num_draft_tokens
        self.rows: dict[Request, DraftRow] = {}
        self.pool: BlockPool = sequence.pool
        self._factory = factory
        # Behind a sliding window the writes of several steps cannot be undone, so they go to a fork.
        self._forks = any(group.spec.window is not None for group in self.pool.groups)
        self._last: list[int] = []  # row uids of the last step; empty if a prompt was computed beside it
        self._num_drafted: dict[Request, int] = {}  # number of drafts in each row's own tables

    # Rows -----------------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[Request]) -> None:
        """Add the rows that want and can take drafts, and whose cached tokens are known."""
        for row in rows:
            if self._most(row) and row.knows_history and row.takes_drafts:
                self.rows[row] = own = DraftRow(self._factory(), Acceptance(expected=self.depth.acceptance.chance))
                found, table = self.prefixes.adopt(*self._shared(row))
                if found.length:
                    own.end = self.first_position + found.length
                    own.sequence.take_over(table)

    def remove(self, rows: Collection[Request]) -> None:
        """Release the draft model's blocks of rows, and donate their prefixes to the prefix cache."""
        for row in rows:
            self._drop_drafts(row)
            own = self.rows.pop(row, None)
            if own is None:
                continue
            tokens, salt = self._shared(row)
            tokens = tokens[: max(0, own.end - self.first_position)]
            if tokens and own.sequence.length == len(tokens):  # nothing was skipped
                self.prefixes.insert(tokens, own.sequence.table, salt)
            own.release()

    def _shared(self, row: Request) -> tuple[list[int], Hashable]:
        """Return the row's tokens from :attr:`first_position` on, and the salt under which their prefix is shared."""
        return [*row.history, *row.source], row.options.salt

    def _most(self, row: Request) -> int:
        most = row.options.num_draft_tokens
        return self.num_draft_tokens if most is None else most

    def _drop_drafts(self, row: Request, kept: int = 0) -> None:
        """Drop the drafts in the row's tables, except the first ``kept``."""
        ahead = self._num_drafted.pop(row, 0)
        if ahead:
            kept = min(kept, ahead)
            self.rows[row].sequence.cut(ahead - kept)
            self.rows[row].end += kept

    # Proposing ------------------------------------------------------------------------------------------------

    def propose(
        self, rows: Sequence[Request], inputs: mx.array, vocab_size: int | None, *, is_alone: bool
    ) -> Proposal | None:
        """Return the draft model's most likely tokens; see :meth:`..engine.interfaces.Proposer.propose`."""
        for row in list(self._num_drafted):  # drafts that were not verified
            self._drop_drafts(row)
        if vocab_size is None:  # a draft model with a larger vocabulary might propose tokens that the model lacks
            return None
        uids = [row.uid for row in rows]
        self.depth.begin(len(rows), is_like_last=uids == self._last)
        self._last = uids if is_alone else []
        if not self.depth.may_choose(len(rows)):
            return None
        able = [(i, row) for i, row in enumerate(rows) if row in self.rows and most_drafts(row) > 0 and self.knows(row)]
        share = (MOST_TOKENS - len(rows)) // max(1, len(able))
        wanted = self.depth.choose([self._candidate(row, share) for _, row in able], len(rows))
        chosen = {index: count for (index, _), count in zip(able, wanted, strict=True) if count}
        self._catch_up([rows[index] for index in chosen], inputs)
        chosen = {index: n for index, n in chosen.items() if self._is_ready(rows[index])}
        if not chosen:
            return None
        try:
            return self._draft(rows, chosen, inputs, vocab_size)
        except (NoBlocksError, PoolExhaustedError):
            return None

    @property
    def seconds_saved(self) -> float:
        """See :attr:`..engine.interfaces.Proposer.seconds_saved`."""
        return self.depth.seconds_saved

    def _candidate(self, row: Request, share: int) -> Candidate:
        """Return a row that can have drafts as a candidate for up to ``share`` of them."""
        own, left = self.rows[row], most_drafts(row)
        missing = 0 if self._is_ready(row) else num_known(row) - own.end
        return Candidate(own.acceptance.chances(max(0, min(share, self._most(row), left))), left, missing)

    def knows(self, row: Request) -> bool:
        """Return whether everything that the row's drafts depend on is known."""
        return True

    def forward(
        self, tokens: mx.array, layers: list[Any], spans: Sequence[Span] = (), before: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Return logits of the next tokens, and ``before`` for the next call.

        Args:
            tokens: ``[1, T]`` of a sequence, or ``[T, 1]`` of several.
            layers: the layers' caches.
            spans: positions of the tokens; empty: they are drafts, one of each row.
            before: returned by the call that these drafts come from.
        """
        return self.model(tokens, cache=layers), None

    def _run(
        self,
        call: ModelCall,
        rows: Sequence[Request],
        tokens: mx.array,
        spans: Sequence[Span] = (),
        before: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Return logits ``[T, vocab]`` of a call's tokens ``[T]``, and ``before`` for the next call. If a row finds no
        block, it gets no more drafts, and NoBlocksError is raised."""
        after: mx.array | None = None

        def forward(tokens: mx.array, cache: list[Any]) -> mx.array:
            nonlocal after
            logits, after = self.forward(tokens, cache, spans, before)
            return logits

        try:
            return call.run(forward, tokens), after
        except NoBlocksError as lack:
            self.remove([rows[lack.row]])
            raise

    def _is_ready(self, row: Request) -> bool:
        return row in self.rows and num_known(row) - self.rows[row].end <= MOST_BEHIND

    def _catch_up(self, rows: Sequence[Request], inputs: mx.array) -> None:
        """Compute up to :data:`CHUNK` tokens of rows that the draft model lacks, and note their time."""
        behind = [row for row in rows if not self._is_ready(row)]
        if not behind:
            return
        mx.eval(inputs)  # keeps the step under way out of that time
        begin, left = self.depth.clock(), CHUNK
        spans: list[Span] = []
        for row in behind:
            own, known = self.rows[row], num_known(row)
            if self.depth.is_trial:
                own.end = max(own.end, known - TRIAL_CONTEXT)
            if left > 0:
                spans.append(Span(row, own.end, min(known, own.end + left)))
                left -= spans[-1].end - own.end
        call = ModelCall(
            [self.rows[span.row] for span in spans],
            [span.end - span.begin for span in spans],
            together=len(spans) > 1,
        )
        tokens = mx.array([token for span in spans for token in _tokens(*span)], mx.uint32)
        with suppress(NoBlocksError):  # the row that lacked blocks gets no drafts; the others wait for the next time
            self._run(call, [span.row for span in spans], tokens, spans)
            mx.eval(self.pool.ready())
            for span in spans:
                self.rows[span.row].end = span.end
        self.depth.note_prompt(self.depth.clock() - begin)

    def _draft(self, rows: Sequence[Request], chosen: dict[int, int], inputs: mx.array, vocab_size: int) -> Proposal:
        drafted, depth = [rows[index] for index in chosen], max(chosen.values())
        self.depth.note_proposed(sum(chosen.values()))
        logits, before = self._first_step(rows, list(chosen), inputs)
        own = [self.rows[row] for row in drafted]
        forks: list[DraftRow] = []
        found: list[mx.array] = []
        try:
            if self._forks and depth > 1:
                own = forks = [DraftRow(copy.deepcopy(each.caches), each.acceptance) for each in own]
            call = ModelCall(own)
            for ahead in range(1, depth + 1):
                tokens = mx.argmax(logits[:, :vocab_size], axis=-1)
                found.append(tokens)
                if ahead == depth:
                    break
                logits, before = self._run(call, drafted, tokens, before=before)
                if not forks:
                    self._num_drafted = dict.fromkeys(drafted, ahead)
            mx.async_eval(found)
        finally:
            for fork in forks:
                fork.release()
        counts = [chosen.get(index, 0) for index in range(len(rows))]
        if len(set(chosen.values())) == 1:
            return Proposal(counts, mx.stack(found, axis=1).reshape(-1))
        parts = [mx.stack(found[:n])[:, place] for place, n in enumerate(chosen.values())]
        return Proposal(counts, mx.concatenate(parts))

    def _first_step(
        self, rows: Sequence[Request], indices: list[int], inputs: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """Compute the tokens that rows got since the last draft step, and their next tokens. Returns the logits after
        these, ``[R, vocab]``, and ``before`` for the next call."""
        own = [self.rows[rows[index]] for index in indices]
        flat: list[int] = []
        ends: list[int] = []
        for index, each in zip(indices, own, strict=True):
            flat += _tokens(rows[index], each.end, num_known(rows[index]))
            flat.append(0)  # the next token, which the host may not know
            ends.append(len(flat) - 1)
        if len(flat) == len(indices) == len(rows):
            tokens = inputs
        else:
            tokens = mx.array(flat, mx.uint32)
            tokens[mx.array(ends)] = inputs[mx.array(indices)].astype(mx.uint32)
        counts = [end - begin for begin, end in zip([-1, *ends], ends, strict=False)]
        drafted = [rows[index] for index in indices]
        spans = [Span(row, each.end, each.end + n) for row, each, n in zip(drafted, own, counts, strict=True)]
        logits, after = self._run(ModelCall(own, counts, as_rows=True), drafted, tokens, spans)
        for each, count in zip(own, counts, strict=True):
            each.end += count
        if len(flat) > len(ends):
            last = mx.array(ends)
            logits, after = logits[last], None if after is None else after[last]
        return logits, after

    def note(
        self,
        rows: Sequence[Request],
        drafted: Sequence[int],
        accepted: Sequence[int],
        following: list[int],
        *,
        is_new: bool,
    ) -> None:
        """Drop what the draft model computed after a wrong draft, and note acceptance."""
        able = []
        for row, tried, right in zip(rows, drafted, accepted, strict=True):
            own = self.rows.get(row)
            if own is None or not tried:
                continue
            own.acceptance.note([tried], [right])
            able.append((tried, right))
            self._drop_drafts(row, right if self.keeps_accepted else 0)
        if able:
            self.depth.note([tried for tried, _ in able], [right for _, right in able], is_new=is_new)


def _tokens(row: Request, begin: int, end: int) -> list[int]:
    """Return the row's tokens at positions ``begin`` to ``end``."""
    known = len(row.history)
    if begin >= known:
        return row.source[begin - known : end - known]
    return [*row.history[begin:end], *row.source[: max(0, end - known)]]
