"""``mlx_paged.generate``: mlx-lm's own generate command, parser and main, on the paged cache."""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..config import STOCK_QUANTISES, KVBits, PagedConfig
from ..errors import ConfigError, PatchError
from ..grammar.grammar import GrammarProcessor
from ..machine import memory_beside
from ..model_folder import (
    check_model_folder,
    explain_load_errors,
    warn_if_unbounded,
    warn_max_kv_size_ignored,
    weight_bytes,
)
from ..patches.patch import replaced
from ..ranks.ranks import Ranks
from ..server.errors import RequestRefused
from ..warn import warn_once
from . import answer_grammars, batch_run, over_ranks
from .answer_grammars import AnswerGrammars
from .terminal import PrefillProgress, add_version, orderly_end, restrict, whole_number

if TYPE_CHECKING:
    from ..patches.models.mtp import HeadFiles

CPU_CACHE_LIMIT = 1 << 30


def raise_cpu_cache_limit() -> None:
    """Raise MLX's cache limit on a CPU to 1 GiB, so that freed buffers are kept. With its default of 32 MB, large
    temporaries such as gathers of long contexts page-fault each time. Only for processes of our own commands."""
    if mx.default_device() == mx.Device(mx.cpu):
        mx.set_cache_limit(CPU_CACHE_LIMIT)


def extend_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's flags to mlx-lm's parser."""
    PagedConfig.add_arguments(parser)
    add_version(parser)
    restrict(parser, "--max-tokens", whole_number(1, also=-1))
    parser.add_argument(
        "--cache-stats", action="store_true", help="Print the KV block pool's statistics to stderr at the end"
    )
    parser.add_argument("--no-paged", action="store_true", help="Run stock mlx-lm, without the paged cache")
    answer_grammars.add_arguments(parser)
    batch_run.add_arguments(parser)
    over_ranks.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run mlx_lm.generate's main with paged caches; ``argv`` defaults to the process's arguments."""
    with orderly_end("mlx_paged.generate"):
        upstream = importlib.import_module("mlx_lm.generate")  # `from mlx_lm import generate` is the function
        upstream_parser = upstream.setup_arg_parser

        def setup_arg_parser() -> argparse.ArgumentParser:
            return extend_parser(upstream_parser())

        if argv is not None:
            sys.argv = [sys.argv[0], *argv]
        args = setup_arg_parser().parse_args()
        try:
            with over_ranks.over_ranks(args) as ranks:
                run(upstream, args, setup_arg_parser, ranks)
        except KeyboardInterrupt:
            if args.prompts_file is None:
                raise
            kept = "" if args.output is None else f"; continue {args.output} with --resume"
            raise KeyboardInterrupt(f"interrupted{kept}") from None


