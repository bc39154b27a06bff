"""ServerConfig: options of mlx_paged.server beyond those of mlx_lm.server and PagedConfig."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import argument_type, parse_memory
from ..errors import ConfigError
from .clients import VARIABLE, ApiKeys
from .memory import WATERMARK

DISK_CAP = 10 << 30
DRAIN_SECONDS = 30.0
ALIVE = ("idle_unload", "memory_watermark", "watchdog_timeout", "drain_timeout")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds greater than 0, got {text!r}")
    return value


def _seconds_or_none(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _seconds(text)


def _percent(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a percentage from 0 to 100, got {text!r}")
    return value


def _size(text: str) -> int:
    value: int | None = argument_type(parse_memory)(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 10GB, got {text!r}")
    return value


def option(
    default: Any,
    text: str,
    metavar: str | None = None,
    parse: Callable[[str], Any] = str,
    *,
    flag: str | None = None,
    collect: Callable[[list[str] | None], Any] | None = None,
    default_text: str | None = None,
    more: str = "",
) -> Any:
    """Return a dataclass field with the metadata of its flag.

    Args:
        default: value without the flag; a switch whose default is True turns the option off.
        text: what the option does, for ``--help`` and docs/reference.md.
        metavar: placeholder of the value in the help; None: the flag is a switch.
        parse: converts the given text.
        flag: name of the flag; None: the field's name with dashes.
        collect: for flags that may be given several times: makes the value from all that were given, or from None.
        default_text: the default in help and reference; None: the reference says ``off`` for a switch, else ``none``.
        more: text that only the reference adds.
    """
    how = {"text": text, "metavar": metavar, "parse": parse, "flag": flag, "collect": collect}
    return field(default=default, metadata={**how, "default_text": default_text, "more": more})


def _flag_of(each: Field[Any]) -> str:
    return each.metadata["flag"] or f"--{each.name.replace('_', '-')}"


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server; the text of each says what it does."""

    prefix_cache: bool = option(True, "Disable the prefix cache", flag="--no-prefix-cache")
    prefix_cache_ttl: float | None = option(None, "Evict prefixes idle for longer than this", "SECONDS", _seconds)
    prefix_cache_dir: Path | None = option(
        None,
        "Also keep prefixes on disk, across restarts",
        "DIR",
        Path,
        more=" and crashes, for the same model: weights, adapter, configuration and code. They are written when the "
        "server is idle, when they are evicted from memory (by a thread, with a queue of up to 256 MB; prefixes beyond "
        "that are dropped and counted) and at shutdown. Only your user can read the files",
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
        flag="--api-key",
        collect=lambda given: ApiKeys.from_options(given, os.environ.get(VARIABLE)),
        more=". The header `x-api-key` is accepted as well. Clients with different keys [take turns](#several-clients)",
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "Additional model name for clients, besides the folder's name; may be given several times",
        "NAME",
        flag="--served-model-name",
        collect=lambda given: tuple(name.strip() for name in given or ()),
    )
    strict_parameters: bool = option(
        False,
        "Refuse unknown parameters with 400; by default they are ignored, logged once and named in the response header "
        "x-ignored-parameters",
        more=" ([known parameters](api.md))",
    )
    response_store: bool = option(
        True,
        "Do not store Responses; by default up to 64 MiB are kept in memory, except those with store: false",
        flag="--no-response-store",
        more="; `previous_response_id` refers to them",
    )
    model_dir: Path | None = option(None, "Serve the models in this folder, by folder name", "DIR", Path)
    allow_any_model: bool = option(
        False,
        "Let clients load any model, adapter or draft model, as in mlx-lm",
        more=". Without this flag, `--model` and `--model-dir`, clients can load the models in the Hugging Face cache",
    )
    mtp: bool = option(
        False,
        "Experimental: draft tokens (--num-draft-tokens) with the model's own prediction head; the model verifies them",
        more=" ([multi-token prediction](#multi-token-prediction))",
    )
    idle_unload: float | None = option(
        None,
        "Unload models and caches after this time without a request; the next request loads them again",
        "SECONDS",
        _seconds,
        default_text="never",
        more="; prefixes stay in `--prefix-cache-dir`, if it is given",
    )
    memory_watermark: float = option(
        WATERMARK,
        "Share of the memory limit above which prefixes are evicted, then the youngest request is preempted and none "
        "starts while another runs; 0 disables it",
        "PERCENT",
        _percent,
        default_text=f"{WATERMARK:.0%}",
        more="; see [below](#staying-alive)",
    )
    watchdog_timeout: float | None = option(
        None,
        "Exit with status 70 after this time without progress, so that a service manager restarts the server; 0 "
        "disables it",
        "SECONDS",
        _seconds_or_none,
        default_text="300 on a GPU, 3600 on a CPU",
        more="; see [below](#staying-alive)",
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
    def reference(cls) -> list[str]:
        """Return the rows of the table in docs/reference.md."""
        rows = []
        for each in fields(cls):
            how = each.metadata
            value = "" if how["metavar"] is None else f" {how['metavar']}"
            default = how["default_text"] or ("off" if how["metavar"] is None else "none")
            rows.append(f"| `{_flag_of(each)}{value}` | {default} | {how['text']}{how['more']} |")
        return rows

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        access, alive = (parser.add_argument_group(name) for name in ("prefix cache and access", "staying alive"))
        for each in fields(cls):
            how = each.metadata
            kind: dict[str, Any] = {"action": "store_false" if each.default else "store_true"}
            if how["metavar"] is not None:
                kind = {"metavar": how["metavar"], "type": how["parse"], "default": each.default}
            if how["collect"] is not None:
                kind |= {"action": "append", "default": None}
            group = alive if each.name in ALIVE else access
            default = "" if how["default_text"] is None else f" (default: {how['default_text']})"
            text = f"{how['text']}{default}".replace("%", "%%")
            group.add_argument(_flag_of(each), dest=each.name, help=text, **kind)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> ServerConfig:
        """Return the parsed options. Raises ConfigError if they contradict each other or hold an invalid value."""
        given = {each.name: getattr(args, each.name) for each in fields(cls)}
        collect = {each.name: how for each in fields(cls) if (how := each.metadata["collect"]) is not None}
        config = cls(**given | {name: how(given[name]) for name, how in collect.items()})
        if not config.prefix_cache and (config.prefix_cache_dir is not None or config.prefix_cache_ttl is not None):
            raise ConfigError("--no-prefix-cache cannot be combined with --prefix-cache-dir or --prefix-cache-ttl")
        if not all(config.served_model_names):
            raise ConfigError("--served-model-name must not be empty")
        if config.model_dir is not None and not config.model_dir.is_dir():
            raise ConfigError(f"--model-dir: {config.model_dir} is not a folder")
        if (
            config.prefix_cache_dir is not None
            and config.prefix_cache_dir.exists()
            and not config.prefix_cache_dir.is_dir()
        ):
            raise ConfigError(f"--prefix-cache-dir: {config.prefix_cache_dir} is a file, not a folder")
        if config.served_model_names and getattr(args, "model", None) is None:
            raise ConfigError("--served-model-name requires --model")
        return config
