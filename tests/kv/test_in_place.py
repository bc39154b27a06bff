"""In-place storage holds the same bytes as functional storage after any operations; on a CPU with fake kernels."""

import ast
import inspect
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kv import device_blocks
from mlx_paged.kv.block_table import BlockTable
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.geometry import QueryHeads
from mlx_paged.kv.group import PACED_TOKENS, LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.pools import noise

HEADS, KD, VD, SIZE, WINDOW = 2, 64, 80, 8, 20
GROUPS = [LayerGroup((0, 2)), LayerGroup((1,), WINDOW, "window")]


def make_pool(use_kernel: bool) -> BlockPool:
    pool = BlockPool(GROUPS, block_size=SIZE, choose_blocks=blocks_choice(use_kernel))
    for layer in (0, 1):
        k, v = noise(0, 1, HEADS, 1, KD), noise(1, 1, HEADS, 1, VD)
        pool.set_geometry(layer, k, v, batch=1, heads=QueryHeads(4))
    return pool


class Twin:
    """Two pools, in place and functional, that get the same operations; every read must give the same bits."""

    def __init__(self) -> None:
        self.pools = [make_pool(True), make_pool(False)]
        self.sequences: list[list[BlockTable]] = []  # in each pool
        self.seed = 10

    def new(self) -> None:
        self.sequences.append([pool.new_table() for pool in self.pools])

    def append(self, index: int, count: int) -> None:
        self.seed += 1
        for pool, table in zip(self.pools, self.sequences[index], strict=True):
            pool.append_tokens(table, count)
            for layer in range(3):
                k, v = (
                    noise(self.seed * 7 + layer, 1, HEADS, count, KD),
                    noise(self.seed * 7 + layer, 1, HEADS, count, VD),
                )
                pool.write(layer, [table], k, v)

    def step(self, indices: list[int]) -> None:
        """Append one token to several sequences in one call."""
        self.seed += 1
        for which, pool in enumerate(self.pools):
            rows = [self.sequences[i][which] for i in indices]
            for table in rows:
                pool.append_tokens(table, 1)
            for layer in range(3):
                k, v = (noise(self.seed * 5 + layer, len(rows), HEADS, 1, dim) for dim in (KD, VD))
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
                got, expected = (pool.gather_visible(own, layer) for pool, own in zip(self.pools, tables, strict=True))
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_on_the_gpu(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = list("naaasssftd")
    run_schedule([(str(rng.choice(kinds)), int(rng.integers(8)), int(rng.integers(1, 38))) for _ in range(40)])


def run_schedule(operations: list[tuple[str, int, int]]) -> None:
    twin = Twin()
    twin.new()
    twin.append(0, 5)
    for kind, index, count in operations:
        index %= max(1, len(twin.sequences))
        if kind == "n":
            twin.new()
        elif not twin.sequences:
            continue
        elif kind == "a":
            twin.append(index, count)
        elif kind == "s":
            twin.step(sorted({index, count % len(twin.sequences)}))
        elif kind == "f":
            twin.fork(index)
        elif kind == "t":
            twin.trim(index, count)
        else:
            twin.drop(index)
    assert all(group.in_place for group in twin.pools[0].groups)
    if mx.default_device() == mx.Device(mx.cpu):
        assert not any(group.in_place for group in twin.pools[1].groups)
    twin.check()


@pytest.mark.usefixtures("kernels")
def test_growth_keeps_the_blocks_even_if_it_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_paged.kv.group.IN_PLACE_FIRST_BYTES", 0)
    twin = Twin()
    twin.new()
    for count in (40, 70, 1):
        twin.append(0, count)
    pool = twin.pools[0]
    storage, known, extended, calls = pool.blocks_of(2), pool.stats().total_blocks, device_blocks._resized, 0

    def fail_in_the_second_layer(blocks: mx.array, num_blocks: int) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 4:  # the second layer's values; its keys have grown
            raise RuntimeError("out of memory")
        return extended(blocks, num_blocks)

    monkeypatch.setattr(device_blocks, "_resized", fail_in_the_second_layer)
    with pytest.raises(RuntimeError, match="out of memory"):
        pool.append_tokens(pool.new_table(), 10_000)
    assert calls == 4 and storage.num_blocks > known
    assert pool.stats().total_blocks == known
    twin.check()
    monkeypatch.setattr(device_blocks, "_resized", extended)
    for count in (1, 800):
        twin.append(0, count)
    twin.check()


@pytest.mark.usefixtures("kernels")
def test_prompt_chunks_are_computed_a_few_layers_at_a_time(tmp_path: Path) -> None:
    def num_nodes(array: mx.array) -> int:
        mx.export_to_dot(str(tmp_path / "graph.dot"), array)
        return (tmp_path / "graph.dot").read_text().count("rectangle")

    layers = range(6)
    pool = BlockPool([LayerGroup(tuple(layers))], block_size=SIZE, choose_blocks=blocks_choice(True))
    table = pool.new_table()
    for num_tokens, paced in ((PACED_TOKENS, True), (PACED_TOKENS - 1, False)):
        pool.append_tokens(table, num_tokens)
        x = mx.zeros((1, HEADS, num_tokens, KD))
        pending = []
        with pool.lock:  # as in a model's call; its end computes everything
            for layer in layers:
                for _ in range(10):
                    x = x + 1
                pool.write_prefill(table, layer, x, x)
                pending.append([num_nodes(*pool.ready(earlier)) > 0 for earlier in layers[: layer + 1]])
        if paced:
            assert not any(any(row) for row in pending)
        else:
            assert all(pending[-1])
    keys, _ = pool.gather_visible(table, 5)
    assert mx.array_equal(keys[0, 0, :, 0], mx.full((2 * PACED_TOKENS - 1,), 60.0)).item()


def test_every_kernel_is_called_with_the_latest_fence() -> None:
    with fake_kernels() as fake:
        twin = Twin()
        twin.new()
        twin.append(0, 13)
        twin.fork(0)
        twin.step([0, 1])
        twin.check()
        assert fake.calls["write_slots"] and fake.calls["gather_blocks"] and fake.calls["copy_blocks"]
        storage = twin.pools[0].blocks_of(0)
        keys = storage._DeviceBlocks__keys
        with pytest.raises(AssertionError, match="old fence"):
            fake.copy_blocks(keys, keys, mx.zeros((1,), mx.uint32), [1], [2])


def test_no_mlx_op_can_read_the_blocks() -> None:
    """The tensors are private to the class, and inside it only kernels are given them."""
    tree = ast.parse(inspect.getsource(device_blocks))
    private = {"__keys", "__values"}

    def is_block_tensor(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in private and isinstance(node.value, ast.Name)

    handed_over = [
        node
        for method in ast.walk(tree)
        if isinstance(method, ast.FunctionDef) and method.name in ("run", "traced")
        for node in ast.walk(method)
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and "__keys" in ast.unparse(node)
    ]
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if not is_block_tensor(node):
                continue
            if isinstance(node.ctx, ast.Store):
                continue
            if isinstance(parent, ast.Attribute):  # metadata, which MLX knows without reading the tensor
                assert parent.attr in ("shape", "dtype")
            elif parent in handed_over:  # to a function that gives them to `traced`, which puts them back
                pass
            else:
                assert isinstance(parent, ast.Call), ast.unparse(parent)
                called = ast.unparse(parent.func)
                assert called.startswith(("kernels.", "quantized.")) or called in (
                    "write",
                    "launch",
                    "prepare_prefill",
                    "_resized",
                ), called
    assert len(handed_over) == 2
    resize = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "resize")
    statements = [ast.unparse(node) for node in resize.body]
    assert statements[2] == "mx.eval(self.__fence)"  # before MLX is given any
    assert sum("_resized(" in ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef)) == 1
