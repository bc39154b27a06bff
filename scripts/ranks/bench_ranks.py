"""Two ranks of one machine and one: stock mlx-lm against mlx_paged, in one run.

    python scripts/ranks/bench_ranks.py OUTDIR                    # GPUs: NCCL, an 8B shape in bf16
    python scripts/ranks/bench_ranks.py OUTDIR --preset tiny      # without GPUs: ring, to try the script

Parts, each in processes of their own and with a time limit of its own, after which they are killed:

- ``tokens``: greedy tokens of a small f32 model on two ranks and on one.
- ``two``: on two ranks, stock and then paged: decode tokens/s, first tokens and peak memory of a rank, with one row and
  with 16 of 1,024 tokens, and how long the paged side's host is at messages to the other rank; and 16 rows in a budget
  that holds them on two ranks only (``tight``).
- ``one``: the paged side on one rank, the tight budget too.

Decode counts the steps in which all rows decode: from the last first token to the first finish. A run of the same shape
goes before each that is measured. ``ranks.json`` in OUTDIR has everything, also of parts that were cut short.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

SECONDS = {"tokens": 50, "two": 150, "one": 65}
ROWS, PROMPT, ANSWER = 16, 1024, 128
TIGHT = 0.75  # of what the rows take on one rank
MOST_PRINTED = 40


# A rank -------------------------------------------------------------------------------------------------------------


class Rank:
    """This process: its part of the model, and where its figures go.

    Args:
        args: of the command line.
        preset: of the model; see scripts/support/bench_common.py.
        dtype: of its weights; None: the preset's.
    """

    def __init__(self, args: argparse.Namespace, preset: str, dtype: str | None) -> None:
        import mlx.core as mx
        from support.bench_common import random_model

        size = int(os.environ["BENCH_SIZE"])
        self.rank = int(os.environ.get("MLX_RANK", 0))
        backend = "nccl" if "NCCL_HOST_IP" in os.environ else "ring"
        self.group = mx.distributed.init(strict=True, backend=backend) if size > 1 else None
        self.model = random_model(preset, dtype)
        if self.group is not None:
            self.model.shard(self.group)
            mx.eval(self.model.parameters())
        gc.collect()
        mx.clear_cache()
        self.vocab = self.model.args.vocab_size
        self.folder, self.name = args.folder, f"{args.part}-{self.rank}"
        self.figures: dict[str, Any] = {"model_bytes": mx.get_active_memory()}
        self._generate = importlib.import_module("mlx_lm.generate")
        self.tell()

    def tell(self, **figures: Any) -> None:
        """Keep figures, whatever happens next."""
        self.figures.update(figures)
        (self.folder / f"{self.name}.json").write_text(json.dumps(self.figures))

    def prompts(self, rows: int, length: int) -> list[list[int]]:
        chosen = random.Random(rows)
        return [[chosen.randrange(self.vocab) for _ in range(length)] for _ in range(rows)]

    def generator(self, rows: int) -> Any:
        return self._generate.BatchGenerator(self.model, completion_batch_size=rows)

    def paged(self, budget: int | None = None) -> None:
        """From now on, with a new pool, and with a head that is sharded as our loader does it."""
        import mlx.core as mx

        import mlx_paged
        from mlx_paged.patches.sharded_head import shard_head

        mlx_paged.remove_patches()
        if self.group is not None and shard_head(self.model, self.group):
            mx.eval(self.model.parameters())
            self.figures["model_bytes"] = mx.get_active_memory()
        gc.collect()
        mlx_paged.apply_patches(mlx_paged.PagedConfig(kv_cache_memory=budget))

    def measured(self, rows: int, length: int, answer: int) -> dict[str, Any]:
        """Figures of the second of two runs of a case."""
        self._run(rows, length, min(answer, 16))
        return self._run(rows, length, answer)

    def _run(self, rows: int, length: int, answer: int) -> dict[str, Any]:
        import mlx.core as mx

        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        gen = self.generator(rows)
        gen.insert(self.prompts(rows, length), [answer] * rows)
        begin = time.perf_counter()
        first: dict[int, float] = {}
        done = most = 0
        counted, since, until = 0, 0.0, 0.0
        while done < rows:
            _, generated = gen.next()
            now = time.perf_counter() - begin
            for response in generated:
                first.setdefault(response.uid, now)
                done += response.finish_reason is not None
            most = max(most, len(generated))
            if len(first) == rows and not done:
                counted += len(generated) if since else 0
                since, until = since or now, now
        figures = {
            "decode_tokens_per_second": counted / (until - since) if until > since else None,
            "first_token": min(first.values()),
            "last_first_token": max(first.values()),
            "seconds": time.perf_counter() - begin,
            "peak_bytes": mx.get_peak_memory(),
            "most_rows_at_once": most,
            "preemptions": getattr(gen, "preemptions", None),
        }
        gen.close()
        return figures


def cases(rank: Rank, args: argparse.Namespace) -> dict[str, tuple[int, int, int]]:
    return {"1": (1, args.prompt, args.answer), str(args.rows): (args.rows, args.prompt, args.answer)}


def tokens(args: argparse.Namespace) -> None:
    """Greedy tokens of rows of different lengths."""
    rank = Rank(args, "tiny", "float32")
    rank.paged()
    gen = rank.generator(4)
    uids = gen.insert([rank.prompts(1, length)[0] for length in (300, 40, 7, 129)], [48] * 4)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(len(each) < 48 for each in found.values()):
        for response in gen.next()[1]:
            found[response.uid].append(response.token)
    rank.tell(tokens=list(found.values()))


def two(args: argparse.Namespace) -> None:
    """Stock, paged, and what paged ranks say to each other."""
    from mlx_paged.engine.ranks.ranks import Ranks

    rank = Rank(args, args.preset, None)
    for name, case in cases(rank, args).items():
        rank.tell(**{f"stock {name}": rank.measured(*case)})
    rank.paged(args.budget)
    waited = [0.0, 0]

    def timed(original: Any) -> Any:
        def call(self: Any, *values: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(self, *values, **options)
            finally:
                waited[0] += time.perf_counter() - begin
                waited[1] += 1

        return call

    Ranks.broadcast, Ranks.exchange = timed(Ranks.broadcast), timed(Ranks.exchange)  # type: ignore[method-assign]
    for name, case in cases(rank, args).items():
        rank._run(*case)
        waited[:] = [0.0, 0]
        figures = rank._run(*case)
        figures["messages"], figures["milliseconds_a_message"] = waited[1], waited[0] / waited[1] * 1e3
        rank.tell(**{f"paged {name}": figures})
    tight(rank, args)


def one(args: argparse.Namespace) -> None:
    rank = Rank(args, args.preset, None)
    rank.paged(args.budget)
    for name, case in cases(rank, args).items():
        rank.tell(**{f"paged {name}": rank.measured(*case)})
    tight(rank, args)


def tight(rank: Rank, args: argparse.Namespace) -> None:
    """All rows in a budget, of each rank, that one rank alone cannot hold them in."""
    shape = rank.model.args
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    itemsize = rank.model.layers[0].self_attn.k_proj.weight.itemsize
    a_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * itemsize
    rank.paged(int(TIGHT * args.rows * (args.prompt + args.answer) * a_token))
    rank.tell(tight=rank._run(args.rows, args.prompt, args.answer))


# Starting them ------------------------------------------------------------------------------------------------------


def start(part: str, size: int, argv: Sequence[str], folder: Path) -> list[subprocess.Popen[bytes]]:
    """The processes of a part, with the variables that mlx.launch gives them."""
    import mlx.core as mx

    env = {**os.environ, "BENCH_SIZE": str(size), "MLX_PAGED_RANK_TIMEOUT": "60", "HF_HUB_OFFLINE": "1"}
    ports = free_ports(max(2, size))
    has_gpu = mx.default_device() == mx.Device(mx.gpu)
    if size > 1 and has_gpu:
        env |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(size)}
        env.setdefault("NCCL_NVLS_ENABLE", "0")
    elif size > 1:
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        env["MLX_HOSTFILE"] = str(hosts)
    started = []
    for rank in range(size):
        mine = {**env, "CUDA_VISIBLE_DEVICES": str(rank)} | ({"MLX_RANK": str(rank)} if size > 1 else {})
        with (folder / f"{part}-{rank}.log").open("w") as log:
            command = [sys.executable, __file__, *argv, "--part", part, "--folder", str(folder)]
            started.append(subprocess.Popen(command, env=mine, stdout=log, stderr=log, start_new_session=True))
    return started


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run_part(name: str, part: str, size: int, argv: Sequence[str], out: Path, seconds: float) -> dict[str, Any]:
    """What the ranks of a part told, and how they ended."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    started = start(part, size, argv, folder)
    try:
        while any(each.poll() is None for each in started) and time.monotonic() - begin < seconds:
            if any(each.poll() not in (None, 0) for each in started):
                time.sleep(3)  # for the last words of the others
                break
            time.sleep(0.1)
    finally:
        for each in started:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
        codes = [each.wait() for each in started]
    found = []
    for rank in range(size):
        path = folder / f"{part}-{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    ended: dict[str, Any] = {"ranks": found, "codes": codes, "seconds": time.monotonic() - begin}
    if any(codes):
        ended["log"] = (folder / f"{part}-{next(i for i, code in enumerate(codes) if code)}.log").read_text()[-1500:]
    return ended


