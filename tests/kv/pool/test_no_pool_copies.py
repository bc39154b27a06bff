"""No write or read copies the tensors of a pool."""

import functools
import gc
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from mlx_paged.cache.batch import Batch
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.kv.geometry import AttentionParams
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import kv, noise, pool_of

FEW_MB = 6 << 20


@pytest.fixture
def big_pool() -> Iterator[BlockPool]:
    """About 64 MB of K and V in one layer: 8 heads of 128 + 128 in half precision, 4 KiB per token."""
    pool = pool_of(block_size=32)
    holder, table = pool.new_table(), pool.new_table()
    pool.append_tokens(holder, 1)  # tensors live as long as a block is held
    pool.append_tokens(table, 16_000)
    k, v = kv(0, 1, heads=8, kd=128, vd=128, dtype=mx.float16)
    pool.write(0, [table], k, v)
    mx.eval(pool.ready())
    pool.release_table(table)
    assert pool.stats().bytes_reserved > 64_000_000
    assert mx.get_active_memory() > 64_000_000
    yield pool
    del pool, table, holder
    gc.collect()
    mx.clear_cache()


def extra_peak(action: Callable[[], None]) -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    action()
    mx.synchronize()
    return mx.get_peak_memory() - before


def one_step_ahead(x: mx.array, attend: Callable[[mx.array, mx.array], mx.array]) -> None:
    """Run 12 decode steps with queries ``[B, 16, 1, 128]``. Step t + 1 is built on the result of step t and started
    before that result is read."""
    pending = None
    for _ in range(12):
        slow = mx.ones((256, 256)) * x[0, 0, 0, 0].astype(mx.float32)
        for _ in range(3):  # keeps the read of this step unfinished while the next one is built
            slow = mx.tanh(slow @ slow)
        token = mx.broadcast_to(x[:, :8] + 0 * slow[0, 0].astype(x.dtype), (len(x), 8, 1, 128))
        x = mx.tanh(attend(x, token))
        mx.async_eval(x)
        if pending is not None:
            assert mx.all(mx.isfinite(pending)).item()
        pending = x
    mx.eval(x)


def test_write_never_copies_the_pool(big_pool: BlockPool) -> None:
    pool = big_pool
    shape = {"heads": 8, "kd": 128, "vd": 128, "dtype": mx.float16}
    sequence = SequenceTables(pool)
    cache = PagedKVCache(sequence, 0)
    seeds = iter(range(1, 1000))

    def query(n: int = 1) -> mx.array:
        return noise(5, 1, 16, n, 128, dtype=mx.float16)

    def prefill() -> None:
        cache.update(*kv(next(seeds), 70, **shape))
        mx.eval(pool.ready())

    def decode() -> None:
        cache.update(*kv(next(seeds), 1, **shape))
        mx.eval(pool.ready())

    def batched_decode() -> None:
        tables = [sequence.table, pool.new_table()]
        for table in tables:
            pool.append_tokens(table, 1)
        pool.write(0, tables, *kv(next(seeds), 1, batch=2, **shape))
        mx.eval(pool.ready())

    def write_then_read() -> None:  # one graph
        k, v = kv(next(seeds), 1, **shape)
        mx.eval(cache.attend(query(), k, v, AttentionParams(0.1)))

    def chunk_then_read() -> None:
        k, v = kv(next(seeds), 40, **shape)
        mx.eval(cache.attend(query(40), k, v, AttentionParams(0.1, "causal")))

    def pipelined() -> None:
        one_step_ahead(query(), lambda x, token: cache.attend(x, token, token * 0.5, AttentionParams(0.1)))

    def fetch_and_keep() -> None:  # as a caller that does not attend over them
        kept = []
        for _ in range(3):
            kept.append(cache.update_and_fetch(*kv(next(seeds), 1, **shape)))
            mx.eval(kept[-1], pool.ready())

    def fork_and_copy() -> None:
        forks = [pool.fork(sequence.table) for _ in range(3)]
        before = pool.stats().cow_forks
        for table in forks:
            pool.append_tokens(table, 1)
            pool.write(0, [table], *kv(next(seeds), 1, **shape))
            mx.eval(pool.gather_visible(table, 0))
        assert pool.stats().cow_forks == before + 3

    actions = (prefill, decode, batched_decode, write_then_read, chunk_then_read, pipelined)
    sequence.begin_layer(0, 5)  # so that the tail block is never full when it is forked
    pool.write_prefill(sequence.table, 0, *kv(0, 5, **shape))
    peaks = {action.__name__: extra_peak(action) for action in (*actions, fetch_and_keep, fork_and_copy)}
    assert max(peaks.values()) < FEW_MB, peaks
    assert min(peaks.values()) >= 0

    # Not even a second handle on a tensor makes a write of a prompt copy it.
    held = pool.groups[0].blocks[0]._keys.reshape(-1)
    mx.eval(held)
    assert extra_peak(prefill) < FEW_MB
    assert extra_peak(functools.partial(mx.eval, held + 1)) > 30_000_000, "the measurement does not see a copy"
    pool.check_integrity()


@pytest.mark.parametrize("lengths", [(40, 40, 40), (5, 9, 17)])
@pytest.mark.parametrize("by_seam", [False, True])
def test_reading_batched_rows_does_not_copy_the_pool(
    by_seam: bool, lengths: tuple[int, ...], big_pool: BlockPool
) -> None:
    """The next step is built and its write started while the step before may still be reading."""
    pool, num_rows = big_pool, len(lengths)
    shape = {"heads": 8, "kd": 128, "vd": 128, "dtype": mx.float16}
    sequences = [SequenceTables(pool) for _ in lengths]
    for seed, (sequence, n) in enumerate(zip(sequences, lengths, strict=True)):
        PagedKVCache(sequence, 0).update(*kv(seed, n, **shape))
    cache = PagedBatchKVCache(Batch(pool, sequences), 0)

    def attend(x: mx.array, token: mx.array) -> mx.array:
        cache.batch.reserve()
        if not by_seam:
            return cache.attend(x, token, token * 0.5, AttentionParams(0.1))
        return mx.fast.scaled_dot_product_attention(x, *cache.update_and_fetch(token, token * 0.5), scale=0.1)

    assert extra_peak(lambda: one_step_ahead(noise(5, num_rows, 16, 1, 128, dtype=mx.float16), attend)) < 2 * FEW_MB
