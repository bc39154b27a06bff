"""AnswerGrammars: what the answers of a run have to be, by the command line and by what single prompts say."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.grammar.compiler import INSTALL
from ..errors import ConfigError
from ..server.constraint import Constraint, constraint_of
from ..server.errors import RequestRefused, invalid
from .prompts_file import load_object

if TYPE_CHECKING:
    from ..engine.grammar.grammar import CompiledGrammar
    from ..engine.ranks.ranks import Ranks
    from ..patches.grammar import TokenizerGrammars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what answers have to be."""
    parser.add_argument(
        "--json-schema", metavar="FILE", help="Answers are JSON of this schema (needs the package llguidance)"
    )


class AnswerGrammars:
    """The grammars of a run.

    Args:
        args: of the command line.
        ranks: that compute the run together; the first one tries each grammar for all.

    Raises:
        ConfigError: the file of ``--json-schema`` cannot be used.
    """

    def __init__(self, args: argparse.Namespace, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
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
        """Return whether the command line says what answers have to be."""
        return self._default is not None

    def learn(self, tokenizer: Any) -> None:
        """Take the model's tokenizer, mlx-lm's wrapper of it."""
        from ..patches.grammar import TokenizerGrammars

        self._tokenizer, self._grammars = tokenizer, TokenizerGrammars(tokenizer)

    def grammar(self, options: Mapping[str, Any], prompt: Sequence[int]) -> CompiledGrammar | None:
        """Return the grammar of a prompt with these options, which replaces the command line's.

        Raises:
            RequestRefused: it cannot be used.
        """
        from ..patches.grammar import behind_reasoning, reasons_first

        constraint = constraint_of(options, chat=False) or self._default
        if constraint is None:
            return None
        assert self._grammars is not None, "the model has been loaded"
        compiled = self._compile(self._grammars, constraint)
        if compiled is not None and reasons_first(self._tokenizer, list(prompt)):
            return behind_reasoning(compiled, self._tokenizer)
        return compiled

    def _compile(self, grammars: TokenizerGrammars, constraint: Constraint) -> CompiledGrammar | None:
        ranks = self._ranks
        if ranks is None:
            return grammars.compile(constraint)
        compiled: CompiledGrammar | None = None
        fault: str | None = None
        if ranks.rank == 0:
            try:
                compiled = grammars.compile(constraint)
            except RequestRefused as refusal:
                fault = str(refusal)
        fault = ranks.broadcast(fault)
        if fault is not None:
            raise invalid(fault)
        return compiled if ranks.rank == 0 else grammars.compile(constraint, is_checked=True)
