"""ServerConfig: options of mlx_paged.server beyond those of mlx_lm.server and PagedConfig."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..config import parse_memory
from ..errors import ConfigError
from .api_keys import VARIABLE, ApiKeys
from .health.memory import WATERMARK

DISK_CAP = 10 << 30
DRAIN_SECONDS = 30.0


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Attributes:
        prefix_cache: whether prefixes are kept and shared.
        prefix_cache_ttl: evict prefixes idle for longer than these seconds; None: when their memory is needed.
        prefix_cache_dir: where prefixes outlive the process; None: nowhere.
        prefix_cache_dir_bytes: most bytes there.
        api_keys: what a client must send as its bearer token, if anything.
        served_model_names: other names of the model.
        allow_chat_template_override: whether a request may bring its own chat template.
        response_store: whether answers of Responses are kept for later ones.
        strict_parameters: whether parameters that are not known are refused, and not ignored.
        model_dir: folder of models that clients may ask for by their folders' names.
        allow_any_model: whether clients may have any model loaded, with adapters and draft models.
        image_hosts: that images are fetched from.
        memory_watermark: share of the memory's limit above which prefixes and requests make room; 0: it is not watched.
        watchdog_timeout: seconds without progress after which the process ends; 0: never; None: by the device.
        drain_timeout: grace period after SIGTERM in seconds; 0 disables it.
    """

    prefix_cache: bool = True
    prefix_cache_ttl: float | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_dir_bytes: int = DISK_CAP
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    served_model_names: tuple[str, ...] = ()
    allow_chat_template_override: bool = False
    response_store: bool = True
    strict_parameters: bool = False
    model_dir: Path | None = None
    allow_any_model: bool = False
    image_hosts: frozenset[str] = frozenset()
    memory_watermark: float = WATERMARK
    watchdog_timeout: float | None = None
    drain_timeout: float = DRAIN_SECONDS

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("prefix cache and access")
        group.add_argument("--no-prefix-cache", action="store_true", help="Compute every prompt anew")
        group.add_argument(
            "--prefix-cache-ttl",
            type=_seconds,
            metavar="SECONDS",
            help="Evict prefixes idle for longer than this",
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
            action="append",
            help="Clients must send it as their bearer token. May be given several times: the holders of different "
            "keys share no prefixes. Also MLX_PAGED_API_KEY, which other users cannot see, with commas between keys",
        )
        group.add_argument(
            "--served-model-name",
            metavar="NAME",
            action="append",
            default=[],
            help="Another name of the model for clients; may be given several times",
        )
        group.add_argument(
            "--allow-chat-template-override",
            action="store_true",
            help="Let requests bring a chat template in chat_template_kwargs; it is run, in a sandbox and with limits",
        )
        group.add_argument(
            "--strict-parameters",
            action="store_true",
            help="Refuse parameters that this server does not know (400); without it they are ignored, logged once and "
            "named in the answer's header x-ignored-parameters",
        )
        group.add_argument(
            "--no-response-store",
            action="store_true",
            help="Keep no answers of Responses; without it those that clients do not say store: false of are kept in "
            "memory, 64 MiB of them",
        )
        group.add_argument("--ignore-unknown-parameters", action="store_true", help="Without effect: it is the default")
        group.add_argument(
            "--model-dir",
            type=Path,
            metavar="DIR",
            help="Clients may ask for the models in it, by their folders' names",
        )
        group.add_argument(
            "--allow-any-model",
            action="store_true",
            help="Clients may have any model loaded that they name, with adapters and draft models, as in mlx-lm",
        )
        group.add_argument(
            "--allow-remote-images",
            metavar="HOST",
            action="append",
            default=[],
            help="Fetch images from this host; others must come as data URLs. May be given several times",
        )
        cls._add_liveness(parser)

    @staticmethod
    def _add_liveness(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("staying alive")
        group.add_argument(
            "--memory-watermark",
            type=_percent,
            metavar="PERCENT",
            default=WATERMARK,
            help="Of the memory's limit: above it cached prefixes go, then no request starts beside others, then the "
            f"youngest makes room (default: {WATERMARK:.0%}; 0: not watched)".replace("%", "%%"),
        )
        group.add_argument(
            "--watchdog-timeout",
            type=_seconds_or_none,
            metavar="SECONDS",
            help="End the process with status 70 after this time without any progress, for a service manager to start "
            "it again (default: 300 on a GPU, 3600 on a CPU; 0: never)",
        )
        group.add_argument(
            "--drain-timeout",
            type=_seconds_or_none,
            metavar="SECONDS",
            default=DRAIN_SECONDS,
            help="Grace period for requests after SIGTERM or SIGHUP (default: 30; 0 disables it); a second signal ends "
            "the server at once",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> ServerConfig:
        """Raises ConfigError: options that contradict each other."""
        if args.no_prefix_cache and (args.prefix_cache_dir is not None or args.prefix_cache_ttl is not None):
            raise ConfigError("--no-prefix-cache leaves nothing for --prefix-cache-dir or --prefix-cache-ttl")
        names = tuple(name.strip() for name in args.served_model_name)
        if not all(names):
            raise ConfigError("--served-model-name needs a name")
        if args.model_dir is not None and not args.model_dir.is_dir():
            raise ConfigError(f"--model-dir: {args.model_dir} is not a folder")
        if names and getattr(args, "model", None) is None:
            raise ConfigError("--served-model-name names the model of --model, which was not given")
        return cls(
            prefix_cache=not args.no_prefix_cache,
            prefix_cache_ttl=args.prefix_cache_ttl,
            prefix_cache_dir=args.prefix_cache_dir,
            prefix_cache_dir_bytes=args.prefix_cache_dir_size,
            api_keys=ApiKeys.from_options(args.api_key, os.environ.get(VARIABLE)),
            served_model_names=names,
            allow_chat_template_override=args.allow_chat_template_override,
            response_store=not args.no_response_store,
            strict_parameters=args.strict_parameters,
            model_dir=args.model_dir,
            allow_any_model=args.allow_any_model,
            image_hosts=frozenset(args.allow_remote_images),
            memory_watermark=args.memory_watermark,
            watchdog_timeout=args.watchdog_timeout,
            drain_timeout=args.drain_timeout,
        )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value


def _seconds_or_none(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _seconds(text)


def _percent(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 100, in percent, not {text!r}")
    return value


def _size(text: str) -> int:
    try:
        value = parse_memory(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value is None:
        raise argparse.ArgumentTypeError("must be a size such as 10GB")
    return value
