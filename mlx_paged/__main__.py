"""``mlx_paged COMMAND``: this package's commands, and any mlx_lm command with the patches applied."""

from __future__ import annotations

import argparse
import difflib
import importlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cli.terminal import Parser, orderly_end, parser_of, version_text
from .config import STOCK_BITS, PagedConfig
from .errors import ConfigError
from .model_folder import check_model_folder, explain_load_errors
from .patches.patch import replaced

OWN = {
    "generate": "generate text for a prompt, or for each prompt of a file, in batches",
    "server": "serve a model over OpenAI's and Anthropic's APIs, with shared prefixes and a page that shows the cache",
    "launch": "start a coding agent (claude, codex, opencode, aider) and a server for it",
    "doctor": "check whether the fused kernel works on this machine",
}
# Commands of mlx_lm, which run under the patches.
UPSTREAM = {
    "chat": "talk to a model",
    "cache_prompt": "compute a prompt once and save its cache, for generate --prompt-cache-file",
    "benchmark": "measure prefill and decode speed",
    "evaluate": "run tasks of lm-evaluation-harness",
    "perplexity": "measure a model's perplexity on a data set",
    "convert": "convert a hub model to MLX, optionally quantised",
    "lora": "fine-tune a model",
    "fuse": "merge a LoRA adapter into its model's weights",
    "awq": "quantise with AWQ",
    "dwq": "quantise with distillation",
    "dynamic_quant": "quantise each layer by its sensitivity",
    "gptq": "quantise with GPTQ",
    "manage": "list and delete models of the local hub cache",
    "upload": "upload a model to the hub",
    "share": "share a model with other machines",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command of this package, or one of mlx_lm under the patches."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "--version"):
        with orderly_end("mlx_paged"):
            print(version_text() if command == "--version" else help_text())
    elif command in OWN:
        sys.argv = [f"{sys.argv[0]} {command}", *arguments[1:]]
        importlib.import_module(f".cli.{command}", __package__).main(arguments[1:])
    else:
        with orderly_end("mlx_paged"):
            _run_upstream(arguments)


def help_text() -> str:
    """Return the text of ``--help``: one line per command, and the options that all commands take."""

    def listed(commands: Mapping[str, str]) -> str:
        return "\n".join(f"  {name:<15} {text}" for name, text in commands.items())

    parser = argparse.ArgumentParser(prog="mlx_paged", add_help=False, usage=argparse.SUPPRESS)
    PagedConfig.add_arguments(parser)
    return (
        "usage: mlx_paged COMMAND [options]        (or python -m mlx_paged COMMAND [options])\n"
        "       mlx_paged COMMAND --help           the command's own options\n"
        "       mlx_paged [COMMAND] --version\n\n"
        f"commands:\n{listed(OWN)}\n\n"
        f"commands of mlx_lm; those that generate text use the paged cache:\n{listed(UPSTREAM)}\n\n"
        f"All commands also take these options:\n\n{parser.format_help()}"
    )


def _run_upstream(arguments: list[str]) -> None:
    parser = Parser(prog="mlx_paged", add_help=False, allow_abbrev=False)
    PagedConfig.add_arguments(parser)
    ours, theirs = parser.parse_known_args(arguments)
    command = theirs[0] if theirs else ""
    if command not in UPSTREAM:
        near = difflib.get_close_matches(command, [*OWN, *UPSTREAM], 1)
        hint = f"did you mean {near[0]}?" if near else "mlx_paged --help lists them"
        raise ConfigError(f"unknown command {command!r}; {hint}")
    if "--version" in theirs:
        print(version_text())
        return
    bits = getattr(ours, "paged_kv_bits", None)
    if bits in STOCK_BITS:  # mlx-lm's own caches have them
        ours.paged_kv_bits = None
        theirs += ["--kv-bits", str(bits)]
        theirs += ["--kv-group-size", str(ours.paged_kv_group_size)] if hasattr(ours, "paged_kv_group_size") else []
    _check_upstream(command, theirs[1:])
    from mlx_lm import cli

    from .cli.generate import raise_cpu_cache_limit
    from .patches.registry import apply_patches

    apply_patches(PagedConfig.from_env().with_arguments(ours))
    raise_cpu_cache_limit()
    sys.argv = [sys.argv[0], *theirs]
    try:
        if command in ("chat", "cache_prompt"):
            module = importlib.import_module(f"mlx_lm.{command}")
            names = {"load": explain_load_errors(module.load)}
            if command == "chat":
                names["stream_generate"] = _ending_at_interrupt(module.stream_generate)
            with replaced(module, **names):
                cli.main()
        else:
            cli.main()
    except EOFError:  # the end of a chat's input is the end of the chat
        if command != "chat":
            raise
    except ValueError as error:
        if str(error).startswith("Maximum number of tokens must be non-zero"):
            raise ConfigError("--max-tokens must be at least 1, or -1 for no limit, got 0") from None
        raise


def _check_upstream(command: str, arguments: list[str]) -> None:
    """Check a command line of mlx-lm before mlx-lm is imported, which takes seconds; with ``--help``, print the help.

    Raises:
        SystemExit: a flag is unknown or has a bad value, or the help is printed.
        ModelFolderError: the model is a folder that cannot be used.
    """
    try:
        parser = parser_of(command, f"mlx_paged {command}")
    except (ConfigError, ImportError):  # it lies elsewhere in mlx-lm, which checks its flags by itself
        return
    paged = argparse.ArgumentParser(add_help=False)
    PagedConfig.add_arguments(paged)
    if {"-h", "--help"} & set(arguments):
        PagedConfig.add_arguments(parser)
        parser.print_help()
        sys.exit(0)
    parser.more_flags = tuple(paged._option_string_actions)
    check_model_folder(getattr(parser.parse(arguments), "model", None))


def _ending_at_interrupt(stream_generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap mlx-lm's function so that Ctrl-C ends the answer at its next token; a second one, or one at the chat's own
    prompt, ends the chat."""

    def stream(*args: Any, **options: Any) -> Any:
        pressed: list[int] = []

        def note(number: int, frame: Any) -> None:
            if pressed:
                raise KeyboardInterrupt
            pressed.append(number)

        before = signal.signal(signal.SIGINT, note)
        try:
            for response in stream_generate(*args, **options):
                yield response
                if pressed:
                    return
        finally:
            signal.signal(signal.SIGINT, before)

    return stream


if __name__ == "__main__":
    main()
