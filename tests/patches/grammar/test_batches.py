"""Grammars in batches of the generator, beside rows without any: joining, leaving, preempted, failing."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import mlx.core as mx
import pytest
from mlx_lm.generate import StopSequences, generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

import mlx_paged
from mlx_paged.config import PagedConfig
from mlx_paged.engine.decode_batch import RowByRowBatch
from mlx_paged.engine.grammar import grammar as grammar_module
from mlx_paged.engine.grammar.compiler import GrammarCompiler, GrammarSource
from mlx_paged.engine.grammar.grammar import CompiledGrammar, GrammarProcessor
from mlx_paged.engine.request import RequestOptions
from mlx_paged.errors import GrammarError, RequestFailedError
from mlx_paged.patches.generate.upstream import UPSTREAM
from tests.support.models.batch_runs import assert_released, generator, kv_budget
from tests.support.models.builders import KINDS, build, greedy, perturbed, prompt_of
from tests.support.models.tokenizers import EOS, EOT, byte_tokenizer

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


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_grammars_and_rows_without(kind: str, no_fall_through: None) -> None:
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
        assert run.answers[uid] == tokens, "neighbours change nothing"
    for index, uid in enumerate(constrained):
        run.check(uid, SCHEMAS[index])


def test_a_batch_and_a_sequence_alone_say_the_same() -> None:
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


def test_random_samplers_and_processors_choose_of_what_is_allowed() -> None:
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
            assert abs(mx.sum(mx.exp(logprobs)).item() - 1) < 1e-4, "of what is allowed"


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", range(3))
def test_preempted_answers_go_on_where_they_were(seed: int) -> None:
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


def test_a_grammar_that_raises_fails_its_request_alone() -> None:
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


def test_an_ambiguous_grammar_fails_its_request_alone() -> None:
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
    assert list(run.failures) == [at_fault] and "more work for a token" in str(run.failures[at_fault])
    assert len(run.answers[at_fault]) < 200, "or its masks would have taken longer and longer"
    assert len(run.answers[free]) == 150
    run.check(fine, SCHEMAS[0])


def test_a_grammar_whose_masks_take_long_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(grammar_module.Grammar):
        def count(self, seconds: float) -> None:
            super().count(seconds + 0.2)

    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    fine, free = run.insert(prompt_of(9), NUM_TOKENS, grammar(2)), run.insert(prompt_of(11, seed=2), 50)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "Grammar", Slow)
        slow = run.insert(prompt_of(10, seed=1), NUM_TOKENS, compiler().compile(GrammarSource.regex("[a-z]{50}")))
    run.run()
    assert list(run.failures) == [slow] and "more work for a token" in str(run.failures[slow])
    assert len(run.answers[slow]) <= 3 and len(run.answers[free]) == 50
    run.check(fine, SCHEMAS[2])


def test_an_answer_that_is_cancelled_leaves_nothing() -> None:
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


def test_an_answer_may_be_cut_off() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    uid = run.insert(prompt_of(9), 3, grammar(2))
    run.run()
    assert run.reasons[uid] == "length" and len(run.answers[uid]) == 3
    state = grammar(2).start()
    for token in run.answers[uid]:
        state.accept(token)


def test_rows_that_are_computed_one_by_one() -> None:
    model = build("llama")
    mlx_paged.apply_patches()
    run = Run(model)
    run.gen._engine.batch = RowByRowBatch(model, UPSTREAM)
    uids = [run.insert(prompt_of(9, seed=seed), NUM_TOKENS, grammar(seed)) for seed in range(4)]
    run.run()
    for seed, uid in enumerate(uids):
        run.check(uid, SCHEMAS[seed])


def test_a_batch_that_is_mlx_lms_own() -> None:
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


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_a_draft_models_tokens_may_be_refused(num_drafts: int) -> None:
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


def test_many_answers_in_any_order() -> None:
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
