"""Grammars: each is compiled first in a process that may crash, and constrains an answer token by token."""

import json
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.errors import GrammarAbandoned, GrammarError
from mlx_paged.grammar import check
from mlx_paged.grammar import compiler as module
from mlx_paged.grammar.check import is_long, numbers
from mlx_paged.grammar.compiler import (
    MAX_KEPT,
    MAX_VERDICTS,
    GrammarCompiler,
    GrammarSource,
    TrialProcess,
    Verdict,
    json_in_lark,
)
from mlx_paged.grammar.grammar import CompiledGrammar, Grammar, GrammarProcessor, Part, ThinkingBudget, masked
from tests.support.cases import quick
from tests.support.models.tokenizers import CALL, EOS, EOT, THINK_END, byte_tokenizer
from tests.support.without_collector import without_collector


def make() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer._tokenizer, tokenizer.eos_token_ids)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make()


BROKEN: list[tuple[Any, str]] = [
    ({"type": "strin"}, "#: Invalid type"),
    ({"properties": {"a": {"items": {"type": 5}}}}, "#/properties/a/items: "),
    ({"properties": {"a/b~": {"pattern": "("}}}, "#/properties/a~1b~0: regex parse error"),
    ({"anyOf": [{"type": "string"}, {"not": {}}]}, "#/anyOf/1: Unimplemented keys"),
    (
        {"$defs": {"q": {"prefixItems": [{}, {"format": "odd"}]}}, "items": {"$ref": "#/$defs/q"}},
        "#/$defs/q/prefixItems/1",
    ),
    ({"properties": {"a": {"$ref": "#/nope"}}}, "#/properties/a: Pointer '/nope' does not exist"),
    ({"$ref": "http://127.0.0.1:9/schema"}, "#: .*does not fetch"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "#: Unsatisfiable"),
    ({"$ref": "#"}, "#: no answer can satisfy it"),
    ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "#/properties/a: Unimplemented"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "#: Unimplemented keys"),
]


LONG = -936044455.8565181  # llguidance 1.9 reads it as ...518
BROKEN += [
    ({"const": LONG}, "#/const: -936044455.8565181 has more digits than llguidance keeps"),
    ({"properties": {"a/b": {"enum": [1.5, {"x": [LONG]}]}}}, "#/properties/a~1b/enum/1/x/0: .* more digits"),
]


