"""Grammars under mlx-lm: made from its tokenizers, and in batches of requests with and without grammars."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import StopSequences, generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tool_parsers import qwen3_coder

import mlx_paged
from mlx_paged.config import PagedConfig
from mlx_paged.engine.constraint import GrammarProcessor
from mlx_paged.engine.decode_batch import DecodeBatch
from mlx_paged.engine.request import RequestOptions
from mlx_paged.errors import GrammarError, RequestFailedError
from mlx_paged.grammar.compiler import GrammarCompiler, GrammarSource
from mlx_paged.grammar.grammar import CompiledGrammar, Grammar, Part
from mlx_paged.patches.generate.upstream import UPSTREAM
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.grammars import (
    TokenizerGrammars,
    ends_in_reasoning,
)
from tests.support.cases import quick, slow
from tests.support.constraints import constraint_of
from tests.support.models.batch_runs import assert_released, generator, kv_budget
from tests.support.models.builders import KINDS, build, greedy, perturbed, prompt_of
from tests.support.models.tokenizers import CALL, CALL_END, EOS, EOT, THINK, THINK_END, byte_tokenizer

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
    | {"additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", None, True]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"s": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}}}
    | {"required": ["s", "b"], "additionalProperties": False},
    {"enum": ["left", "right", 7]},
]
ENDS = StopSequences([(EOS,), (EOT,)])
NUM_TOKENS = 100


@cache
def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer._tokenizer, tokenizer.eos_token_ids)


@cache
def grammar(index: int) -> CompiledGrammar:
    return compiler().compile(GrammarSource.json(SCHEMAS[index]))


class Run:
    """Requests in a generator. Every answer that has a grammar ends with EOS or after ``NUM_TOKENS``."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.gen = generator(model, sampler=options.pop("sampler", None) or make_sampler(0.0), **options)
        self.answers: dict[int, list[int]] = {}
        self.reasons: dict[int, str | None] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.failures: dict[int, RequestFailedError] = {}

    def insert(self, prompt: Any, num_tokens: int, compiled: CompiledGrammar | None = None, **options: Any) -> int:
        (uid,) = self.gen.insert_segments(
            [[prompt.tolist()]],
            [num_tokens],
            stop_sequences=[ENDS if compiled is not None else StopSequences([])],
            options=[RequestOptions(grammar=compiled)],
            **options,
        )
        self.answers[uid], self.logprobs[uid] = [], []
        return uid

    def step(self) -> bool:
        try:
            prompts, generated = self.gen.next()
        except RequestFailedError as error:
            self.failures[error.uid] = error
            return True
        for response in generated:
            self.answers[response.uid].append(response.token)
            self.reasons[response.uid] = response.finish_reason
            self.logprobs[response.uid].append(response.logprobs)
        return bool(prompts or generated)

    def run(self) -> None:
        while self.step():
            pass

    def check(self, uid: int, schema: dict[str, Any]) -> None:
        answer = self.answers[uid]
        assert self.reasons[uid] == "stop" and answer[-1] in (EOS, EOT) and max(answer[:-1]) < 256
        jsonschema.validate(json.loads(bytes(answer[:-1])), schema)


def until_the_end(steps: Iterator[Any]) -> list[int]:
    """Return the tokens of one of mlx-lm's runs up to the first that ends an answer."""
    found = []
    for token, *_ in steps:
        found.append(int(token))
        if token in (EOS, EOT):
            break
    return found


def alone(model: Any, prompt: mx.array, index: int) -> list[int]:
    """Return stock mlx-lm's answer in a grammar."""
    processors = [GrammarProcessor(grammar(index))]
    return until_the_end(generate_step(prompt, model, max_tokens=NUM_TOKENS, logits_processors=processors))


@pytest.mark.parametrize("kind", quick(KINDS, "llama"))
def test_rows_with_grammars_do_not_affect_rows_without(kind: str, no_fall_through: None) -> None:
    model = build(kind)
    free = [prompt_of(length, seed=length) for length in (3, 17, 40)]
    expected = [greedy(model, prompt, 24)[0] for prompt in free]
    mlx_paged.apply_patches()
    run = Run(model)
    constrained, others = [], []
    for index in range(4):
        constrained.append(run.insert(prompt_of(5 + 9 * index, seed=index), NUM_TOKENS, grammar(index)))
        if index < 3:
            others.append(run.insert(free[index], 24))
        run.step()
    run.run()
    for uid, tokens in zip(others, expected, strict=True):
        assert run.answers[uid] == tokens, "rows with grammars do not affect it"
    for index, uid in enumerate(constrained):
        run.check(uid, SCHEMAS[index])


