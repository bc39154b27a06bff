"""Random histories of sequences on one pool, against NumPy arrays of every token ever written."""

import gc
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mlx_paged.errors import BlockStateError, PoolExhaustedError, TrimError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.geometry import QueryHeads
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.cases import run_machine, slow
from tests.support.kernels.fake_kernels import fake_kernels

LAYERS = ((0, 2), (1, 3))  # of the global group and of the window group
HEADS, KD, VD = 2, 4, 2
MAX_SEQUENCES = 6
BLOCKS_PER_POOL = 40  # small enough to run out now and then


class Sequence:
    """The table of one sequence, and what it must hold."""

    def __init__(self, table: BlockTable, history: dict[int, tuple[np.ndarray, np.ndarray]], start: int) -> None:
        self.table = table
        self.history = history  # by layer: K [heads, length, KD], V [heads, length, VD]
        self.start = start  # first position the window group still sees

    @property
    def length(self) -> int:
        return self.history[0][0].shape[1]


class PoolMachine(RuleBasedStateMachine):
    """A pool with a global group and a window group of two layers each, under random writes, forks, trims, releases
    and drops."""

    in_place = False

    @initialize(block_size=st.sampled_from([4, 8]), window=st.sampled_from([1, 5, 8]))
    def start(self, block_size: int, window: int) -> None:
        self.block_size, self.window = block_size, window
        per_block = block_size * HEADS * (KD + VD) * 4 * 2
        self.pool = BlockPool(
            [LayerGroup(LAYERS[0]), LayerGroup(LAYERS[1], window, "window")],
            block_size=block_size,
            memory_budget=BLOCKS_PER_POOL * per_block,
            choose_blocks=blocks_choice(self.in_place),
        )
        for layer in (0, 1):
            k, v = mx.zeros((1, HEADS, 1, KD)), mx.zeros((1, HEADS, 1, VD))
            if self.in_place:
                self.pool.set_geometry(layer, k, v, batch=1, heads=QueryHeads(HEADS))
        self.sequences: list[Sequence] = []
        self.random = np.random.default_rng(0)

    def pick(self, number: int) -> Sequence:
        return self.sequences[number % len(self.sequences)]

    def has_sequences(self) -> bool:
        return bool(self.sequences)

    def reserve(self, sequence: Sequence, n: int) -> bool:
        """Append n tokens, and update the expected start. Return False if the pool is exhausted."""
        table, length, live = sequence.table, sequence.length, self.pool.stats().live_blocks
        try:
            self.pool.append_tokens(table, n)
        except PoolExhaustedError as error:
            assert error.bytes_reserved + error.bytes_needed > error.budget_bytes
            assert error.budget_bytes <= self.pool.memory_budget
            assert error.blocks_needed > 0 and table.length == length
            assert self.pool.stats().live_blocks <= live
            sequence.start = table.starts[1]
            assert sequence.start <= max(0, length - self.window + 1)
            return False
        sequence.start = max(sequence.start, length - self.window + 1)
        return True

    def new_tokens(self, batch: int, n: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return {
            layer: (
                self.random.standard_normal((batch, HEADS, n, KD)).astype(np.float32),
                self.random.standard_normal((batch, HEADS, n, VD)).astype(np.float32),
            )
            for layer in range(4)
        }

    def note(self, sequence: Sequence, tokens: dict[int, tuple[np.ndarray, np.ndarray]], row: int) -> None:
        sequence.history = {
            layer: tuple(
                np.concatenate([old, new[row]], axis=1) for old, new in zip(history, tokens[layer], strict=True)
            )
            for layer, history in sequence.history.items()
        }  # type: ignore[assignment]

    # Rules --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(n=st.integers(1, 20))
    def begin(self, n: int) -> None:
        nothing = {
            layer: (np.zeros((HEADS, 0, KD), np.float32), np.zeros((HEADS, 0, VD), np.float32)) for layer in range(4)
        }
        self.sequences.append(Sequence(self.pool.new_table(), nothing, 0))
        self.prefill(len(self.sequences) - 1, n)

    @precondition(has_sequences)
    @rule(number=st.integers(0, MAX_SEQUENCES), n=st.integers(1, 25))
    def prefill(self, number: int, n: int) -> None:
        sequence = self.pick(number)
        if not self.reserve(sequence, n):
            return
        tokens = self.new_tokens(1, n)
        for layer, (k, v) in tokens.items():
            self.pool.write_prefill(sequence.table, layer, mx.array(k), mx.array(v))
        self.note(sequence, tokens, 0)

    @precondition(has_sequences)
    @rule(number=st.integers(0, MAX_SEQUENCES), steps=st.integers(1, 9))
    def decode(self, number: int, steps: int) -> None:
        sequence = self.pick(number)
        for _ in range(steps):
            if not self.reserve(sequence, 1):
                return
            tokens = self.new_tokens(1, 1)
            for layer, (k, v) in tokens.items():
                self.pool.write(layer, [sequence.table], mx.array(k), mx.array(v))
            self.note(sequence, tokens, 0)

    @precondition(lambda self: len(self.sequences) > 1)
    @rule(order=st.permutations(range(MAX_SEQUENCES)), count=st.integers(2, MAX_SEQUENCES), steps=st.integers(1, 4))
    def decode_batch(self, order: list[int], count: int, steps: int) -> None:
        chosen = [self.sequences[i] for i in order if i < len(self.sequences)][:count]
        for _ in range(steps):
            batch = [sequence for sequence in chosen if self.reserve(sequence, 1)]
            if not batch:
                return
            tokens = self.new_tokens(len(batch), 1)
            for layer, (k, v) in tokens.items():
                tables = [sequence.table for sequence in batch]
                self.pool.write(layer, tables, mx.array(k), mx.array(v))
            for row, sequence in enumerate(batch):
                self.note(sequence, tokens, row)

    @precondition(lambda self: 0 < len(self.sequences) < MAX_SEQUENCES)
    @rule(number=st.integers(0, MAX_SEQUENCES))
    def fork(self, number: int) -> None:
        sequence = self.pick(number)
        before = self.pool.stats()
        copy = self.pool.fork(sequence.table)
        after = self.pool.stats()
        assert (after.live_blocks, after.bytes_reserved) == (before.live_blocks, before.bytes_reserved)
        self.sequences.append(Sequence(copy, sequence.history, sequence.start))

    @precondition(has_sequences)
    @rule(number=st.integers(0, MAX_SEQUENCES), n=st.integers(0, 30))
    def trim(self, number: int, n: int) -> None:
        sequence = self.pick(number)
        length = sequence.length - n
        if length < 0 or max(0, length - self.window + 1) < sequence.start:
            with pytest.raises(TrimError):
                self.pool.trim(sequence.table, n)
        else:
            self.pool.trim(sequence.table, n)
            sequence.history = {layer: (k[:, :length], v[:, :length]) for layer, (k, v) in sequence.history.items()}

    @precondition(has_sequences)
    @rule(number=st.integers(0, MAX_SEQUENCES))
    def release(self, number: int) -> None:
        sequence = self.pick(number)
        self.sequences.remove(sequence)
        self.pool.release_table(sequence.table)
        with pytest.raises(BlockStateError):
            self.pool.release_table(sequence.table)

    @precondition(has_sequences)
    @rule(number=st.integers(0, MAX_SEQUENCES), look=st.booleans())
    def drop(self, number: int, look: bool) -> None:
        """Drop a sequence without releasing its tables. The next rule must not depend on whether the pool was inspected
        since."""
        self.sequences.remove(self.pick(number))
        gc.collect(0)
        self.not_looked_at = not look

    # Invariants ---------------------------------------------------------------------------------------------------

    not_looked_at = False

    @invariant()
    def contents_and_accounts_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        if self.not_looked_at:
            self.not_looked_at = False
            return
        pool = self.pool
        live = shared = 0
        for group, block_group in enumerate(pool.groups):
            held: Counter[int] = Counter()
            for sequence in self.sequences:
                table = sequence.table
                start = sequence.start if group else 0
                assert (table.length, table.starts[group]) == (sequence.length, start)
                assert table.num_blocks(group) == -(-table.length // self.block_size) - start // self.block_size
                ids = [block_id for block_id in table.block_ids[group] if block_id]
                assert len(set(ids)) == len(ids)
                held.update(ids)
            live += len(held)
            shared += sum(count > 1 for count in held.values())
            pool.stats()  # collects the blocks of dropped tables
            counts = {b: block_group.allocator.refcount(b) for b in range(1, block_group.allocator.num_blocks)}
            assert {b: count for b, count in counts.items() if count} == held
        stats = pool.stats()
        assert (stats.live_blocks, stats.shared_blocks) == (live, shared)
        assert stats.free_blocks + live == stats.total_blocks
        assert stats.bytes_reserved <= pool.memory_budget
        assert stats.bytes_reserved == 0 or live
        pool.check_integrity()

        got: list[tuple[mx.array, mx.array]] = []
        expected: list[tuple[np.ndarray, np.ndarray]] = []
        for sequence in self.sequences:
            for layer, (k, v) in sequence.history.items():
                table = sequence.table
                start = table.starts[layer % 2]
                if table.length > start:
                    got.append(pool.gather_visible(table, layer))
                    expected.append((k[:, start:], v[:, start:]))
        mx.eval(got)
        for pair, arrays in zip(got, expected, strict=True):
            for x, array in zip(pair, arrays, strict=True):
                np.testing.assert_array_equal(np.array(x)[0], array)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert all(group.in_place == self.in_place for group in self.pool.groups if group.blocks)
        for number, sequence in enumerate(self.sequences):
            if number % 2:
                self.pool.release_table(sequence.table)
        del self.sequences[:]
        sequence = None  # type: ignore[assignment]
        gc.collect(0)
        stats = self.pool.stats()
        assert (stats.live_blocks, stats.shared_blocks, stats.bytes_in_use) == (0, 0, 0)
        assert stats.free_blocks == stats.total_blocks == stats.bytes_reserved == 0
        self.pool.check_integrity()


@pytest.mark.parametrize(("examples", "steps"), [(25, 30), *slow((600, 80))])
def test_random_histories(examples: int, steps: int) -> None:
    run_machine(PoolMachine, examples, steps)


class InPlacePoolMachine(PoolMachine):
    in_place = True


def test_random_histories_in_place() -> None:
    with fake_kernels():
        run_machine(InPlacePoolMachine, 15, 30)
