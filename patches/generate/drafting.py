"""Draft models of batches: a pool that shares the budget of the model's pool, and a proposer over it."""

from __future__ import annotations

import argparse
import threading
import weakref
from typing import Any

from ...drafts.depth import new_depth
from ...drafts.draft_model import DraftModel, is_paged
from ...drafts.look_up import LookUp, depth_of
from ...drafts.prediction_head import PredictionHead
from ...engine.decode_batch import DecodeBatch
from ...engine.draft_steps import NO_DRAFTS_REASON
from ...engine.hidden_states import HiddenStates
from ...engine.interfaces import Proposer
from ...engine.prefill import can_pack
from ...engine.request import sequence_of
from ...errors import ConfigError
from ...kv.pool import BlockPool
from ...kv.pool_memory import UNLIMITED
from ...prefix.prefix_cache import PrefixCache, SharedPrefixes
from ..cache.layout import reads_blocks_only
from ..cache.prompt_cache import factory_of
from ..models.mtp import HiddenCall, MTPHead
from ..sharded import group_of
from .upstream import UPSTREAM

NUM_DRAFT_TOKENS = 3  # mlx-lm's default
MOST_DRAFT_TOKENS = 64  # the server's limit

_lock = threading.Lock()
_whole: weakref.WeakKeyDictionary[BlockPool, int] = weakref.WeakKeyDictionary()  # budgets before they were shared
_draft_pools: weakref.WeakKeyDictionary[BlockPool, weakref.WeakSet[BlockPool]] = weakref.WeakKeyDictionary()


def share_budget(pool: BlockPool, draft_pool: BlockPool) -> None:
    """Divide a pool's budget between it and the pools of its draft models, in proportion to the bytes of a token. Call
    it in the compute thread, between steps."""
    with _lock:
        draft_pools = _draft_pools.setdefault(pool, weakref.WeakSet())
        if draft_pool in draft_pools:
            return
        draft_pools.add(draft_pool)
        sizes = {p: sum(g.bytes_per_block for g in p.groups) / p.block_size for p in (pool, *draft_pools)}
        whole = min(_whole.setdefault(p, p.memory.budget) for p in sizes)  # one may leave room for more weights
        for each, size in sizes.items():
            each.memory.budget = max(1, int(whole * size / sum(sizes.values())))
            if each.memory.unreserved_bytes < 0:
                each.memory.evict(UNLIMITED)  # tensors go whole, once no prefix holds a block


def check_one_proposer(args: argparse.Namespace) -> None:
    """Raise ConfigError if the flags ask for both a draft model and the model's prediction head."""
    if args.mtp and args.draft_model is not None:
        raise ConfigError("--draft-model and --mtp both propose tokens: choose one")


def check_draft_tokens(num_draft_tokens: int) -> None:
    """Raise ConfigError unless the number of draft tokens is from 0 to 64."""
    is_whole = isinstance(num_draft_tokens, int) and not isinstance(num_draft_tokens, bool)
    if not is_whole or not 0 <= num_draft_tokens <= MOST_DRAFT_TOKENS:
        raise ConfigError(f"num_draft_tokens must be from 0 to {MOST_DRAFT_TOKENS}, got {num_draft_tokens!r}")


def check_same_tokens(tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ConfigError unless both tokenizers have the same vocabulary: else drafts would stand for other texts."""
    own, other = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if own == other:
        return
    different = sorted(text for text in own.keys() | other.keys() if own.get(text) != other.get(text))
    raise ConfigError(
        f"the draft model's tokenizer differs from the model's in {len(different)} token(s), such as {different[0]!r}: "
        f"its id is {own.get(different[0])} in the model's and {other.get(different[0])} in the draft model's"
    )


def why_not_drafted(model: Any, draft_model: Any) -> str | None:
    """Return why batches of a model cannot use this draft model or prediction head, or None if they can."""
    if group_of(model) is not None:
        return "draft models and prediction heads are not supported over several ranks"
    if draft_model is model:
        return "a model cannot be its own draft model"
    fresh = factory_of(model, None)()
    verifies = can_pack(fresh, UPSTREAM.state_cache, reads_blocks_only=reads_blocks_only(model))
    if sequence_of(fresh) is None or not verifies:
        return f"{type(model).__module__} cannot verify drafts: {NO_DRAFTS_REASON}"
    if isinstance(draft_model, MTPHead):
        return None if draft_model.model is model else "the prediction head belongs to another model"
    if not is_paged(factory_of(draft_model, None)()) or not reads_blocks_only(draft_model):
        why = "not all of its layers are paged, or its attention may bypass mlx-lm's attention function"
        return f"{type(draft_model).__module__} cannot be a draft model: {why}"
    return None


def proposer_for(
    batch: DecodeBatch,
    draft_model: Any,
    num_draft_tokens: int,
    pool: BlockPool | None,
    prefixes: SharedPrefixes | None = None,
) -> Proposer | None:
    """Return what proposes drafts for a decode batch: a draft model, to which the model's pool gives up part of its
    budget, or look-up, for rows that ask for it. None: no layer is paged.

    Args:
        batch: the batch. With a prediction head its calls of the model also note the hidden states.
        draft_model: a model with the same vocabulary, or the model's own prediction head; None: look-up.
        num_draft_tokens: most drafts of a row in a step.
        pool: the model's pool.
        prefixes: shared prefixes over the draft model's pool; None makes new ones.

    Raises:
        ConfigError: the models cannot be used together; nothing has changed.
    """
    if draft_model is None:
        return None if pool is None else LookUp(depth_of(pool, batch.peers))
    check_draft_tokens(num_draft_tokens)
    if (why_not := why_not_drafted(batch.model, draft_model)) is not None:
        raise ConfigError(why_not)
    if not batch.takes_rows:
        raise ConfigError(f"{type(batch.model).__module__} cannot verify drafts: {NO_DRAFTS_REASON}")
    factory = factory_of(draft_model, None)
    assert factory.pool is not None
    depth = new_depth()
    proposer: DraftModel
    prefixes = prefixes or SharedPrefixes(PrefixCache(factory.pool))
    if isinstance(draft_model, MTPHead):
        hidden = HiddenStates()
        proposer = PredictionHead(draft_model, factory, num_draft_tokens, depth, prefixes, hidden)
        batch.forward = HiddenCall(batch.model, hidden)
    else:
        proposer = DraftModel(draft_model, factory, num_draft_tokens, depth, prefixes)
    if pool is not None:
        share_budget(pool, factory.pool)
    return proposer
