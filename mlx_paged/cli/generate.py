"""``mlx_paged.generate``: mlx-lm's own generate command, parser and main, on the paged cache."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..config import STOCK_QUANTISES, KVBits, PagedConfig, number
from ..engine.constraint import GrammarProcessor
from ..engine.memory import PoolBudget
from ..errors import ConfigError, PatchError, PoolExhaustedError
from ..grammar.compiler import INSTALL, GrammarSource
from ..machine import memory_beside
from ..model_folder import (
    check_model_folder,
    explain_load_errors,
    weight_bytes,
)
from ..patches.patch import replaced
from ..ranks.ranks import Ranks
from ..server.errors import RequestRefused
from ..server.request import Constraint
from ..warn import warn_once
from . import over_ranks
from .terminal import (
    PrefillProgress,
    add_version,
    missing_packages,
    orderly_end,
    parser_of,
    plural,
    print_stats,
    restrict,
    show_first,
)

CPU_CACHE_LIMIT = 1 << 30
MTP = "Let the model's multi-token prediction head propose up to --num-draft-tokens tokens, which the model verifies"
COMMON_FLAGS = (
    *("--model", "--prompt", "--system-prompt", "--max-tokens", "--temp", "--prompts-file"),
    *("--kv-cache-memory", "--kv-bits", "--cache-stats"),
)
NOT_BATCHED = {
    "prompt_cache_file": "--prompt-cache-file",
    "image": "--image",
    "max_kv_size": "--max-kv-size",
    "quantize_activations": "--quantize-activations",
    "no_paged": "--no-paged",
    "pipeline": "--pipeline",
}


def raise_cpu_cache_limit() -> None:
    """Raise MLX's cache limit on a CPU to 1 GiB, so that freed buffers are kept. With its default of 32 MB, large
    temporaries such as gathers of long contexts page-fault each time. Only for processes of our own commands."""
    if mx.default_device() == mx.Device(mx.cpu):
        mx.set_cache_limit(CPU_CACHE_LIMIT)


def extend_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's flags to mlx-lm's parser."""
    PagedConfig.add_arguments(parser)
    add_version(parser)
    restrict(parser, "--max-tokens", number("max_tokens", 1, others={"-1": -1}))
    parser.add_argument(
        "--cache-stats", action="store_true", help="Print the KV block pool's statistics to stderr at the end"
    )
    parser.add_argument("--no-paged", action="store_true", help="Run stock mlx-lm, without the paged cache")
    parser.add_argument(
        "--json-schema", metavar="FILE", help="Constrain answers to JSON of this schema (needs the package llguidance)"
    )
    add_batch_arguments(parser)
    over_ranks.add_arguments(parser)
    return parser


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run over a file."""
    group = parser.add_argument_group("batches of prompts")
    group.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="Answer all prompts of a file in batches: plain text with one message per line, or JSONL whose lines are "
        'bodies of the server\'s chats ("messages") or completions ("prompt"), with "custom_id" or "id". "-" is stdin. '
        "Results are JSONL, in the order in which they finish",
    )
    group.add_argument("--output", metavar="FILE", help="File for the results (default: stdout)")
    group.add_argument(
        "--resume", action="store_true", help="Keep the results in --output; run prompts that have none or have failed"
    )
    group.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="Maximum number of prompts in a batch (default: 32)"
    )
    group.add_argument("--mtp", action="store_true", help=MTP)


def check_batch_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that cannot be combined with ``--prompts-file``, or that require it."""
    from ..patches.generate.drafting import check_draft_tokens, check_one_proposer

    if args.prompts_file is None:
        if args.output is not None or args.resume:
            raise ConfigError("--output and --resume need --prompts-file")
        if args.mtp:
            raise ConfigError("--mtp needs --prompts-file")
        return
    for name, flag in NOT_BATCHED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{flag} cannot be combined with --prompts-file")
    check_one_proposer(args)
    if args.draft_model is not None or args.mtp:
        check_draft_tokens(args.num_draft_tokens)
        if "paged_prompt_lookup" in args:
            flag = "--mtp" if args.mtp else "--draft-model"
            raise ConfigError(f"{flag} and --prompt-lookup both propose tokens: choose one")
    if args.resume and args.output is None:
        raise ConfigError("--resume needs --output, the file to continue")
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1 with --prompts-file, got {args.max_tokens}")
    try:
        json.loads(args.chat_template_config or "{}")
    except ValueError as error:
        raise ConfigError(f"--chat-template-config is not valid JSON: {error}") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Run mlx_lm.generate's main with paged caches; ``argv`` defaults to the process's arguments."""
    with orderly_end("mlx_paged generate"):
        if argv is not None:
            sys.argv = [sys.argv[0], *argv]
        parser = parser_of("generate", "mlx_paged generate")
        extend_parser(parser)
        show_first(parser, *COMMON_FLAGS)
        args = parser.parse(None)
        check_model_folder(args.model)
        upstream = importlib.import_module("mlx_lm.generate")  # `from mlx_lm import generate` is the function
        upstream_parser = upstream.setup_arg_parser

        def setup_arg_parser() -> argparse.ArgumentParser:
            return extend_parser(upstream_parser())

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
    from ..patches import registry
    from ..patches.cache.pools import known_pool

    used: list[Any] = []
    check_batch_arguments(args)
    constraint = constraint_from(args.json_schema)
    for folder in (args.model, args.draft_model):
        check_model_folder(folder)
    if args.mtp:
        from ..patches.models.mtp import find_head, folder_of

        find_head(folder_of(args.model or upstream.DEFAULT_MODEL))
    load = upstream.load if ranks is None else over_ranks.loading(ranks, pipeline=args.pipeline)
    names: dict[str, Any] = {"setup_arg_parser": setup_arg_parser, "load": explain_load_errors(load)}
    if args.pipeline:
        warn_once(over_ranks.PIPELINE)
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
    if "paged_prompt_lookup" in args and args.prompts_file is None:
        raise ConfigError("--prompt-lookup needs --prompts-file")
    if kv_bits is not None and kv_bits.format is None and args.prompts_file is not None:
        raise ConfigError(f"--prompts-file: {kv_bits.why_not}")
    if args.prompts_file is not None:
        _check_batches()
    if not args.no_paged:
        if kv_bits is not None and kv_bits.format is None:
            warn_once(STOCK_QUANTISES)
        config = PagedConfig.from_env().with_arguments(args)
        registry.apply_patches(config if kv_bits is None else kv_bits.configured(config))
        num_bytes = weight_bytes(args.model or upstream.DEFAULT_MODEL, args.draft_model, adapter=args.adapter_path)
        memory_beside(num_bytes // (1 if ranks is None else ranks.size))
        raise_cpu_cache_limit()
    # transformers warns about prompts beyond the context, which are refused here.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    if args.prompts_file is not None:
        from .prompts_file import run_prompts_file

        if failed := run_prompts_file(args, constraint, ranks):
            sys.exit(f'mlx_paged generate: {plural(failed, "prompt")} failed; see "error" in their results')
        return
    tokenizers: list[Any] = []
    names["load"] = _noting_tokenizer(tokenizers, names["load"])
    constrained = None if constraint is None else functools.partial(_processors, constraint, tokenizers)
    for step in ("generate_step", "speculative_generate_step"):
        names[step] = functools.partial(_generate_step, getattr(upstream, step), used, constrained, ranks)
    with replaced(upstream, **names):
        upstream.main()
    if args.cache_stats:
        pools = (known_pool(model) for model in used)
        print_stats(dict(zip(("KV cache", "KV cache of the draft model"), pools, strict=False)))


def _check_batches() -> None:
    """Raise ConfigError if prompts cannot be batched with this version of mlx-lm, or a package is missing."""
    from ..patches.registry import check_known

    try:
        check_known("mlx_lm.generate.BatchGenerator")
    except PatchError as error:
        raise ConfigError(f"--prompts-file does not support this version of mlx-lm: {error}") from None
    if missing := missing_packages():
        raise ConfigError(f"--prompts-file needs {missing}: pip install 'mlx_paged[server]'")


def _noting_tokenizer(tokenizers: list[Any], load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap mlx-lm's ``load`` so that it also puts the tokenizer into a list."""

    def load_and_note(*args: Any, **kw: Any) -> Any:
        loaded = load(*args, **kw)
        tokenizers.append(loaded[1])
        return loaded

    return load_and_note


