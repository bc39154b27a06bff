"""ServerConfig: what mlx_paged.server can be told beyond mlx_lm.server and PagedConfig."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from .config import parse_memory
from .errors import ConfigError

DISK_CAP = 10 << 30


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Attributes:
        prefix_cache: whether prefixes are kept and shared.
        prefix_cache_ttl: seconds after which an unused prefix is given up; None: when its memory is needed.
        prefix_cache_dir: where prefixes outlive the process; None: nowhere.
        prefix_cache_dir_bytes: most bytes there.
        api_key: what a client must send as its bearer token, if anything.
    """

    prefix_cache: bool = True
    prefix_cache_ttl: float | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_dir_bytes: int = DISK_CAP
    api_key: str | None = None

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("prefix cache and access")
        group.add_argument("--no-prefix-cache", action="store_true", help="Compute every prompt anew")
        group.add_argument(
            "--prefix-cache-ttl",
            type=_seconds,
            metavar="SECONDS",
            help="Give prefixes up that were not used so long",
        )
        group.add_argument(
            "--prefix-cache-dir", type=Path, metavar="DIR", help="Keep prefixes on disk, too; they outlive a restart"
        )
        group.add_argument(
            "--prefix-cache-dir-size", type=_size, metavar="SIZE", default=DISK_CAP, help="Most bytes there (10GiB)"
        )
        group.add_argument(
            "--api-key",
            metavar="KEY",
            default=os.environ.get("MLX_PAGED_API_KEY"),
            help="Clients must send it as their bearer token; also MLX_PAGED_API_KEY, which other users cannot see",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> ServerConfig:
        """Raises ConfigError: options that contradict each other."""
        if args.no_prefix_cache and (args.prefix_cache_dir is not None or args.prefix_cache_ttl is not None):
            raise ConfigError("--no-prefix-cache leaves nothing for --prefix-cache-dir or --prefix-cache-ttl")
        return cls(
            prefix_cache=not args.no_prefix_cache,
            prefix_cache_ttl=args.prefix_cache_ttl,
            prefix_cache_dir=args.prefix_cache_dir,
            prefix_cache_dir_bytes=args.prefix_cache_dir_size,
            api_key=args.api_key or None,
        )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def _size(text: str) -> int:
    try:
        value = parse_memory(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value is None:
        raise argparse.ArgumentTypeError("must be a size such as 10GB")
    return value
