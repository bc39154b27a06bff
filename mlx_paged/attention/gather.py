"""Gather-then-SDPA: copy each sequence's blocks together, then MLX's own attention. The reference and the fallback."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import GeometryError
from ..kv.block_table import BlockTable
from ..kv.group import LayerGroup
from ..kv.layer import PoolLayer
from ..kv.step import Columns, RowsApart, RowsTogether, Step
from ..kv.storage.attention_params import AttentionParams, Window
from ..kv.storage.functional import FunctionalStorage


def causal_mask(num_tokens: int, offset: int = 0, window: Window | None = None) -> mx.array:
    """Boolean mask ``[num_tokens, offset + num_tokens]``: query i, at position ``offset + i``, sees positions up to
    its own, with a window from the first one on that this shows it. Positions count from what is visible."""
    keys = mx.arange(offset + num_tokens)[None]
    queries = mx.arange(offset, offset + num_tokens)[:, None]
    mask = queries >= keys
    if window is not None:
        mask = mask & (keys >= mx.array(window.first_seen_by(np.arange(offset, offset + num_tokens)))[:, None])
    return mask


def window_under(group: LayerGroup, size: int | None) -> Window | None:
    """Return what a token sees under a mask that slides over ``size`` tokens; None: under the group's own.

    Raises:
        GeometryError: tokens see chunks, and the mask is of another size.
    """
    if size is None or size == group.window:
        return group.sees
    if group.stride > 1:
        raise GeometryError(f"a mask of a window of {size} tokens over chunks of {group.window}")
    return Window(size)


# Keys and values of a row of up to so many bytes are copied faster than a row's operations are launched. Then the
# fewest rows for which that pays, and how many bytes are gathered at a time.
SHORT_BYTES, FEWEST_TOGETHER, MOST_BYTES_TOGETHER = 1 << 17, 2, 1 << 24


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    params: AttentionParams,
) -> mx.array:
    """MLX's attention, of q ``[B, n_q_heads, q_len, head_dim]`` over k, v ``[B, n_kv_heads, n, head_dim]``.

    With a soft cap, which MLX's does not have, it is spelled out: scores ``softcap * tanh(q k^T scale / softcap)``.
    """
    scale, mask, _, softcap, sinks, latent = params
    if latent:
        return _latent_attention(q, k, v, scale, mask)
    if softcap is None:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    batch, n_q_heads, q_len, _ = q.shape
    n_kv_heads = k.shape[1]
    q = (q * scale).reshape(batch, n_kv_heads, n_q_heads // n_kv_heads, q_len, -1)
    scores = q @ k[:, :, None].swapaxes(-1, -2)
    scores = mx.tanh(scores / softcap) * softcap
    if isinstance(mask, str):
        mask = causal_mask(q_len, k.shape[2] - q_len)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        column = mx.broadcast_to(sinks.reshape(1, n_kv_heads, -1, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([column.astype(scores.dtype), scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    return (weights @ v[:, :, None]).reshape(batch, n_q_heads, q_len, -1)


def _latent_attention(
    q: mx.array, latents: mx.array, rotated: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attend as mlx-lm's modules do for one token: the scores of what is rotated are the mask of attention over
    latents."""
    rank, q_len, length = latents.shape[3], q.shape[2], latents.shape[2]
    scores = (q[..., rank:] * scale) @ rotated.swapaxes(-1, -2)
    if isinstance(mask, str):
        mask = causal_mask(q_len, length - q_len)
    if mask is not None:
        least = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        scores = mx.where(mask, scores, least) if mask.dtype == mx.bool_ else scores + mask.astype(scores.dtype)
    return mx.fast.scaled_dot_product_attention(q[..., :rank], latents, latents, scale=scale, mask=scores)


def gather_attention(
    q: mx.array,
    kv: PoolLayer,
    tables: Sequence[BlockTable],
    params: AttentionParams,
    step: Step,
) -> mx.array:
    """Attention of the last tokens of each sequence over all its visible tokens: one SDPA call per sequence, or for
    short ones of one length together, which gives the same bits.

    Args:
        q: ``[B, n_q_heads, q_len, head_dim]``; the queries are the last ``q_len`` tokens of each sequence.
        kv, tables: where the keys and values lie, those of the queries included.
        params: its mask is over the visible tokens.
        step: of these tables.

    Returns:
        ``[B, n_q_heads, q_len, v_head_dim]``.
    """
    if len(tables) == 1:
        return attend_alone(q, kv.gather_visible(tables[0], copy=False), kv, params)
    parts = [RowsTogether([row], None) for row in range(len(tables))]
    is_plain = params.softcap is None and not params.latent and not isinstance(params.mask, mx.array)
    if is_plain and not step.is_pack:
        parts = _together(kv, tables, step)
    outputs: list[mx.array] = []
    order = _attend_apart(outputs, q, kv, tables, params, step, parts) if is_plain else []
    done = set(order)
    for rows, columns in parts:
        if rows[0] in done:
            continue
        if columns is not None:
            k, v = kv.storage.read_rows(columns)
        else:
            k, v = kv.gather_visible(tables[rows[0]], copy=False)
        outputs.append(attention(_rows_of(q, rows), k, v, params))
        order += rows
    output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    if order != sorted(order):
        output = output[mx.array(np.argsort(order))]
    if q.shape[2] == 1:  # a prefill's result may never be asked for: waiting for it would compute it
        kv.note_read(output)
    return output


def reads_together(num_rows: int, keys: mx.array, values: mx.array) -> bool:
    """Return whether :func:`gather_attention` reads rows of one length as these arrays hold them, all at once."""
    nbytes = keys.nbytes + values.nbytes
    return num_rows >= FEWEST_TOGETHER and nbytes <= min(num_rows * SHORT_BYTES, MOST_BYTES_TOGETHER)


