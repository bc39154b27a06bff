"""GrammarSource and GrammarCompiler: compile schemas, expressions and grammars for one tokenizer, within bounds."""

from __future__ import annotations

import importlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from ..errors import GrammarError
from .grammar import CompiledGrammar, reason

Result = TypeVar("Result")

# Between JSON tokens: nothing or one space. Small models that may write newlines write little else.
WHITE_SPACE = "[ ]"
JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE, "lenient": False}
ANY_OBJECT = {"type": "object"}
MAX_KEPT = 32  # compiled grammars; most take less than 1 MB, and one of 15,000 texts takes 11
MAX_KEPT_CHARACTERS = 1 << 20  # of their texts together
# llguidance limits its own counts, but not its stack, nor the time of some constructs: these are counted in the text
# before it is compiled.
MAX_CHARACTERS = 1 << 18
MAX_DEPTH = 128  # nesting of lists and objects; llguidance's JSON parser accepts no more
MAX_REFERENCES = 2_000  # in a chain, each takes some 7 KB of stack
MAX_LINES = 4_000  # of a Lark grammar; a rule takes at least one line and some 3 KB of stack
# Signs of repetition in a row take time with the square of their number: 5,000 take a second, 60,000 minutes.
MAX_REPETITIONS = 5_000
# A lexer counts in steps of a multiple: 10,007 takes 0.2 s, 250,007 takes 4 s and 90 MB, 16,777,216 minutes.
MAX_MULTIPLE = 20_000
LEAST_INTEGER = -(1 << 62)  # llguidance 1.9 crashes on integers near -2**63
STACK_BYTES = 128 << 20  # of the thread that compiles

# A mask takes up to 9 ms with 200,000 units of lexer fuel, and some 6 ms with 3,000 items. Where rules are ambiguous,
# time grows with the square of the items in a row: 4 ms for 600, 100 to 300 ms for 2,000. An object has four items per
# optional property, so schemas have a higher limit. :meth:`.grammar.Grammar.record_time` ends slow answers.
LIMITS = {
    "max_lexer_states": 50_000,
    "max_grammar_size": 20_000,
    "step_lexer_fuel": 200_000,
    "verbose_errors": False,
}
LARK_LIMITS = {"max_items_in_row": 600, "step_max_items": 3_000}
OTHER_LIMITS = {"max_items_in_row": 2_000, "step_max_items": 5_000}

_REPETITIONS = re.compile(r"[?*+]")
_JSON_IN_LARK = re.compile(r"%json\s*")
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
        kind: ``json`` (a JSON schema), ``regex`` (matched as a whole), ``lark`` (its start rule is ``start``),
            ``choice`` (Lark made from texts), or ``tools`` (Lark made from the schemas of tools).
        text: the schema, regular expression or grammar.
    """

    kind: str
    text: str

    @classmethod
    def json(cls, schema: Any) -> GrammarSource:
        """Return the source of an answer that is JSON matching a schema, given parsed."""
        return cls("json", json.dumps(schema))

    @classmethod
    def choice(cls, answers: Sequence[str]) -> GrammarSource:
        """Return the source of an answer that is one of these texts."""
        # One terminal: as rules, each answer would take an item of the parser, whose number is limited.
        return cls("choice", "start: ANSWER\nANSWER: " + " | ".join(map(text_in_lark, answers)))


def fault_of(kind: str, text: str) -> str:
    """Return why a source is not given to llguidance, or "".

    Args:
        kind, text: see :class:`GrammarSource`.
    """
    if len(text) > MAX_CHARACTERS:
        return f"it has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}"
    if kind not in ("json", "regex") and (lines := text.count("\n")) > MAX_LINES:
        return f"it has {lines:,} lines; the limit is {MAX_LINES:,}"
    repetitions = len(_REPETITIONS.findall(text)) if kind in ("regex", "lark") else 0
    try:
        schemas = [json.loads(text)] if kind == "json" else list(_schemas_in(text)) if kind in ("lark", "tools") else []
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return f"it is not JSON: {error}"
    references, multiples = 0, []
    for depth, part in _parts(schemas):
        if depth > MAX_DEPTH:
            return f"it is nested too deeply; the limit is {MAX_DEPTH} levels"
        if type(part) is int and part < LEAST_INTEGER:
            return f"integers must be at least {LEAST_INTEGER}, got {part}"
        if isinstance(part, dict):
            references += "$ref" in part
            repetitions += sum(len(_REPETITIONS.findall(pattern)) for pattern in _patterns(part))
            multiples += _multiples(part)
    if references > MAX_REFERENCES:
        return f"it has {references:,} references; the limit is {MAX_REFERENCES:,}"
    if repetitions > MAX_REPETITIONS:
        return f"it has {repetitions:,} repetitions; the limit is {MAX_REPETITIONS:,}"
    # Alternatives are counted side by side, and what holds together by the least common multiple.
    if (states := max(sum(multiples), math.lcm(*multiples))) > MAX_MULTIPLE:
        return f"multipleOf takes {states:,} states; the limit is {MAX_MULTIPLE:,}"
    return ""


def _schemas_in(grammar: str) -> Iterator[Any]:
    """Yield the schemas in a Lark grammar. Raises RecursionError."""
    decoder = json.JSONDecoder()
    for found in _JSON_IN_LARK.finditer(grammar):
        try:
            yield decoder.raw_decode(grammar, found.end())[0]
        except ValueError:
            continue  # in a literal text; anywhere else llguidance refuses it


def _parts(schemas: list[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the values in schemas, outer ones first, and how deeply each is nested."""
    depth, level = 0, schemas
    while level:
        for part in level:
            yield depth, part
        lists = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        depth, level = depth + 1, [child for part in lists for child in part]


def _patterns(part: dict[str, Any]) -> list[str]:
    named = part.get("patternProperties")
    return [
        each for each in (part.get("pattern"), *(named if isinstance(named, dict) else ())) if isinstance(each, str)
    ]


def _multiples(part: dict[str, Any]) -> list[int]:
    """Return the digits of a part's ``multipleOf`` as an integer, without zeros at either end, if there is one."""
    number = part.get("multipleOf")
    if not isinstance(number, int | float) or not math.isfinite(number) or not number:
        return []
    return [int("".join(map(str, Decimal(str(+number)).normalize().as_tuple().digits)))]


class GrammarCompiler:
    """Compiles grammars, one at a time, and keeps the latest ones. Thread-safe.

    What llguidance cannot bear is refused before (:func:`fault_of`); the rest is compiled in a thread with a large
    stack.

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


def on_stack(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Return the result of ``work``, which runs in a thread with a stack of this size. Raises what it raises."""
    with ThreadPoolExecutor(1, "grammar") as executor:
        with _stack_size:
            before = threading.stack_size(num_bytes)
            try:
                found = executor.submit(work)  # starts the thread
            finally:
                threading.stack_size(before)
        return found.result()