@pytest.mark.parametrize("row_by_row", [False, True])
def test_batch_gives_the_constrained_answer_of_a_solo_run(row_by_row: bool) -> None:
    model, prompts = build("llama"), [prompt_of(12, seed=index) for index in range(4)]
    expected = [alone(model, prompt, index) for index, prompt in enumerate(prompts)]
    mlx_paged.apply_patches()
    run = Run(model)
    if row_by_row:
        run.gen._engine.batch = DecodeBatch(model, UPSTREAM, takes_rows=False)
    uids = [run.insert(prompt, NUM_TOKENS, grammar(index)) for index, prompt in enumerate(prompts)]
    run.run()
    assert [run.answers[uid] for uid in uids] == expected
    for index, uid in enumerate(uids):
        run.check(uid, SCHEMAS[index])


def test_samplers_and_processors_choose_only_allowed_tokens() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    mx.random.seed(3)
    run = Run(model, sampler=make_sampler(1.5, top_p=0.9))

    def prefers_what_is_not_allowed(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + 50 * (mx.arange(logits.shape[-1]) == ord("!"))

    uids = [
        run.insert(
            prompt_of(8, seed=seed), NUM_TOKENS, grammar(seed % 4), logits_processors=[[prefers_what_is_not_allowed]]
        )
        for seed in range(12)
    ]
    run.run()
    for seed, uid in enumerate(uids):
        run.check(uid, SCHEMAS[seed % 4])
        for logprobs in run.logprobs[uid]:
            assert not mx.any(mx.isnan(logprobs)).item()
            assert abs(mx.sum(mx.exp(logprobs)).item() - 1) < 1e-4, "normalised over the allowed tokens"


@pytest.mark.parametrize("seed", quick(range(3), 0))
def test_preempted_answers_continue_in_their_grammars(seed: int) -> None:
    model = build("llama")
    prompts = [prompt_of(9 + index, seed=100 * seed + index) for index in range(5)]
    letters = compiler().compile(GrammarSource("regex", "([a-f][x-z]){20}"))

    def answers(num_blocks: int) -> tuple[list[list[int]], int]:
        mlx_paged.apply_patches(PagedConfig(kv_cache_memory=kv_budget(model, num_blocks, 8), block_size=8))
        run = Run(model)
        uids = [run.insert(prompt, 60, None if index == 4 else letters) for index, prompt in enumerate(prompts)]
        run.run()
        mlx_paged.remove_patches()
        return [run.answers[uid] for uid in uids], run.gen.preemptions

    ample, none = answers(200)
    tight, some = answers(16)
    assert none == 0 and some > 0
    assert tight == ample and len(ample[0]) == 41


def always(letter: str) -> Any:
    """Return a processor that leaves only one letter."""
    return lambda _, logits: mx.where(mx.arange(logits.shape[-1]) == ord(letter), logits, -mx.inf)


AMBIGUOUS = GrammarSource("lark", 'start: a\na: a a a | a a | "x" | "y" | a "z"')


@pytest.mark.parametrize(
    ("source", "letter", "told"),
    [(GrammarSource.json(SCHEMAS[0]), "!", ""), (AMBIGUOUS, "x", "too much work: ")],
    ids=["nothing is allowed", "too ambiguous"],
)
def test_grammar_error_fails_only_its_request(source: GrammarSource, letter: str, told: str) -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    processors = [[always(letter)]]
    at_fault = run.insert(prompt_of(10, seed=1), 400, compiler().compile(source), logits_processors=processors)
    fine, free = run.insert(prompt_of(9), NUM_TOKENS, grammar(0)), run.insert(prompt_of(11, seed=2), 150)
    run.run()
    assert list(run.failures) == [at_fault] and isinstance(run.failures[at_fault].__cause__, GrammarError)
    assert told in str(run.failures[at_fault])
    assert len(run.answers[at_fault]) < 200, "it failed before its masks became slow"
    assert len(run.answers[free]) == 150
    run.check(fine, SCHEMAS[0])
    assert_released(model)


@pytest.mark.parametrize("num_drafts", [7, *slow(1, 3)])
def test_draft_model_does_not_change_a_constrained_answer(num_drafts: int) -> None:
    model, draft = build("llama"), perturbed("llama", 0.2)
    for index in (0, 2):
        prompt, options = prompt_of(12, seed=index), {"num_draft_tokens": num_drafts, "max_tokens": NUM_TOKENS}
        processors = [GrammarProcessor(grammar(index))]
        steps = speculative_generate_step(prompt, model, draft, logits_processors=processors, **options)
        assert until_the_end(steps) == alone(model, prompt, index)


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"name": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": 'the "clock"'}}


def compiled(body: dict[str, Any], **options: Any) -> CompiledGrammar | None:
    constraint = constraint_of(body)
    assert constraint is not None
    return TokenizerGrammars(byte_tokenizer(calls_tools=True, **options)).compile(constraint)


def allowed(grammar: Grammar) -> list[int]:
    words = np.zeros(9, np.uint32)
    grammar.mask(words)
    return [token for token in range(262) if words[token // 32] >> token % 32 & 1]


def answer_of(name: str, arguments: dict[str, Any]) -> list[int]:
    return [CALL, *f"\n{json.dumps({'name': name, 'arguments': arguments})}\n".encode(), CALL_END]


def takes(grammar: CompiledGrammar | None, tokens: list[int]) -> bool:
    """Return whether an answer may be these tokens."""
    assert grammar is not None
    state = grammar.start()
    for token in tokens:
        if token not in allowed(state):
            return False
        state.accept(token)
    return EOS in allowed(state)


def test_tool_choice_allows_only_calls_of_the_chosen_tools() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    rome, clock = answer_of("weather", {"city": "Rome", "days": 3}), answer_of('the "clock"', {"any": 1})
    required = compiled({"tools": [WEATHER, CLOCK], "tool_choice": "required"})
    one = compiled({"tools": [CLOCK, WEATHER], "tool_choice": named})
    assert takes(required, rome) and takes(required, clock) and takes(required, rome + clock)
    single = compiled({"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False})
    assert takes(one, rome) and not takes(one, clock) and not takes(one, rome + rome)
    assert takes(single, clock) and not takes(single, clock + clock)
    for grammar in (required, one):
        assert not takes(grammar, list(b"Rome")) and not takes(grammar, answer_of("weather", {"city": "Bonn"}))


def test_strict_tool_constrains_the_arguments_of_its_calls() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    grammar = compiled({"tools": [strict, CLOCK]})
    assert grammar is not None and grammar.trigger == (CALL,)
    state = grammar.start()
    for token in b"let me see ":
        assert len(allowed(state)) == 262
        state.accept(token)
    state.accept(CALL)
    for token in b'{"name": "weather", "arguments": {"city":"':
        state.accept(token)
    assert allowed(state) == [ord("O"), ord("R")]
    for token in [*b'Rome","days":3}}', CALL_END]:
        state.accept(token)
    assert state.part is Part.BETWEEN and len(allowed(state)) == 262


def read_nothing(text: str, tools: Any) -> Any:
    """Parser of an unknown form."""


def test_strict_holds_for_tags_and_is_logged_as_unsupported_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    strict = {"tools": [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]}
    tagged = compiled(strict, parser=qwen3_coder.parse_tool_call)
    assert tagged is not None and tagged.trigger == (CALL,) and not caplog.records
    assert compiled(strict, parser=read_nothing) is None
    assert "cannot be constrained" in caplog.text
    bad = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"not": {}}}}}
    assert compiled({"tools": [{"type": "function", "function": bad}]}) is None
    assert "tools[0].function.parameters: Unimplemented" in caplog.text


def test_answer_may_be_json_or_a_call() -> None:
    body = {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}}
    grammar = compiled(body)
    assert grammar is not None
    assert allowed(grammar.start()) == [ord("{"), CALL] and takes(grammar, list(b'{"city":"Rome","days":1}'))


