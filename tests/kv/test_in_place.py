"""In-place storage holds the same bytes as functional storage after any operations; on a CPU with fake kernels."""

import ast
import inspect
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kv import device_blocks
from mlx_paged.kv.blocks import blocks_choice
from mlx_paged.kv.device_blocks import PACED_TOKENS
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from tests.support.kernels.fake_kernels import fake_kernels
from tests.support.twins import HEADS, KD, SIZE, Twin


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
def test_prompt_chunks_are_computed_a_few_layers_at_a_time(tmp_path: Path) -> None:
    def num_nodes(array: mx.array) -> int:
        mx.export_to_dot(str(tmp_path / "graph.dot"), array)
        return (tmp_path / "graph.dot").read_text().count("rectangle")

    layers = range(6)
    pool = BlockPool([LayerGroup(tuple(layers))], block_size=SIZE, choose_blocks=blocks_choice(True))
    table = pool.new_table()
    for num_tokens, together in ((PACED_TOKENS, 1), (PACED_TOKENS // 4, 4)):
        pool.append_tokens(table, num_tokens)
        x = mx.zeros((1, HEADS, num_tokens, KD))
        pending = []
        with pool.lock:  # as in a model's call; its end computes everything
            pool.lock.use()
            pool.set_geometry(0, x, x, batch=1)
            tokens = pool.tokens_of(0, [table], num_tokens)
            for layer in layers:
                for _ in range(10):
                    x = x + 1
                pool.blocks_of(layer).write(tokens, x, x)
                pending.append([num_nodes(*pool.ready(earlier)) > 0 for earlier in layers[: layer + 1]])
        for layer in layers:
            started = (layer + 1) // together * together
            assert pending[layer] == [earlier >= started for earlier in range(layer + 1)]
    keys, _ = pool.gather_visible(table, 5)
    assert mx.array_equal(keys[0, 0, :, 0], mx.full((PACED_TOKENS + PACED_TOKENS // 4,), 60.0)).item()


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