# What is printed ----------------------------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['device']}, {result['preset']}, prompts of {result['prompt']} tokens"]
    for name, part in result["parts"].items():
        if any(part["codes"]):
            lines.append(f"{name}: ended with {part['codes']} after {part['seconds']:.0f} s")
            lines += [f"  | {line[:150]}" for line in part.get("log", "").strip().splitlines()[-6:]]
    alone, several = (result["parts"][name]["ranks"] for name in ("tokens-of-one", "tokens-of-two"))
    if all(each.get("tokens") for each in [*alone, *several]):
        same = all(each["tokens"] == alone[0]["tokens"] for each in several)
        lines.append(f"greedy f32 tokens of two ranks are one's: {'yes' if same else 'NO'}")
    for name in ("two", "one"):
        for case, figures in result["parts"][name]["ranks"][0].items():
            if isinstance(figures, dict):
                rate = figures["decode_tokens_per_second"]
                decode = "     -      " if rate is None else f"{rate:7.1f} tok/s"  # all rows never decode together
                peaks = [each[case]["peak_bytes"] / 1e9 for each in result["parts"][name]["ranks"] if case in each]
                more = ""
                if "milliseconds_a_message" in figures:
                    more = f", {figures['milliseconds_a_message']:.3f} ms a message"
                if case == "tight":
                    more = f", {figures['most_rows_at_once']} rows at once, {figures['preemptions']} preemptions"
                lines.append(
                    f"{name:3} {case:9} decode {decode}  first {figures['first_token']:6.3f} "
                    f"last first {figures['last_first_token']:6.3f} s  peak {max(peaks):6.2f} GB{more}"
                )
    mine, theirs = result["parts"]["two"]["ranks"][0], result["parts"]["one"]["ranks"][0]
    for case in ("1", str(result["rows"])):
        stock, paged, on_one = mine.get(f"stock {case}"), mine.get(f"paged {case}"), theirs.get(f"paged {case}")
        if stock and paged:
            rate, late = "decode_tokens_per_second", "last_first_token"
            text = f"two ranks, {case} row(s): decode {paged[rate] / stock[rate]:.2f}x of stock's, last first token "
            text += f"{paged[late] / stock[late]:.2f}x"
            if on_one:
                text += f", peak {paged['peak_bytes'] / on_one['peak_bytes']:.2f} of one card's"
            lines.append(text)
    return lines[:MOST_PRINTED]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path, metavar="OUTDIR")
    made.add_argument("--preset", default="llama-8b", help="llama-8b (default), llama-1b, tiny")
    made.add_argument("--rows", type=int, default=ROWS)
    made.add_argument("--prompt", type=int, default=PROMPT)
    made.add_argument("--answer", type=int, default=ANSWER)
    made.add_argument("--budget", type=int, default=None, help="bytes of each rank's pool")
    made.add_argument("--only", help="parts, with commas: tokens, two, one")
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> None:
    args = parser().parse_args()
    if args.part is not None:
        {"tokens": tokens, "two": two, "one": one}[args.part](args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = (args.only or "two,tokens,one").split(",")
    parts: dict[str, Any] = {
        name: {"ranks": [{}], "codes": [0], "seconds": 0.0} for name in ("tokens-of-one", "tokens-of-two", "two", "one")
    }
    import mlx.core as mx

    result = {"preset": args.preset, "prompt": args.prompt, "rows": args.rows, "parts": parts}
    result["device"] = str(mx.device_info().get("device_name", mx.default_device()))
    argv = sys.argv[1:]
    for name, part, size in (
        ("two", "two", 2),
        ("one", "one", 1),
        ("tokens-of-two", "tokens", 2),
        ("tokens-of-one", "tokens", 1),
    ):
        if part in wanted:
            parts[name] = run_part(name, part, size, argv, args.out, SECONDS[part] / (2 if part == "tokens" else 1))
            (args.out / "ranks.json").write_text(json.dumps(result, indent=1))
    print("\n".join(summary(result)))


if __name__ == "__main__":
    main()
