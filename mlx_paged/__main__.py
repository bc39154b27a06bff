"""``python -m mlx_paged COMMAND``: any mlx_lm command, with the patches applied."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .config import PagedConfig
from .errors import PagedCacheError


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``generate``, ``server`` or ``doctor`` of this package, or a command of mlx_lm under the patches."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(
            "usage: python -m mlx_paged COMMAND [options]\n\n"
            "COMMAND is generate, server, doctor (does the fused kernel work on this machine?), or\n"
            "any command of mlx_lm (chat, cache_prompt, ...), run on the paged cache.\n"
            "All commands take, besides their own options:"
        )
        parser = argparse.ArgumentParser(prog="mlx_paged", add_help=False, usage=argparse.SUPPRESS)
        PagedConfig.add_arguments(parser)
        print(parser.format_help())
        return
    if command == "--version":
        from . import __version__

        print(__version__)
        return
    if command == "generate":
        from . import generate

        sys.argv = [f"{sys.argv[0]} generate", *arguments[1:]]
        generate.main()
        return
    if command == "server":
        from . import server

        sys.argv = [f"{sys.argv[0]} server", *arguments[1:]]
        server.main()
        return
    if command == "doctor":
        from . import doctor

        doctor.main(arguments[1:])
        return
    try:
        _run_upstream(arguments)
    except PagedCacheError as error:
        sys.exit(f"mlx_paged: {error}")


def _run_upstream(arguments: list[str]) -> None:
    from mlx_lm import cli

    from . import patches
    from .generate import raise_cpu_cache_limit

    parser = argparse.ArgumentParser(prog="mlx_paged", add_help=False, allow_abbrev=False)
    PagedConfig.add_arguments(parser)
    ours, theirs = parser.parse_known_args(arguments)
    patches.apply_patches(PagedConfig.from_env().with_arguments(ours))
    raise_cpu_cache_limit()
    sys.argv = [sys.argv[0], *theirs]
    try:
        cli.main()
    except ValueError as error:
        if str(error).startswith("CLI requires a subcommand"):
            sys.exit(f"mlx_paged: unknown command {arguments[0]!r}. {error}")
        raise


if __name__ == "__main__":
    main()
