"""Bounds on what llguidance is given, and on what it may do with it.

llguidance limits its own counts, but not its stack, nor the time of some constructs: these are counted in the text
before it is compiled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

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


def fault_of(kind: str, text: str) -> str:
    """Return why a source is not given to llguidance, or "".

    Args:
        kind, text: see :class:`.compiler.GrammarSource`.
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
