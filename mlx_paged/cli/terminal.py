"""Command lines and terminals: version text, flags of mlx-lm's commands, orderly ends, and progress bars."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NoReturn, Self, TextIO

from tqdm import tqdm

from ..config import argument_type
from ..errors import ConfigError, PagedCacheError
from ..kv.pool import BlockPool
from ..patches.patch import replaced

SERVER_PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")
INTERRUPTED = 130  # exit status of a program that SIGINT ended
BROKEN_PIPE = 141  # and of one that SIGPIPE ended


def version_text() -> str:
    """Return the versions of this package, mlx-lm and MLX, in one line."""
    from .. import __version__

    return f"mlx_paged {__version__} (mlx-lm {metadata.version('mlx-lm')}, mlx {metadata.version('mlx')})"


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version`` to a command's flags."""
    parser.add_argument("--version", action="version", version=version_text())


def missing_packages() -> str:
    """Return the names of the server's packages that are not installed; "" if all are."""
    return ", ".join(name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None)


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 prompt" or "1,024 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def restrict(parser: argparse.ArgumentParser, flag: str, parse: Callable[[str], Any]) -> None:
    """Let one of mlx-lm's flags be parsed by a function that may raise ConfigError, if this version has the flag."""
    action = parser._option_string_actions.get(flag)
    if action is not None:
        action.type = argument_type(parse)


# Parsers of mlx-lm's commands ----------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the flag that was meant.

    While mlx-lm's main adds its flags, :meth:`parse_args` stops it; :meth:`parse` parses.

    Attributes:
        more_flags: flags that are parsed elsewhere, and may be meant.
    """

    more_flags: tuple[str, ...] = ()

    def parse_args(self, *args: Any, **options: Any) -> Any:
        """Stop mlx-lm's main, which has made its parser."""
        raise _CompleteError(self)

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line; None: the process's. Exits with status 2 for a usage error."""
        return argparse.ArgumentParser.parse_args(self, arguments)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line."""
        flags = [flag for flag in (*self._option_string_actions, *self.more_flags) if flag.startswith("--")]
        found = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if found and (near := difflib.get_close_matches(found[1], flags, 1)):
            message += f"; did you mean {near[0]}?"
        elif found:
            message += f"; {self.prog} --help lists the options"
        self.exit(2, f"{self.prog}: error: {message}\n")


class _CompleteError(Exception):
    def __init__(self, parser: Parser) -> None:
        self.parser = parser


def parser_of(name: str, prog: str) -> Parser:
    """Return the parser of a command of mlx-lm.

    Args:
        name: name of the module, such as ``generate``.
        prog: the program's name in its help and errors.

    Raises:
        ConfigError: the flags of this version of mlx-lm cannot be read.
    """
    module = importlib.import_module(f"mlx_lm.{name}")
    with replaced(module, argparse=SimpleNamespace(**vars(argparse) | {"ArgumentParser": Parser})):
        try:
            module.main()
            raise ConfigError(f"the flags of this version of mlx_lm.{name} cannot be read")
        except _CompleteError as complete:
            parser = complete.parser
    parser.prog = prog
    return parser


def show_first(parser: argparse.ArgumentParser, *flags: str) -> None:
    """List these flags before all others in the help."""
    first = parser.add_argument_group("common options")
    for group in parser._action_groups[:-1]:
        moved = [action for action in group._group_actions if set(flags) & set(action.option_strings)]
        for action in moved:
            group._group_actions.remove(action)
        first._group_actions += moved
    parser._action_groups.remove(first)
    parser._action_groups.insert(0, first)


# Ends -----------------------------------------------------------------------------------------------------------------


class StdoutError(PagedCacheError):
    """The standard output cannot be written; ``is_closed``: its reader has gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout cannot be written: {error}")
        self.is_closed = isinstance(error, BrokenPipeError)


class Stdout:
    """A command's standard output, whose errors are told from those of other files and sockets.

    Args:
        stream: the stream to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_start = True  # of a line

    def write(self, text: str) -> int:
        """Write text. Raises StdoutError if that fails."""
        if text:
            self._at_start = text.endswith("\n")
        with self._explaining():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush. Raises StdoutError if that fails."""
        with self._explaining():
            self._stream.flush()

    def end_line(self) -> None:
        """End the current line, if it is not empty, and flush, if that is possible."""
        with suppress(StdoutError):
            if not self._at_start:
                self.write("\n")
            self.flush()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # else Python flushes it again at exit, and reports an error
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            raise StdoutError(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def orderly_end(command: str, status_of: Callable[[Exception], int] = lambda error: 1) -> Iterator[None]:
    """Turn exceptions into exits of a command: this package's errors into one line, an interrupt into status 130, a
    stdout whose reader has gone into status 141 without a message.

    Args:
        command: name that is printed before an error.
        status_of: returns the exit status for an error of this package.

    Raises:
        SystemExit: for a PagedCacheError, after a message; for a KeyboardInterrupt.
    """
    before, stdout = sys.stdout, Stdout(sys.stdout)
    sys.stdout = stdout  # type: ignore[assignment]
    try:
        yield
        stdout.flush()
    except PagedCacheError as error:
        if isinstance(error, StdoutError) and error.is_closed:
            sys.exit(BROKEN_PIPE)
        stdout.end_line()
        print(f"{command}: {error}", file=sys.stderr)
        sys.exit(status_of(error))
    except KeyboardInterrupt as interrupt:
        stdout.end_line()
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after the terminal's ^C
        if interrupt.args:
            print(f"{command}: {interrupt}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        sys.stdout = before


def rate(number: int, seconds: float) -> str:
    """Return tokens per second, with a decimal below 10."""
    value = number / max(seconds, 1e-9)
    return f"{value:.{1 if value < 10 else 0}f} tokens/s"


def print_stats(pools: Mapping[str, BlockPool | None]) -> None:
    """Print the statistics of pools by name, the ways that attention took, and the process's memory, to stderr."""
    from ..attention.dispatch import dispatch_counts

    for name, pool in pools.items():
        print(f"{name}: {pool.stats() if pool else 'stock mlx-lm (not paged)'}", file=sys.stderr)
    for choice, count in dispatch_counts().items():
        print(f"attention: {choice.path} {count}x ({choice.reason})", file=sys.stderr)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"memory of the process: {most / 1e6:.1f} MB at its peak", file=sys.stderr)


SHOW_AFTER_SECONDS = 0.5  # shorter prefills finish before a bar says anything


def bar(total: int, line: str, **options: Any) -> tqdm[Any]:
    """Return a progress bar on stderr, which vanishes when it is closed; nothing is drawn unless stderr is a terminal.

    Args:
        total: what is to be done.
        line: what is drawn, as tqdm's ``bar_format``.
        options: further ones of tqdm.
    """
    options |= {"file": sys.stderr, "ascii": ".#", "disable": not sys.stderr.isatty(), "leave": False}
    return tqdm(total=total, bar_format=line, **options)


class PrefillProgress:
    """A ``prompt_progress_callback`` that draws a bar on stderr, once prefill has taken a while. A ``with`` block
    clears it."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, processed: int, total: int) -> None:
        """Draw the bar; clear it at the end."""
        if self._bar is None:
            line = "prefill [{bar:30}] {n_fmt}/{total_fmt} tokens, {rate_fmt}"
            self._bar = bar(total, line, unit=" tokens", delay=SHOW_AFTER_SECONDS)
        self._bar.update(processed - self._bar.n)
        if processed >= total:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
