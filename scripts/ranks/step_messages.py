"""What ranks tell each other in each step beside the model's reductions: messages and bytes, over MLX's ring.

    python scripts/ranks/step_messages.py 2 4 --simulate 8

A tiny model on so many processes of this machine; sizes depend on the requests, not on the model. ``--simulate`` takes
the messages that two ranks have sent, and counts them as more ranks would send them: each of rank 0's to every other
one, with a value of each rank in the answers to an exchange, and each of another rank's from every other one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, PROMPT, ANSWER = 16, 1024, 64


def size_for(size: int, value: Any, *, is_of_rank_0: bool) -> int:
    """Bytes of what so many ranks send in the place of a message between two of them."""
    from mlx_paged.engine.ranks.peer import _HEAD

    sequence, what, checksum, content = value
    if what == "exchange" and is_of_rank_0 and size > 2:  # with all ranks' values
        content = [content] * size
    body = json.dumps([sequence, what, checksum, content], separators=(",", ":")).encode()
    return (size - 1) * (_HEAD.size + len(body))


def play() -> None:
    """As one of the ranks: requests of :data:`PROMPT` tokens; the first rank prints."""
    import mlx.core as mx
    from mlx_lm.models import llama

    import mlx_paged
    from mlx_paged.engine.ranks.peer import DATA, Peer
    from mlx_paged.engine.ranks.world import ranks_of
    from mlx_paged.patches.sharded_head import shard_head

    simulated = [int(size) for size in os.environ.get("SIMULATED", "").split()]
    send, sent_values = Peer.send, []

    def noting(self: Peer, kind: bytes, value: Any) -> None:
        if kind == DATA:
            sent_values.append(value)
        send(self, kind, value)

    Peer.send = noting  # type: ignore[method-assign]
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "rms_norm_eps": 1e-5}
    model = llama.Model(llama.ModelArgs(model_type="llama", tie_word_embeddings=False, **shape, **heads))
    mx.eval(model.parameters())
    model.shard(mx.distributed.init())
    shard_head(model, mx.distributed.init())
    mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory="64M"))
    gen = importlib.import_module("mlx_lm.generate").BatchGenerator(model, completion_batch_size=ROWS)
    ranks = ranks_of(model)
    assert ranks is not None
    chosen = random.Random(0)
    gen.insert([[chosen.randrange(1000) for _ in range(PROMPT)] for _ in range(ROWS)], [ANSWER] * ROWS)
    counts = {"prefill": [0, 0, 0, 0.0], "decode": [0, 0, 0, 0.0]}
    more = {name: {str(size): 0 for size in simulated} for name in counts}  # bytes of so many ranks
    while True:
        before, steps, begin = ranks.num_sent, ranks.record.count, time.perf_counter()
        sent_values.clear()
        prompts, generated = gen.next()
        if not prompts and not generated:
            break
        name = "decode" if len(generated) == ROWS and not prompts else "prefill"
        kind = counts[name]
        for size in simulated:
            more[name][str(size)] += sum(size_for(size, each, is_of_rank_0=ranks.rank == 0) for each in sent_values)
        now = ranks.num_sent
        kind[0] += ranks.record.count - steps
        kind[1] += now[0] - before[0]
        kind[2] += now[1] - before[1]
        kind[3] += time.perf_counter() - begin
    every, of_more = ranks.exchange(counts), ranks.exchange(more)
    if ranks.rank == 0:
        for kind in counts:
            steps = every[0][kind][0]
            messages, sent = (sum(rank[kind][i] for rank in every) / steps for i in (1, 2))
            print(
                f"{ranks.size} ranks, {kind}: {steps} steps, {messages:.1f} messages and {sent:.0f} bytes a step in "
                f"all, of rank 0 {every[0][kind][2] / steps:.0f} bytes; {every[0][kind][3] / steps * 1e3:.1f} ms a step"
            )
            for size in simulated:
                ours, all_bytes = of_more[0][kind][str(size)], sum(rank[kind][str(size)] for rank in of_more)
                print(
                    f"{size} ranks by simulation, {kind}: {messages * (size - 1):.1f} messages and "
                    f"{all_bytes / steps:.0f} bytes a step in all, of rank 0 {ours / steps:.0f} bytes"
                )
    ranks.close()


def main() -> None:
    if "MLX_RANK" in os.environ:
        play()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=[2, 4], metavar="RANKS")
    parser.add_argument("--simulate", type=int, nargs="*", default=[], metavar="RANKS", help="from what two ranks send")
    args = parser.parse_args()
    for size in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
            hosts = Path(folder, "hosts.json")
            hosts.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
            for each in sockets:
                each.close()
            env = {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_PAGED_RANK_TIMEOUT": "120"}
            if size == 2:
                env["SIMULATED"] = " ".join(map(str, args.simulate))
            command = [sys.executable, __file__]
            started = [subprocess.Popen(command, env={**env, "MLX_RANK": str(rank)}) for rank in range(size)]
            if any([process.wait() for process in started]):
                sys.exit(f"{size} ranks: failed")


if __name__ == "__main__":
    main()