def test_unsupported_constraints_are_refused() -> None:
    required = {"tools": [WEATHER], "tool_choice": "required"}
    with pytest.raises(RequestRefused, match="in a format that cannot be constrained") as caught:
        compiled(required, parser=read_nothing)
    assert caught.value.status == 400 and caught.value.param == "tool_choice"
    constraint = constraint_of(required)
    assert constraint is not None
    without = TokenizerGrammars(byte_tokenizer())
    with pytest.raises(RequestRefused, match="this model cannot call tools"):
        without.compile(constraint)
    strict = constraint_of({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, chat=True)
    assert strict is not None and without.compile(strict) is None
    endless = {"properties": {"x": {"type": "integer", "multipleOf": 16777216}}}
    for schema, why in (({"properties": {"x": {"not": {}}}}, "Unimpl"), (endless, "multipleOf takes")):
        bad = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with pytest.raises(RequestRefused, match=rf"tools\[1\].function.parameters: {why}") as caught:
            compiled({"tools": [WEATHER, bad], "tool_choice": "required"})
        assert caught.value.param == "tools" and caught.value.status == 400
    with pytest.raises(RequestRefused, match="with tools, only JSON is supported"):
        compiled({"tools": [WEATHER], "structured_outputs": {"regex": "a"}})


def test_reasoning_begun_in_the_prompt_is_unconstrained() -> None:
    tokenizer = byte_tokenizer()
    assert all(ends_in_reasoning(tokenizer, [5, THINK, *behind]) for behind in ([], [10], [10, 10]))
    for prompt in ([5], [5, THINK, 6], [5, THINK, 10, THINK_END, 10], [THINK, 10, 65, 10]):
        assert not ends_in_reasoning(tokenizer, prompt)
    constraint = constraint_of({"structured_outputs": {"choice": ["no"]}})
    assert constraint is not None
    grammar = TokenizerGrammars(tokenizer).compile(constraint)
    assert grammar is not None
    state = grammar.begins_after(tokenizer.think_end_tokens).start()
    for token in [*b"hm", THINK_END]:
        assert len(allowed(state)) == 260
        state.accept(token)
    assert allowed(state) == [ord("n")]
