"""GrammarSource and GrammarCompiler: compile schemas, regular expressions and grammars for one tokenizer."""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import GrammarError
from .bounds import LARK_LIMITS, LIMITS, OTHER_LIMITS, STACK_BYTES, fault_of
from .grammar import CompiledGrammar, reason

# Between JSON tokens: nothing or one space. Small models that may write newlines write little else.
WHITE_SPACE = "[ ]"
JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE, "lenient": False}
ANY_OBJECT = {"type": "object"}
MAX_KEPT = 32  # compiled grammars; most take less than 1 MB, and one of 15,000 texts takes 11
MAX_KEPT_CHARACTERS = 1 << 20  # of their texts together
INSTALL = "constrained answers need the package llguidance: pip install llguidance"


def json_in_lark(schema: Any) -> str:
    """Return a term of a Lark grammar for JSON that matches a schema."""
    return "%json " + _escaped(json.dumps({**schema, "x-guidance": JSON_OPTIONS}))


def text_in_lark(text: str) -> str:
    """Return a term of a Lark grammar for a literal text."""
    return _escaped(json.dumps(text, ensure_ascii=False))


def _escaped(text: str) -> str:
    """Escape DEL, which may stand unescaped in JSON but not in Lark."""
    return text.replace("\x7f", "\\u007f")


class GrammarSource(NamedTuple):
    """The text of a grammar, for any model.

    Attributes:
        kind: ``json`` (a JSON schema), ``regex``, ``lark``, ``choice`` (Lark made from texts), or ``tools`` (Lark made
            from the schemas of tools).
        text: the schema, regular expression or grammar.
    """

    kind: str
    text: str

    @classmethod
    def json(cls, schema: Any) -> GrammarSource:
        """Return the source of an answer that is JSON matching a schema, given parsed."""
        return cls("json", json.dumps(schema))

    @classmethod
    def regex(cls, expression: str) -> GrammarSource:
        """Return the source of an answer that matches a regular expression as a whole."""
        return cls("regex", expression)

    @classmethod
    def lark(cls, grammar: str) -> GrammarSource:
        """Return the source of a context-free grammar in Lark, whose start rule is ``start``."""
        return cls("lark", grammar)

    @classmethod
    def choice(cls, answers: Sequence[str]) -> GrammarSource:
        """Return the source of an answer that is one of these texts."""
        # One terminal: as rules, each answer would take an item of the parser, whose number is limited.
        return cls("choice", "start: ANSWER\nANSWER: " + " | ".join(map(text_in_lark, answers)))


class GrammarCompiler:
    """Compiles grammars, one at a time, and keeps the latest ones. Thread-safe.

    What llguidance cannot bear is refused before (:mod:`.bounds`); the rest is compiled in a thread with a large stack.

    Args:
        tokenizer: a fast tokenizer of transformers.
        eos_tokens: tokens that end an answer.

    Raises:
        GrammarError: llguidance is not installed, or does not support the tokenizer.
    """

    def __init__(self, tokenizer: Any, eos_tokens: Iterable[int]) -> None:
        try:
            library: Any = importlib.import_module("llguidance")
            convert = importlib.import_module("llguidance.hf").from_tokenizer
        except ImportError:
            raise GrammarError(INSTALL) from None
        self._library = library
        self._eos_tokens = sorted(eos_tokens)
        try:
            self._tokenizer = convert(tokenizer, eos_token=self._eos_tokens)
        except Exception as error:
            raise GrammarError(f"llguidance does not support this model's tokenizer: {error}") from error
        self._lark_limits = library.LLParserLimits(**LIMITS, **LARK_LIMITS)
        self._other_limits = library.LLParserLimits(**LIMITS, **OTHER_LIMITS)
        self._kept: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()  # least recently used first
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # for what is kept

    def compile(self, source: GrammarSource, *, trigger: tuple[int, ...] = ()) -> CompiledGrammar:
        """Return the compiled grammar. Blocks, so call it from a thread that may wait.

        Args:
            source: the grammar's text.
            trigger: see :class:`CompiledGrammar`.

        Raises:
            GrammarError: the grammar cannot be used; the message says why.
        """
        compiled = self._find(source)
        if compiled is None:
            if fault := fault_of(*source):
                raise GrammarError(fault)
            with self._compiling:
                compiled = self._find(source)
                if compiled is None:
                    compiled = self._compile(source)
                    self._keep(source, compiled)
        return replace(compiled, trigger=trigger) if trigger else compiled

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        fault, matcher = on_stack(STACK_BYTES, lambda: self._matcher(*source))
        if fault:
            raise GrammarError(fault)
        return CompiledGrammar(matcher, self._tokenizer.vocab_size, tuple(self._eos_tokens))

    def _matcher(self, kind: str, text: str) -> tuple[str, Any]:
        """Return an error message or "", and a matcher that has computed its first mask (None after an error)."""
        make = self._library.LLMatcher
        try:
            if kind == "json":
                grammar = make.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            else:
                grammar = (make.grammar_from_regex if kind == "regex" else make.grammar_from_lark)(text)
        except ValueError as error:
            return str(error), None
        limits = self._lark_limits if kind in ("lark", "choice") else self._other_limits
        matcher = make(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return "", matcher
        fault = reason(matcher)
        return ("no answer can satisfy it" if fault.startswith("NoExtension") else fault), None

    def _find(self, source: GrammarSource) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._kept.get(source)
            if compiled is None:
                return None
            self._kept.move_to_end(source)
        matcher = compiled.matcher.deep_copy()
        matcher.compute_bitmask()
        # All answers share the lexer's states, whose number is limited: they may be used up.
        return None if matcher.is_error() else compiled

    def _keep(self, source: GrammarSource, compiled: CompiledGrammar) -> None:
        with self._lock:
            self._kept[source] = compiled
            self._kept.move_to_end(source)
            while len(self._kept) > 1 and (
                len(self._kept) > MAX_KEPT or sum(len(each.text) for each in self._kept) > MAX_KEPT_CHARACTERS
            ):
                self._kept.popitem(last=False)


_stack_size = threading.Lock()  # threading.stack_size holds for the whole process


def on_stack(num_bytes: int, work: Callable[[], Any]) -> Any:
    """Return the result of ``work``, which runs in a thread with a stack of this size. Raises what it raises."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="grammar")
    with _stack_size:
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised.pop()
    return found.pop()