BIG = 123456789012345678  # llguidance reads it as ...680
BROKEN += [
    ({"enum": [BIG]}, "#/enum/0: 123456789012345678 has more digits"),
    ({"properties": {"a": {"const": {"id": 2**53 + 1}}}}, "#/properties/a/const/id: 9007199254740993 has more digits"),
    ({"type": "integer", "minimum": 2**53 + 1}, "#: minimum 9007199254740993 cannot be enforced: 9007199254740992"),
    ({"items": {"type": "integer", "exclusiveMinimum": 2**53}}, "#/items: exclusiveMinimum 9007199254740992 cannot"),
    ({"type": "integer", "minimum": 2**63 + 10, "maximum": 2**63 + 11}, "#: minimum .* cannot be enforced"),
    (
        {"properties": {"x": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}}},
        "#/properties/x: .*: 0 w",
    ),
    ({"type": "number", "exclusiveMinimum": 99, "exclusiveMaximum": 99.5}, "#: .* cannot be enforced: 99 would"),
    ({"const": -(2**63)}, "#/const: integers must be at least -4611686018427387904, got -9223372036854775808"),
    ({"enum": [0, -(2**63) + 1]}, "#/enum/1: integers must be at least"),
    ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "#/minimum: integers must be at least"),
]
KEPT: list[Any] = [
    {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
    {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": ["integer", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"type": "object", "properties": {"const": {"type": "string", "default": BIG, "examples": [BIG]}}},
]


@pytest.mark.parametrize("schema", KEPT)
def test_schemas_whose_numbers_are_kept_are_accepted(compiler: GrammarCompiler, schema: Any) -> None:
    compiler.compile(GrammarSource.json(schema))


@pytest.mark.parametrize("schema, message", BROKEN)
def test_unusable_schema_is_refused_with_its_location(compiler: GrammarCompiler, schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message.replace("$", r"\$")):
        compiler.compile(GrammarSource.json(schema))


@pytest.mark.parametrize(
    "source, message",
    [
        (GrammarSource.regex("("), "unclosed group"),
        (GrammarSource.regex("(?<=a)b"), "look-around"),
        (GrammarSource.lark("start: x"), r"at 1\(8\): unknown name"),
        (GrammarSource.lark("begin: x"), "no start rule"),
        (GrammarSource.lark("start: start"), "no answer"),
        (GrammarSource.lark(""), "Empty"),
    ],
)
def test_unusable_expression_is_refused_with_a_reason(
    compiler: GrammarCompiler, source: GrammarSource, message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        compiler.compile(source)


def nested(levels: int) -> GrammarSource:
    return GrammarSource("json", '{"properties":{"a":' * levels + "{}" + "}}" * levels)


HOSTILE = [
    nested(100),
    nested(5000),
    GrammarSource.json({"properties": {f"key{i}": {"type": "string"} for i in range(6000)}}),
    GrammarSource.json({"enum": [f"value {i}" for i in range(15_000)]}),
    GrammarSource.json({"type": "array", "minItems": 10**7}),
    GrammarSource.json({"type": "string", "maxLength": 10**9}),
    GrammarSource.json({"type": "string", "pattern": "((a{1000}){1000}){1000}"}),
    GrammarSource.json({"type": "integer", "multipleOf": 999_999_937}),
    GrammarSource.json({"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(3)]} for i in range(12)]}),
    GrammarSource.json({"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1200)}, "$ref": "#/$defs/a0"}),
    GrammarSource.json({"type": "integer", "minimum": -(2**62), "maximum": -(2**62)}),
    GrammarSource.lark("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3900)) + '\nr3900: "a"'),
    GrammarSource.lark("start: r0\n" + "\n".join(f'r{i}: "k{i}" r{i + 1}?' for i in range(3900)) + '\nr3900: "a"'),
    GrammarSource.lark("\n".join(["start: r0"] * 4002)),
    GrammarSource.choice(["\ud800"]),
    GrammarSource.regex("(" * 100_000 + "a" + ")" * 100_000),
    GrammarSource.regex("(a|b)*" * 5000),
    GrammarSource.regex("(a|b)*a(a|b){100000}"),
    GrammarSource.lark("start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    GrammarSource.lark("start: " + "%lark { " * 3000 + 'start: "a"' + "}" * 3000),
    GrammarSource.lark('start: s\ns: s s | "a" |'),
    GrammarSource.regex("a" * (1 << 18) + "a"),
]
QUICKLY_REFUSED = [source for source in HOSTILE[::3] if "$defs" not in source.text]


@pytest.mark.parametrize(
    "source", quick(HOSTILE, *QUICKLY_REFUSED, single=True), ids=lambda source: f"{source.kind}-{source.text[:20]}"
)
def test_hostile_grammars_do_not_crash_the_process(compiler: GrammarCompiler, source: GrammarSource) -> None:
    try:
        grammar = compiler.compile(source).start()
        for token in b"aaaa":
            grammar.accept(token)
    except GrammarError as error:
        assert str(error)


def test_recently_used_grammars_are_cached() -> None:
    compiler = make()
    first = GrammarSource.regex("first")
    kept = compiler.compile(first).matcher
    for number in range(MAX_KEPT - 1):
        compiler.compile(GrammarSource.regex(f"x{number}"))
    assert compiler.compile(first).matcher is kept
    for number in range(MAX_KEPT):
        compiler.compile(GrammarSource.regex(f"y{number}"))
    assert compiler.compile(first).matcher is not kept and len(compiler._kept) == MAX_KEPT


def test_cached_grammars_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make()
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 40 << 20)
    for number in range(4):  # some 10 MB each
        compiler.compile(GrammarSource.json({"enum": [f"v{i} {number}" for i in range(15_000)]}))
    sizes = [num_bytes for _, num_bytes in compiler._kept.values()]
    assert 0 < sum(sizes) <= 40 << 20 and min(sizes) > 1 << 20


@pytest.mark.slow
def test_compiled_grammar_larger_than_64_mb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TRIAL_SECONDS", 60.0)  # it takes 2 s, and more on a busy machine
    with pytest.raises(GrammarError, match="MB when compiled; the limit is 64 MB"):
        make().compile(GrammarSource.json({"type": "integer", "multipleOf": 250007}))


def test_many_threads_can_compile_grammars() -> None:
    compiler = make()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(10):
                grammar = compiler.compile(GrammarSource.json({"enum": [f"{i % 3}", number]})).start()
                grammar.accept(ord('"'))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and len(compiler._kept) == 6


def test_compiler_and_grammars_are_freed_without_the_collector() -> None:
    def use() -> list[weakref.ref[object]]:
        compiler = make()
        compiled = compiler.compile(GrammarSource.regex("a"))
        return [weakref.ref(each) for each in (compiler, compiled, compiled.start())]

    with without_collector():
        assert [each() for each in use()] == [None] * 3


def test_missing_llguidance_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match="pip install llguidance"):
        make()


def test_tokenizer_that_is_not_a_fast_one_is_refused() -> None:
    with pytest.raises(GrammarError, match="does not support this model's tokenizer"):
        GrammarCompiler(object(), [0])


def test_llguidance_is_not_imported_before_a_grammar_is_compiled() -> None:
    program = "import sys, mlx_paged.patches, mlx_paged.cli.generate; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_long_numbers_that_are_read_exactly_are_accepted(compiler: GrammarCompiler) -> None:
    given = [0.1, 0.30000000000000004, 2.2250738585e-313, 1e23, 12, 10**17]
    assert [number for _, number, _ in numbers({"enum": given}) if is_long(number)] == [given[1], *given[2:4], 10**17]
    compiler.compile(GrammarSource.json({"enum": given}))


NUM_TOKENS = 262


@cache
def letters_compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer._tokenizer, tokenizer.eos_token_ids)


def compiled(regex: str) -> CompiledGrammar:
    return letters_compiler().compile(GrammarSource.regex(regex))


def allowed(grammar: Grammar, num_tokens: int = NUM_TOKENS) -> set[int]:
    words = np.full(-(-num_tokens // 32), 0xDEADBEEF, np.uint32)
    grammar.mask(words)
    return {token for token in range(len(words) * 32) if words[token // 32] >> token % 32 & 1}


def test_answer_follows_its_grammar_and_then_ends() -> None:
    grammar = compiled("ab?").start()
    assert allowed(grammar) == {ord("a")}
    grammar.accept(ord("a"))
    assert allowed(grammar) == {ord("b"), EOS, EOT}
    grammar.accept(ord("b"))
    assert allowed(grammar) == {EOS, EOT}
    grammar.accept(EOT)
    assert allowed(grammar) == {EOS, EOT} and grammar.part is Part.ENDED
    grammar.accept(ord("z"))  # a batch is one step ahead, and its extra token is dropped
    assert allowed(grammar) == {EOS, EOT}


def test_states_of_one_grammar_are_independent() -> None:
    one = compiled("a|b")
    first, second = one.start(), one.start()
    first.accept(ord("a"))
    assert allowed(second) == {ord("a"), ord("b")}
    assert allowed(one.start()) == {ord("a"), ord("b")}


def test_forbidden_token_raises() -> None:
    with pytest.raises(GrammarError, match="the grammar does not allow token 122"):
        compiled("a").start().accept(ord("z"))
    with pytest.raises(GrammarError):
        compiled("ab").start().accept(EOS)


def test_grammar_may_begin_after_the_reasoning() -> None:
    grammar = compiled("a").begins_after((ord("#"), THINK_END)).start()
    everything = set(range(288)) - {EOS, EOT}
    assert allowed(grammar) == everything, "an answer does not end before it has begun"
    for token in (ord("x"), THINK_END, ord("#"), THINK_END):
        assert allowed(grammar) == everything and grammar.part is Part.BEFORE
        grammar.accept(token)
    assert allowed(grammar) == {ord("a")}


def test_a_grammar_may_describe_parts_of_an_answer() -> None:
    one = letters_compiler().compile(GrammarSource.regex("a"), trigger=(CALL,))
    grammar = one.start()
    for _ in range(2):
        assert allowed(grammar) == set(range(288))
        grammar.accept(ord("x"))
        grammar.accept(CALL)
        assert allowed(grammar) == {ord("a")}
        grammar.accept(ord("a"))
    assert grammar.part is Part.BETWEEN
    behind = one.begins_after((THINK_END,)).start()
    for token in (CALL, ord("z"), THINK_END, CALL):
        assert behind.part in (Part.BEFORE, Part.BETWEEN), "a call within the reasoning does not count"
        behind.accept(token)
    assert allowed(behind) == {ord("a")}


@pytest.mark.parametrize("answer", ["aab", "aa", "b", ""])
def test_tokens_may_be_taken_back(answer: str) -> None:
    grammar = compiled("a*bc").start()
    grammar.follow([ord(letter) for letter in "aabc"])
    assert allowed(grammar) == {EOS, EOT}
    grammar.follow([ord(letter) for letter in answer])
    again = compiled("a*bc").start()
    for letter in answer:
        again.accept(ord(letter))
    assert allowed(grammar) == allowed(again)


def test_a_model_may_have_more_tokens_than_its_tokenizer_or_fewer() -> None:
    grammar = compiled("a|<").start()
    assert allowed(grammar, 1000) == {ord("a"), ord("<")}
    assert allowed(grammar, 96) == {ord("<")}
    with pytest.raises(GrammarError, match="none of the model's tokens"):
        allowed(grammar, 32)


@pytest.mark.parametrize("vocab", [31, 32, 33, 320])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_masked_logits(vocab: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(vocab)
    logits = mx.array(rng.standard_normal((3, vocab)).astype(np.float32)).astype(dtype)
    words = rng.integers(0, 1 << 32, (3, -(-vocab // 32)), dtype=np.uint64).astype(np.uint32)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    result = masked(logits, mx.array(words))
    assert result.dtype == dtype and result.shape == (3, vocab)
    expected = np.where(bits, np.array(logits.astype(mx.float32)), -np.inf)
    assert np.array_equal(np.array(result.astype(mx.float32)), expected)


def test_processor_finds_its_answer_after_the_prompt() -> None:
    process = GrammarProcessor(compiled("ab"))
    logits = mx.zeros((1, 320))
    prompt = [5, 6, 7]
    for answer, expected in (("", "a"), ("a", "b"), ("", "a"), ("a", "b")):
        result = process(mx.array(prompt + [ord(letter) for letter in answer]), logits)
        assert np.flatnonzero(np.isfinite(np.array(result[0]))).tolist() == [ord(expected)]


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "array"}])
def test_json_allows_at_most_a_single_space(schema: dict[str, str]) -> None:
    in_lark = GrammarSource.lark(f"start: {json_in_lark(schema)}")
    for source in (GrammarSource.json(schema), in_lark):
        grammar = letters_compiler().compile(source).start()
        grammar.accept(ord("{" if schema["type"] == "object" else "["))
        assert ord(" ") in allowed(grammar) and not {ord(letter) for letter in "\n\t\r"} & allowed(grammar)
        grammar.accept(ord(" "))
        assert not {ord(letter) for letter in " \n\t\r"} & allowed(grammar)


@pytest.mark.parametrize("answer", ['say "no"', "two\nlines", "é\u2028/\\", "😀", "\x01", "a\x7fb", "%json {}"])
def test_choices_are_matched_literally(answer: str) -> None:
    grammar = letters_compiler().compile(GrammarSource.choice(["zzz", answer])).start()
    for byte in answer.encode():
        assert byte in allowed(grammar)
        grammar.accept(byte)
    assert allowed(grammar) == {EOS, EOT}


def test_an_answer_may_be_one_of_ten_thousand() -> None:
    answers = [f"label {number}" for number in range(10_000)]
    grammar = letters_compiler().compile(GrammarSource.choice(answers)).start()
    for byte in answers[-1].encode():
        assert byte in allowed(grammar)
        grammar.accept(byte)
    assert allowed(grammar) == {EOS, EOT}


@pytest.mark.parametrize("rules", ['start: s\ns: s s | "a" |', 'start: a\na: a a a | a a | "a" | "y" | a "z"'])
def test_ambiguous_grammar_fails_before_its_masks_take_long(rules: str) -> None:
    grammar = letters_compiler().compile(GrammarSource.lark(rules)).start()
    with pytest.raises(GrammarError, match="the grammar takes too much work: "):
        for _ in range(400):
            allowed(grammar)
            grammar.accept(ord("a"))


def test_an_object_may_have_hundreds_of_optional_properties() -> None:
    schema = {"type": "object", "properties": {f"key_{i}": {"type": "integer"} for i in range(400)}}
    grammar = letters_compiler().compile(GrammarSource.json(schema)).start()
    for byte in b'{"key_0":1,"key_399":2}':
        assert byte in allowed(grammar)
        grammar.accept(byte)


def test_json_of_a_schema_parses() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, "x"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    rng = np.random.default_rng(0)
    for _ in range(20):
        grammar, text = letters_compiler().compile(GrammarSource.json(schema)).start(), bytearray()
        while not allowed(grammar) <= {EOS, EOT}:
            token = int(rng.choice(sorted(allowed(grammar))))
            text.append(token)
            grammar.accept(token)
        assert json.loads(text)["a"] in (1, "x")


BEGIN, END = (ord("<"), ord("t")), (ord("<"), ord("/"))


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("is_constrained", [True, False])
def test_reasoning_ends_at_its_budget(is_open: bool, is_constrained: bool) -> None:
    grammar = replace(compiled("ab"), after=END) if is_constrained else CompiledGrammar(None, 0, [EOS, EOT])
    budget = ThinkingBudget(2, BEGIN, END, is_open)
    state = replace(grammar, thinking=budget).start()
    before = [] if is_open else [*b"x", *BEGIN]
    for token in [*before, *b"so"]:
        assert len(allowed(state)) > 200
        state.accept(token)
    for token in END:
        assert allowed(state) == {token}
        state.accept(token)
    assert allowed(state) == {ord("a")} if is_constrained else len(allowed(state)) > 200
    again = replace(grammar, thinking=budget).start()
    again.follow([*before, *b"s<"])  # a partly written end counts
    assert allowed(again) == {END[1]}
    again.follow([*before, *b"s"])
    assert len(allowed(again)) > 200


def test_a_thinking_budget_of_0_ends_reasoning_at_once() -> None:
    none = CompiledGrammar(None, 0, [EOS], thinking=ThinkingBudget(0, BEGIN, END, True)).start()
    assert allowed(none) == {END[0]}
    short = CompiledGrammar(None, 0, [EOS], thinking=ThinkingBudget(9, BEGIN, END, True)).start()
    for token in [*b"a", *END, *b"much more than nine tokens of an answer"]:
        assert len(allowed(short)) > 200
        short.accept(token)


ENDLESS = GrammarSource.json({"type": "integer", "multipleOf": 16777216})
FINE = GrammarSource.regex("[a-z]+")


@pytest.fixture
def slow_compiler(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    monkeypatch.setattr(check, "TRIAL_SECONDS", 0.5)
    return make()


def num_started(slow_compiler: GrammarCompiler) -> int:
    return sum(process.num_started for process in slow_compiler.trials._idle)


TOO_LONG = [
    ENDLESS,
    GrammarSource.json({"properties": {"a": {"type": "integer", "multipleOf": 2147483648}}}),
    GrammarSource.regex("a?" * 60_000),
]


@pytest.mark.parametrize(
    "source", quick(TOO_LONG, ENDLESS, single=True), ids=lambda source: f"{source.kind}-{source.text[:20]}"
)
def test_slow_grammar_is_refused_and_not_tried_again(slow_compiler: GrammarCompiler, source: GrammarSource) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"takes more than 0\.5 s to compile"):
            slow_compiler.compile(source)
    assert num_started(slow_compiler) == 1
    slow_compiler.compile(FINE)
    assert num_started(slow_compiler) == 2


def test_grammar_that_takes_much_memory_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TRIAL_BYTES", 80 << 20)  # the stack takes 64 MB
    monkeypatch.setattr(check, "TRIAL_SECONDS", 60.0)
    slow_compiler = make()
    with pytest.raises(GrammarError, match=r"needs more than 0\.078125 GB of memory"):
        slow_compiler.compile(ENDLESS)
    slow_compiler.compile(GrammarSource.regex("a"))


def test_grammar_that_crashes_llguidance_is_refused(
    slow_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash = GrammarSource.json({"const": -(2**63)})
    for name in ("mlx_paged.grammar.compiler.fault_of_size",):
        monkeypatch.setattr(name, lambda kind, text: "")  # or it would be refused earlier
    with pytest.raises(GrammarError, match="needs more than 1 GB of memory, or too much stack, to compile"):
        slow_compiler.compile(crash)
    slow_compiler.compile(FINE)
    assert num_started(slow_compiler) == 2


def test_trial_process_is_started_on_demand_and_reused() -> None:
    slow_compiler = make()
    assert num_started(slow_compiler) == 0
    for number in range(20):
        slow_compiler.compile(GrammarSource.regex(f"{number}"))
    assert num_started(slow_compiler) == 1


def test_trial_process_that_has_grown_is_not_reused() -> None:
    slow_compiler = make()
    slow_compiler.compile(GrammarSource.json({"enum": [f"v{i}" for i in range(20_000)]}))
    slow_compiler.compile(FINE)
    assert num_started(slow_compiler) == 2


def test_grammar_checked_elsewhere_is_not_tried_again() -> None:
    slow_compiler = make()
    slow_compiler.compile(FINE, is_checked=True)
    assert num_started(slow_compiler) == 0


def test_number_of_verdicts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_compiler = make()
    monkeypatch.setattr(slow_compiler.trials, "try_out", lambda kind, text, is_cancelled: Verdict("no"))
    for number in range(MAX_VERDICTS + 10):
        with pytest.raises(GrammarError, match="no"):
            slow_compiler.check(GrammarSource.regex(f"{number}"))
    assert len(slow_compiler._verdicts) == MAX_VERDICTS


class Client:
    """A client that compiles in its own thread until it leaves."""

    def __init__(self, slow_compiler: GrammarCompiler, source: GrammarSource) -> None:
        self.has_gone, self.is_asked = threading.Event(), threading.Event()
        self.raised: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(slow_compiler.compile, source))
        self.thread.start()

    def _run(self, compile_it: Callable[..., object], source: GrammarSource) -> None:
        try:
            compile_it(source, is_cancelled=self._is_cancelled)
        except BaseException as error:
            self.raised.append(error)

    def _is_cancelled(self) -> bool:
        self.is_asked.set()
        return self.has_gone.is_set()

    def leave(self) -> None:
        self.has_gone.set()
        self.thread.join(60)
        (error,) = self.raised
        assert isinstance(error, GrammarAbandoned)


def test_slow_trial_blocks_nobody_and_ends_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TRIAL_SECONDS", 600.0)
    slow_compiler = make()
    processes = list(slow_compiler.trials._idle)
    one = Client(slow_compiler, ENDLESS)
    assert one.is_asked.wait(60)
    for number in range(5):
        slow_compiler.compile(GrammarSource.regex(f"{number}"))
    assert one.thread.is_alive() and not one.raised
    two = Client(slow_compiler, GrammarSource.json({"type": "integer", "multipleOf": 16777218}))
    three = Client(slow_compiler, GrammarSource.regex("new"))  # waits until its client leaves
    assert two.is_asked.wait(60) and three.is_asked.wait(60)
    slow_compiler.compile(GrammarSource.regex("3"))  # which was compiled before
    three.leave()
    two.leave()
    one.leave()
    assert [process._process.poll() for process in processes if process._process] == [-9, -9]
    slow_compiler.compile(FINE)


def test_concurrent_requests_for_one_grammar_share_a_trial(slow_compiler: GrammarCompiler) -> None:
    clients = [Client(slow_compiler, ENDLESS) for _ in range(16)]
    for client in clients:
        client.thread.join(60)
        (error,) = client.raised
        assert "takes more than" in str(error)
    assert num_started(slow_compiler) == 1


def test_killed_trial_process_is_restarted(slow_compiler: GrammarCompiler) -> None:
    slow_compiler.compile(FINE)
    (process,) = [process for process in slow_compiler.trials._idle if process._process is not None]
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    slow_compiler.compile(GrammarSource.regex("b"))


def test_trial_runs_no_code_of_the_current_folder_or_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "llguidance", "sitecustomize", "usercustomize", "signal"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    slow_compiler = make()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    slow_compiler.compile(FINE)
    assert num_started(slow_compiler) == 1 and not (tmp_path / "ran").exists()


def test_trial_process_ends_with_its_owner() -> None:
    def use() -> tuple[weakref.ref[TrialProcess], Callable[[], int | None]]:
        slow_compiler = make()
        slow_compiler.compile(FINE)
        (owner,) = [process for process in slow_compiler.trials._idle if process._process is not None]
        assert owner._process is not None
        return weakref.ref(owner), owner._process.poll

    with without_collector():
        owner, status = use()
        assert owner() is None and status() is not None


def test_exhausted_lexer_is_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.LIMITS, "max_lexer_states", 500)
    source, slow_compiler = GrammarSource.regex("(.*a.{12})+"), make()

    def use_up() -> None:
        letters, grammar = random.Random(0), slow_compiler.compile(source).start()
        for _ in range(2000):
            grammar.accept(ord(letters.choice("ab")))

    for _ in range(3):  # each time it is fresh at first
        with pytest.raises(GrammarError, match="too much work: lexer error: too many states"):
            use_up()


def test_time_limit_allows_for_a_busy_machine() -> None:
    assert module.WALL_FACTOR * check.TRIAL_SECONDS >= 30, "a busy machine does not make grammars fail"
