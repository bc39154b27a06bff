"""attend(): attention of new queries over their sequences' blocks; records which path was taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx

from ..errors import GeometryError
from ..kernels.availability import backend
from ..kernels.build import NoKernelError
from ..kernels.launch_shape import MAX_QUERY_LENGTH
from ..kv.geometry import AttentionParams, QueryHeads, Window
from ..kv.group import Group
from ..kv.host_blocks import HostBlocks
from ..kv.new_tokens import NewTokens
from ..kv.pool import BlockPool
from . import gather
from .gather import causal_mask

# On CUDA, where MLX's attention prepares a plan for each new shape (docs/adr/0023), the decode kernel takes up to
# MOST_FEW_TOKENS new tokens per sequence, if their number times the sequence's length is at most MOST_READS: it reads
# the context again for each of them.
MOST_FEW_TOKENS = 64
MOST_READS = 1 << 18
# Also on CUDA, the prefill kernel takes a sequence's new tokens unless their numbers come again in other prompts: whole
# chunks after whole chunks of the same size. For these MLX's attention has its plan (docs/adr/0023).
WHOLE_CHUNK = 1024
MOST_PLANNED_HEAD_DIM = 128  # for wider heads MLX's attention is slower, too


class Dispatch(NamedTuple):
    """One choice of path.

    Attributes:
        path: "prefill" (fresh keys and values only, nothing read from the pool), "kernel" (the fused kernel), "gather"
            (gather-then-SDPA), "apart" (a pack, sequence by sequence; the path of each sequence is recorded after it).
        reason: why this path was taken.
    """

    path: str
    reason: str


_counts: Counter[Dispatch] = Counter()
_last: Dispatch | None = None


def last_dispatch() -> Dispatch | None:
    """Return the path taken by the last attention call in this process, or None."""
    return _last


def dispatch_counts() -> dict[Dispatch, int]:
    """Return how often each path was taken, with its reason, since the last :func:`reset_dispatch_counts`."""
    return dict(_counts)


def reset_dispatch_counts() -> None:
    """Forget the counts, and the last dispatch."""
    global _last
    _counts.clear()
    _last = None


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing within a ``with`` block, in which a step is traced."""
    global _last
    counts, last = _counts.copy(), _last
    try:
        yield
    finally:
        _counts.clear()
        _counts.update(counts)
        _last = last


_FRESH = Dispatch("prefill", "no prefix: only new keys")
_KERNEL_ONE = Dispatch("kernel", "one new token per sequence")
_KERNEL_FEW = Dispatch("kernel", "a few new tokens per sequence")
_KERNEL_PACK = Dispatch("kernel", "new tokens of several sequences")
_KERNEL_PROMPT = Dispatch("kernel", "new tokens of one sequence")
_GATHERS: dict[str, Dispatch] = {}  # by reason; made once, since the host's time limits decode steps


def record(choice: Dispatch, times: int = 1) -> None:
    """Count a choice of path."""
    global _last
    _last = choice
    _counts[choice] += times


def record_compiled(num_layers: int) -> None:
    """Count a compiled decode step, in which every layer ran in the kernel."""
    record(_KERNEL_ONE, num_layers)


def attend(
    q: mx.array,
    new: tuple[mx.array, mx.array] | None,
    group: Group,
    position: int,
    tokens: NewTokens,
    params: AttentionParams,
    *,
    is_written: bool = False,
    as_rows: bool = False,
) -> mx.array:
    """Write the new tokens of B sequences, unless they are written already, and attend from each token over the tokens
    it sees, itself included.

    Uses one kernel for all sequences, which also writes if each has one new token, or else MLX's attention.

    Args:
        q: ``[B, n_q_heads, n, head_dim]`` if each sequence has n new tokens; ``[T, n_q_heads, 1, head_dim]``, for T
            tokens in all, if their numbers differ.
        new: the new keys ``[B, n_kv_heads, n, head_dim]`` or ``[T, n_kv_heads, 1, head_dim]`` and values, accepted by
            :meth:`Group.validate`; None if they are written and the caller does not have them.
        group, position: the layer's group, and its index there.
        tokens: the new tokens, with positions reserved for them.
        params: for one sequence the mask is over the visible keys; for several it is None.
        is_written: the new tokens are written already.
        as_rows: use the decode kernel, for few new tokens after long contexts.

    Returns:
        The output, shaped like q but with the values' head size.

    Raises:
        GeometryError: q does not match the numbers of tokens and sequences.
    """
    global _last
    shape, num_tables = q.shape, len(tokens.counts)
    if len(shape) != 4 or shape[0] * shape[2] != tokens.num_tokens or shape[0] not in (num_tables, tokens.num_tokens):
        raise GeometryError(f"queries {shape} do not match {tokens.num_tokens} new tokens of {num_tables} sequence(s)")
    if tokens.is_pack or not group.in_place:
        blocks = group.blocks[position]
        if new is not None and not is_written:
            blocks.write(tokens, *new)
        if isinstance(blocks, HostBlocks) and not tokens.is_pack:
            reason = group.blocks_reason
            _last = _GATHERS.get(reason) or _GATHERS.setdefault(reason, Dispatch("gather", reason))
            _counts[_last] += 1
            return gather.view_attention(q, blocks, tokens, params)
        call = _Call(q, group, position, tokens, params)
        if shape[0] == num_tables == 1:
            return call.attend_one(new)
        if shape[0] == num_tables:
            return call.attend_rows(None)
        return call.attend_pack(new, as_rows)
    return _Call(q, group, position, tokens, params).attend_rows(None if is_written else new)


