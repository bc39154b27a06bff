"""Heads for multi-token prediction in batches: tokens are the same as without, whatever the head says."""

import functools
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import ConfigError, PagedConfig
from mlx_paged.drafts.depth import TRIAL_CONTEXT
from mlx_paged.engine import compiled_step
from mlx_paged.engine.compiled_step import CompiledStep
from mlx_paged.engine.hidden_states import MOST_POSITIONS, HiddenStates
from mlx_paged.engine.proposer import num_known
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick
from tests.support.models import prediction_heads
from tests.support.models.batch_runs import Outcome, collect, generator, run_all
from tests.support.models.builders import greedy
from tests.support.models.drafting import DRAFTS, check_nothing_left, drafted, in_every_step, prompts_of
from tests.support.models.prediction_heads import FAMILIES, head_of

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS, LENGTHS = 24, (3, 37, 12)
QUICK = ("qwen3_next", "mimo")


@functools.cache
def model_of(name: str, scale: float, *, is_wide: bool = False) -> Any:
    return prediction_heads.model_of(name, scale, is_wide=is_wide)


@functools.cache
def solos(name: str, scale: float, *, is_wide: bool = False) -> list[tuple[list[int], list[int]]]:
    """Return prompts and the answers of stock mlx-lm."""
    assert not mlx_paged.patches.is_applied()
    model = model_of(name, scale, is_wide=is_wide)
    return [(p, greedy(model, mx.array(p, mx.uint32), TOKENS)[0]) for p in prompts_of(f"{name}-of-mlx-lm", LENGTHS)]


def run_alike(name: str, model_scale: float, scale: float | None, prompts: slice = slice(None)) -> Any:
    """Run prompts with a head, which must give stock's tokens. Returns the statistics."""
    expected = solos(name, model_scale)[prompts]
    model = model_of(name, model_scale)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    head = head_of(name, model, scale)
    outcomes, gen = drafted(model, head, [p for p, _ in expected], [TOKENS] * len(expected))
    assert [outcome.tokens for outcome in outcomes] == [tokens for _, tokens in expected]
    stats = mlx_paged.pool_of(model).stats()
    check_nothing_left(gen, model, head)
    return stats


@pytest.mark.parametrize("name", quick(FAMILIES, "qwen3_next"))
def test_accurate_head_gives_the_same_tokens_in_fewer_steps(name: str) -> None:
    stats = run_alike(name, 0.01, 0.01)
    assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 0
    assert stats.draft_steps < TOKENS - 4


@pytest.mark.parametrize("name", quick(FAMILIES, "mimo"))
def test_random_head_gives_the_same_tokens(name: str) -> None:
    stats = run_alike(name, 1.0, None)
    assert stats.drafted_tokens > 100 and stats.accepted_tokens < 0.15 * stats.drafted_tokens


@pytest.mark.parametrize("index", quick(range(3), 1))
def test_single_request_has_the_same_tokens_with_a_head(index: int) -> None:
    stats = run_alike("mimo", 0.2, 0.3, slice(index, index + 1))
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    quick(crossed(QUICK, range(1, 9)), ("qwen3_next", 2), ("mimo", DRAFTS), ("mimo", DRAFTS + 1)),
)
def test_answer_ends_at_max_tokens(name: str, num_tokens: int) -> None:
    expected = solos(name, 0.05)
    model = model_of(name, 0.05)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    most = (num_tokens, 20, 1 + num_tokens)
    head = head_of(name, model, 0.05)
    outcomes, gen = drafted(model, head, [p for p, _ in expected], most)
    for outcome, (prompt, tokens), number in zip(outcomes, expected, most, strict=True):
        assert outcome.tokens == tokens[:number] and outcome.reason == "length"
        assert outcome.all_tokens == prompt + tokens[:number]
    check_nothing_left(gen, model, head)


