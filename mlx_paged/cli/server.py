"""``mlx_paged.server``: mlx_lm.server on the paged cache, with prefixes shared, its parser and its main."""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from ..config import KVBits, PagedConfig
from ..early_interrupt import raise_at_interrupt
from ..engine.ranks.ranks import Ranks
from ..engine.ranks.same_start import check_same
from ..errors import ConfigError, PagedCacheError
from ..model_folder import check_model_folder, explain_load_errors
from ..patches.replaced import replaced
from ..serve.server_config import ServerConfig
from ..warn import warn_once
from . import over_ranks
from .generate import raise_cpu_cache_limit
from .terminal import add_version, orderly_end, restrict, whole_number

LOOPBACK = ("127.", "::1", "localhost")


class ServerParser(argparse.ArgumentParser):
    """mlx-lm's parser, which it makes in its main, with this package's flags; sets everything up once it has parsed.

    Attributes:
        shares: whether prefixes are kept in the paged prompt cache.
        ranks: that compute the model together; None: it is all here.
        put_back: makes mlx-lm's server its own again.
        parsed: the arguments.
    """

    shares = True
    ranks: Ranks | None = None
    put_back: Callable[[], None]
    parsed: argparse.Namespace | None = None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        PagedConfig.add_arguments(self)
        ServerConfig.add_arguments(self)
        over_ranks.add_arguments(self)
        add_version(self)
        restrict(self, "--port", whole_number(0, 65535))
        restrict(self, "--max-tokens", whole_number(1))
        most = self.get_default("prompt_cache_size")
        if self.shares:
            self.set_defaults(prompt_cache_size=None)  # as many as fit; the flag still sets a number
        ServerParser.parsed = parsed = super().parse_args(args, namespace)
        if parsed.pipeline and parsed.prompt_cache_size is None:
            parsed.prompt_cache_size = most
        ServerParser.ranks = ranks = over_ranks.join(parsed)
        if ranks is None:
            prepare(parsed)
            return parsed
        if ranks.rank > 0:  # rank 0 ends all
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            check_ranks(parsed, ranks)
            prepare(parsed)
        except PagedCacheError as error:
            ranks.fail(error)
        return parsed


def check_ranks(args: argparse.Namespace, ranks: Ranks) -> None:
    """Raise ConfigError for arguments that do not go with several ranks."""
    if args.model is None:
        raise ConfigError("several ranks serve one model: name it with --model")
    asked = KVBits.of(vars(args))
    if asked is not None and asked.format is None:
        raise ConfigError(f"{asked.why_not}: several ranks serve what runs in a batch")
    # Only rank 0 has clients, and so needs their keys.
    given = {name: repr(value) for name, value in vars(args).items() if name != "api_key"}
    check_same(ranks, "the arguments", given)


def prepare(args: argparse.Namespace) -> None:
    """Check the arguments and put the patches in, before mlx-lm makes its server.

    Raises:
        PagedCacheError: an option cannot be used, or a model folder cannot be read.
    """
    from .. import patches

    config = ServerConfig.from_arguments(args)
    for folder in (args.model, args.draft_model):
        check_model_folder(folder)
    config_of_pages = PagedConfig.from_env().with_arguments(args)
    asked = KVBits.of(vars(args))
    if asked is not None:
        config_of_pages = asked.configured(config_of_pages)
        if asked.format is None:
            warn_once(f"{asked.why_not}: requests run one at a time, in mlx-lm's own cache")
        else:
            args.kv_bits = None  # mlx-lm would not batch
    if args.pipeline:
        over_ranks.warn_of_pipeline()
        ServerParser.shares = False
        ServerParser.put_back()
    else:
        patches.apply_patches(config_of_pages)
    raise_cpu_cache_limit()
    if ServerParser.shares:
        from ..patches.server import replacements as adapter

        adapter.configure(config, ServerParser.ranks)
    elif config.api_keys:
        raise ConfigError(
            "--api-key: this version of mlx_lm.server, or one with --pipeline, cannot be made to ask for it"
        )
    if not config.api_keys and not args.host.startswith(LOOPBACK):
        print(
            f"mlx_paged.server: warning: {args.host} can be reached from other machines, and there is no --api-key",
            file=sys.stderr,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run mlx_lm.server's main with shared prefixes; ``argv`` defaults to the process's arguments."""
    with orderly_end("mlx_paged.server"):
        _main(argv)


def _main(argv: Sequence[str] | None) -> None:
    upstream = importlib.import_module("mlx_lm.server")
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    start_error: Callable[[], Exception | None] = lambda: None  # noqa: E731
    begin_drain: Callable[[], bool] = lambda: False  # noqa: E731
    try:
        from ..patches.server.replacements import begin_drain, replacements, start_error

        names = replacements(upstream)
    except (ImportError, AttributeError) as error:  # a name that it needs is missing in this version of mlx-lm
        warnings.warn(f"mlx_paged: mlx_lm.server is not adapted: {error}; its own code runs", stacklevel=2)
        names = {}
    ServerParser.shares = bool(names)
    # Its checks are not what is used here.
    warnings.filterwarnings("ignore", message="mlx_lm.server is not recommended for production")
    names["argparse"] = SimpleNamespace(ArgumentParser=ServerParser)
    for name in ("load", "sharded_load"):
        names[name] = explain_load_errors(names.get(name, getattr(upstream, name)))
    stock = {name: getattr(upstream, name) for name in ("LRUPromptCache", "ResponseGenerator", "_run_http_server")}
    ServerParser.put_back = lambda: vars(upstream).update(stock)

    def end(number: int, frame: Any) -> None:
        if not begin_drain():
            raise KeyboardInterrupt  # mlx-lm ends in order at an interrupt only

    signal.signal(signal.SIGTERM, end)
    raise_at_interrupt()
    try:
        with replaced(upstream, **names):
            upstream.main()
    except (PagedCacheError, OSError) as error:
        fail_ranks(error)
        if isinstance(error, PagedCacheError):
            sys.exit(f"mlx_paged.server: {error}")
        print(f"mlx_paged.server: the server cannot start: {_explained(error)}", file=sys.stderr)
        leave(1)
    except KeyboardInterrupt as interrupt:
        fail_ranks(interrupt)
        logging.info("interrupted")
    except Exception as error:  # the computing thread would keep the process, which serves nobody
        logging.exception("the server has failed")
        fail_ranks(error)
        leave(1)
    failure = start_error()
    if failure is not None:
        print(f"mlx_paged.server: the server cannot start: {failure}", file=sys.stderr)
    leave(0 if failure is None else 1)


def _explained(error: OSError) -> str:
    """Return what the error says, with the address if it was that which could not be had."""
    args = ServerParser.parsed
    if args is None or error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES) or error.filename:
        return str(error)
    hint = "; --port names another" if error.errno != errno.EADDRNOTAVAIL else ""
    return f"{args.host} port {args.port}: {error.strerror}{hint}"


def fail_ranks(error: BaseException) -> None:
    """Does not return where there are several ranks: all of them end."""
    if ServerParser.ranks is not None:
        ServerParser.ranks.fail(error)


def leave(status: int) -> NoReturn:
    """End the process, everything being saved. At a normal exit, MLX's CPU streams of threads that have ended abort it;
    and where the port cannot be had, mlx-lm's computing thread would keep it running."""
    if ServerParser.ranks is not None:
        ServerParser.ranks.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
