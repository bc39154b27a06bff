"""``--json-schema``: the grammar that constrains the answers of a command line."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..grammar.compiler import INSTALL
from ..server.constraint import Constraint
from ..server.errors import RequestRefused, invalid
from .prompts_file import load_object
from .terminal import missing_packages

if TYPE_CHECKING:
    from ..grammar.grammar import CompiledGrammar
    from ..ranks.ranks import Ranks


def constraint_from(name: str | None) -> Constraint | None:
    """Return the constraint of a JSON schema's file, or None without one.

    Raises:
        ConfigError: the file cannot be used, or a package that checks it is not installed.
    """
    if name is None:
        return None
    if importlib.util.find_spec("llguidance") is None:
        raise ConfigError(f"--json-schema: {INSTALL}")
    if missing := missing_packages():
        raise ConfigError(f"--json-schema needs {missing}: pip install 'mlx_paged[server]'")
    from ..server.requests.constraints import AnswerParameters, NamedSchema, SchemaFormat

    try:
        schema = load_object(Path(name).expanduser().read_bytes(), name)
        form = SchemaFormat(json_schema=NamedSchema(schema=schema))
        return AnswerParameters(response_format=form, structured_outputs=None).constraint()
    except (OSError, RequestRefused) as error:
        raise ConfigError(f"--json-schema: {name} cannot be used: {error}") from None


def grammar_for(
    constraint: Constraint, tokenizer: Any, prompt: Sequence[int], ranks: Ranks | None = None
) -> CompiledGrammar | None:
    """Return the grammar for a prompt; only what follows reasoning that the prompt has begun is constrained.

    Args:
        constraint: what the answer has to be.
        tokenizer: mlx-lm's.
        prompt: its tokens.
        ranks: the ranks that compute the run, or None; rank 0 checks the grammar for all.

    Raises:
        RequestRefused: the grammar cannot be used.
    """
    from ..server.grammars import TokenizerGrammars, behind_reasoning, ends_in_reasoning

    grammars = TokenizerGrammars(tokenizer)
    fault, compiled = None, None
    if ranks is None or ranks.rank == 0:
        try:
            compiled = grammars.compile(constraint)
        except RequestRefused as refusal:
            fault = str(refusal)
    fault = fault if ranks is None else ranks.broadcast(fault)
    if fault is not None:
        raise invalid(fault)
    if ranks is not None and ranks.rank > 0:
        compiled = grammars.compile(constraint)
    if compiled is not None and ends_in_reasoning(tokenizer, list(prompt)):
        return behind_reasoning(compiled, tokenizer)
    return compiled
