"""The parsers of mlx-lm's commands, made without importing mlx-lm, which takes seconds."""

from __future__ import annotations
import __future__ as future

import argparse
import ast
import difflib
import importlib
import importlib.util
import re
import sys
from contextlib import suppress
from pathlib import Path
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
    stand_in = SimpleNamespace(**vars(argparse) | {"ArgumentParser": Parser})
    parser = None
    with suppress(Exception):  # then the module itself is asked
        names = _light_names(name)
        names["argparse"] = stand_in
        parser = _parser_made_by(names["main"])
    if parser is None:
        module = importlib.import_module(f"mlx_lm.{name}")
        with replaced(module, argparse=stand_in):
            parser = _parser_made_by(module.main)
    if parser is None:
        raise ConfigError(f"the flags of this version of mlx_lm.{name} cannot be read")
    parser.prog = prog
    return parser


def _parser_made_by(main: Any) -> Parser | None:
    try:
        main()
    except _CompleteError as complete:
        return complete.parser
    return None


def _light_names(name: str) -> dict[str, Any]:
    """Return a module's functions and constants, without what it imports from other packages."""
    spec = importlib.util.find_spec("mlx_lm")  # does not import it
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / f"{name}.py"
    names: dict[str, Any] = {"__name__": f"mlx_lm.{name}"}
    tree = ast.parse(path.read_text())
    arguments = [each.value for each in ast.walk(tree) if isinstance(each, ast.keyword)]
    given = {each.id for each in arguments if isinstance(each, ast.Name)}  # such as types of flags
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            wanted = {each.name for each in node.names} & given
            others = _light_names(str(node.module)) if wanted else {}
            names |= {each: others[each] for each in wanted if each in others}
        elif _is_light(node):
            flags = future.annotations.compiler_flag
            code = compile(ast.Module([node], []), str(path), "exec", flags=flags, dont_inherit=True)
            with suppress(Exception):  # it uses a name of another package
                exec(code, names)
    return names


def _is_light(node: ast.stmt) -> bool:
    """Return whether a statement defines a function or a constant, or imports a part of Python."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        modules = [str(node.module)]
    if modules:
        return all(each.partition(".")[0] in sys.stdlib_module_names for each in modules)
    return isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef)


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
