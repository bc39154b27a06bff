"""Drafts of rows with grammars: masks follow a draft, and refused drafts leave no trace."""

import functools
import json
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

import mlx_paged
from mlx_paged import PagedConfig
from mlx_paged.engine.constraint import ALL, constrain
from mlx_paged.engine.request import RequestOptions
from mlx_paged.errors import GrammarError
from mlx_paged.grammar.compiler import GrammarCompiler, GrammarSource
from mlx_paged.grammar.grammar import CompiledGrammar
from tests.support.cases import slow
from tests.support.models.batch_runs import Outcome, generator, run_all
from tests.support.models.drafting import DRAFTS, in_every_step, model_of, noisy, prompts_of
from tests.support.models.tokenizers import byte_tokenizer

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"s": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}}}
    | {"required": ["s", "n"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["left", "right", None]}, "minItems": 3, "maxItems": 8},
]
MOST = 90


@functools.cache
def compiled(index: int) -> CompiledGrammar:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer._tokenizer, tokenizer.eos_token_ids).compile(GrammarSource.json(SCHEMAS[index]))


def run(draft: Any, temperature: float) -> tuple[list[Outcome], Any]:
    """Run two rows with grammars and one without."""
    model = model_of("llama")
    with in_every_step():
        options = {} if draft is None else {"draft_model": draft, "num_draft_tokens": DRAFTS}
        gen = generator(model, stop_tokens=[[token] for token in byte_tokenizer().eos_token_ids], **options)
    grammars = [compiled(0), compiled(1), None]
    uids = gen.insert_segments(
        [[prompt] for prompt in prompts_of("llama", (3, 37, 12))],
        [MOST, MOST, 40],
        samplers=[make_sampler(temperature)] * 3,
        options=[RequestOptions(seed=9, grammar=each) for each in grammars],
    )
    outcomes = {uid: Outcome() for uid in uids}
    run_all(gen, outcomes)
    return list(outcomes.values()), gen


@pytest.mark.parametrize(("scale", "temperature"), [(0.05, 0.3), *slow((0.0, 0.0), (0.0, 0.3), (0.05, 0.0))])
def test_answers_with_grammars_are_the_same_without_drafts(scale: float, temperature: float) -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    expected, _ = run(None, temperature)
    found, gen = run(noisy("llama", scale), temperature)
    for outcome, plain in zip(found, expected, strict=True):
        assert (outcome.tokens, outcome.reason, outcome.all_tokens) == (plain.tokens, plain.reason, plain.all_tokens)
        with np.errstate(invalid="ignore"):  # both are minus infinity where a token is not allowed
            apart = np.abs(np.stack(outcome.logprobs) - np.stack(plain.logprobs))
        assert np.nanmax(apart) < 1e-4
    for outcome, schema in zip(found, SCHEMAS, strict=False):
        if outcome.reason == "stop":
            text = byte_tokenizer().decode(outcome.tokens[:-1])
            jsonschema.validate(json.loads(text), schema)
    stats = mlx_paged.pool_of(model_of("llama")).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert not gen._engine.drafts.proposer.rows


class Row:
    """A row after a prompt of one token, before its first new token."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = grammar.start()
        self.source = [1]
        self.prompt_length = 1
        self.logits: Any = None


def masks(row: Row, drafts: list[int]) -> tuple[np.ndarray, dict[int, Exception]]:
    """Return which tokens are allowed at each position, and the errors by position."""
    logits = mx.zeros((1 + len(drafts), 320))
    found, broken = constrain(logits, [row] * (1 + len(drafts)), [1, *drafts])
    return np.array(found) == 0, broken


def test_masks_follow_a_draft_without_advancing_the_row() -> None:
    row, text = Row(compiled(1)), [ord(c) for c in '["left"']
    allowed, broken = masks(row, text)
    assert not broken and row.grammar.tokens == []
    for place, token in enumerate(text):
        assert allowed[place, token], "a right draft is allowed at its position"
    assert allowed[-1, ord(",")] and not allowed[-1, ord("x")]
    again, _ = masks(row, text)
    assert (again == allowed).all()


def test_positions_after_a_forbidden_draft_are_not_masked() -> None:
    row = Row(compiled(1))
    allowed, broken = masks(row, [ord("["), ord("x"), ord("y")])
    assert not broken and allowed[0].sum() < 10 and not allowed[1, ord("x")]
    assert allowed[2:].all(), "these positions are never used"


def test_grammar_error_after_a_draft_is_reported_with_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(compiled(1))
    kind = type(row.grammar)
    original = kind.mask

    def mask(self: Any, out: np.ndarray) -> None:
        if len(self.tokens) == 2:
            raise GrammarError("no more")
        original(self, out)

    monkeypatch.setattr(kind, "mask", mask)
    allowed, broken = masks(row, [ord("["), ord('"'), ord("l")])
    assert list(broken) == [2] and isinstance(broken[2], GrammarError)
    assert allowed[2:].all() and ALL == 0xFFFFFFFF
