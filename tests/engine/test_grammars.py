"""Grammars: bounded, compiled, and constraining an answer token by token."""

import json
import random
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.constraint import GrammarProcessor, masked
from mlx_paged.errors import GrammarError
from mlx_paged.grammar.compiler import (
    LIMITS,
    MAX_KEPT,
    MAX_KEPT_CHARACTERS,
    GrammarCompiler,
    GrammarSource,
    fault_of,
    json_in_lark,
    on_stack,
)
from mlx_paged.grammar.grammar import CompiledGrammar, Grammar, Part, ThinkingBudget
from tests.support.cases import quick
from tests.support.models.tokenizers import CALL, EOS, EOT, THINK_END, byte_tokenizer
from tests.support.without_collector import without_collector


def make() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer._tokenizer, tokenizer.eos_token_ids)


common = cache(make)


BROKEN: list[tuple[Any, str]] = [
    ({"type": "strin"}, "Invalid type"),
    ({"properties": {"a/b~": {"pattern": "("}}}, "regex parse error"),
    ({"anyOf": [{"type": "string"}, {"not": {}}]}, "Unimplemented keys"),
    ({"properties": {"a": {"$ref": "#/nope"}}}, "Pointer '/nope' does not exist"),
    ({"$ref": "http://127.0.0.1:9/schema"}, "does not fetch"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "Unsatisfiable"),
    ({"$ref": "#"}, "no answer can satisfy it"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "Unimplemented keys"),
    ({"const": -(2**63)}, "integers must be at least -4611686018427387904, got -9223372036854775808"),
    ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "integers must be at least"),
    ({"type": "integer", "multipleOf": 16777216}, "multipleOf takes 16,777,216 states; the limit is 20,000"),
    ({"anyOf": [{"type": "integer", "multipleOf": 9973 + i} for i in range(3)]}, "multipleOf takes"),
    ({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83, 79)]}, "multipleOf takes 56,606,581"),
    ({"items": {"pattern": "a?" * 6000}}, "6,000 repetitions; the limit is 5,000"),
    ({"patternProperties": {"a?" * 3000: {}, "b?" * 3000: {}}}, "6,000 repetitions"),
]


