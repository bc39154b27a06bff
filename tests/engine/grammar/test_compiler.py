"""GrammarCompiler: what cannot be used is refused, and says where; nothing a client sends takes long or grows."""

import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from mlx_paged.engine.grammar import compiler as module
from mlx_paged.engine.grammar.check import is_long, numbers
from mlx_paged.engine.grammar.compiler import MAX_KEPT, GrammarCompiler, GrammarSource
from mlx_paged.errors import GrammarError
from tests.support.cases import quick
from tests.support.models.tokenizers import byte_tokenizer
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
    ({"$ref": "#"}, "#: there is no answer that it allows"),
    ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "#/properties/a: Unimplemented"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "#: Unimplemented keys"),
]


LONG = -936044455.8565181  # llguidance 1.9 reads it as ...518
BROKEN += [
    ({"const": LONG}, "#/const: -936044455.8565181 has more digits than would be kept"),
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
    ({"const": -(2**63)}, "#/const: integers may not be below -4611686018427387904, got -9223372036854775808"),
    ({"enum": [0, -(2**63) + 1]}, "#/enum/1: integers may not be below"),
    ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "#/minimum: integers may not be below"),
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
def test_numbers_that_are_kept_are_taken(compiler: GrammarCompiler, schema: Any) -> None:
    compiler.compile(GrammarSource.json(schema))


@pytest.mark.parametrize("schema, message", BROKEN)
def test_a_schema_that_cannot_be_used_says_where(compiler: GrammarCompiler, schema: Any, message: str) -> None:
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
def test_an_expression_that_cannot_be_used_says_why(
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


@pytest.mark.parametrize(
    "source", quick(HOSTILE, *HOSTILE[::3], single=True), ids=lambda source: f"{source.kind}-{source.text[:20]}"
)
def test_nothing_takes_the_process_down(compiler: GrammarCompiler, source: GrammarSource) -> None:
    try:
        grammar = compiler.compile(source).start()
        for token in b"aaaa":
            grammar.accept(token)
    except GrammarError as error:
        assert str(error)


def test_grammars_are_kept_while_they_are_asked_for() -> None:
    compiler = make()
    first = GrammarSource.regex("first")
    kept = compiler.compile(first).matcher
    for number in range(MAX_KEPT - 1):
        compiler.compile(GrammarSource.regex(f"x{number}"))
    assert compiler.compile(first).matcher is kept
    for number in range(MAX_KEPT):
        compiler.compile(GrammarSource.regex(f"y{number}"))
    assert compiler.compile(first).matcher is not kept and len(compiler._kept) == MAX_KEPT


def test_large_grammars_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make()
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 40 << 20)
    for number in range(4):  # some 10 MB each
        compiler.compile(GrammarSource.json({"enum": [f"v{i} {number}" for i in range(15_000)]}))
    sizes = [num_bytes for _, num_bytes in compiler._kept.values()]
    assert 0 < sum(sizes) <= 40 << 20 and min(sizes) > 1 << 20


def test_a_grammar_that_takes_much_memory_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="MB when it is compiled, of at most 64"):
        compiler.compile(GrammarSource.json({"type": "integer", "multipleOf": 250007}))


def test_many_threads_compile() -> None:
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


def test_it_goes_with_its_owner() -> None:
    def use() -> list[weakref.ref[object]]:
        compiler = make()
        compiled = compiler.compile(GrammarSource.regex("a"))
        return [weakref.ref(each) for each in (compiler, compiled, compiled.start())]

    with without_collector():
        assert [each() for each in use()] == [None] * 3


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarError, match="pip install llguidance"):
        make()


def test_a_tokenizer_that_is_none_of_the_fast_ones_is_refused() -> None:
    with pytest.raises(GrammarError, match="cannot be constrained"):
        GrammarCompiler(object(), [0])


def test_nothing_is_imported_before_a_grammar_is_compiled() -> None:
    program = "import sys, mlx_paged.patches, mlx_paged.cli.generate; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_long_numbers_that_are_read_right_are_taken(compiler: GrammarCompiler) -> None:
    given = [0.1, 0.30000000000000004, 2.2250738585e-313, 1e23, 12, 10**17]
    assert [number for _, number, _ in numbers({"enum": given}) if is_long(number)] == [given[1], *given[2:4], 10**17]
    compiler.compile(GrammarSource.json({"enum": given}))