@pytest.mark.parametrize("name", quick(QUICK, "qwen3_next"))
def test_preempted_rows_continue_with_drafts(name: str) -> None:
    expected = solos(name, 0.05)
    model = model_of(name, 0.05)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    head = head_of(name, model, 0.05)
    with in_every_step():
        gen = generator(model, draft_model=head, num_draft_tokens=DRAFTS)
    outcomes = {uid: Outcome() for uid in gen.insert([p for p, _ in expected], [TOKENS] * 3)}
    for step in range(40):
        collect(outcomes, *gen.next())
        if step % 3 == 2:
            gen.preempt_last()
    run_all(gen, outcomes)
    assert [outcome.tokens for outcome in outcomes.values()] == [tokens for _, tokens in expected]
    stats = mlx_paged.pool_of(model).stats()
    assert stats.preemptions > 1 and stats.accepted_tokens > 0
    check_nothing_left(gen, model, head)


@pytest.mark.parametrize("name", QUICK)
def test_request_with_a_cached_prefix_gets_drafts(name: str) -> None:
    model = model_of(name, 0.05)
    ((first, tokens), *_) = [solo for solo in solos(name, 0.05) if len(solo[0]) == 37]
    second = [*first, *tokens[:10], 5, 6]
    expected = greedy(model, mx.array(second, mx.uint32), 12)[0]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    prefixes = SharedPrefixes(PrefixCache(mlx_paged.pool_of(model)))
    with in_every_step():
        gen = generator(
            model, draft_model=head_of(name, model, 0.05), num_draft_tokens=DRAFTS, prefixes=prefixes,
            prefill_step_size=8,
        )  # fmt: skip
    outcomes = {uid: Outcome() for uid in gen.insert([first], [10])}
    run_all(gen, outcomes)
    before = mlx_paged.pool_of(model).stats()
    outcomes = {uid: Outcome() for uid in gen.insert([second], [12])}
    run_all(gen, outcomes)
    stats = mlx_paged.pool_of(model).stats()
    assert stats.prefix_hit_tokens > 0
    assert next(iter(outcomes.values())).tokens == expected
    assert stats.accepted_tokens > before.accepted_tokens


@pytest.mark.parametrize("is_same_beginning", [True, False])
def test_head_reuses_its_cached_prefix(is_same_beginning: bool) -> None:
    """The head's results depend on all tokens, including the first one, which the head is not given."""
    model = model_of("mimo", 0.05)
    ((first, tokens), *_) = [solo for solo in solos("mimo", 0.05) if len(solo[0]) == 37]
    second = [*first, *tokens[:10], 5, 6]
    if not is_same_beginning:
        second[0] += 1
    expected = greedy(model, mx.array(second, mx.uint32), 12)[0]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    head = head_of("mimo", model, 0.05)
    prefixes = SharedPrefixes(PrefixCache(mlx_paged.pool_of(model)))
    with in_every_step():
        gen = generator(model, draft_model=head, num_draft_tokens=DRAFTS, prefixes=prefixes)
    run_all(gen, {uid: Outcome() for uid in gen.insert([first], [10])})
    outcomes = {uid: Outcome() for uid in gen.insert([second], [12])}
    run_all(gen, outcomes)
    assert next(iter(outcomes.values())).tokens == expected
    hit = mlx_paged.pool_of(head).stats().prefix_hit_tokens
    assert hit > 30 if is_same_beginning else hit == 0
    known = gen._engine.drafts.proposer.prefixes.match([*second, *expected][1:], (None, second[0]))
    assert known.length > len(second) - 8, "no token was skipped, so the next request finds this one's prefix"
    assert not gen._engine.drafts.proposer.rows
    for each in (model, head):
        mlx_paged.pool_of(each).check_integrity()


@pytest.mark.slow  # the next test always covers compiled steps
@pytest.mark.parametrize("name", QUICK)
def test_in_place_pools_give_the_same_tokens_with_a_head(name: str, kernels: Any) -> None:
    expected = solos(name, 0.05, is_wide=True)
    model = model_of(name, 0.05, is_wide=True)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    outcomes, _ = drafted(model, head_of(name, model, 0.05), [p for p, _ in expected], [TOKENS] * 3)
    assert [outcome.tokens for outcome in outcomes] == [tokens for _, tokens in expected]
    assert mlx_paged.pool_of(model).stats().accepted_tokens > 0