@pytest.mark.parametrize("schema, message", BROKEN)
def test_unusable_schema_is_refused_with_a_reason(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        common().compile(GrammarSource.json(schema))
    with pytest.raises(GrammarError):
        common().compile(GrammarSource("lark", f"start: {json_in_lark(schema)}"))


@pytest.mark.parametrize("number", [0.01, 2.5, 100, 1_000_000, 60, -7])
def test_usual_multiples_are_accepted(number: float) -> None:
    assert fault_of("json", json.dumps({"properties": {f"p{i}": {"multipleOf": number} for i in range(50)}})) == ""


@pytest.mark.parametrize(
    "source, message",
    [
        (GrammarSource("regex", "("), "unclosed group"),
        (GrammarSource("regex", "(?<=a)b"), "look-around"),
        (GrammarSource("lark", "start: x"), r"at 1\(8\): unknown name"),
        (GrammarSource("lark", "begin: x"), "no start rule"),
        (GrammarSource("lark", "start: start"), "no answer"),
        (GrammarSource("lark", ""), "Empty"),
    ],
)
def test_unusable_expression_is_refused_with_a_reason(source: GrammarSource, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        common().compile(source)


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
    GrammarSource("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3900)) + '\nr3900: "a"'),
    GrammarSource("lark", "start: r0\n" + "\n".join(f'r{i}: "k{i}" r{i + 1}?' for i in range(3900)) + '\nr3900: "a"'),
    GrammarSource("lark", "\n".join(["start: r0"] * 4002)),
    GrammarSource.choice(["\ud800"]),
    GrammarSource("regex", "(" * 100_000 + "a" + ")" * 100_000),
    GrammarSource("regex", "(a|b)*" * 5000),
    GrammarSource("regex", "(a|b)*a(a|b){100000}"),
    GrammarSource("lark", "start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
    GrammarSource("lark", "start: " + "%lark { " * 3000 + 'start: "a"' + "}" * 3000),
    GrammarSource("lark", 'start: s\ns: s s | "a" |'),
    GrammarSource("regex", "a" * (1 << 18) + "a"),
    GrammarSource("regex", "a?" * 60_000),
    GrammarSource("regex", "(a|b|c)*" * 5000),
    GrammarSource("regex", "(a{0,300}){0,300}"),
    GrammarSource("regex", "(.*a.{300})+"),
    GrammarSource("lark", "start: " + "%lark { " * 100 + 'start: "a"' + "}" * 100),
    GrammarSource("lark", 'start: ("a"~0..1000)~0..1000'),
    GrammarSource("lark", "start: %json " + '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000),
    GrammarSource.json({"type": "integer", "multipleOf": 20_000 - 1}),
    GrammarSource.json({"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(3000)]}),
]
QUICKLY_REFUSED = [source for source in HOSTILE[::3] if "$defs" not in source.text]


@pytest.mark.parametrize(
    "source", quick(HOSTILE, *QUICKLY_REFUSED, single=True), ids=lambda source: f"{source.kind}-{source.text[:20]}"
)
def test_hostile_grammars_do_not_crash_the_process(source: GrammarSource) -> None:
    """Masks are computed, and matchers freed, on a stack that is smaller than that of any thread which does so."""

    def answer() -> None:
        grammar = common().compile(source).start()
        for token in b"aaaa":
            allowed(grammar)
            grammar.accept(token)

    try:
        on_stack(1 << 19, answer)
    except GrammarError as error:
        assert str(error)


def test_recently_used_grammars_are_cached_up_to_a_number_of_characters() -> None:
    compiler = make()
    first = GrammarSource("regex", "first")
    kept = compiler.compile(first).matcher
    for number in range(MAX_KEPT - 1):
        compiler.compile(GrammarSource("regex", f"x{number}"))
    assert compiler.compile(first).matcher is kept
    for number in range(MAX_KEPT):
        compiler.compile(GrammarSource("regex", f"y{number}"))
    assert compiler.compile(first).matcher is not kept and len(compiler._kept) == MAX_KEPT
    for number in range(6):  # some 250,000 each
        compiler.compile(GrammarSource.json({"enum": [f"v{i} {number}" for i in range(17_000)]}))
    assert 0 < sum(len(each.text) for each in compiler._kept) <= MAX_KEPT_CHARACTERS


def test_many_threads_can_compile_grammars() -> None:
    compiler = make()

    def work(number: int) -> None:
        for i in range(10):
            grammar = compiler.compile(GrammarSource.json({"enum": [f"{i % 3}", number % 2]})).start()
            grammar.accept(ord('"'))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [None] * 4
    assert len(compiler._kept) == 6


def test_compiler_and_grammars_are_freed_without_the_collector() -> None:
    def use() -> list[weakref.ref[object]]:
        compiler = make()
        compiled = compiler.compile(GrammarSource("regex", "a"))
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


NUM_TOKENS = 262


def compiled(regex: str) -> CompiledGrammar:
    return common().compile(GrammarSource("regex", regex))


def allowed(grammar: Grammar, num_tokens: int = NUM_TOKENS) -> set[int]:
    words = np.full(-(-num_tokens // 32), 0xDEADBEEF, np.uint32)
    grammar.mask(words)
    return {token for token in range(len(words) * 32) if words[token // 32] >> token % 32 & 1}


def test_answer_follows_its_grammar_and_then_ends() -> None:
    one = compiled("ab?")
    grammar = one.start()
    with pytest.raises(GrammarError, match="the grammar does not allow token 122"):
        one.start().accept(ord("z"))
    with pytest.raises(GrammarError):
        one.start().accept(EOS)
    assert allowed(grammar) == {ord("a")}
    grammar.accept(ord("a"))
    assert allowed(grammar) == {ord("b"), EOS, EOT}
    assert allowed(one.start()) == {ord("a")}, "states of one grammar are independent"
    grammar.accept(ord("b"))
    assert allowed(grammar) == {EOS, EOT}
    grammar.accept(EOT)
    assert allowed(grammar) == {EOS, EOT} and grammar.part is Part.ENDED
    grammar.accept(ord("z"))  # a batch is one step ahead, and its extra token is dropped
    assert allowed(grammar) == {EOS, EOT}


def test_grammar_may_begin_after_the_reasoning() -> None:
    grammar = compiled("a").begins_after((ord("#"), THINK_END)).start()
    everything = set(range(288)) - {EOS, EOT}
    assert allowed(grammar) == everything, "an answer does not end before it has begun"
    for token in (ord("x"), THINK_END, ord("#"), THINK_END):
        assert allowed(grammar) == everything and grammar.part is Part.BEFORE
        grammar.accept(token)
    assert allowed(grammar) == {ord("a")}


def test_a_grammar_may_describe_parts_of_an_answer() -> None:
    one = common().compile(GrammarSource("regex", "a"), trigger=(CALL,))
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
    in_lark = GrammarSource("lark", f"start: {json_in_lark(schema)}")
    for source in (GrammarSource.json(schema), in_lark):
        grammar = common().compile(source).start()
        grammar.accept(ord("{" if schema["type"] == "object" else "["))
        assert ord(" ") in allowed(grammar) and not {ord(letter) for letter in "\n\t\r"} & allowed(grammar)
        grammar.accept(ord(" "))
        assert not {ord(letter) for letter in " \n\t\r"} & allowed(grammar)


ACCEPTED: list[tuple[str, GrammarSource]] = [
    *(
        (answer, GrammarSource.choice(["zzz", answer]))
        for answer in ('say "no"', "two\nlines", "é\u2028/\\", "😀", "\x01", "a\x7fb", "%json {}")
    ),
    ("label 9999", GrammarSource.choice([f"label {number}" for number in range(10_000)])),
    (
        '{"key_0":1,"key_399":2}',
        GrammarSource.json({"properties": {f"key_{i}": {"type": "integer"} for i in range(400)}, "type": "object"}),
    ),
]


@pytest.mark.parametrize(("answer", "source"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_literal_choices_and_large_grammars_are_accepted(answer: str, source: GrammarSource) -> None:
    grammar = common().compile(source).start()
    for byte in answer.encode():
        assert byte in allowed(grammar)
        grammar.accept(byte)
    assert EOS in allowed(grammar)


@pytest.mark.parametrize("rules", ['start: s\ns: s s | "a" |', 'start: a\na: a a a | a a | "a" | "y" | a "z"'])
def test_ambiguous_grammar_fails_before_its_masks_take_long(rules: str) -> None:
    grammar = common().compile(GrammarSource("lark", rules)).start()
    with pytest.raises(GrammarError, match="the grammar takes too much work: "):
        for _ in range(400):
            allowed(grammar)
            grammar.accept(ord("a"))


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


def test_exhausted_lexer_is_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "max_lexer_states", 500)
    source, compiler = GrammarSource("regex", "(.*a.{12})+"), make()

    def use_up() -> None:
        letters, grammar = random.Random(0), compiler.compile(source).start()
        for _ in range(2000):
            grammar.accept(ord(letters.choice("ab")))

    for _ in range(3):  # each time it is fresh at first
        with pytest.raises(GrammarError, match="too much work: lexer error: too many states"):
            use_up()
