"""Grammars under mlx-lm: made from its tokenizers, and in batches of requests with and without grammars."""

import json
import random
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx_lm.generate import StopSequences, generate_step, make_text_state_machine, speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tool_parsers import glm47, json_tools, kimi_k2, longcat, minimax_m2, mistral, qwen3_coder
from tokenizers import AddedToken
from transformers import AutoTokenizer

import mlx_paged
from mlx_paged.config import PagedConfig
from mlx_paged.engine.constraint import GrammarProcessor
from mlx_paged.engine.request import RequestOptions
from mlx_paged.errors import GrammarError, RequestFailedError
from mlx_paged.grammar import grammar as grammar_module
from mlx_paged.grammar.compiler import GrammarCompiler, GrammarSource
from mlx_paged.grammar.grammar import CompiledGrammar, Grammar, Part
from mlx_paged.patches.generate import batch_generator
from mlx_paged.server.call_formats import FORMS
from mlx_paged.server.errors import RequestRefused
from mlx_paged.server.grammars import (
    TokenizerGrammars,
    behind_reasoning,
    ends_in_reasoning,
    tool_format,
    unwrapped,
)
from tests.support.cases import quick, slow
from tests.support.constraints import constraint_of
from tests.support.models.batch_runs import assert_released, generator, kv_budget
from tests.support.models.builders import KINDS, build, greedy, perturbed, prompt_of
from tests.support.models.tiny_model import copy_tokenizer
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
        self.cached: dict[int, int] = {}
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
            self.cached[response.uid] = response.num_cached
        return bool(prompts or generated)

    def run(self) -> None:
        while self.step():
            pass

    def check(self, uid: int, schema: dict[str, Any]) -> None:
        answer = self.answers[uid]
        assert self.reasons[uid] == "stop" and answer[-1] in (EOS, EOT) and max(answer[:-1]) < 256
        jsonschema.validate(json.loads(bytes(answer[:-1])), schema)


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


def test_batch_gives_the_constrained_answer_of_a_solo_run() -> None:
    model = build("llama")
    for index, schema in enumerate(SCHEMAS):
        prompt = prompt_of(12, seed=index)
        stock = []
        for token, _ in generate_step(
            prompt, model, max_tokens=NUM_TOKENS, logits_processors=[GrammarProcessor(grammar(index))]
        ):
            stock.append(int(token))
            if token in (EOS, EOT):
                break
        mlx_paged.apply_patches()
        run = Run(model)
        uid = run.insert(prompt, NUM_TOKENS, grammar(index))
        run.run()
        assert run.answers[uid] == stock
        run.check(uid, schema)
        mlx_paged.remove_patches()


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
    letters = compiler().compile(GrammarSource.regex("([a-f][x-z]){20}"))

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


def test_grammar_error_fails_only_its_request() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    fine = run.insert(prompt_of(9), NUM_TOKENS, grammar(0))

    def only_what_is_not_allowed(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == ord("!"), mx.zeros_like(logits), -mx.inf)

    at_fault = run.insert(prompt_of(10, seed=1), NUM_TOKENS, grammar(0), logits_processors=[[only_what_is_not_allowed]])
    free = run.insert(prompt_of(11, seed=2), 12)
    run.run()
    assert list(run.failures) == [at_fault] and isinstance(run.failures[at_fault].__cause__, GrammarError)
    assert len(run.answers[free]) == 12
    run.check(fine, SCHEMAS[0])
    assert_released(model)


