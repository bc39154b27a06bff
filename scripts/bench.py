"""Benchmarks: stock mlx-lm against mlx_paged.

    python scripts/bench.py COMMAND --help

Models are random weights of a known shape (``--random``) or a folder (``--model``). With ``--out`` the results are
written as JSON, with the machine and the arguments beside them, and as a figure if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [folder for folder in map(str, Path(__file__).resolve().parents[:2]) if folder not in sys.path]

COMMANDS = {
    "batch": "one sequence and batches: throughput, latency, first tokens and memory",
    "prefix": "requests that share a prefix, against the stock server's prompt cache",
    "drafts": "several tokens a step: looked up, from a draft model, and with a made acceptance",
    "kernel": "the kernels by themselves, on a GPU",
    "ranks": "two ranks of one machine, and one",
    "servers": "both servers side by side: chats alone and at once",
    "engine": "what a step of the engine takes of the host, by rows, by who waits, by what is cached",
}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    listed = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"commands:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    name = parser.parse_args(given[:1]).command
    module = importlib.import_module(f"benchmarks.{name}")
    own = argparse.ArgumentParser(
        prog=f"bench.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(own)
    args = own.parse_args(given[1:])
    from benchmarks.models import BenchError

    from mlx_paged import PagedCacheError

    try:
        return int(module.run(args, given[1:]) or 0)
    except (BenchError, PagedCacheError) as error:
        print(f"bench.py {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