def run(
    upstream: Any,
    args: argparse.Namespace,
    setup_arg_parser: Callable[[], argparse.ArgumentParser],
    ranks: Ranks | None = None,
) -> None:
    """Run the prompts file, or else upstream's main with its names replaced for the call; each rank loads its part."""
    from .. import patches

    used: list[Any] = []
    batch_run.check_arguments(args)
    grammars = AnswerGrammars(args)
    for folder in (args.model, args.draft_model):
        check_model_folder(folder)
    head: HeadFiles | None = None
    if args.mtp:
        from ..patches.models.mtp import find_head, folder_of

        head = find_head(folder_of(args.model or upstream.DEFAULT_MODEL))
    if args.max_kv_size is not None and args.draft_model is not None:
        warn_max_kv_size_ignored("a draft model requires an unbounded cache")
    load = upstream.load if ranks is None else over_ranks.loading(ranks, pipeline=args.pipeline)
    names: dict[str, Any] = {"setup_arg_parser": setup_arg_parser, "load": explain_load_errors(load)}
    if args.pipeline:
        over_ranks.warn_of_pipeline()
        args.no_paged = True
    if ranks is not None:
        args.cache_stats = args.cache_stats and ranks.rank == 0
        if args.prompts_file is None and args.prompt == "-":
            sys.stdin = io.StringIO(over_ranks.from_rank_0(ranks, sys.stdin.read))
    if args.prompt_cache_file is not None:
        names["load_prompt_cache"] = explain_load_errors(upstream.load_prompt_cache, args.prompt_cache_file)
    kv_bits = KVBits.of(vars(args))
    if args.no_paged and isinstance(args.kv_bits, tuple):
        raise ConfigError("--kv-bits 8,4 requires the paged cache; remove --no-paged or --pipeline")
    if args.no_paged and getattr(args, "paged_kv_rotate", False):
        raise ConfigError("--kv-rotate requires the paged cache; remove --no-paged or --pipeline")
    if "paged_prompt_lookup" in args and (args.no_paged or args.prompts_file is None):
        raise ConfigError("--prompt-lookup needs --prompts-file, and the paged cache: no --no-paged and no --pipeline")
    if kv_bits is not None and kv_bits.format is None and args.prompts_file is not None:
        raise ConfigError(f"--prompts-file: {kv_bits.why_not}")
    if args.prompts_file is not None:
        _check_batches()
    if not args.no_paged:
        if kv_bits is not None and kv_bits.format is None:
            warn_once(STOCK_QUANTISES)
        config = PagedConfig.from_env().with_arguments(args)
        patches.apply_patches(config if kv_bits is None else kv_bits.configured(config))
        num_bytes = weight_bytes(args.model or upstream.DEFAULT_MODEL, args.draft_model, adapter=args.adapter_path)
        memory_beside(num_bytes // (1 if ranks is None else ranks.size))
        raise_cpu_cache_limit()
    if args.prompts_file is not None:
        model, failed = batch_run.run_prompts_file(args, names["load"], grammars, ranks, head)
        if args.cache_stats:
            _print_stats([model])
        if failed:
            sys.exit(f'mlx_paged.generate: {failed} prompt(s) failed; see "error" in their results')
        return
    if grammars.has_default:
        names["load"] = _passing_tokenizer(grammars, names["load"])
    for step in ("generate_step", "speculative_generate_step"):
        names[step] = functools.partial(_generate_step, getattr(upstream, step), used, grammars, ranks)
    with replaced(upstream, **names):
        upstream.main()
    if args.cache_stats:
        _print_stats(used)


def _check_batches() -> None:
    """Raise ConfigError if prompts cannot be batched with this version of mlx-lm."""
    from ..patches.registry import check_known

    try:
        check_known("mlx_lm.generate.BatchGenerator")
    except PatchError as error:
        raise ConfigError(f"--prompts-file does not support this version of mlx-lm: {error}") from None


def _passing_tokenizer(grammars: AnswerGrammars, load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap mlx-lm's ``load`` so that the grammars get the tokenizer."""

    def load_and_pass(*args: Any, **kw: Any) -> Any:
        loaded = load(*args, **kw)
        grammars.set_tokenizer(loaded[1])
        return loaded

    return load_and_pass


def _generate_step(
    original: Callable[..., Any],
    used: list[Any],
    grammars: AnswerGrammars,
    ranks: Ranks | None,
    prompt: mx.array,
    model: Any,
    *rest: Any,
    **kw: Any,
) -> Any:
    """Run upstream's generator with what this package adds: a prompt cache from a file is taken into the pool, the
    command line's grammar constrains the answer, all ranks use rank 0's tokens, and a terminal shows a prefill bar."""
    from .. import patches
    from ..patches.cache.pools import count_weights

    if grammars.has_default:
        try:
            grammar = grammars.grammar({}, prompt.tolist())  # type: ignore[arg-type]
        except RequestRefused as error:
            raise ConfigError(f"--json-schema: {error}") from None
        if grammar is not None:
            kw["logits_processors"] = [GrammarProcessor(grammar), *(kw.get("logits_processors") or [])]

    if ranks is not None:
        sampler = kw.get("sampler") or (lambda logprobs: mx.argmax(logprobs, axis=-1))
        kw["sampler"] = lambda logprobs: ranks.agreed(sampler(logprobs))
    models = [model, *(m for m in rest[:1] if hasattr(m, "layers"))]  # speculative decoding passes the draft model
    used.extend(models)
    if patches.is_applied():
        count_weights(*models)
    cache = kw.get("prompt_cache")
    if cache is not None and patches.is_applied() and len(models) == 1:
        kv_bits = KVBits.of(kw)
        if kv_bits is None or kv_bits.format is not None:
            kw["prompt_cache"] = patches.adopt_prompt_cache(model, cache)
    if kw.get("max_kv_size") is not None:
        warn_if_unbounded(model, has_cache=cache is not None)
    with PrefillProgress() as bar:
        if len(models) == 1 and kw.get("prompt_progress_callback") is None:
            kw["prompt_progress_callback"] = bar
        yield from original(prompt, model, *rest, **kw)


def _print_stats(models: Sequence[Any]) -> None:
    from ..attention.dispatch import dispatch_counts
    from ..patches.cache.pools import known_pool

    for name, model in zip(("KV cache", "KV cache of the draft model"), models, strict=False):
        pool = known_pool(model)
        print(f"{name}: {pool.stats() if pool else 'stock mlx-lm (not paged)'}", file=sys.stderr)
    for choice, count in dispatch_counts().items():
        print(f"attention: {choice.path} {count}x ({choice.reason})", file=sys.stderr)
    print(f"memory of the process: {mx.get_peak_memory() / 1e6:.1f} MB at its peak", file=sys.stderr)


if __name__ == "__main__":
    main()
