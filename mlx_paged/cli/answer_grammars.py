"""AnswerGrammars: the grammars that constrain the answers of a run, from the command line and from single prompts."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..grammar.compiler import INSTALL
from ..server.constraint import Constraint, constraint_of
from ..server.errors import RequestRefused
from .prompts_file import load_object

if TYPE_CHECKING:
    from ..grammar.grammar import CompiledGrammar
    from ..patches.grammar import TokenizerGrammars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that constrain answers."""
    parser.add_argument(
        "--json-schema", metavar="FILE", help="Constrain answers to JSON of this schema (needs the package llguidance)"
    )


class AnswerGrammars:
    """The grammars of a run.

    Args:
        args: the parsed command line.

    Raises:
        ConfigError: the file of ``--json-schema`` cannot be used, or llguidance is not installed.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._default: Constraint | None = None
        self._grammars: TokenizerGrammars | None = None
        name = args.json_schema
        if name is None:
            return
        if importlib.util.find_spec("llguidance") is None:
            raise ConfigError(f"--json-schema: {INSTALL}")
        try:
            schema = load_object(Path(name).expanduser().read_bytes(), name)
            described = {"type": "json_schema", "json_schema": {"schema": schema}}
            self._default = constraint_of({"response_format": described}, chat=False)
        except (OSError, RequestRefused) as error:
            raise ConfigError(f"--json-schema: {name} cannot be used: {error}") from None

    @property
    def has_default(self) -> bool:
        """Return whether the command line constrains answers."""
        return self._default is not None

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Set the model's tokenizer (mlx-lm's wrapper); call this before :meth:`grammar`."""
        from ..patches.grammar import TokenizerGrammars

        self._tokenizer, self._grammars = tokenizer, TokenizerGrammars(tokenizer)

    def grammar(self, options: Mapping[str, Any], prompt: Sequence[int]) -> CompiledGrammar | None:
        """Return the grammar for a prompt, or None. One in the prompt's options replaces the command line's.

        If the prompt ends in reasoning, only what follows the reasoning is constrained.

        Raises:
            RequestRefused: the grammar cannot be used.
        """
        from ..patches.grammar import behind_reasoning, ends_in_reasoning

        constraint = constraint_of(options, chat=False) or self._default
        if constraint is None:
            return None
        assert self._grammars is not None, "call set_tokenizer() first"
        compiled = self._grammars.compile(constraint)
        if compiled is not None and ends_in_reasoning(self._tokenizer, list(prompt)):
            return behind_reasoning(compiled, self._tokenizer)
        return compiled
