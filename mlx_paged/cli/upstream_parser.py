"""The parsers of mlx-lm's commands, with errors of one line."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
from types import SimpleNamespace
from typing import Any, NoReturn

from ..errors import ConfigError
from ..patches.patch import replaced


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

    def parse(self, arguments: list[str] | None) -> argparse.Namespace:
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
