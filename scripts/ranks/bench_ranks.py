"""Two ranks of one machine and one: stock mlx-lm against mlx_paged, in one run.

    python scripts/ranks/bench_ranks.py OUTDIR                    # GPUs: NCCL, an 8B shape in bf16
    python scripts/ranks/bench_ranks.py OUTDIR --preset deep      # without GPUs: ring, to try the script

Parts, each in processes of their own and with a time limit of its own, after which they are killed:

- ``tokens``: greedy tokens of a small f32 model on two ranks and on one.
- ``two``: on two ranks, stock and then paged, peak memory of a rank with one row and with 16 of 1,024 tokens, each side
  with nothing but its own model; 16 rows in a budget that holds them on two ranks only (``tight``); and then rounds of
  stock, paged, stock, paged, ...: decode tokens/s, first tokens, and where the host's time goes in a decode step.
  Between rounds the patches and the output layer are changed, and both output layers are kept.
- ``one``: the paged side on one rank, the tight budget too.

Decode counts the steps in which all rows decode: from the last first token to the first finish. A shorter run of the
same shape goes before each that is measured. ``ranks.json`` in OUTDIR has all, also of parts that were cut short.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from bench_rank import Rank  # noqa: E402
from host_time import KINDS, HostTime  # noqa: E402

SECONDS = {"tokens": 25, "two": 150, "one": 65}
ROWS, PROMPT, ANSWER = 16, 1024, 128
ROUNDS = 5  # with one row; half as many with all
TIGHT = 0.75  # of what the rows take on one rank
MOST_PRINTED = 40
FIRST: dict[str, int] = {}  # what was changed, as it was


# Parts --------------------------------------------------------------------------------------------------------------


def cases(rank: Rank, args: argparse.Namespace) -> dict[str, tuple[int, int, int]]:
    return {"1": (1, args.prompt, args.answer), str(args.rows): (args.rows, args.prompt, args.answer)}


def tokens(args: argparse.Namespace) -> None:
    """Greedy tokens of rows of different lengths."""
    rank = Rank(args, "tiny", "float32")
    rank.be("paged")
    gen = rank.generator(4)
    uids = gen.insert([rank.prompts(1, length)[0] for length in (300, 40, 7, 129)], [48] * 4)
    found: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(len(each) < 48 for each in found.values()):
        for response in gen.next()[1]:
            found[response.uid].append(response.token)
    rank.tell(tokens=list(found.values()))


def two(args: argparse.Namespace) -> None:
    """Stock and paged: peaks of each by itself, and then rounds of one after the other."""
    rank = Rank(args, args.preset, None)
    host = HostTime(rank.model)
    for name, case in cases(rank, args).items():
        rank.tell(**{f"stock {name}": rank.measured(*case)})
    rank.be("paged", args.budget)
    for name, case in cases(rank, args).items():
        rank.tell(**{f"paged {name}": rank.measured(*case)})
    tight(rank, args)
    host.watch_ranks()
    rank.host = host
    rank.keep_both_heads()
    for rows, count, answer in ((1, args.rounds, 2 * args.answer), (args.rows, (args.rounds + 1) // 2, args.answer)):
        found: dict[str, list[Any]] = {side: [] for side in ("stock", "paged", *["also"] * bool(args.also))}
        for _ in range(count):
            for side, figures in found.items():
                rank.be("stock" if side == "stock" else "paged", args.budget)
                if args.also:
                    change(args.also, is_on=side == "also")
                figures.append(rank.measured(rows, args.prompt, answer))
                rank.tell(**{f"rounds {rows}": found})


def change(setting: str, *, is_on: bool) -> None:
    """Give a number of mlx_paged's, ``module.NAME=value``, that value, or the one it had at first."""
    place, value = setting.split("=")
    module, name = place.rsplit(".", 1)
    found = importlib.import_module(module)
    FIRST.setdefault(place, getattr(found, name))
    setattr(found, name, int(value) if is_on else FIRST[place])


def one(args: argparse.Namespace) -> None:
    rank = Rank(args, args.preset, None)
    rank.be("paged", args.budget)
    for name, case in cases(rank, args).items():
        rank.tell(**{f"paged {name}": rank.measured(*case)})
    tight(rank, args)


