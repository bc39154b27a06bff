"""Random prefixes over a small alphabet against a model that compares every prefix with every other."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mlx_paged.errors import PoolExhaustedError
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.geometry import Window
from mlx_paged.prefix.entry import Entry
from mlx_paged.prefix.prefix_cache import PrefixCache
from tests.support.cases import run_machine, slow
from tests.support.prefixes import check_contents, compute, make_pool

Tokens = tuple[int, ...]
MAX_LIVE = 4
SIZE = 4  # tokens per block
SALTS = ("a", "b")
suffixes = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
# A prefix of an earlier request, and new tokens.
recipes = st.tuples(st.integers(0, 30), st.integers(0, 40), suffixes)


def common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class CacheMachine(RuleBasedStateMachine):
    """A prefix cache under requests that adopt, compute, insert, continue or end, with evictions and an exhausted
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
        self.cache = PrefixCache(self.pool)
        self.live: list[tuple[str, Tokens, BlockTable]] = []
        # Inserted prefixes, whole blocks only, each with the first position whose keys each group held. After an
        # eviction they are only an upper bound.
        self.inserted: dict[str, list[tuple[Tokens, list[int]]]] = {salt: [] for salt in SALTS}
        # Paths that were found, which later requests look up and insert from. Entries of some were evicted.
        self.paths: dict[str, list[list[Entry]]] = {salt: [[]] for salt in SALTS}
        self.complete = True  # nothing has been evicted
        self.asked: list[Tokens] = [()]

    def tokens_of(self, recipe: tuple[int, int, Tokens]) -> Tokens:
        number, cut, suffix = recipe
        tokens = self.asked[number % len(self.asked)][:cut] + suffix
        self.asked.append(tokens)
        return tokens[:60]

    def known_path(self, salt: str, tokens: Tokens) -> list[Entry]:
        """Return the latest path that was found by a beginning of the tokens."""
        paths = reversed(self.paths[salt])
        return next(p for p in paths if tokens[: SIZE * len(p)] == tuple(n for entry in p for n in entry.tokens))

    def insert(self, salt: str, tokens: Tokens, table: BlockTable) -> None:
        before = len(self.cache.entries)
        self.cache.insert(tokens, table, salt, after=self.known_path(salt, tokens))
        tokens = tokens[: len(tokens) // SIZE * SIZE]
        known = max((common(tokens, other) // SIZE for other, _ in self.inserted[salt]), default=0)
        if self.complete:
            assert len(self.cache.entries) - before == len(tokens) // SIZE - known
        self.inserted[salt].append((tokens, [start // SIZE * SIZE for start in table.starts]))

    def check_match(self, salt: str, tokens: Tokens, length: int) -> None:
        """Compare ``length`` with the model: equal without windows, between two bounds with them."""
        limit = len(tokens) - 1
        known = [
            (min(common(tokens, other), limit) // SIZE * SIZE, other, starts) for other, starts in self.inserted[salt]
        ]
        assert length % SIZE == 0 and 0 <= length <= max((agreed for agreed, _, _ in known), default=0)
        if not self.complete:
            return
        if set(self.windows) == {None}:
            assert length == max((agreed for agreed, _, _ in known), default=0)
        for agreed, _, starts in known:
            needed = [0 if w is None else w.first_seen(agreed) for w in self.windows]
            if all(start <= need for start, need in zip(starts, needed, strict=True)):
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
        match, table = self.cache.adopt(tokens, salt, after=self.known_path(salt, tokens))
        assert match == self.cache.match(tokens, salt)
        self.paths[salt].append(match.path)
        length = match.length
        assert table.length == length
        self.check_match(salt, tokens, length)
        check_contents(self.pool, table, tokens, salt)
        table = self.go_on(salt, tokens, table, cut)
        if keep and table.length == len(tokens):
            self.live.append((salt, tokens, table))
        else:
            self.pool.release_table(table)

    def go_on(self, salt: str, tokens: Tokens, table: BlockTable, cut: int) -> BlockTable:
        """Compute in two chunks, inserting after each; return the table, an empty one if the pool is exhausted."""
        for chunk in (tokens[:cut], tokens):
            if len(chunk) <= table.length:
                continue
            evictions = self.cache.evictions
            try:
                compute(self.pool, table, chunk, salt)
            except PoolExhaustedError as error:
                # It refuses only if evicting all would not be enough. The error does not name the group, so: some
                # group.
                free = [
                    group.allocator.num_free + self.cache.reclaimable(i) for i, group in enumerate(self.pool.groups)
                ]
                assert error.blocks_needed > 0 and min(free) < 20
                self.complete &= self.cache.evictions == evictions
                self.pool.release_table(table)
                return self.pool.new_table()
            self.complete &= self.cache.evictions == evictions
            self.insert(salt, chunk, table)
        return table

    @precondition(lambda self: bool(self.live))
    @rule(number=st.integers(0, MAX_LIVE), more=suffixes, keep=st.booleans())
    def write_on(self, number: int, more: Tokens, keep: bool) -> None:
        salt, tokens, table = self.live.pop(number % len(self.live))
        tokens += more
        table = self.go_on(salt, tokens, table, 0)
        if table.length == len(tokens) and keep:
            self.live.append((salt, tokens, table))

    @precondition(lambda self: bool(self.live))
    @rule(number=st.integers(0, MAX_LIVE), more=suffixes)
    def fork(self, number: int, more: Tokens) -> None:
        salt, tokens, table = self.live[number % len(self.live)]
        fork = self.go_on(salt, tokens + more, self.pool.fork(table), 0)
        check_contents(self.pool, fork, tokens + more, salt)
        self.pool.release_table(fork)

    @rule(group=st.integers(0, 2), num_blocks=st.integers(1, 12))
    def evict(self, group: int, num_blocks: int) -> None:
        group %= len(self.windows)
        self.pool.stats()  # collects the blocks of dropped tables
        allocator = self.pool.groups[group].allocator
        live, reclaimable = allocator.num_live, self.cache.reclaimable(group)
        freed = self.cache.evict(group, num_blocks)
        assert freed == live - allocator.num_live and freed >= min(num_blocks, reclaimable)
        self.complete &= freed == 0 and reclaimable == 0

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert len(self.cache.entries) == self.cache.nbytes == 0
        self.inserted = {salt: [] for salt in SALTS}
        self.complete = True

    # Invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def accounts_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.cache.check_integrity()
        self.pool.check_integrity()
        for salt, tokens, table in self.live:
            check_contents(self.pool, table, tokens, salt)
        stats = self.pool.stats()
        for group, block_group in enumerate(self.pool.groups):
            assert self.cache.reclaimable(group) <= block_group.allocator.num_live
        assert stats.cached_blocks == sum(self.cache.reclaimable(g) for g in range(len(self.windows)))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for _, _, table in self.live:
            self.pool.release_table(table)
        self.cache.clear()
        stats = self.pool.stats()
        assert (stats.live_blocks, stats.cached_blocks) == (0, 0)
        self.pool.check_integrity()


@pytest.mark.parametrize("num_examples", [20, *slow(200)])
def test_random_prefixes(num_examples: int) -> None:
    run_machine(CacheMachine, num_examples, 30)