def constraint_from(name: str | None) -> Constraint | None:
    """Return the constraint of a JSON schema's file, or None without one.

    Raises:
        ConfigError: the file cannot be used, or llguidance is not installed.
    """
    if name is None:
        return None
    if importlib.util.find_spec("llguidance") is None:
        raise ConfigError(f"--json-schema: {INSTALL}")
    try:
        schema = json.loads(Path(name).expanduser().read_bytes())
        if not isinstance(schema, dict):
            raise ValueError("it must be a JSON object")
        return Constraint(GrammarSource.json(schema), "--json-schema", schema)
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"--json-schema: {name} cannot be used: {error}") from None


def _processors(constraint: Constraint, tokenizers: list[Any], prompt: mx.array) -> list[GrammarProcessor]:
    """Return the processors that constrain the answer to a prompt; only what follows reasoning that the prompt has
    begun is constrained. Raises ConfigError if the schema cannot be used."""
    from ..server.grammars import TokenizerGrammars, ends_in_reasoning

    (tokenizer,) = tokenizers
    try:
        grammar = TokenizerGrammars(tokenizer).compile(constraint)
    except RequestRefused as error:
        raise ConfigError(str(error)) from None
    if grammar is None:
        return []
    reasons = ends_in_reasoning(tokenizer, prompt.tolist())  # type: ignore[arg-type]
    return [GrammarProcessor(grammar.begins_after(tokenizer.think_end_tokens) if reasons else grammar)]


