"""ServerConfig: options of mlx_paged.server beyond those of mlx_lm.server and PagedConfig."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import Option, Options, parse_memory
from ..errors import ConfigError
from .clients import VARIABLE, ApiKeys
from .memory import WATERMARK

DISK_CAP = 10 << 30
DRAIN_SECONDS = 30.0
ALIVE = ("idle_unload", "memory_watermark", "watchdog_timeout", "drain_timeout")


def _number(text: str, what: str, allows: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not allows(value):
        raise ConfigError(f"must be {what}, got {text!r}")
    return value


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds greater than 0", lambda value: 0 < value < math.inf)


def _seconds_or_none(text: str) -> float:
    return _number(text, "a number of seconds, or 0", lambda value: 0 <= value < math.inf)


def _percent(text: str) -> float:
    given = text.strip().removesuffix("%")
    return _number(given, "a percentage from 0 to 100", lambda value: 0 <= value <= 100) / 100


def _size(text: str) -> int:
    value = parse_memory(text)
    if value is None:
        raise ConfigError(f"must be a size such as 10GB, got {text!r}")
    return value


def _keys(given: ApiKeys | list[str] | None) -> ApiKeys:
    return given if isinstance(given, ApiKeys) else ApiKeys.from_options(given, os.environ.get(VARIABLE))


def option(
    default: Any,
    text: str,
    metavar: str | None = None,
    argument: Callable[[str], Any] = str,
    parse: Callable[[Any], Any] = lambda value: value,
    **more: Any,
) -> Any:
    """Return an :class:`Option`; ``argument`` converts the flag's text."""
    return Option(default, parse, text, metavar, argument=argument, **more)


@dataclass(frozen=True)
class ServerConfig(Options):
    """Options of the server; the text of each says what it does."""

    prefix_cache: bool = option(True, "Disable the prefix cache", flag="--no-prefix-cache")
    prefix_cache_ttl: float | None = option(None, "Evict prefixes idle for longer than this", "SECONDS", _seconds)
    prefix_cache_dir: Path | None = option(
        None,
        "Also keep prefixes on disk, across restarts",
        "DIR",
        Path,
    )
    prefix_cache_dir_size: int = option(
        DISK_CAP,
        "Size limit of --prefix-cache-dir; the least recently used prefixes are deleted first",
        "SIZE",
        _size,
        default_text="10GiB",
    )
    api_keys: ApiKeys = option(
        ApiKeys(),
        "API key that clients must send as bearer token; may be given several times; different keys share no prefixes. "
        f"Without the flag, keys are read from {VARIABLE} (comma-separated), which other users cannot see",
        "KEY",
        parse=_keys,
        flag="--api-key",
        repeats=True,
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "Additional model name for clients, besides the folder's name; may be given several times",
        "NAME",
        parse=lambda given: tuple(name.strip() for name in given or ()),
        flag="--served-model-name",
        repeats=True,
    )
    strict_parameters: bool = option(
        False,
        "Refuse unknown parameters with 400; by default they are ignored, logged once and named in the response header "
        "x-ignored-parameters",
    )
    response_store: bool = option(
        True,
        "Do not store Responses; by default up to 64 MiB are kept in memory, except those with store: false",
        flag="--no-response-store",
    )
    model_dir: Path | None = option(None, "Serve the models in this folder, by folder name", "DIR", Path)
    allow_any_model: bool = option(
        False,
        "Let clients load any model, adapter or draft model, as in mlx-lm",
    )
    mtp: bool = option(
        False,
        "Experimental: draft tokens (--num-draft-tokens) with the model's own prediction head; the model verifies them",
    )
    idle_unload: float | None = option(
        None,
        "Unload models and caches after this time without a request; the next request loads them again",
        "SECONDS",
        _seconds,
        default_text="never",
    )
    memory_watermark: float = option(
        WATERMARK,
        "Share of the memory limit above which prefixes are evicted, then the youngest request is preempted and none "
        "starts while another runs; 0 disables it",
        "PERCENT",
        _percent,
        default_text=f"{WATERMARK:.0%}",
    )
    watchdog_timeout: float | None = option(
        None,
        "Exit with status 70 after this time without progress, so that a service manager restarts the server; 0 "
        "disables it",
        "SECONDS",
        _seconds_or_none,
        default_text="300 on a GPU, 3600 on a CPU",
    )
    drain_timeout: float = option(
        DRAIN_SECONDS,
        "Grace period for requests after SIGTERM, SIGINT (Ctrl-C) or SIGHUP; 0 disables it; a second signal ends the "
        "server at once",
        "SECONDS",
        _seconds_or_none,
        default_text=f"{DRAIN_SECONDS:.0f}",
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        access, alive = (parser.add_argument_group(name) for name in ("prefix cache and access", "staying alive"))
        for each in cls.options():
            default = None if each.repeats else each.default
            each.add_to(alive if each.name in ALIVE else access, each.name, default)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> ServerConfig:
        """Return the parsed options. Raises ConfigError if they contradict each other or hold an invalid value."""
        config = cls(**{each.name: getattr(args, each.name) for each in fields(cls)})
        if not config.prefix_cache and (config.prefix_cache_dir is not None or config.prefix_cache_ttl is not None):
            raise ConfigError("--no-prefix-cache cannot be combined with --prefix-cache-dir or --prefix-cache-ttl")
        if not all(config.served_model_names):
            raise ConfigError("--served-model-name must not be empty")
        if config.model_dir is not None and not config.model_dir.is_dir():
            raise ConfigError(f"--model-dir: {config.model_dir} is not a folder")
        folder = config.prefix_cache_dir
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(f"--prefix-cache-dir: {folder} is a file, not a folder")
        if config.served_model_names and getattr(args, "model", None) is None:
            raise ConfigError("--served-model-name requires --model")
        return config
