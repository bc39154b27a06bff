"""Heads for multi-token prediction in batches: tokens are the same as without, whatever the head says."""

import functools
from typing import Any

import mlx.core as mx
import pytest

import mlx_paged
from mlx_paged import ConfigError, PagedConfig
from mlx_paged.drafts.depth import TRIAL_CONTEXT
from mlx_paged.engine.hidden_states import MOST_POSITIONS, HiddenStates
from mlx_paged.engine.interfaces import num_known
from mlx_paged.prefix.prefix_cache import PrefixCache, SharedPrefixes
from tests.support.cases import crossed, quick
from tests.support.models import prediction_heads
from tests.support.models.batch_runs import Outcome, answers, collect, generator
from tests.support.models.builders import greedy
from tests.support.models.compiled_steps import compiled_steps_taken
from tests.support.models.drafting import DRAFTS, check_nothing_left, drafted, drafting_generator, prompts_of
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
    assert not mlx_paged.is_applied()
    model = model_of(name, scale, is_wide=is_wide)
    return [(p, greedy(model, mx.array(p, mx.uint32), TOKENS)[0]) for p in prompts_of(f"{name}-of-mlx-lm", LENGTHS)]


# Scales of what the layers of model and head add, and the least and the largest share of drafts that are accepted.
HEADS = {"accurate": (0.01, 0.01, 0.5, 1.0), "noisy": (0.2, 0.3, 0.01, 0.99), "random": (1.0, None, 0.0, 0.15)}


@pytest.mark.parametrize(
    ("name", "head"), quick(crossed(FAMILIES, HEADS), ("qwen3_next", "accurate"), ("mimo", "noisy"), ("mimo", "random"))
)
def test_tokens_are_the_same_whatever_the_head_says(name: str, head: str) -> None:
    model_scale, scale, least, most = HEADS[head]
    expected = solos(name, model_scale)
    model = model_of(name, model_scale)
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    drafting = head_of(name, model, scale)
    outcomes, gen = drafted(model, drafting, [p for p, _ in expected], [TOKENS] * 3)
    assert [outcome.tokens for outcome in outcomes] == [tokens for _, tokens in expected]
    stats = mlx_paged.pool_of(model).stats()
    assert stats.drafted_tokens and least <= stats.accepted_tokens / stats.drafted_tokens <= most
    assert stats.draft_steps < TOKENS - 4 or head != "accurate"
    check_nothing_left(gen, model, drafting)


@pytest.mark.parametrize("name", QUICK)
def test_request_with_a_cached_prefix_gets_drafts(name: str) -> None:
    model = model_of(name, 0.05)
    ((first, tokens), *_) = [solo for solo in solos(name, 0.05) if len(solo[0]) == 37]
    second = [*first, *tokens[:10], 5, 6]
    expected = greedy(model, mx.array(second, mx.uint32), 12)[0]
    mlx_paged.apply_patches(PagedConfig(block_size=8))
    prefixes, head = SharedPrefixes(PrefixCache(mlx_paged.pool_of(model))), head_of(name, model, 0.05)
    gen = drafting_generator(model, head, prefixes=prefixes, prefill_step_size=8)
    answers(gen, [first], [10])
    before = mlx_paged.pool_of(model).stats()
    assert answers(gen, [second], [12]) == [expected]
    stats = mlx_paged.pool_of(model).stats()
    assert stats.prefix_hit_tokens > 0
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
    gen = drafting_generator(model, head, prefixes=prefixes)
    answers(gen, [first], [10])
    assert answers(gen, [second], [12]) == [expected]
    hit = mlx_paged.pool_of(head).stats().prefix_hit_tokens
    assert hit > 30 if is_same_beginning else hit == 0
    known = gen._engine.drafts.proposer.prefixes.match([*second, *expected][1:], (None, second[0]))
    assert known.length > len(second) - 8, "no token was skipped, so the next request finds this one's prefix"
    assert not gen._engine.drafts.proposer.rows
    for each in (model, head):
        mlx_paged.pool_of(each).check_integrity()


@pytest.mark.usefixtures("kernels")
def test_decode_steps_in_place_run_compiled() -> None:
    """Their single output is split into logits and hidden states."""
    expected = solos("mimo", 0.05, is_wide=True)
    model = model_of("mimo", 0.05, is_wide=True)
    mlx_paged.apply_patches(PagedConfig(block_size=8, kernel="on"))
    with compiled_steps_taken() as taken:
        outcomes, _ = drafted(model, head_of("mimo", model, 0.05), [p for p, _ in expected], [TOKENS] * 3)
    assert [outcome.tokens for outcome in outcomes] == [tokens for _, tokens in expected]
    assert len(taken) > 2 and mlx_paged.pool_of(model).stats().accepted_tokens > 0


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