class _Call(NamedTuple):
    """A call of attention; see :func:`attend` for the fields."""

    q: mx.array
    group: Group
    position: int
    tokens: NewTokens
    params: AttentionParams

    def attend_one(self, new: tuple[mx.array, mx.array] | None) -> mx.array:
        """Attend from the new tokens of one sequence, which are written; over these alone if there is no prefix."""
        q, group, position, tokens, params = self
        table = tokens.tables[0]
        if backend() == "cuda":
            if _unsupported_reason(q, group, table.length, params) is None:
                return self.attend_rows(None)
            if not (params.latent or _masks_otherwise(params) or _has_plan(q, table.num_visible(group.index))):
                own = params._replace(mask=None, window=_seen(group, params))
                attended, _ = self._replace(q=q.swapaxes(0, 2), params=own).attend_prompts()
                if attended is not None:
                    record(_KERNEL_PROMPT)
                    return attended.swapaxes(0, 2)
        # With quantised pages, attend over what the pages hold: later tokens and other sequences will see the same.
        if new is not None and table.num_visible(group.index) == q.shape[2] and not group.is_quantized:
            record(_FRESH)
            # Otherwise MLX may put off all layers' writes to the end of a prefill, which keeps every layer's new keys
            # and values alive until then.
            k, v = group.device(position).after_writes(*new) if group.in_place else new
            return gather.attention(q, k, v, params)
        return self.attend_rows(None)

    def attend_rows(self, append: tuple[mx.array, mx.array] | None) -> mx.array:
        """Attend from the same number of tokens of each sequence, by the decode kernel or over gathered arrays.

        ``append``: keys and values of the new tokens, if they are not written yet.
        """
        attended, unsupported = self.attend_by_decode_kernel(append)
        if attended is not None:
            return attended
        blocks = self.group.blocks[self.position]
        if append is not None:
            blocks.write(self.tokens, *append)
        record(Dispatch("gather", unsupported))
        if isinstance(blocks, HostBlocks) and self.q.shape[2] <= MAX_QUERY_LENGTH:
            return gather.view_attention(self.q, blocks, self.tokens, self.params)
        # A prompt's result in the last layer is never used, so it must not be among the reads that a write computes.
        return gather.gather_attention(*self)

    def attend_by_decode_kernel(self, append: tuple[mx.array, mx.array] | None) -> tuple[mx.array | None, str]:
        """Attend by the decode kernel, prepared once for all layers with the same parameters; return None and the
        reason if the kernel does not serve."""
        q, group, position, tokens, params = self
        shape, (scale, mask, window, softcap, sinks, latent) = q.shape, params
        key = "decode", shape, q.dtype, scale, window, softcap, sinks is None, latent, append is None
        launch = None if mask is not None and _has_other_mask(params) else tokens.made.get(key)
        if launch is None:
            longest = max(table.length for table in tokens.tables) if shape[2] > MAX_QUERY_LENGTH else 0
            unsupported = _unsupported_reason(q, group, longest, params)
            if unsupported is not None:
                return None, unsupported
        blocks = group.device(position)
        try:
            if launch is None:
                seen = params._replace(window=_seen(group, params))
                launch = blocks.prepare_decode(q, tokens, seen, appends=append is not None)
                tokens.made[key] = launch
            attended = blocks.decode(launch, q, sinks, append)
        except NoKernelError as error:  # a kernel that this call was the first to need; nothing was launched
            tokens.made.clear()
            unsupported = group.unsupported[params.heads(shape[1]), False] = f"the kernel is off: {error}"
            return None, unsupported
        record(_KERNEL_ONE if shape[2] == 1 and not tokens.is_pack else _KERNEL_FEW)
        return attended, ""

    def attend_pack(self, new: tuple[mx.array, mx.array] | None, as_rows: bool) -> mx.array:
        """Attend from several sequences' new tokens, which are written: in one launch, or one sequence after the
        other."""
        q, group, position, tokens, params = call = self._replace(
            params=self.params._replace(window=_seen(self.group, self.params))
        )
        if as_rows:
            attended, _ = call.attend_by_decode_kernel(None)
            if attended is not None:
                return attended
        attended, why = call.attend_prompts()
        if attended is not None:
            record(_KERNEL_PACK)
            return attended
        record(Dispatch("apart", why))
        queries = tokens.split(q)
        pairs = [None] * len(queries) if new is None else list(zip(*map(tokens.split, new), strict=True))
        outputs = []
        for index, (one, table, pair) in enumerate(zip(queries, tokens.tables, pairs, strict=True)):
            own = params._replace(mask=_mask_of(one.shape[2], table.num_visible(group.index), params.window))
            outputs.append(_Call(one, group, position, tokens.single(index), own).attend_one(pair))
        return tokens.join(outputs)

    def attend_prompts(self) -> tuple[mx.array | None, str]:
        """Attend from ``[T, n_q_heads, 1, head_dim]`` over the written tokens in one launch of the prefill kernel;
        return None and the reason if it does not serve."""
        q, group, position, tokens, params = self
        heads = params.heads(q.shape[1])
        unsupported = group.unsupported_reason(heads, is_prefill=True) or _mismatch(q, group, params)
        if unsupported is not None:
            return None, unsupported
        try:
            return group.device(position).prefill(q, tokens, params), ""
        except NoKernelError as error:  # raised before anything was launched
            unsupported = group.unsupported[heads, True] = f"the kernel is off: {error}"
            return None, unsupported