def attend_alone(q: mx.array, seen: tuple[mx.array, mx.array], kv: PoolLayer, params: AttentionParams) -> mx.array:
    """Attention of the last tokens of one sequence over all its visible tokens, read from a layer."""
    output = attention(q, *seen, params)
    if q.shape[2] == 1:  # a prefill's result may never be asked for: waiting for it would compute it
        kv.note_read(output)
    return output


def _attend_apart(
    outputs: list[mx.array],
    q: mx.array,
    kv: PoolLayer,
    tables: Sequence[BlockTable],
    params: AttentionParams,
    step: Step,
    parts: Sequence[RowsTogether],
) -> list[int]:
    """Attention of rows with one new token that share no operations with rows of their length, appended to the outputs;
    not of all, and of none where MLX's attention function is more than these operations. Returns which rows.

    On a CPU that function is them, and the bits are the same. An operation costs as much as the products of a short
    row. Here rows share those before and after, and one gather, and 3 are left of 20 or more for each.
    """
    storage = kv.storage
    rows = [part.rows[0] for part in parts if part.columns is None]
    is_on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if (
        len(rows) < FEWEST_TOGETHER
        or not is_on_cpu
        or q.shape[2] != 1
        or params.sinks is not None
        or not isinstance(storage, FunctionalStorage)
    ):
        return []
    if step.apart is None or step.apart.num_blocks != storage.num_blocks:
        step.apart = _places(storage, tables, rows)
    batch, num_heads = q.shape[:2]
    scaled = (q * mx.array(params.scale, q.dtype)).reshape(batch, storage.geometry.num_kv_heads, -1, 1, q.shape[3])
    queries = mx.split(scaled, batch)
    found: dict[int, mx.array] = {}
    for rows, edges, index in step.apart.sources:
        keys, values = storage.for_single_queries(index)
        own = zip(rows, mx.split(keys, edges, axis=-1)[1::2], mx.split(values, edges, axis=-2)[1::2], strict=True)
        for row, k, v in own:
            found[row] = mx.softmax(queries[row] @ k, axis=-1, precise=True) @ v
    if not found:
        return []
    done = sorted(found)
    outputs.append(mx.concatenate([found[row] for row in done]).reshape(len(done), num_heads, 1, -1))
    return done


def _places(storage: FunctionalStorage, tables: Sequence[BlockTable], rows: Sequence[int]) -> RowsApart:
    """Return where rows are read: in the pool if their blocks follow each other, else in one array of the blocks of
    as many rows as may be gathered at a time."""
    geometry, size = storage.geometry, storage.block_size
    block_bytes = size * geometry.num_kv_heads * (geometry.k_head_dim + geometry.v_head_dim) * geometry.dtype.size
    places = sorted((place, row) for row in rows if (place := storage.place_of(tables[row])) is not None)
    in_pool, pool_edges = list[int](), [0]
    gathered, edges, blocks = list[int](), list[int](), list[int]()
    for (start, end), row in places:
        if start >= pool_edges[-1]:  # always, but for blocks that rows share to the last
            in_pool.append(row)
            pool_edges += start, end
    for row in rows:
        table = tables[row]
        first, last = table.logical_start // size, -(-table.length // size)
        if row not in in_pool and (len(blocks) + last - first) * block_bytes <= MOST_BYTES_TOGETHER:
            start = len(blocks) * size + table.logical_start % size
            gathered.append(row)
            edges += start, start + table.num_visible
            blocks += table.block_ids[first:last]
    sources: list[tuple[list[int], list[int], mx.array | None]] = [(in_pool, pool_edges[1:], None)]
    if gathered:
        sources.append((gathered, edges, storage.block_index(blocks)))
    return RowsApart([source for source in sources if source[0]], storage.num_blocks)


def _together(kv: PoolLayer, tables: Sequence[BlockTable], step: Step) -> list[RowsTogether]:
    """Return which rows of a decode step share operations; found once for all layers of a group."""
    if step.together is not None:
        return step.together
    geometry = kv.group.geometry
    assert geometry is not None
    token_bytes = geometry.num_kv_heads * (geometry.k_head_dim + geometry.v_head_dim) * geometry.dtype.size
    alone: list[int] = []
    together: list[RowsTogether] = []
    by_extent: dict[tuple[int, int], list[int]] = {}
    for row, table in enumerate(tables):
        if kv.in_place:
            alone.append(row)
        else:
            by_extent.setdefault((table.logical_start, table.length), []).append(row)
    for (start, end), rows in by_extent.items():
        row_bytes = (end - start) * token_bytes
        most = MOST_BYTES_TOGETHER // row_bytes if row_bytes <= SHORT_BYTES else 1
        for index in range(0, len(rows), most):
            some = rows[index : index + most]
            if len(some) < FEWEST_TOGETHER:
                alone.extend(some)
                continue
            num_blocks = -(-end // tables[some[0]].block_size)
            block_ids = np.array([tables[row].block_ids[:num_blocks] for row in some], np.int32)
            positions = np.broadcast_to(np.arange(start, end, dtype=np.int32), (len(some), end - start))
            together.append(RowsTogether(some, Columns(mx.array(block_ids), mx.array(positions))))
    step.together = [*(RowsTogether([row], None) for row in sorted(alone)), *together]
    return step.together


def _rows_of(q: mx.array, rows: list[int]) -> mx.array:
    first, last = rows[0], rows[-1]
    if len(rows) == q.shape[0] and last == first + len(rows) - 1:
        return q
    return q[first : last + 1] if last == first + len(rows) - 1 else q[mx.array(rows)]
