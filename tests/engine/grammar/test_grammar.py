"""Grammar: what an answer may go on with is a function of its tokens, in every part of it."""

import json
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.engine.grammar.compiler import GrammarCompiler, GrammarSource, json_in_lark
from mlx_paged.engine.grammar.grammar import CompiledGrammar, Grammar, GrammarProcessor, Part, ThinkingBudget, masked
from mlx_paged.errors import GrammarError
from tests.support.models.tokenizers import CALL, EOS, EOT, THINK_END, byte_tokenizer

NUM_TOKENS = 262


@cache
def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer._tokenizer, tokenizer.eos_token_ids)


def compiled(regex: str) -> CompiledGrammar:
    return compiler().compile(GrammarSource.regex(regex))


def allowed(grammar: Grammar, num_tokens: int = NUM_TOKENS) -> set[int]:
    words = np.full(-(-num_tokens // 32), 0xDEADBEEF, np.uint32)
    grammar.mask(words)
    return {token for token in range(len(words) * 32) if words[token // 32] >> token % 32 & 1}


def test_an_answer_goes_on_as_its_grammar_says_and_then_ends() -> None:
    grammar = compiled("ab?").start()
    assert allowed(grammar) == {ord("a")} and not grammar.is_finished
    grammar.accept(ord("a"))
    assert allowed(grammar) == {ord("b"), EOS, EOT} and not grammar.is_finished
    grammar.accept(ord("b"))
    assert allowed(grammar) == {EOS, EOT} and grammar.is_finished
    grammar.accept(EOT)
    assert allowed(grammar) == {EOS, EOT} and grammar.is_finished and grammar.part is Part.ENDED
    grammar.accept(ord("z"))  # a batch is a step ahead, and what comes of that is dropped
    assert allowed(grammar) == {EOS, EOT}


def test_states_of_one_grammar_do_not_know_each_other() -> None:
    one = compiled("a|b")
    first, second = one.start(), one.start()
    first.accept(ord("a"))
    assert allowed(second) == {ord("a"), ord("b")}
    assert allowed(one.start()) == {ord("a"), ord("b")}


def test_what_is_not_allowed_is_an_error() -> None:
    with pytest.raises(GrammarError, match="token 122 is not what the grammar allows"):
        compiled("a").start().accept(ord("z"))
    with pytest.raises(GrammarError):
        compiled("ab").start().accept(EOS)


def test_a_grammar_may_begin_behind_the_reasoning() -> None:
    grammar = compiled("a").begins_after((ord("#"), THINK_END)).start()
    everything = set(range(288)) - {EOS, EOT}
    assert allowed(grammar) == everything, "an answer does not end before it has begun"
    for token in (ord("x"), THINK_END, ord("#"), THINK_END):
        assert allowed(grammar) == everything and grammar.part is Part.BEFORE
        grammar.accept(token)
    assert allowed(grammar) == {ord("a")}


def test_a_grammar_may_describe_parts_of_an_answer() -> None:
    one = compiler().compile(GrammarSource.regex("a"), trigger=CALL)
    grammar = one.start()
    for _ in range(2):
        assert allowed(grammar) == set(range(288))
        grammar.accept(ord("x"))
        grammar.accept(CALL)
        assert allowed(grammar) == {ord("a")}
        grammar.accept(ord("a"))
    assert grammar.part is Part.BETWEEN and not grammar.is_finished
    behind = one.begins_after((THINK_END,)).start()
    for token in (CALL, ord("z"), THINK_END, CALL):
        assert behind.part in (Part.BEFORE, Part.BETWEEN), "a call within the reasoning is none"
        behind.accept(token)
    assert allowed(behind) == {ord("a")}


@pytest.mark.parametrize("answer", ["aab", "aa", "b", ""])
def test_tokens_may_be_taken_back(answer: str) -> None:
    grammar = compiled("a*bc").start()
    grammar.follow([ord(letter) for letter in "aabc"])
    assert grammar.is_finished
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


def test_a_processor_finds_its_answer_behind_the_prompt() -> None:
    process = GrammarProcessor(compiled("ab"))
    logits = mx.zeros((1, 320))
    prompt = [5, 6, 7]
    for answer, expected in (("", "a"), ("a", "b"), ("", "a"), ("a", "b")):
        result = process(mx.array(prompt + [ord(letter) for letter in answer]), logits)
        assert np.flatnonzero(np.isfinite(np.array(result[0]))).tolist() == [ord(expected)]


@pytest.mark.parametrize("schema", [{"type": "object"}, {"type": "array"}])
def test_json_has_a_single_space_at_most(schema: dict[str, str]) -> None:
    in_lark = GrammarSource.lark(f"start: {json_in_lark(schema)}")
    for source in (GrammarSource.json(schema), in_lark):
        grammar = compiler().compile(source).start()
        grammar.accept(ord("{" if schema["type"] == "object" else "["))
        assert ord(" ") in allowed(grammar) and not {ord(letter) for letter in "\n\t\r"} & allowed(grammar)
        grammar.accept(ord(" "))
        assert not {ord(letter) for letter in " \n\t\r"} & allowed(grammar)


@pytest.mark.parametrize("answer", ['say "no"', "two\nlines", "é\u2028/\\", "😀", "\x01", "a\x7fb", "%json {}"])
def test_choices_are_taken_by_the_letter(answer: str) -> None:
    grammar = compiler().compile(GrammarSource.choice(["zzz", answer])).start()
    for byte in answer.encode():
        assert byte in allowed(grammar)
        grammar.accept(byte)
    assert allowed(grammar) == {EOS, EOT}


def test_an_answer_may_be_one_of_ten_thousand() -> None:
    answers = [f"label {number}" for number in range(10_000)]
    grammar = compiler().compile(GrammarSource.choice(answers)).start()
    for byte in answers[-1].encode():
        assert byte in allowed(grammar)
        grammar.accept(byte)
    assert allowed(grammar) == {EOS, EOT}


@pytest.mark.parametrize("rules", ['start: s\ns: s s | "a" |', 'start: a\na: a a a | a a | "a" | "y" | a "z"'])
def test_an_ambiguous_grammar_ends_before_its_masks_take_long(rules: str) -> None:
    grammar = compiler().compile(GrammarSource.lark(rules)).start()
    with pytest.raises(GrammarError, match="more work for a token than is allowed"):
        for _ in range(400):
            allowed(grammar)
            grammar.accept(ord("a"))


def test_an_object_may_have_hundreds_of_optional_properties() -> None:
    schema = {"type": "object", "properties": {f"key_{i}": {"type": "integer"} for i in range(400)}}
    grammar = compiler().compile(GrammarSource.json(schema)).start()
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
        grammar, text = compiler().compile(GrammarSource.json(schema)).start(), bytearray()
        while not grammar.is_finished:
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
    again.follow([*before, *b"s<"])  # what was being written of the end counts
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
