"""Benchmarks: stock mlx-lm against mlx_paged, in one call.

    python scripts/bench.py COMMAND --help

Models are random weights of a known shape (``--random``) or a folder (``--model``). Figures of a case are medians. In
brackets is the ratio to the first side of the case, above 1 if it is better. With ``--out`` the results are written as
COMMAND.json, with the machine and the arguments beside them, and as COMMAND.png if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

COMMANDS = {
    "batch": "one sequence, batches and shared prefixes, on one rank or several: speed, latency and memory",
    "drafts": "several tokens a step: looked up, and from a draft model that is right with a known chance",
    "kernel": "the kernels by themselves, on a GPU",
    "servers": "both servers side by side: chats alone and at once",
}


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    listed = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"commands:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    name = parser.parse_args(given[:1]).command
    from mlx_paged import PagedCacheError
    from scripts.benchmarks.report import BenchError, report

    module = importlib.import_module(f"scripts.benchmarks.{name}")
    own = argparse.ArgumentParser(
        prog=f"bench.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(own)
    own.add_argument("--out", type=Path, help="folder for the results as JSON and, with matplotlib, PNG")
    args = own.parse_args(given[1:])
    try:
        results = module.run(args, given[1:])
        return 0 if results is None else report(args.out, name, given[1:], results, module.METRICS)
    except (BenchError, PagedCacheError) as error:
        print(f"bench.py {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
