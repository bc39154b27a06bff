"""GrammarCompiler: makes grammars for one tokenizer's tokens."""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import GrammarError
from .compiled_grammar import CompiledGrammar
from .grammar import reason
from .long_numbers import long_numbers
from .schema_fault import place_of_fault
from .source import WHITE_SPACE, GrammarSource

MAX_SOURCE_CHARACTERS = 1 << 18
MAX_KEPT = 64
MAX_KEPT_CHARACTERS = 1 << 20  # of the sources of those that are kept
# Compiling takes time in the square of a grammar: some seconds at most.
LIMITS = {"max_lexer_states": 50_000, "max_grammar_size": 20_000, "verbose_errors": False}
INSTALL = "constrained answers need the package llguidance: pip install llguidance"


class GrammarCompiler:
    """Compiles and keeps grammars, the latest ones. By any thread.

    Args:
        tokenizer: of transformers, and one of its fast ones.
        eos_tokens: those that end an answer.

    Raises:
        GrammarError: llguidance is not there, or not made for such a tokenizer.
    """

    def __init__(self, tokenizer: Any, eos_tokens: Iterable[int]) -> None:
        try:
            self._library = importlib.import_module("llguidance")
            convert = importlib.import_module("llguidance.hf").from_tokenizer
        except ImportError:
            raise GrammarError(INSTALL) from None
        self._eos_tokens = sorted(eos_tokens)
        try:
            self._tokenizer = convert(tokenizer, eos_token=self._eos_tokens)
        except Exception as error:
            raise GrammarError(f"answers of this model's tokenizer cannot be constrained: {error}") from error
        self._limits = self._library.LLParserLimits(**LIMITS)
        self._kept: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, source: GrammarSource, *, trigger: int | None = None) -> CompiledGrammar:
        """A grammar for the tokenizer's tokens.

        Args:
            source: what an answer has to be.
            trigger: as in :class:`CompiledGrammar`.

        Raises:
            GrammarError: it is not one that can be used; the message says where.
        """
        if len(source.text) > MAX_SOURCE_CHARACTERS:
            raise GrammarError(f"it has {len(source.text):,} characters, of at most {MAX_SOURCE_CHARACTERS:,}")
        with self._lock:
            compiled = self._kept.get(source)
            if compiled is not None:
                self._kept.move_to_end(source)
        if compiled is None:
            try:
                matcher = self._matcher(source)
            except RecursionError:
                raise GrammarError("it is nested too deeply") from None
            compiled = CompiledGrammar(matcher, self._tokenizer.vocab_size, tuple(self._eos_tokens))
            self._keep(source, compiled)
        return compiled if trigger is None else replace(compiled, trigger=trigger)

    def _keep(self, source: GrammarSource, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._kept[source] = compiled
            while len(self._kept) > 1 and (
                len(self._kept) > MAX_KEPT or sum(len(kept.text) for kept in self._kept) > MAX_KEPT_CHARACTERS
            ):
                self._kept.popitem(last=False)

    def _matcher(self, source: GrammarSource) -> Any:
        """A matcher at the beginning, which knows already what an answer may begin with."""
        if source.kind == "json":
            schema = json.loads(source.text)
            fault, matcher = self._try_schema(schema)
            if fault:
                where = place_of_fault(schema, fault, lambda part: self._try_schema(part)[0])
                raise GrammarError(f"{where}: {fault}")
            for where, number in long_numbers(schema):
                if not self._is_read_right(number):
                    raise GrammarError(f"{where}: {number!r} has more digits than would be kept")
            return matcher
        library = self._library.LLMatcher
        make = library.grammar_from_regex if source.kind == "regex" else library.grammar_from_lark
        fault, matcher = self._try(make(source.text))
        if fault:
            raise GrammarError(fault)
        return matcher

    def _try_schema(self, schema: Any) -> tuple[str, Any]:
        """What is wrong with a schema, or nothing, and its matcher."""
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": False}
        try:
            grammar = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            return str(error), None
        return self._try(grammar)

    def _is_read_right(self, number: float) -> bool:
        """Whether llguidance takes a number for itself: of some with 16 digits and more it takes the neighbour."""
        fault, matcher = self._try_schema({"const": number})
        return not fault and float(matcher.compute_ff_bytes()) == number

    def _try(self, grammar: str) -> tuple[str, Any]:
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        words = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if not matcher.is_error():
            return "", matcher
        fault = reason(matcher)
        return ("there is no answer that it allows" if fault.startswith("NoExtension") else fault), None
