"""Gather-then-SDPA: copy each sequence's blocks together, then MLX's own attention. The reference and the fallback."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import GeometryError
from ..kv.block_table import BlockTable
from ..kv.group import LayerGroup
from ..kv.layer import PoolLayer
from ..kv.step import Columns, RowsInParts, RowsTogether, Step, padded_slots
from ..kv.storage.attention_params import AttentionParams, Window
from ..kv.storage.base import Geometry, Storage
from ..kv.storage.functional import FunctionalStorage


def causal_mask(num_tokens: int, offset: int = 0, window: Window | None = None) -> mx.array:
    """Return the boolean mask ``[num_tokens, offset + num_tokens]``: query i, at position ``offset + i``, sees the
    positions up to its own, and with a window only those inside it. Positions count from the first visible token."""
    keys = mx.arange(offset + num_tokens)[None]
    queries = mx.arange(offset, offset + num_tokens)[:, None]
    mask = queries >= keys
    if window is not None:
        mask = mask & (keys >= mx.array(window.first_seen_by(np.arange(offset, offset + num_tokens)))[:, None])
    return mask


def window_under(group: LayerGroup, size: int | None) -> Window | None:
    """Return a token's window under a sliding mask of ``size`` tokens, or the group's own window if ``size`` is None.

    Raises:
        GeometryError: the group's windows are chunks, and the mask has another size.
    """
    if size is None or size == group.window:
        return group.sees
    if group.stride > 1:
        raise GeometryError(f"attention in chunks of {group.window} tokens cannot have a window of {size} tokens")
    return Window(size)


# A row whose keys and values take up to SHORT_BYTES is copied faster than its operations are launched. Reading rows
# together pays from FEWEST_TOGETHER rows on; at most MOST_BYTES_TOGETHER are gathered at a time.
SHORT_BYTES, FEWEST_TOGETHER, MOST_BYTES_TOGETHER = 1 << 17, 2, 1 << 24
# Costs for rows of several lengths, as the bytes that could be copied meanwhile: to look up a key and its value, and to
# run the operations of one part.
PAIR_BYTES, PART_BYTES = 1 << 8, 3 << 16


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    params: AttentionParams,
) -> mx.array:
    """Compute MLX's attention of q ``[B, n_q_heads, q_len, head_dim]`` over k, v ``[B, n_kv_heads, n, head_dim]``.

    A soft cap, which MLX's function lacks, is computed explicitly: scores ``softcap * tanh(q k^T scale / softcap)``.
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
    """Attend as mlx-lm's MLA modules do for one token: the scores of the rotated part become the additive mask of
    attention over latents."""
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
    """Attend from the last tokens of each sequence over all its visible tokens: one SDPA call per sequence, or
    operations for several short sequences together, with the same bits.

    Args:
        q: ``[B, n_q_heads, q_len, head_dim]``; the queries are the last ``q_len`` tokens of each sequence.
        kv, tables: the layer and the tables that hold keys and values, those of the queries included.
        params: the mask is over the visible tokens.
        step: the step of these tables.

    Returns:
        ``[B, n_q_heads, q_len, v_head_dim]``.
    """
    if len(tables) == 1:
        return attend_alone(q, kv.gather_visible(tables[0], copy=False), kv, params)
    is_plain = (
        not step.is_pack and params.softcap is None and not params.latent and not isinstance(params.mask, mx.array)
    )
    plan = None
    if is_plain and params.sinks is None:
        storage, plan = kv.storage, step.read_plan
        if plan is None or plan.num_blocks != storage.num_blocks:
            plan = _read_plan(q, kv, storage, tables, step)
    if isinstance(plan, RowsTogether):
        assert isinstance(storage, FunctionalStorage)
        output = _attend_padded(q, *storage.read_tokens(plan.tokens), params.scale, plan.mask)
    elif plan is not None:
        output = _attend_in_parts(q, kv, params, plan)
    else:
        parts = _row_parts(kv, tables, step) if is_plain else [[row] for row in range(len(tables))]
        output = _attend_by_function(q, kv, tables, params, step, parts)
    if q.shape[2] == 1:  # a prefill's result may never be used: waiting for it would compute it
        kv.note_read(output)
    return output


def _attend_by_function(
    q: mx.array,
    kv: PoolLayer,
    tables: Sequence[BlockTable],
    params: AttentionParams,
    step: Step,
    parts: Sequence[list[int]],
) -> mx.array:
    """Attend with one call of MLX's function for each part of the rows."""
    outputs: list[mx.array] = []
    for rows in parts:
        if len(rows) > 1:
            k, v = kv.storage.read_rows(_columns(tables, rows, step))
        else:
            k, v = kv.gather_visible(tables[rows[0]], copy=False)
        outputs.append(attention(_rows_of(q, rows), k, v, params))
    output = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    order = [row for rows in parts for row in rows]
    return output if order == sorted(order) else output[mx.array(np.argsort(order))]


