"""What it costs to make a pool's tensors smaller, per GB kept and per GB moved; in place where there is a GPU.

Half of the blocks are given back, the lower half (all others move), the upper half (none does) or every second one.
"""

from __future__ import annotations

import argparse
import time

import mlx.core as mx

from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.kv.storage.choice import storage_choice
from mlx_paged.kv.storage.scoring import QueryHeads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the pool (default: 1)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=8, help="of keys and values")
    parser.add_argument("--repeats", type=int, default=5, help="the best counts")
    args = parser.parse_args()
    keys = mx.zeros((1, args.heads, 1, 128), mx.bfloat16)
    for name, gone in (("upper half free", "upper"), ("every second one free", "odd"), ("lower half free", "lower")):
        best = float("inf")
        for _ in range(args.repeats):
            pool = BlockPool([LayerGroup(tuple(range(args.layers)))], choose_storage=storage_choice(None))
            pool.set_geometry(0, keys, keys, batch=1, heads=QueryHeads(4 * args.heads))
            group = pool.groups[0]
            count = int(args.gigabytes * 1e9 / group.bytes_per_block) // 2 * 2
            ids = pool.allocate(0, count)
            table = pool.new_table()
            kept = {"upper": ids[: count // 2], "odd": ids[::2], "lower": ids[count // 2 :]}[gone]
            table.block_ids.extend(kept)  # as a sequence of them would
            table.length = len(kept) * pool.block_size
            pool.release(0, sorted(set(ids) - set(kept)))
            mx.eval([pool.fence(layer) for layer in range(args.layers)])
            begin = time.perf_counter()
            moved = sum(block_id > count // 2 for block_id in kept) * group.bytes_per_block / 1e9
            with pool.lock:
                pool.memory.shrink(0, count // 2 + 1)
            mx.eval([pool.fence(layer) for layer in range(args.layers)])
            best = min(best, time.perf_counter() - begin)
            pool.check_integrity()
        form = "in place" if group.in_place else f"functional ({group.storage_reason})"
        kept_bytes = len(kept) * group.bytes_per_block / 1e9
        print(f"{name}: {best * 1e3:.1f} ms; {kept_bytes:.2f} GB kept, of them {moved:.2f} GB moved; {form}")


if __name__ == "__main__":
    main()