def test_ambiguous_grammar_fails_only_its_request() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    ambiguous = compiler().compile(GrammarSource.lark('start: a\na: a a a | a a | "x" | "y" | a "z"'))

    def prefers_to_go_on(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + 50 * (mx.arange(logits.shape[-1]) == ord("x"))

    at_fault = run.insert(prompt_of(10, seed=1), 400, ambiguous, logits_processors=[[prefers_to_go_on]])
    fine = run.insert(prompt_of(9), NUM_TOKENS, grammar(0))
    free = run.insert(prompt_of(11, seed=2), 150)
    run.run()
    assert list(run.failures) == [at_fault] and "too much work: " in str(run.failures[at_fault])
    assert len(run.answers[at_fault]) < 200, "it failed before its masks became slow"
    assert len(run.answers[free]) == 150
    run.check(fine, SCHEMAS[0])


def test_grammar_with_slow_masks_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(grammar_module.Grammar):
        def record_time(self, seconds: float) -> None:
            super().record_time(seconds + 0.2)

    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    fine, free = run.insert(prompt_of(9), NUM_TOKENS, grammar(2)), run.insert(prompt_of(11, seed=2), 50)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "Grammar", Slow)
        slow = run.insert(prompt_of(10, seed=1), NUM_TOKENS, compiler().compile(GrammarSource.regex("[a-z]{50}")))
    run.run()
    assert list(run.failures) == [slow] and "too much work: " in str(run.failures[slow])
    assert len(run.answers[slow]) <= 3 and len(run.answers[free]) == 50
    run.check(fine, SCHEMAS[2])


def test_cancelled_answer_leaves_no_blocks() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    uids = [run.insert(prompt_of(9, seed=seed), NUM_TOKENS, grammar(2)) for seed in range(3)]
    for _ in range(4):
        run.step()
    run.gen.remove([uids[1]])
    run.run()
    for uid in (uids[0], uids[2]):
        run.check(uid, SCHEMAS[2])
    assert mlx_paged.pool_of(model).stats().live_blocks == 0


def test_answer_may_reach_its_limit_within_a_grammar() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    uid = run.insert(prompt_of(9), 3, grammar(2))
    run.run()
    assert run.reasons[uid] == "length" and len(run.answers[uid]) == 3
    state = grammar(2).start()
    for token in run.answers[uid]:
        state.accept(token)


def test_rows_computed_one_by_one_follow_their_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(batch_generator, "why_one_by_one", lambda *_: "as asked")
    mlx_paged.apply_patches()
    run = Run(model)
    uids = [run.insert(prompt_of(9, seed=seed), NUM_TOKENS, grammar(seed)) for seed in range(4)]
    run.run()
    for seed, uid in enumerate(uids):
        run.check(uid, SCHEMAS[seed])


def test_mlx_lms_own_batch_follows_grammars() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    run.gen._engine = None
    uids = [run.insert(prompt_of(9, seed=seed), NUM_TOKENS, grammar(seed)) for seed in range(4)]
    while True:
        prompts, generated = run.gen.next()
        if not prompts and not generated:
            break
        for response in generated:
            run.answers[response.uid].append(response.token)
            run.reasons[response.uid] = response.finish_reason
    for seed, uid in enumerate(uids):
        run.check(uid, SCHEMAS[seed])


@pytest.mark.parametrize("num_drafts", [7, *slow(1, 3)])
def test_draft_model_does_not_change_a_constrained_answer(num_drafts: int) -> None:
    model, draft = build("llama"), perturbed("llama", 0.2)
    for index in (0, 2):
        prompt, answer = prompt_of(12, seed=index), []
        alone: list[int] = []
        for token, _ in generate_step(
            prompt, model, max_tokens=NUM_TOKENS, logits_processors=[GrammarProcessor(grammar(index))]
        ):
            alone.append(int(token))
            if token in (EOS, EOT):
                break
        steps = speculative_generate_step(
            prompt,
            model,
            draft,
            num_draft_tokens=num_drafts,
            max_tokens=NUM_TOKENS,
            logits_processors=[GrammarProcessor(grammar(index))],
        )
        for token, _, _ in steps:
            answer.append(int(token))
            if token in (EOS, EOT):
                break
        assert answer == alone


def test_constrained_requests_at_random_times_match_their_schemas() -> None:
    model = build("qwen3")
    mlx_paged.apply_patches(PagedConfig(kv_cache_memory=kv_budget(model, 40, 8), block_size=8))
    rng = random.Random(0)
    run = Run(model, completion_batch_size=5, prefill_batch_size=2)
    wanted: dict[int, int] = {}
    gone: set[int] = set()
    for _ in range(40):
        index = rng.randrange(4)
        prompt = prompt_of(rng.randint(1, 30), seed=rng.randrange(5))
        wanted[run.insert(prompt, 120, grammar(index))] = index
        for _ in range(rng.randrange(12)):
            run.step()
        if rng.random() < 0.2:
            uid = rng.choice(list(wanted))
            run.gen.remove([uid])
            gone.add(uid)
    run.run()
    assert not run.failures and len(wanted) == 40
    for uid, index in wanted.items():
        if uid not in gone and run.reasons[uid] == "stop":
            run.check(uid, SCHEMAS[index])
    assert sum(reason == "stop" for reason in run.reasons.values()) > 20


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