def _has_plan(q: mx.array, num_visible: int) -> bool:
    """Return whether MLX's attention has met these numbers of new tokens and of all tokens, or will meet them again."""
    _, _, count, head_dim = q.shape
    return head_dim <= MOST_PLANNED_HEAD_DIM and count % WHOLE_CHUNK == 0 and num_visible % count == 0


def supports_latents(num_q_heads: int, pool: BlockPool, layer: int) -> bool:
    """Return whether the decode kernel attends over a layer's latents with ``num_q_heads`` query heads, for one new
    token per sequence."""
    return pool.group_of(layer).unsupported_reason(QueryHeads(num_q_heads, latent=True)) is None


def _mask_of(num_tokens: int, num_visible: int, window: Window | None) -> mx.array | str:
    """Return the mask of a sequence's last ``num_tokens`` tokens over its visible ones."""
    before = num_visible - num_tokens
    if window is None or not window.first_seen(before + num_tokens - 1):
        return "causal"
    return causal_mask(num_tokens, before, window)


def _seen(group: Group, params: AttentionParams) -> Window | None:
    """Return the window of the queries: the group's, or that of the parameters if it is narrower."""
    if group.sees is None or (params.window is not None and params.window.size < group.sees.size):
        return params.window
    return group.sees


def _mismatch(q: mx.array, group: Group, params: AttentionParams) -> str | None:
    """Return why queries do not fit the group's keys, or None."""
    assert group.geometry is not None
    _, k_dim, v_dim, dtype, _ = group.geometry
    if q.dtype != dtype or q.shape[3] != k_dim + params.latent * v_dim:
        return f"queries of {q.dtype} x {q.shape[3]} do not match keys of {dtype} x {k_dim}"
    return None


def _unsupported_reason(q: mx.array, group: Group, longest: int, params: AttentionParams) -> str | None:
    """Return why the decode kernel cannot serve this call, or None."""
    _, num_q_heads, q_len, _ = q.shape
    if q_len > MAX_QUERY_LENGTH and not (
        q_len <= MOST_FEW_TOKENS and q_len * longest <= MOST_READS and backend() == "cuda"
    ):
        return "several new tokens after a prefix"
    if group.has_kernel and _has_other_mask(params):
        return "the mask is more than causality and a window"
    return group.unsupported_reason(params.heads(num_q_heads)) or _mismatch(q, group, params)


def _has_other_mask(params: AttentionParams) -> bool:
    """Return whether the mask is more than causality and a window, which is all that kernels support."""
    return params.window is None and isinstance(params.mask, mx.array)


def _masks_otherwise(params: AttentionParams) -> bool:
    """Return whether several new tokens are masked by something else than causality and a window, or not at all."""
    return params.window is None and not isinstance(params.mask, str)
