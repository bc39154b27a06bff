"""A pool in place and a functional one under the same operations."""

import numpy as np

from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.geometry import PageFormat, QueryHeads
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.pools import noise

HEADS, KD, VD, SIZE, WINDOW = 2, 64, 80, 8, 20


class Twin:
    """Two pools, in place and functional, that get the same operations; every read must give the same bits. Layers 0
    and 2 see all tokens, layer 1 those in a window."""

    def __init__(self, page_format: PageFormat | None = None) -> None:
        self.dims = (KD, VD) if page_format is None else (KD, KD)
        self.pools = [self._pool(use_kernel, page_format) for use_kernel in (True, False)]
        self.sequences: list[list[BlockTable]] = []  # in each pool
        self.seed = 10

    def _pool(self, use_kernel: bool, page_format: PageFormat | None) -> BlockPool:
        groups = [LayerGroup((0, 2)), LayerGroup((1,), WINDOW, "window")]
        choice = blocks_choice(use_kernel)
        pool = BlockPool(groups, block_size=SIZE, choose_blocks=choice, page_format=page_format)
        for layer in (0, 1):
            k, v = (noise(0, 1, HEADS, 1, dim) for dim in self.dims)
            pool.set_geometry(layer, k, v, batch=1, heads=QueryHeads(4))
        return pool

    def new(self) -> None:
        self.sequences.append([pool.new_table() for pool in self.pools])

    def append(self, index: int, count: int) -> None:
        self.seed += 1
        for pool, table in zip(self.pools, self.sequences[index], strict=True):
            pool.append_tokens(table, count)
            for layer in range(3):
                k, v = (noise(self.seed * 7 + layer, 1, HEADS, count, dim) for dim in self.dims)
                pool.write(layer, [table], k, v)

    def step(self, indices: list[int]) -> None:
        """Append one token to several sequences in one call."""
        self.seed += 1
        for which, pool in enumerate(self.pools):
            rows = [self.sequences[i][which] for i in indices]
            for table in rows:
                pool.append_tokens(table, 1)
            for layer in range(3):
                k, v = (noise(self.seed * 5 + layer, len(rows), HEADS, 1, dim) for dim in self.dims)
                pool.write(layer, rows, k, v)

    def fork(self, index: int) -> None:
        pairs = zip(self.pools, self.sequences[index], strict=True)
        self.sequences.append([pool.fork(table) for pool, table in pairs])

    def trim(self, index: int, count: int) -> None:
        for pool, table in zip(self.pools, self.sequences[index], strict=True):
            if count <= table.length and table.starts[1] == 0:
                pool.trim(table, count)

    def drop(self, index: int) -> None:
        for pool, table in zip(self.pools, self.sequences.pop(index), strict=True):
            pool.release_table(table)

    def check(self) -> None:
        for pool in self.pools:
            pool.check_integrity()
        left, right = (pool.stats().as_dict() for pool in self.pools)
        grown = ("total_blocks", "free_blocks", "bytes_reserved")  # pools in place grow by more
        assert {k: v for k, v in left.items() if k not in grown} == {k: v for k, v in right.items() if k not in grown}
        for tables in self.sequences:
            for layer, (group, _) in self.pools[0].places.items():
                if not tables[0].num_visible(group):
                    continue
                for stored in (False, True):
                    got, expected = (
                        pool.gather_visible(own, layer, stored=stored)
                        for pool, own in zip(self.pools, tables, strict=True)
                    )
                    for a, b in zip(got, expected, strict=True):
                        np.testing.assert_array_equal(np.array(a), np.array(b))