def _generate_step(
    original: Callable[..., Any],
    used: list[Any],
    constrained: Callable[[mx.array], list[GrammarProcessor]] | None,
    ranks: Ranks | None,
    prompt: mx.array,
    model: Any,
    *rest: Any,
    **kw: Any,
) -> Any:
    """Run upstream's generator with what this package adds: a prompt cache from a file is taken into the pool, the
    command line's grammar constrains the answer, all ranks use rank 0's tokens, and a terminal shows a prefill bar."""
    from ..patches import registry
    from ..patches.cache.pools import count_weights, known_pool
    from ..patches.cache.prompt_cache import adopt_prompt_cache

    if constrained is not None:
        kw["logits_processors"] = [*constrained(prompt), *(kw.get("logits_processors") or [])]
    if ranks is not None:
        sampler = kw.get("sampler") or (lambda logprobs: mx.argmax(logprobs, axis=-1))
        kw["sampler"] = lambda logprobs: ranks.agreed(sampler(logprobs))
    length = getattr(getattr(model, "args", None), "max_position_embeddings", None)
    if isinstance(length, int) and 0 < length < prompt.size:
        raise ConfigError(f"the prompt has {prompt.size:,} tokens, the model's context {length:,}")
    models = [model, *(m for m in rest[:1] if hasattr(m, "layers"))]  # speculative decoding passes the draft model
    used.extend(models)
    if registry.is_applied():
        count_weights(*models)
    cache = kw.get("prompt_cache")
    if cache is not None and registry.is_applied() and len(models) == 1:
        kv_bits = KVBits.of(kw)
        if kv_bits is None or kv_bits.format is not None:
            kw["prompt_cache"] = adopt_prompt_cache(model, cache)
    with PrefillProgress() as bar:
        if len(models) == 1 and kw.get("prompt_progress_callback") is None:
            kw["prompt_progress_callback"] = bar
        num_tokens = prompt.size + 1
        try:
            for each in original(prompt, model, *rest, **kw):
                num_tokens += 1
                yield each
        except PoolExhaustedError as error:  # it knows what a chunk lacks
            pool = known_pool(model)
            needed = (
                0 if pool is None else PoolBudget(pool, chunk=kw.get("prefill_step_size", 2048)).bytes_for(num_tokens)
            )
            if pool is None or needed <= pool.memory_budget:
                raise
            raise ConfigError(
                f"the KV cache budget of {pool.memory_budget:,} bytes is too small: {num_tokens:,} tokens of prompt "
                f"and answer need {needed:,} bytes. Raise kv_cache_memory (--kv-cache-memory) or use fewer tokens"
            ) from error