def tight(rank: Rank, args: argparse.Namespace) -> None:
    """All rows in a budget, of each rank, that one rank alone cannot hold them in."""
    shape = rank.model.args
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    itemsize = rank.model.layers[0].self_attn.k_proj.weight.itemsize
    a_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * head_dim * itemsize
    rank.be("paged", int(TIGHT * args.rows * (args.prompt + args.answer) * a_token))
    rank.tell(tight=rank.run(args.rows, args.prompt, args.answer))


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
        env.setdefault("MLX_USE_CUDA_GRAPHS", "0")  # as our commands have it; for stock, too
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


def run_part(name: str, argv: Sequence[str], out: Path) -> dict[str, Any]:
    """What the ranks of a part told, and how they ended."""
    part, size = name.split("-")[0], 2 if name.endswith("two") else 1
    seconds = SECONDS[part]
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
            if isinstance(figures, dict) and "peak_bytes" in figures:
                peaks = [each[case]["peak_bytes"] / 1e9 for each in result["parts"][name]["ranks"] if case in each]
                text = f"{name} {case:8} decode {rated(figures)}, last first {figures['last_first_token']:6.3f} s, "
                text += f"peak {max(peaks):6.2f} GB"
                if case == "tight":
                    text += f", {figures['most_rows_at_once']} rows at once, {figures['preemptions']} preemptions"
                lines.append(text)
    mine, theirs = result["parts"]["two"]["ranks"][0], result["parts"]["one"]["ranks"][0]
    for case in ("1", str(result["rows"])):
        paged, on_one = mine.get(f"paged {case}"), theirs.get(f"paged {case}")
        if paged and on_one:
            lines.append(f"{case} row(s): peak {paged['peak_bytes'] / on_one['peak_bytes']:.3f} of one card's")
        lines += of_rounds(mine.get(f"rounds {case}"), case)
    return lines[:MOST_PRINTED]


def rated(figures: dict[str, Any]) -> str:
    rate = figures["decode_tokens_per_second"]
    return "     - tok/s" if rate is None else f"{rate:6.0f} tok/s"  # None: all rows never decode together


def of_rounds(found: dict[str, list[dict[str, Any]]] | None, case: str) -> list[str]:
    """Each round's rates, medians, ratios, and the first rank's time in a step."""
    if not found or not found["paged"]:
        return []
    median = statistics.median
    rates = {side: [each["decode_tokens_per_second"] for each in rounds] for side, rounds in found.items()}
    lines = [f"{case} row(s), rounds, tok/s:"]
    for side, each in rates.items():
        late = median(figures["last_first_token"] for figures in found[side])
        listed = " ".join(f"{rate:.1f}" for rate in each)
        lines.append(f"  {side} {listed}, median {median(each):.1f}, last first token {late:.3f} s")
    steps = {side: median(figures["median_step_ms"] for figures in rounds) for side, rounds in found.items()}
    for side in list(found)[1:]:
        in_turn = median(ours / stock for ours, stock in zip(rates[side], rates["stock"], strict=False))
        lines.append(
            f"  {side}: decode {median(rates[side]) / median(rates['stock']):.2f}x of stock's by medians, "
            f"{in_turn:.2f} median of rounds, {steps['stock'] / steps[side]:.2f} by median steps"
        )
    for side, rounds in found.items():
        of_kind = {
            kind: [median(each["host_ms_a_step"][kind][i] for each in rounds) for i in (1, 2)]
            for kind in ("all", *KINDS, "python")
        }
        told = ", ".join(f"{kind} {wall:.2f} ({cpu:.2f})" for kind, (wall, cpu) in of_kind.items() if wall)
        lines.append(f"  {side}, ms a step (of the processor): {told}")
    return lines


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path, metavar="OUTDIR")
    made.add_argument("--preset", default="llama-8b", help="llama-8b (default), llama-1b, tiny, deep")
    made.add_argument("--rows", type=int, default=ROWS)
    made.add_argument("--prompt", type=int, default=PROMPT)
    made.add_argument("--answer", type=int, default=ANSWER)
    made.add_argument("--rounds", type=int, default=ROUNDS, help="with one row; half as many with all")
    made.add_argument("--also", metavar="MODULE.NAME=N", help="a third kind of rounds: paged, with that number")
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
    for group in (("two",), ("one",), ("tokens-of-two", "tokens-of-one")):
        names = [name for name in group if name.split("-")[0] in wanted]
        with ThreadPoolExecutor() as pool:
            for name, part in zip(names, pool.map(lambda name: run_part(name, argv, args.out), names), strict=True):
                parts[name] = part
        (args.out / "ranks.json").write_text(json.dumps(result, indent=1))
    print("\n".join(summary(result)))


if __name__ == "__main__":
    main()
