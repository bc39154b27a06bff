"""What ranks tell each other in each step beside the model's reductions: messages and bytes, over MLX's ring.

    python scripts/ranks/step_messages.py 2 4 8

A tiny model on so many processes of this machine; sizes depend on the requests, not on the model.
"""

from __future__ import annotations

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

ROWS, PROMPT, ANSWER = 16, 1024, 64


def play() -> None:
    """As one of the ranks: requests of :data:`PROMPT` tokens; the first rank prints."""
    import mlx.core as mx
    from mlx_lm.models import llama

    import mlx_paged
    from mlx_paged.engine.ranks.world import ranks_of

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "rms_norm_eps": 1e-5}
    model = llama.Model(llama.ModelArgs(model_type="llama", tie_word_embeddings=False, **shape, **heads))
    mx.eval(model.parameters())
    model.shard(mx.distributed.init())
    mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory="64M"))
    gen = importlib.import_module("mlx_lm.generate").BatchGenerator(model, completion_batch_size=ROWS)
    ranks = ranks_of(model)
    assert ranks is not None
    chosen = random.Random(0)
    gen.insert([[chosen.randrange(1000) for _ in range(PROMPT)] for _ in range(ROWS)], [ANSWER] * ROWS)
    counts = {"prefill": [0, 0, 0, 0.0], "decode": [0, 0, 0, 0.0]}
    while True:
        before, steps, begin = ranks.num_sent, ranks.record.count, time.perf_counter()
        prompts, generated = gen.next()
        if not prompts and not generated:
            break
        kind = counts["decode" if len(generated) == ROWS and not prompts else "prefill"]
        now = ranks.num_sent
        kind[0] += ranks.record.count - steps
        kind[1] += now[0] - before[0]
        kind[2] += now[1] - before[1]
        kind[3] += time.perf_counter() - begin
    every = ranks.exchange(counts)
    if ranks.rank == 0:
        for kind in counts:
            steps = every[0][kind][0]
            messages, sent = (sum(rank[kind][i] for rank in every) / steps for i in (1, 2))
            print(
                f"{ranks.size} ranks, {kind}: {steps} steps, {messages:.1f} messages and {sent:.0f} bytes a step in "
                f"all, of rank 0 {every[0][kind][2] / steps:.0f} bytes; {every[0][kind][3] / steps * 1e3:.1f} ms a step"
            )
    ranks.close()


def main() -> None:
    if "MLX_RANK" in os.environ:
        play()
        return
    for size in map(int, sys.argv[1:] or ["2", "4"]):
        with tempfile.TemporaryDirectory() as folder:
            sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
            hosts = Path(folder, "hosts.json")
            hosts.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
            for each in sockets:
                each.close()
            env = {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_PAGED_RANK_TIMEOUT": "120"}
            command = [sys.executable, __file__]
            started = [subprocess.Popen(command, env={**env, "MLX_RANK": str(rank)}) for rank in range(size)]
            if any([process.wait() for process in started]):
                sys.exit(f"{size} ranks: failed")


if __name__ == "__main__":
    main()
