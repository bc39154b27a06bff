"""Limits on schemas, regular expressions and grammars, and their trial compilation in llguidance.

Also a script, run in a separate process (:class:`.compiler.TrialProcess`): llguidance can crash, hang or take all
memory on what a client sends. It imports nothing of this package, so that the process starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

MAX_CHARACTERS = 1 << 18
MAX_DEPTH = 128  # nesting of lists and objects; llguidance's JSON parser accepts no more
MAX_REFERENCES = 2_000  # in a chain, each takes some 7 KB of stack
MAX_LINES = 4_000  # of a Lark grammar; a rule takes at least one line and some 3 KB of stack
TRIAL_SECONDS = 3.0  # CPU time for one grammar
TRIAL_BYTES = 1 << 30  # memory for one grammar; no effect on macOS, which does not enforce RLIMIT_AS
MAX_BYTES = 64 << 20  # size of a compiled grammar; an object with 3,000 properties takes 11 MB
COMPILE_STACK = 64 << 20
STEP_STACK = 1 << 20  # smaller than the stack of any thread that computes masks
NUM_STEPS = 3
MAX_PLACES = 200  # parts of a schema compiled by themselves to find the one at fault

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

# Between JSON tokens: nothing or one space. Small models that may write newlines write little else.
WHITE_SPACE = "[ ]"
JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE, "lenient": False}

# Digits and powers of ten that every parser of doubles reads exactly.
DIGITS, POWER = 15, 22
LARGEST_INTEGER = 1 << 53
LEAST_INTEGER = -(1 << 62)  # llguidance 1.9 crashes on integers near -2**63
LIMITS_OF_INTEGERS = [sign * (1 << 63) + more for sign in (-1, 1) for more in (-1, 0, 1)]

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
SHARED = ("$defs", "definitions")  # targets of references from any part
ANNOTATIONS = ("default", "example", "examples")


def fault_of_size(kind: str, text: str) -> str:
    """Return what makes a source too large or too deep for llguidance, or "".

    Args:
        kind, text: see :class:`.compiler.GrammarSource`.
    """
    if len(text) > MAX_CHARACTERS:
        return f"it has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}"
    if kind in ("lark", "tools") and (lines := text.count("\n")) > MAX_LINES:
        return f"it has {lines:,} lines; the limit is {MAX_LINES:,}"
    if kind != "json":
        return ""
    try:
        schema = json.loads(text)
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return f"it is not JSON: {error}"
    num_references, level = 0, [schema]
    for _ in range(MAX_DEPTH):
        num_references += sum("$ref" in part for part in level if isinstance(part, dict))
        level = [child for part in level for child in _children(part)]
    if level:
        return f"it is nested too deeply; the limit is {MAX_DEPTH} levels"
    if num_references > MAX_REFERENCES:
        return f"it has {num_references:,} references; the limit is {MAX_REFERENCES:,}"
    for where, number, _ in numbers(schema):
        if isinstance(number, int) and number < LEAST_INTEGER:
            return f"{where}: integers must be at least {LEAST_INTEGER}, got {number}"
    return ""


class Checker:
    """Compiles grammars for one tokenizer's tokens.

    Args:
        library: the module llguidance.
        tokenizer: llguidance's.
        seconds: CPU time of :meth:`try_out`; the search for the part at fault stops after half of it.
    """

    def __init__(self, library: Any, tokenizer: Any, seconds: float = TRIAL_SECONDS) -> None:
        self._library, self._tokenizer, self._seconds = library, tokenizer, seconds
        self._lark_limits = library.LLParserLimits(**LIMITS, **LARK_LIMITS)
        self._other_limits = library.LLParserLimits(**LIMITS, **OTHER_LIMITS)

    def matcher(self, kind: str, text: str) -> tuple[str, Any]:
        """Return an error message or "", and a matcher that has computed its first mask (None after an error)."""
        make = self._library.LLMatcher
        try:
            if kind == "json":
                grammar = make.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            else:
                grammar = (make.grammar_from_regex if kind == "regex" else make.grammar_from_lark)(text)
        except ValueError as error:
            return str(error), None
        limits = self._lark_limits if kind == "lark" else self._other_limits
        matcher = make(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return "", matcher
        fault = reason(matcher)
        return ("no answer can satisfy it" if fault.startswith("NoExtension") else fault), None

    def try_out(self, kind: str, text: str) -> tuple[str, int]:
        """Compile a grammar and take the first steps of an answer. Returns an error message or "", and its bytes.

        Raises:
            RecursionError: it is nested too deeply.
        """
        begin, before = time.process_time(), resident_bytes()
        schema = json.loads(text) if kind == "json" else None
        found: list[Any] = []

        def compile_it() -> None:
            found.extend(self.matcher(kind, text))
            num_bytes = max(0, resident_bytes() - before)
            found.append(num_bytes)
            if found[0] and kind == "json":
                found[0] = self._placed(schema, found[0], lambda: time.process_time() - begin > self._seconds / 2)
            elif not found[0] and num_bytes > MAX_BYTES:
                found[0] = f"it takes {num_bytes >> 20} MB when compiled; the limit is {MAX_BYTES >> 20} MB"
            elif not found[0] and kind == "json":
                found[0] = self._fault_of_numbers(schema)

        on_stack(COMPILE_STACK, compile_it)
        on_stack(STEP_STACK, lambda: self._step(found.pop(1)))
        fault, num_bytes = found
        return str(fault), num_bytes

    def _step(self, matcher: Any) -> None:
        """Begin an answer. Holds the last reference to the matcher, so that it is also freed on this small stack."""
        for _ in range(NUM_STEPS if matcher is not None else 0):
            mask = matcher.compute_bitmask()
            token = next((8 * index + (byte & -byte).bit_length() - 1 for index, byte in enumerate(mask) if byte), None)
            if matcher.is_stopped() or token is None or not matcher.consume_token(token):
                return

    def _placed(self, schema: Any, fault: str, is_late: Callable[[], bool]) -> str:
        def fault_of(part: Any) -> str | None:
            return None if is_late() else self.matcher("json", json.dumps(part))[0]

        return f"{place_of_fault(schema, fault, fault_of)}: {fault}"

    # Numbers ------------------------------------------------------------------------------------------------------

    def _fault_of_numbers(self, schema: Any) -> str:
        for where, number, is_answer in numbers(schema):
            if (is_answer or isinstance(number, float)) and is_long(number) and not self._is_kept(number):
                return f"{where}: {number!r} has more digits than llguidance keeps"
        for where, bounds in ranges(schema):
            allowed = self._allowed_outside(bounds)
            if allowed:
                described = ", ".join(f"{name} {bounds[name]}" for name in BOUNDS if name in bounds)
                return f"{where}: {described} cannot be enforced: {allowed} would be allowed"
        return ""

    def _is_kept(self, number: float) -> bool:
        """Return whether llguidance keeps a number exactly; it replaces some of 16 digits or more by a neighbour."""
        fault, matcher = self.matcher("json", json.dumps({"const": number}))
        if fault:
            return False
        text = matcher.compute_ff_bytes().decode()
        return text == str(number) if isinstance(number, int) else float(text) == number

    def _allowed_outside(self, bounds: dict[str, Any]) -> str:
        """Return a number outside the bounds that llguidance nevertheless allows, or ""."""
        fault, matcher = self.matcher("json", json.dumps(bounds))
        if fault:
            return ""  # nothing to test: these bounds do not compile by themselves
        given = [bounds[name] for name in BOUNDS if name in bounds]
        texts = {str(number) for number in LIMITS_OF_INTEGERS}
        for number in given:
            texts |= {repr(number), str(int(number)), f"{int(number)}.0"}
            texts |= {str(int(number) + more) for more in (-1, 1)} | {str(int(float(number)))}
        for text in sorted(texts, key=lambda text: (len(text), text)):
            if not _is_within(Decimal(text), bounds) and self._takes(matcher.deep_copy(), text):
                return text
        return ""

    def _takes(self, matcher: Any, text: str) -> bool:
        tokens = self._tokenizer.tokenize_str(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def on_stack(num_bytes: int, work: Callable[[], None]) -> None:
    """Run ``work`` in a thread with a stack of this size, and wait for it.

    Raises:
        BaseException: whatever ``work`` raises.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
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


