"""``mlx_paged.server``: this package's server, with the flags of mlx_lm.server and its own."""

from __future__ import annotations

import argparse
import importlib
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..config import KVBits, PagedConfig, number
from ..errors import ConfigError
from ..machine import kv_budget
from ..model_folder import check_model_folder, check_weight_files, weight_bytes
from ..ranks.ranks import Ranks
from ..ranks.world import check_same
from ..server.errors import is_launchd_job, start_status
from ..server.options import ServerConfig
from ..warn import warn_once
from . import over_ranks
from .generate import raise_cpu_cache_limit
from .terminal import Parser, add_version, missing_packages, orderly_end, parser_of, restrict

LOG_FORMAT = "%(asctime)s - %(levelname)s - %(message)s"


def make_parser() -> Parser:
    """Return a parser with mlx_lm.server's flags and help texts, and this package's flags."""
    parser = parser_of("server", "mlx_paged server")
    parser.description = "Serve a model over HTTP: OpenAI's and Anthropic's APIs."
    PagedConfig.add_arguments(parser)
    ServerConfig.add_arguments(parser)
    over_ranks.add_arguments(parser)
    add_version(parser)
    restrict(parser, "--port", number("the port", 0, 65535))
    restrict(parser, "--max-tokens", number("max_tokens", 1))
    models: list[str] = []

    def first(text: str) -> str:
        models.append(text)
        return models[0]

    restrict(parser, "--model", first)
    parser.set_defaults(models=models)
    _override_flag(
        parser, "model", "Model; repeat for several, the least recently used is unloaded when memory is short"
    )
    _override_flag(parser, "prompt_cache_size", "Maximum number of prefixes to keep (default: as many as fit)")
    tokens = "Maximum number of tokens of an answer (default: as many as the model's context and the KV budget allow)"
    _override_flag(parser, "max_tokens", tokens)
    origins = "Comma-separated origins whose pages may send requests; * allows all (default: those of this machine)"
    _override_flag(parser, "allowed_origins", origins)
    return parser


def _override_flag(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Set the default of one of mlx-lm's flags to None, and its help."""
    for action in parser._actions:
        if action.dest == name:
            action.default, action.help = None, text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked arguments; ``argv`` defaults to the process's arguments."""
    try:
        return make_parser().parse(None if argv is None else list(argv))
    except SystemExit:  # with 2 for a usage error
        if is_launchd_job():
            sys.exit(0)
        raise


def check_ranks(args: argparse.Namespace, ranks: Ranks) -> None:
    """Raise ConfigError for arguments that several ranks do not support, or that differ between ranks."""
    if args.model is None:
        raise ConfigError("--model is required with several ranks")
    if len(args.models) > 1 or args.idle_unload is not None:
        raise ConfigError("several ranks serve one model, which stays loaded: remove further --model and --idle-unload")
    kv_bits = KVBits.of(vars(args))
    if kv_bits is not None and kv_bits.format is None:
        raise ConfigError(f"several ranks need the paged cache: {kv_bits.why_not}")
    # Only rank 0 has clients, and so needs their keys.
    given = {name: repr(value) for name, value in vars(args).items() if name != "api_keys"}
    check_same(ranks, "the arguments", given)


def configured(args: argparse.Namespace) -> PagedConfig:
    """Return the paged cache's configuration. Raises PagedCacheError if an option or a model folder cannot be used."""
    from ..patches.generate.drafting import check_one_proposer
    from ..patches.models.mtp import find_head, folder_of

    check_one_proposer(args)
    for model in args.models[1:]:  # loaded on their first request, so checked now
        if args.mtp:
            find_head(folder_of(model))
        if Path(model).is_dir():
            check_weight_files(Path(model))
    config = PagedConfig.from_env().with_arguments(args)
    if len(args.models) > 1:
        config = replace(config, kv_cache_memory=shared_budget(args, config))
    kv_bits = KVBits.of(vars(args))
    if kv_bits is not None:
        config = kv_bits.configured(config)
        if kv_bits.format is None:
            warn_once(f"requests run one at a time, in mlx-lm's own cache: {kv_bits.why_not}")
        else:
            args.kv_bits = None  # with it, mlx-lm would not batch
    return config


def shared_budget(args: argparse.Namespace, config: PagedConfig) -> int:
    """Return each model's equal share of the KV budget in bytes; an ``auto`` budget leaves room for all weights.

    Raises:
        WeightsTooLargeError: the weights leave nothing.
    """
    budget = config.kv_cache_memory
    if budget is None:
        budget = kv_budget(weight_bytes(*args.models, args.draft_model, adapter=args.adapter_path))
    return max(1, budget // len(args.models))


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until a signal ends it; ``argv`` defaults to the process's arguments."""
    with orderly_end("mlx_paged server", start_status):
        args = parse(argv)
        for folder in (*args.models, args.draft_model):
            check_model_folder(folder)
        logging.basicConfig(level=getattr(logging, args.log_level), format=LOG_FORMAT)
        config = ServerConfig.from_arguments(args)
        ranks = over_ranks.join(args)
        try:
            if ranks is not None:
                if ranks.rank > 0:  # rank 0 handles signals, and ends all ranks
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                check_ranks(args, ranks)
            pages = configured(args)
            importlib.import_module("mlx_lm.server").maybe_set_recommended_wired_limit()
            if args.pipeline:
                warn_once(over_ranks.PIPELINE)
                run_upstream(args, config)
            else:
                serve(args, config, pages, ranks)
        except Exception as error:
            if ranks is not None:
                ranks.fail(error)
            raise


def serve(args: argparse.Namespace, config: ServerConfig, pages: PagedConfig, ranks: Ranks | None) -> None:
    """Run this package's server, which does not return. Raises ConfigError with a version of mlx-lm that it does not
    know, or without its packages."""
    from ..patches import registry

    if missing := missing_packages():
        raise ConfigError(f"the server needs {missing}: pip install 'mlx_paged[server]'")
    registry.apply_patches(pages)
    raise_cpu_cache_limit()
    try:
        from ..server import loaded_models
        from ..server.app import LOOPBACK
        from ..server.service import Service

        loaded_models.check_known()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the server does not support this version of mlx-lm: {error}") from None
    unify_log_format()
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)  # of prompts that are refused
    if not config.api_keys and LOOPBACK.fullmatch(args.host) is None:
        print(
            f"mlx_paged server: warning: {args.host} can be reached from other machines, and there is no --api-key",
            file=sys.stderr,
        )
    service = Service(loaded_models.LoadedModels(args, config, ranks))
    if ranks is not None:
        ranks.on_fault(service.on_rank_fault)
        if ranks.rank > 0:
            service.run_rank()
    service.run()


def unify_log_format() -> None:
    """Log warnings, and lines of libraries with handlers of their own, in the server's format."""
    logging.captureWarnings(True)
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def run_upstream(args: argparse.Namespace, config: ServerConfig) -> None:
    """Run mlx_lm.server's own code. Raises ConfigError if there are API keys, which it does not support."""
    if config.api_keys:
        raise ConfigError("--api-key is not supported with --pipeline")
    upstream = importlib.import_module("mlx_lm.server")
    for name, default in (("prompt_cache_size", 10), ("max_tokens", 512), ("allowed_origins", ["*"])):
        if getattr(args, name) is None:
            setattr(args, name, default)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it shuts down in order only at an interrupt
    upstream.run(args.host, args.port, upstream.ModelProvider(args))
