"""Random prefixes over a small alphabet against a model that compares every prefix with every other."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.attention_params import Window
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.prefix.radix import RadixTree
from tests.support.prefixes import check_contents, compute, make_pool, new_tables, release

Tokens = tuple[int, ...]
MAX_LIVE = 4
SALTS = ("a", "b")
suffixes = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
# A prefix of an earlier request, and new tokens.
recipes = st.tuples(st.integers(0, 30), st.integers(0, 40), suffixes)


def common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TreeMachine(RuleBasedStateMachine):
    """A tree under requests that adopt, compute, insert, continue or end, with locks, evictions and an exhausted
    pool."""

    @initialize(
        windows=st.sampled_from(
            [(None,), (None, 5), (6,), (None, 2, 9), (1, None), (None, Window(6, 6)), (Window(8, 8), 3)]
        ),
        blocks=st.sampled_from([14, 40, 1000]),
    )
    def start(self, windows: tuple[int | Window | None, ...], blocks: int) -> None:
        self.windows = [Window(window) if isinstance(window, int) else window for window in windows]
        self.pool = make_pool(windows, num_blocks=blocks * len(windows))
        self.tree = RadixTree(self.pool)
        self.live: list[tuple[str, Tokens, list[BlockTable]]] = []
        self.locked: list[tuple[Any, str, Tokens, int]] = []
        # Inserted prefixes, each with the first position whose keys each group held. After an eviction they are only an
        # upper bound, except that locked ones must still be found.
        self.inserted: dict[str, list[tuple[Tokens, list[int]]]] = {salt: [] for salt in SALTS}
        self.complete = True  # nothing has been evicted
        self.asked: list[Tokens] = [()]

    def tokens_of(self, recipe: tuple[int, int, Tokens]) -> Tokens:
        number, cut, suffix = recipe
        tokens = self.asked[number % len(self.asked)][:cut] + suffix
        self.asked.append(tokens)
        return tokens[:60]

    def num_tokens(self) -> int:
        return sum(len(node.tokens) for node in self.tree.nodes())

    def insert(self, salt: str, tokens: Tokens, tables: list[BlockTable]) -> None:
        before = self.num_tokens()
        node = self.tree.insert(tokens, tables, salt)
        assert node.start < len(tokens) <= node.end and node.prefix()[: len(tokens)] == tokens
        known = max((common(tokens, other) for other, _ in self.inserted[salt]), default=0)
        if self.complete:
            assert self.num_tokens() - before == len(tokens) - known
        self.inserted[salt].append((tokens, [table.logical_start for table in tables]))

    def check_match(self, salt: str, tokens: Tokens, length: int) -> None:
        """Compare ``length`` with the model: equal without windows, between two bounds with them."""
        known = [(min(common(tokens, other), len(tokens) - 1), other, starts) for other, starts in self.inserted[salt]]
        assert 0 <= length <= max((agreed for agreed, _, _ in known), default=0)
        if not self.complete:
            return
        if set(self.windows) == {None}:
            assert length == max((agreed for agreed, _, _ in known), default=0)
        for agreed, other, starts in known:
            needed = [0 if w is None else w.first_seen(agreed) for w in self.windows]
            if all(start <= need for start, need in zip(starts, needed, strict=True)) and len(other) >= agreed:
                assert length >= agreed
        for group, window in enumerate(self.windows):
            for position in range(window.first_seen(length) if window else 0, length):
                assert any(agreed > position >= starts[group] for agreed, _, starts in known)

    # Rules --------------------------------------------------------------------------------------------------------

    @rule(
        requests=st.lists(st.tuples(st.booleans(), recipes, st.integers(0, 40), st.booleans()), min_size=1, max_size=6)
    )
    def burst(self, requests: list[tuple[bool, tuple[int, int, Tokens], int, bool]]) -> None:
        for other_salt, recipe, cut, keep in requests:
            self.request(SALTS[other_salt], self.tokens_of(recipe), cut, keep and len(self.live) < MAX_LIVE)

    def request(self, salt: str, tokens: Tokens, cut: int, keep: bool) -> None:
        length, tables = self.tree.adopt(tokens, salt)
        assert all(table.length == length for table in tables)
        self.check_match(salt, tokens, length)
        check_contents(self.pool, tables, tokens, salt)
        self.go_on(salt, tokens, tables, cut)
        if keep and tables[0].length == len(tokens):
            self.live.append((salt, tokens, tables))
        else:
            release(self.pool, tables)

    def go_on(self, salt: str, tokens: Tokens, tables: list[BlockTable], cut: int) -> None:
        """Compute in two chunks, inserting after each, unless the pool is exhausted."""
        for chunk in (tokens[:cut], tokens):
            if len(chunk) <= tables[0].length:
                continue
            evictions = self.tree.evictions
            try:
                compute(self.pool, tables, chunk, salt)
            except PoolExhaustedError as error:
                # It refuses only if evicting all would not be enough. The error does not name the group, so: some
                # group.
                free = [group.allocator.num_free + self.tree.reclaimable(i) for i, group in enumerate(self.pool.groups)]
                assert error.blocks_needed > 0 and min(free) < 20
                self.complete &= self.tree.evictions == evictions
                release(self.pool, tables)
                tables[:] = new_tables(self.pool)
                return
            self.complete &= self.tree.evictions == evictions
            self.insert(salt, chunk, tables)

    @precondition(lambda self: bool(self.live))
    @rule(number=st.integers(0, MAX_LIVE), more=suffixes, keep=st.booleans())
    def write_on(self, number: int, more: Tokens, keep: bool) -> None:
        salt, tokens, tables = self.live.pop(number % len(self.live))
        tokens += more
        self.go_on(salt, tokens, tables, 0)
        if tables[0].length == len(tokens) and keep:
            self.live.append((salt, tokens, tables))

    @precondition(lambda self: bool(self.live))
    @rule(number=st.integers(0, MAX_LIVE), more=suffixes)
    def fork(self, number: int, more: Tokens) -> None:
        salt, tokens, tables = self.live[number % len(self.live)]
        copies = [self.pool.fork(table) for table in tables]
        self.go_on(salt, tokens + more, copies, 0)
        check_contents(self.pool, copies, tokens + more, salt)
        release(self.pool, copies)

    @rule(salt=st.sampled_from(SALTS), recipe=recipes)
    def lock(self, salt: str, recipe: tuple[int, int, Tokens]) -> None:
        tokens = self.tokens_of(recipe)
        match = self.tree.match(tokens, salt)
        self.check_match(salt, tokens, match.length)
        if match.length and len(self.locked) < 3:
            self.tree.lock(match.node)
            self.locked.append((match.node, salt, tokens, match.length))

    @precondition(lambda self: bool(self.locked))
    @rule(number=st.integers(0, 3))
    def unlock(self, number: int) -> None:
        node, salt, tokens, length = self.locked.pop(number % len(self.locked))
        assert self.tree.match(tokens, salt).length >= length
        self.tree.unlock(node)

    @rule(group=st.integers(0, 2), num_blocks=st.integers(1, 12))
    def evict(self, group: int, num_blocks: int) -> None:
        group %= len(self.windows)
        self.pool.stats()  # collects the blocks of dropped tables
        allocator = self.pool.groups[group].allocator
        free, reclaimable = allocator.num_free, self.tree.reclaimable(group)
        freed = self.tree.evict(group, num_blocks)
        assert freed == allocator.num_free - free and freed >= min(num_blocks, reclaimable)
        self.complete &= freed == 0 and reclaimable == 0

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        if not self.locked:
            assert len(self.tree) == self.tree.nbytes == 0
            self.inserted = {salt: [] for salt in SALTS}
            self.complete = True
        else:
            self.complete = False

    # Invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.tree.check_integrity()
        self.pool.check_integrity()
        for salt, tokens, tables in self.live:
            check_contents(self.pool, tables, tokens, salt)
        for _, salt, tokens, length in self.locked:
            assert self.tree.match(tokens, salt).length >= length
        stats = self.pool.stats()
        for group, block_group in enumerate(self.pool.groups):
            assert self.tree.reclaimable(group) <= block_group.allocator.num_live
        if not self.locked:
            assert stats.cached_blocks == sum(self.tree.reclaimable(g) for g in range(len(self.windows)))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for node, *_ in self.locked:
            self.tree.unlock(node)
        for _, _, tables in self.live:
            release(self.pool, tables)
        self.tree.clear()
        stats = self.pool.stats()
        assert (stats.live_blocks, stats.cached_blocks) == (0, 0)
        self.pool.check_integrity()


COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


def test_a_shared_tail_is_not_copied_if_its_prefix_is_evicted() -> None:
    machine = TreeMachine()
    machine.start(windows=(None, 5), blocks=14)
    machine.burst([(True, (0, 0, (0, 0, 0, 1, *[0] * 7)), 25, False), (False, (19, 11, (0,) * 8), 0, True),
                   (False, (0, 5, (1, 0)), 1, True), (False, (2, 4, (1,)), 4, False)])  # fmt: skip
    machine.clear()
    machine.burst([(False, (1, 2, (0, 0, 0)), 1, False), (False, (26, 19, (0, 0)), 0, False)])
    machine.accounts_are_right()
    machine.teardown()


@pytest.mark.parametrize("num_examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_random_prefixes(num_examples: int) -> None:
    sizes = {"max_examples": num_examples, "stateful_step_count": 30}
    run_state_machine_as_test(TreeMachine, settings=settings(**sizes, **COMMON))