def reads_together(num_rows: int, keys: mx.array, values: mx.array) -> bool:
    """Return whether :func:`gather_attention` would read rows of equal length, as in these arrays, all at once."""
    nbytes = keys.nbytes + values.nbytes
    return num_rows >= FEWEST_TOGETHER and nbytes <= min(num_rows * SHORT_BYTES, MOST_BYTES_TOGETHER)


def attend_alone(q: mx.array, seen: tuple[mx.array, mx.array], kv: PoolLayer, params: AttentionParams) -> mx.array:
    """Attend from the last tokens of one sequence over all its visible tokens, read from a layer."""
    output = attention(q, *seen, params)
    if q.shape[2] == 1:  # a prefill's result may never be used: waiting for it would compute it
        kv.note_read(output)
    return output


def _attend_in_parts(q: mx.array, kv: PoolLayer, params: AttentionParams, parts: RowsInParts) -> mx.array:
    """Attend from rows with one new token each, by the operations that MLX's attention function runs on a CPU, with the
    same bits.

    An operation costs as much as the products of a short row. Parts share the operations before and after the products
    and most reads, which leaves 3 operations per part instead of 20 or more.
    """
    storage = kv.storage
    assert isinstance(storage, FunctionalStorage)
    batch, num_heads, _, head_dim = q.shape
    num_kv_heads = storage.geometry.num_kv_heads
    keys, values = list[mx.array](), list[mx.array]()
    for edges, blocks in parts.views:
        k, v = storage.for_single_queries(num_heads // num_kv_heads, blocks)
        keys += mx.split(k, edges, axis=-1)[1::2]
        values += mx.split(v, edges, axis=-2)[1::2]
    for index in parts.gathers:
        k, v = storage.read_tokens(index)
        keys.append(k.swapaxes(-1, -2))
        values.append(v)
    scaled = (q * mx.array(params.scale, q.dtype)).reshape(batch, num_kv_heads, -1, 1, head_dim)
    if parts.order is not None:
        scaled = scaled[parts.order[0]]
    queries = zip(mx.split(scaled, parts.ends), parts.places, strict=True)
    found = [mx.softmax(own @ keys[place], axis=-1, precise=True) @ values[place] for own, place in queries]
    output = mx.concatenate(found).reshape(batch, num_heads, 1, -1)
    return output if parts.order is None else output[parts.order[1]]


def _attend_padded(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    """Attend from rows with one new token each, with one product for all queries of a KV head. Call it only where
    :func:`_is_exact_together` has found the bits to equal those of MLX's attention function."""
    batch, num_heads, _, head_dim = q.shape
    scores = (q * scale).reshape(batch, k.shape[1], -1, head_dim) @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = scores + mask
    return (mx.softmax(scores, axis=-1, precise=True) @ v).reshape(batch, num_heads, 1, -1)


@functools.cache
def _is_exact(dtype: mx.Dtype, groups: int, k_dim: int, v_dim: int) -> bool:
    """Return whether padded rows computed together get the same bits as each row alone. They do where MLX adds terms
    one by one, as on x86: weights of zero change no sum. Other builds of MLX add several terms at a time."""
    lengths, noise = (1, 6, 37, 64, 171), np.random.default_rng(0)
    longest, num_kv_heads = max(lengths), 2

    def draw(*shape: int) -> mx.array:
        return mx.array(noise.standard_normal(shape, np.float32)).astype(dtype)

    q = draw(len(lengths), num_kv_heads * groups, 1, k_dim)
    k, v = (draw(len(lengths), num_kv_heads, longest, dim) for dim in (k_dim, v_dim))
    scale = k_dim**-0.5
    got = _attend_padded(q, k, v, scale, _padding_mask(lengths, dtype))
    alone = [
        mx.fast.scaled_dot_product_attention(
            *(x[row : row + 1, :, start:] for x, start in ((q, 0), (k, longest - n), (v, longest - n))), scale=scale
        )
        for row, n in enumerate(lengths)
    ]
    return bool(mx.array_equal(got, mx.concatenate(alone)).item())


def _padding_mask(lengths: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return the mask that hides the padding of rows, ``[B, 1, 1, n]``, to be added to scores."""
    columns = np.arange(max(lengths))
    pads = max(lengths) - np.array(lengths)
    return mx.array(np.where(columns >= pads[:, None, None, None], np.float32(0), np.float32(-np.inf)), dtype)


def _read_plan(
    q: mx.array, kv: PoolLayer, storage: Storage, tables: Sequence[BlockTable], step: Step
) -> RowsTogether | RowsInParts | None:
    """Return how to read rows with one new token each, found once for all layers of a group. None if MLX's attention
    function is called instead: storage is not functional, the device is a GPU, or one call serves all rows."""
    if not isinstance(storage, FunctionalStorage) or mx.default_device().type != mx.DeviceType.cpu:
        return None
    parts = _row_parts(kv, tables, step)
    if _pays_together(storage.geometry, tables, parts) and _is_exact_together(q, storage.geometry):
        lengths = [table.length - table.logical_start for table in tables]
        mask = None if len(set(lengths)) == 1 else _padding_mask(lengths, q.dtype)
        step.read_plan = RowsTogether(storage.host_flat_index(padded_slots(tables)), mask, storage.num_blocks)
    elif len(parts) > 1:
        step.read_plan = _plan_parts(storage, tables, parts)
    return step.read_plan


def _pays_together(geometry: Geometry, tables: Sequence[BlockTable], parts: Sequence[list[int]]) -> bool:
    """Return whether copying all rows, padded to the longest, costs less than the operations of parts."""
    if len(parts) == 1:
        return True
    heads, k_dim, v_dim, dtype, _ = geometry
    num_pairs = heads * len(tables) * max([table.num_visible for table in tables])
    nbytes = num_pairs * (k_dim + v_dim) * dtype.size
    return nbytes <= MOST_BYTES_TOGETHER and nbytes + num_pairs * PAIR_BYTES <= len(parts) * PART_BYTES


def _is_exact_together(q: mx.array, geometry: Geometry) -> bool:
    heads, k_dim, v_dim, dtype, _ = geometry
    return q.dtype == dtype and _is_exact(dtype, q.shape[1] // heads, k_dim, v_dim)


def _plan_parts(storage: FunctionalStorage, tables: Sequence[BlockTable], parts: Sequence[list[int]]) -> RowsInParts:
    """Return where to read the parts. A single row is read from the pool if its blocks are consecutive, else from an
    array of gathered blocks, of up to MOST_BYTES_TOGETHER, which rows share."""
    geometry, size = storage.geometry, storage.block_size
    block_bytes = size * geometry.num_kv_heads * (geometry.k_head_dim + geometry.v_head_dim) * geometry.dtype.size
    views: list[tuple[list[int], list[int], list[int]]] = []  # rows, edges, blocks (none: the pool)
    alone = [rows[0] for rows in parts if len(rows) == 1]
    places = sorted((place, row) for row in alone if (place := storage.place_of(tables[row])) is not None)
    for (start, end), row in places:
        if not views or start < views[-1][1][-1]:  # overlaps the row before it: they share blocks
            views.append(([], [], []))
        views[-1][0].append(row)
        views[-1][1].extend((start, end))
    for row in sorted(set(alone).difference(row for _, row in places)):
        table = tables[row]
        blocks = table.block_ids[table.logical_start // size : -(-table.length // size)]
        num_blocks = len(views[-1][2]) if views else 0
        if not num_blocks or (num_blocks + len(blocks)) * block_bytes > MOST_BYTES_TOGETHER:
            views.append(([], [], []))
            num_blocks = 0
        start = num_blocks * size + table.logical_start % size
        views[-1][0].append(row)
        views[-1][1].extend((start, start + table.num_visible))
        views[-1][2].extend(blocks)
    several = [rows for rows in parts if len(rows) > 1]
    read = [[row] for rows, _, _ in views for row in rows] + several
    by_row = sorted(range(len(read)), key=lambda place: read[place][0])
    order = [row for place in by_row for row in read[place]]
    return RowsInParts(
        [(edges, storage.block_index(blocks) if blocks else None) for _, edges, blocks in views],
        [storage.host_flat_index(padded_slots([tables[row] for row in rows]))[:, :, None] for rows in several],
        by_row,
        np.cumsum([len(read[place]) for place in by_row])[:-1].tolist(),
        None if order == sorted(order) else (mx.array(order), mx.array(np.argsort(order))),
        storage.num_blocks,
    )


def _row_parts(kv: PoolLayer, tables: Sequence[BlockTable], step: Step) -> list[list[int]]:
    """Return the rows of a decode step that share operations, part by part; found once for all layers of a group."""
    if step.row_parts is not None:
        return step.row_parts
    if kv.in_place:
        step.row_parts = [[row] for row in range(len(tables))]
        return step.row_parts
    geometry = kv.group.geometry
    assert geometry is not None
    token_bytes = geometry.num_kv_heads * (geometry.k_head_dim + geometry.v_head_dim) * geometry.dtype.size
    by_extent: dict[tuple[int, int], list[int]] = {}
    for row, table in enumerate(tables):
        by_extent.setdefault((table.logical_start, table.length), []).append(row)
    step.row_parts = []
    for (start, end), rows in by_extent.items():
        row_bytes = (end - start) * token_bytes
        most = MOST_BYTES_TOGETHER // row_bytes if row_bytes <= SHORT_BYTES else 1
        step.row_parts += [rows[index : index + most] for index in range(0, len(rows), most)]
    return step.row_parts


def _columns(tables: Sequence[BlockTable], rows: Sequence[int], step: Step) -> Columns:
    """Return the columns to read for rows of equal length, made once for all layers of a group."""
    key = tuple(rows)
    columns = step.columns.get(key)
    if columns is None:
        columns = step.columns[key] = Columns.of_slots(padded_slots([tables[row] for row in rows]))
    return columns


def _rows_of(q: mx.array, rows: list[int]) -> mx.array:
    first, last = rows[0], rows[-1]
    if len(rows) == q.shape[0] and last == first + len(rows) - 1:
        return q
    return q[first : last + 1] if last == first + len(rows) - 1 else q[mx.array(rows)]