def random_answer(grammar: Grammar, seed: int, most: int = 2000) -> list[int]:
    """Return random allowed tokens, with no indentation and an early end."""
    rng, answer = random.Random(seed), []
    while len(answer) < most:
        tokens = [token for token in allowed(grammar) if token not in set(b" \n\t\r")] or allowed(grammar)
        ends = [token for token in tokens if token in (EOS, EOT)]
        if ends and (len(tokens) == len(ends) or rng.random() < 0.5):
            return answer
        tokens = [token for token in tokens if token not in ends] or tokens
        quotes = [token for token in tokens if token in set(b'"}]')]
        answer.append(rng.choice(quotes) if quotes and rng.random() < 0.5 else rng.choice(tokens))
        grammar.accept(answer[-1])
    raise AssertionError("it does not end")


def parsed(answer: list[int]) -> list[dict[str, Any]]:
    """Return the calls that mlx-lm's server finds in an answer."""
    tokenizer = byte_tokenizer(calls_tools=True)
    machine = make_text_state_machine(tokenizer)
    _, segments = machine.split(machine.make_state("normal"), tokenizer.decode(answer))
    assert not "".join(text for name, text in segments if name == "normal").strip()
    return [json_tools.parse_tool_call(text) for name, text in segments if name == "tool" and text]


@pytest.mark.parametrize("seed", quick(range(6), 0, 1))
def test_tool_choice_required_gives_valid_calls(seed: int) -> None:
    grammar = compiled({"tools": [WEATHER, CLOCK], "tool_choice": "required"})
    assert grammar is not None
    state = grammar.start()
    assert allowed(state) == [CALL]
    calls = parsed(random_answer(state, seed))
    assert calls
    for call in calls:
        assert set(call) == {"name", "arguments"}
        schemas = {"weather": CITY, 'the "clock"': {"type": "object"}}
        jsonschema.validate(call["arguments"], schemas[call["name"]])


@pytest.mark.parametrize("seed", quick(range(3), 0))
def test_named_tool_is_called_once(seed: int) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    grammar = compiled({"tools": [CLOCK, WEATHER], "tool_choice": choice})
    assert grammar is not None
    (call,) = parsed(random_answer(grammar.start(), seed))
    assert call["name"] == "weather"
    jsonschema.validate(call["arguments"], CITY)