def test_decode_steps_in_place_run_compiled(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their single output is split into logits and hidden states."""
    compiled: list[bool] = []
    original = CompiledStep._compiled

    def count(self: CompiledStep, *args: Any) -> Any:
        logits = original(self, *args)
        compiled.append(logits is not None)
        return logits

    monkeypatch.setattr(CompiledStep, "_compiled", count)
    monkeypatch.setattr(compiled_step, "PATIENCE", 0)
    expected = solos("mimo", 0.05, is_wide=True)
    model = model_of("mimo", 0.05, is_wide=True)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    outcomes, _ = drafted(model, head_of("mimo", model, 0.05), [p for p, _ in expected], [TOKENS] * 3)
    assert [outcome.tokens for outcome in outcomes] == [tokens for _, tokens in expected]
    assert sum(compiled) > 2 and mlx_paged.pool_of(model).stats().accepted_tokens > 0


@pytest.mark.parametrize("pays", [True, False])
def test_all_hidden_states_are_kept_only_if_drafts_pay(pays: bool) -> None:
    model = model_of("mimo", 0.05)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    gen = generator(model, draft_model=head_of("mimo", model, 0.05), num_draft_tokens=DRAFTS)
    outcomes = {uid: Outcome() for uid in gen.insert(prompts_of("mimo-of-mlx-lm", (200,)), [40])}
    proposer = gen._engine.drafts.proposer
    proposer.depth.choose = lambda rows, num_rows: [0] * len(rows)
    proposer.depth.pays = pays
    while not proposer.rows or len(next(iter(outcomes.values())).tokens) < 30:
        collect(outcomes, *gen.next())
    (row,) = proposer.rows
    first, end = proposer.hidden.known(row.sequence, num_known(row)), num_known(row)
    assert first == 0 if pays else end - first <= TRIAL_CONTEXT + 2
    gen.close()


def test_head_of_another_model_is_refused() -> None:
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    model, other = model_of("mimo", 1.0), model_of("mimo", 0.05)
    with pytest.raises(ConfigError, match="belongs to another model"):
        generator(model, draft_model=head_of("mimo", other))


# Hidden states ----------------------------------------------------------------------------------------------------


class Sequence:
    """A placeholder for block tables."""


def states_of(*calls: tuple[int, int]) -> tuple[HiddenStates, Any]:
    """Note calls of (first position, number of tokens). A state is its position and the number of its call."""
    states, sequence = HiddenStates(), Sequence()
    for number, (begin, count) in enumerate(calls):
        hidden = mx.stack([mx.arange(begin, begin + count), mx.full(count, number)], axis=1)
        states.note([(sequence, begin, count)], hidden)
    return states, sequence


def values(states: HiddenStates, sequence: Any, begin: int, end: int) -> list[list[int]]:
    return mx.concatenate(states.of(sequence, begin, end)).tolist()


def test_positions_computed_again_replace_what_was_kept() -> None:
    states, sequence = states_of((0, 5), (5, 4), (6, 2))
    assert values(states, sequence, 4, 8) == [[4, 0], [5, 1], [6, 2], [7, 2]]
    assert states.known(sequence, 8) == 0 and states.known(sequence, 6) == 0
    assert states.known(sequence, 9) is None


def test_states_after_a_gap_replace_earlier_ones() -> None:
    states, sequence = states_of((0, 5), (7, 2))
    assert states.known(sequence, 9) == 7
    states.drop(sequence, 9)
    assert states.known(sequence, 9) is None and states.known(Sequence(), 1) is None


def test_positions_before_those_kept_are_zeros() -> None:
    states, sequence = states_of((5, 3))
    assert values(states, sequence, 3, 7) == [[0, 0], [0, 0], [5, 0], [6, 0]]


def test_number_of_kept_positions_is_limited() -> None:
    states, sequence = states_of((0, 3 * MOST_POSITIONS))
    assert states.known(sequence, 3 * MOST_POSITIONS) == 2 * MOST_POSITIONS
    assert values(states, sequence, 2 * MOST_POSITIONS, 2 * MOST_POSITIONS + 1) == [[2 * MOST_POSITIONS, 0]]
    states, sequence = states_of(*((n, 1) for n in range(MOST_POSITIONS + 7)))
    assert states.known(sequence, MOST_POSITIONS + 7) == 7
