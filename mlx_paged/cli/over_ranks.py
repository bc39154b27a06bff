"""Commands that ``mlx.launch`` has started on several ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx

from ..config import argument_type
from ..errors import ConfigError, RankError
from ..ranks.ranks import EXIT_STATUS, Ranks
from ..ranks.world import RANK_TIMEOUT, VARIABLE, check_same, connect, parse_timeout, versions

T = TypeVar("T")
PIPELINE = "--pipeline uses mlx-lm's own caches: the paged cache does not support layers spread over ranks"

# Flags that mlx-lm does not support over ranks, either.
REFUSED = {
    "adapter_path": "--adapter-path",
    "draft_model": "--draft-model",
    "mtp": "--mtp",
    "prompt_cache_file": "--prompt-cache-file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for several ranks."""
    group = parser.add_argument_group("several ranks (mlx.launch)")
    group.add_argument(
        "--rank-timeout",
        type=argument_type(parse_timeout),
        metavar="SECONDS",
        help="Time in seconds to wait for the other ranks, and for a machine that does not answer any more "
        f"(default: {RANK_TIMEOUT:.0f}); also {VARIABLE}",
    )
    if "--pipeline" not in parser._option_string_actions:
        group.add_argument(
            "--pipeline", action="store_true", help="Shard the model by layers, as mlx-lm does, without the paged cache"
        )


def join(args: argparse.Namespace) -> Ranks | None:
    """Connect to the other ranks; return None if there are none. Ends the process if they do not find each other.

    Raises:
        ConfigError: a flag cannot be used with several ranks, or needs them. RankError: another rank has ended.
    """
    group = mx.distributed.init()
    if group.size() == 1:
        if args.pipeline:
            raise ConfigError("--pipeline needs several ranks; start them with mlx.launch -n 2")
        return None
    for name, flag in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{flag} is not supported with several ranks")
    try:
        ranks = connect(group, args.rank_timeout)
    except RankError as error:
        print(f"mlx_paged: rank {group.rank()} of {group.size()} ends: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)  # MLX may wait for the others when the interpreter ends
    if ranks.rank == 0:
        print(f"mlx_paged: {ranks.size} ranks", file=sys.stderr, flush=True)
    try:
        check_same(ranks, "the versions", versions())
    except ConfigError as error:
        ranks.fail(error)
    mx.random.seed(ranks.broadcast(random.getrandbits(32)))
    return ranks


@contextmanager
def over_ranks(args: argparse.Namespace) -> Iterator[Ranks | None]:
    """Join the other ranks for a ``with`` block, in which only rank 0 prints to stdout. Yields None if there are none.

    An exception in the block, except SystemExit and KeyboardInterrupt, ends all ranks, each with a line on stderr and a
    non-zero status.

    Raises:
        ConfigError, RankError: as :func:`join`.
    """
    ranks = join(args)
    if ranks is None:
        yield None
        return
    try:
        with contextlib.ExitStack() as stack:
            if ranks.rank > 0:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield ranks
        ranks.close()
    except (SystemExit, KeyboardInterrupt):
        ranks.close()
        raise
    except BaseException as error:
        ranks.fail(error)


def from_rank_0(ranks: Ranks | None, find: Callable[[], T]) -> T:
    """Call ``find`` on rank 0 only, and return its result, a JSON value, on every rank."""
    if ranks is None:
        return find()
    return ranks.broadcast(find() if ranks.rank == 0 else None)  # type: ignore[return-value]


def loading(ranks: Ranks, *, pipeline: bool) -> Callable[..., Any]:
    """Return a replacement for mlx-lm's ``load`` that loads this rank's part of the model."""

    def load(
        path: str,
        *_: Any,
        tokenizer_config: dict[str, Any] | None = None,
        return_config: bool = False,
        trust_remote_code: bool = False,
        **__: Any,
    ) -> Any:
        from ..patches.sharded import sharded_load

        groups = (ranks.group, None) if pipeline else (None, ranks.group)
        try:
            return sharded_load(
                path, *groups, return_config, tokenizer_config=tokenizer_config, trust_remote_code=trust_remote_code
            )
        except ValueError as error:
            raise ConfigError(f"the model cannot be sharded over {ranks.size} ranks: {error}") from error

    return load