_stack_size = threading.Lock()  # threading.stack_size holds for the whole process


def reason(matcher: Any) -> str:
    """Return why a matcher failed, without the parser state that llguidance appends."""
    return str(matcher.get_error()).partition("\n<")[0].strip()


# Schemas --------------------------------------------------------------------------------------------------------------


def _children(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(part.values())
    return part if isinstance(part, list) else []


def walk(schema: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield a JSON pointer, the value and its kind for each value in a schema except annotations.

    The kind is ``schema`` (a schema or a keyword's value), ``names`` (schemas by name) or ``answer`` (in a ``const`` or
    ``enum``)."""
    todo: list[tuple[str, Any, str]] = [("#", schema, "schema")]
    while todo:
        place, value, kind = todo.pop()
        yield place, value, kind
        children: list[tuple[str, Any, str]] = []
        if isinstance(value, list):
            children = [(f"{place}/{index}", child, kind) for index, child in enumerate(value)]
        elif isinstance(value, dict):
            for name, child in value.items():
                of_child = kind
                if kind == "names":
                    of_child = "schema"
                elif kind == "schema" and name in ANNOTATIONS:
                    continue
                elif kind == "schema" and name in ("const", "enum"):
                    of_child = "answer"
                elif kind == "schema" and name in NAMED_SCHEMAS:
                    of_child = "names"
                children.append((f"{place}/{escaped(name)}", child, of_child))
        todo.extend(reversed(children))


def numbers(schema: Any) -> Iterator[tuple[str, int | float, bool]]:
    """Yield a JSON pointer to each number, the number, and whether it is in a ``const`` or ``enum``."""
    for place, value, kind in walk(schema):
        if type(value) in (int, float):
            yield place, value, kind == "answer"


def is_long(number: float) -> bool:
    """Return whether a parser that uses doubles may read the number as a neighbouring one."""
    if isinstance(number, int):
        return abs(number) > LARGEST_INTEGER
    _, digits, power = Decimal(repr(number)).normalize().as_tuple()
    return len(digits) > DIGITS or not isinstance(power, int) or abs(power) > POWER


def ranges(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a JSON pointer to each part of a schema whose bounds llguidance may get wrong, and these with its type."""
    seen = set()
    for place, part, kind in walk(schema):
        if kind != "schema" or not isinstance(part, dict):
            continue
        bounds = {name: part[name] for name in BOUNDS if type(part.get(name)) in (int, float)}
        is_exclusive = "exclusiveMinimum" in bounds or "exclusiveMaximum" in bounds
        if is_exclusive or any(abs(bound) > LARGEST_INTEGER for bound in bounds.values()):
            if "type" in part:
                bounds["type"] = part["type"]
            if (key := json.dumps(bounds)) not in seen:
                seen.add(key)
                yield place, bounds


def _is_within(number: Decimal, bounds: dict[str, Any]) -> bool:
    exact = {name: Decimal(repr(bounds[name])) for name in BOUNDS if name in bounds}
    return (
        number >= exact.get("minimum", number)
        and number <= exact.get("maximum", number)
        and number > exact.get("exclusiveMinimum", number - 1)
        and number < exact.get("exclusiveMaximum", number + 1)
    )


def place_of_fault(schema: Any, fault: str, fault_of: Callable[[Any], str | None]) -> str:
    """Return a JSON pointer to the innermost part of a schema that has the same fault by itself; ``#`` is the whole.

    Args:
        schema: parsed.
        fault: its error message.
        fault_of: returns the error message of a schema, "" if there is none, None if no time is left to find out.
    """
    place, part, trials = "#", schema, 0
    visited = {place}
    while isinstance(part, dict):
        for where, child in _parts(schema, place, part):
            trials += 1
            if trials > MAX_PLACES:
                return place
            if where in visited:
                continue
            found = fault_of(_alone(schema, child))
            if found is None:
                return place
            if found == fault:
                place, part = where, child
                visited.add(place)
                break
        else:
            return place
    return place


def _parts(schema: Any, place: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a JSON pointer to each subschema and to the target of ``$ref``, and the schema."""
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = schema
        for name in reference[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        if target is not None:
            yield reference, target
    for key in NAMED_SCHEMAS:
        if key not in SHARED and isinstance(part.get(key), dict):
            yield from ((f"{place}/{key}/{escaped(name)}", child) for name, child in part[key].items())
    for key in LISTS:
        if isinstance(part.get(key), list):
            yield from ((f"{place}/{key}/{index}", child) for index, child in enumerate(part[key]))
    yield from ((f"{place}/{key}", part[key]) for key in SINGLE if key in part)


def _alone(schema: Any, part: Any) -> Any:
    shared = {key: schema[key] for key in SHARED if key in schema}
    return {**shared, **part} if isinstance(part, dict) else part


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return json.dumps(name)[1:-1].replace("~", "~0").replace("/", "~1")


# The separate process -------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer lines of JSON: ``[tokenizer, eos_tokens]`` first, with ``"ready"``, then ``[kind, text]`` of each grammar,
    with ``[fault, num_bytes]``."""
    folder, seconds, num_bytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    sys.path.append(folder)  # where llguidance is
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process, too; its parent ends it
    source, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to stderr

    import llguidance

    described, eos_tokens = json.loads(source.readline())
    checker = Checker(llguidance, llguidance.LLTokenizer(described, eos_token=eos_tokens), seconds)
    del described
    _limit_memory(num_bytes)
    answers.write(b'"ready"\n')
    answers.flush()
    while line := source.readline():
        # By default SIGPROF ends the process, even inside native code.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = checker.try_out(*json.loads(line))
        except RecursionError:
            answer = ("it is nested too deeply", 0)
        except MemoryError:
            answer = (f"it needs more than {num_bytes / (1 << 30):g} GB of memory to compile", 0)
        except Exception as error:
            answer = (f"{type(error).__name__}: {error}", 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limit the process to this many bytes more than it has now, if /proc says how many that are."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_pages_of_memory()[0] * resource.getpagesize() + num_bytes,) * 2)


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes; on macOS its peak."""
    try:
        return _pages_of_memory()[1] * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _pages_of_memory() -> list[int]:
    with open("/proc/self/statm") as file:
        return [int(number) for number in file.read().split()]


if __name__ == "__main__":
    main()