def test_parallel_tool_calls_false_allows_one_call() -> None:
    one = compiled({"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False})
    several = compiled({"tools": [CLOCK], "tool_choice": "required"})
    for grammar, goes_on in ((one, False), (several, True)):
        assert grammar is not None
        state = grammar.start()
        call = '\n{"name": "the \\"clock\\"", "arguments": {}}\n'
        for token in [CALL, *call.encode(), CALL_END]:
            state.accept(token)
        assert (CALL in allowed(state)) is goes_on and EOS in allowed(state)


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


EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer", "minimum": 1, "maximum": 99},
        "mode": {"type": "string", "enum": ["insert", "replace"]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["path", "line", "mode"],
    "additionalProperties": False,
}


def tags(begin: str, argument: str, end: str, arguments: dict[str, str]) -> str:
    return begin + "".join(argument.format(*each) for each in arguments.items()) + end


GLM = "\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>"
TAGS: dict[str, tuple[Any, str, str, str]] = {
    "qwen3_coder": (qwen3_coder, "\n<function=edit>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n"),
    "glm47": (glm47, "edit", GLM, "\n"),
    "longcat": (longcat, "edit", GLM.replace("arg_", "longcat_arg_"), "\n"),
    "minimax_m2": (minimax_m2, '\n<invoke name="edit">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>\n"),
}


@pytest.mark.parametrize("form", TAGS)
def test_calls_in_tags_match_their_schema(form: str) -> None:
    parser, *texts = TAGS[form]
    edit = {"type": "function", "function": {"name": "edit", "strict": True, "parameters": EDIT}}
    tools = [edit, {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    grammar = compiled(body, parser=parser.parse_tool_call)
    assert grammar is not None

    def fault(text: str) -> str | None:
        """Return the text up to the first byte that is not allowed."""
        state = grammar.start()
        for place, token in enumerate([CALL, *text.encode(), CALL_END]):
            if token not in allowed(state):
                return text[: max(0, place - 1)]
            state.accept(token)
        assert set(allowed(state)) == {EOS, EOT}
        return None

    path = "a <b> </parameter \n.py"
    for given in ({"line": "12", "mode": "insert"}, {"line": "9", "mode": "replace", "marks": "[true, false]"}):
        text = tags(*texts, {"path": path, **given})
        assert fault(text) is None
        call = parser.parse_tool_call(text, tools)
        call = call[0] if isinstance(call, list) else call
        jsonschema.validate(call["arguments"], EDIT)
        assert call["arguments"]["path"] == path
    assert fault(tags(*texts, {"x": "1"}).replace("edit", "clock")) is None
    for wrong in ({"line": "12x", "mode": "insert"}, {"line": "1", "mode": "undo"}, {"mode": "insert"}, {"line": "1"}):
        assert fault(tags(*texts, {"path": path, **wrong})) is not None
    begin = texts[0].replace("edit", "fly")
    assert fault(begin) == begin[: begin.index("fly")]


HEADS = {
    "kimi_k2": (kimi_k2, "<|tool_call_begin|>functions.edit:{}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "mistral": (mistral, '[{{"name": "edit", "arguments": ', "}}]"),
}


@pytest.mark.parametrize("form", HEADS)
def test_json_calls_after_a_head_match_their_schema(form: str) -> None:
    parser, begin, end = HEADS[form]
    tools = [{"type": "function", "function": {"name": "edit", "strict": True, "parameters": EDIT}}]
    grammar = compiled({"tools": tools}, parser=parser.parse_tool_call)
    assert grammar is not None and grammar.trigger == (CALL,)
    arguments = {"path": "a", "line": 3, "mode": "insert"}

    def taken(text: str) -> bool:
        state = grammar.start()
        for token in [CALL, *text.encode(), CALL_END]:
            if token not in allowed(state):
                return False
            state.accept(token)
        return True

    one = begin.format(0) + json.dumps(arguments) + end.format()
    for text in (one, one + begin.format(1) + json.dumps(arguments) + end.format()) if form == "kimi_k2" else (one,):
        assert taken(text)
        calls = parser.parse_tool_call(text, tools)
        for call in calls if isinstance(calls, list) else [calls]:
            assert (call["name"], call["arguments"]) == ("edit", arguments)
    assert not taken(begin.format(0) + json.dumps({**arguments, "mode": "undo"}) + end.format())


MARKED = {  # the marks of a call, and a call
    "glm47": (
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a <b></arg_value>\n"
        "<arg_key>line</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>mode</arg_key>\n"
        "<arg_value>insert</arg_value>\n</tool_call>",
    ),
    "mistral": (["[TOOL_CALLS]", "[ARGS]"], '[TOOL_CALLS]edit[ARGS]{{"path": "a", "line": {}, "mode": "insert"}}'),
}


@pytest.mark.demo_model
@pytest.mark.parametrize(("form", "special"), [("glm47", False), ("mistral", True)])
def test_marks_within_calls_may_be_tokens(form: str, special: bool, demo_model_folder: Path, tmp_path: Path) -> None:
    marks, text = MARKED[form]
    parser = {"glm47": glm47, "mistral": mistral}[form]
    copy_tokenizer(demo_model_folder, tmp_path)
    inner: Any = AutoTokenizer.from_pretrained(tmp_path)
    inner.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    inner.save_pretrained(tmp_path)
    tokenizer = mlx_lm.utils.load_tokenizer(tmp_path)
    tokenizer._tool_parser, tokenizer._tool_call_start = parser.parse_tool_call, parser.tool_call_start
    tokenizer._tool_call_end = parser.tool_call_end
    for name in ("start", "end"):
        mark = getattr(parser, f"tool_call_{name}")
        setattr(tokenizer, f"_tool_call_{name}_tokens", tuple(inner.encode(mark, add_special_tokens=False)))
    tools = [{"type": "function", "function": {"name": "edit", "strict": True, "parameters": EDIT}}]
    constraint = constraint_of({"tools": tools})
    assert constraint is not None
    grammar = TokenizerGrammars(tokenizer).compile(constraint)
    assert grammar is not None
    for value, is_right in (("3", True), ("x", False)):
        state = grammar.start()
        with nullcontext() if is_right else pytest.raises(GrammarError):
            for token in inner.encode(text.format(value), add_special_tokens=False):
                state.accept(token)


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
    assert allowed(grammar.start()) == [ord("{"), CALL]
    for text in ('{"city":"Rome","days":1}',):
        state = grammar.start()
        for token in text.encode():
            state.accept(token)
        assert set(allowed(state)) == {EOS, EOT}


def test_unsupported_constraints_are_refused() -> None:
    required = {"tools": [WEATHER], "tool_choice": "required"}
    with pytest.raises(RequestRefused, match="in a format that cannot be constrained") as caught:
        compiled(required, parser=read_nothing)
    assert caught.value.status == 400 and caught.value.param == "tool_choice"
    constraint = constraint_of(required)
    assert constraint is not None
    with pytest.raises(RequestRefused, match="this model cannot call tools"):
        TokenizerGrammars(byte_tokenizer()).compile(constraint)
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
    with pytest.raises(RequestRefused, match=r"tools\[1\].function.parameters: Unimpl") as caught:
        compiled({"tools": [WEATHER, bad], "tool_choice": "required"})
    assert caught.value.param == "tools"
    with pytest.raises(RequestRefused, match="with tools, only JSON is supported"):
        compiled({"tools": [WEATHER], "structured_outputs": {"regex": "a"}})


ENDLESS = {"type": "object", "properties": {"x": {"type": "integer", "multipleOf": 16777216}}}


def test_tool_whose_schema_is_refused_is_named() -> None:
    slow = {"type": "function", "function": {"name": "f", "parameters": ENDLESS}}
    with pytest.raises(RequestRefused, match=r"tools\[1\]\.function\.parameters: multipleOf takes") as caught:
        compiled({"tools": [WEATHER, slow], "tool_choice": "required"})
    assert caught.value.param == "tools" and caught.value.status == 400


def test_strict_is_ignored_for_a_model_without_tool_calls() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    constraint = constraint_of({"tools": [strict]})
    assert constraint is not None
    assert TokenizerGrammars(byte_tokenizer()).compile(constraint) is None


def test_tool_format_returns_the_markers_of_a_call() -> None:
    without, tokenizer = byte_tokenizer(), byte_tokenizer(calls_tools=True)
    assert tool_format(without, unwrapped(without)) is None
    form = tool_format(tokenizer, unwrapped(tokenizer))
    assert form is not None and form[:4] == (f"<[{CALL}]>", f"<[{CALL_END}]>", (CALL,), FORMS["json_tools"])


def test_reasoning_begun_in_the_prompt_is_unconstrained() -> None:
    tokenizer = byte_tokenizer()
    assert all(ends_in_reasoning(tokenizer, [5, THINK, *behind]) for behind in ([], [10], [10, 10]))
    for prompt in ([5], [5, THINK, 6], [5, THINK, 10, THINK_END, 10], [THINK, 10, 65, 10]):
        assert not ends_in_reasoning(tokenizer, prompt)
    constraint = constraint_of({"structured_outputs": {"choice": ["no"]}})
    assert constraint is not None
    grammar = TokenizerGrammars(tokenizer).compile(constraint)
    assert grammar is not None
    state = behind_reasoning(grammar, tokenizer).start()
    for token in [*b"hm", THINK_END]:
        assert len(allowed(state)) == 260
        state.accept(token)
    assert allowed(state) == [ord("n")]
    assert json.loads('"no"') == "no"
