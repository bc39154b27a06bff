"""Output layers over two simulated ranks; engine/test_ranks.py and cli/test_over_ranks.py have real ones."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.nn.layers.distributed import shard_linear
from mlx_lm.models import llama

from mlx_paged.patches.sharded import ShardedHead, shard_head

HIDDEN, VOCAB, SIZE = 64, 96, 2
Heads = list[ShardedHead]


class Group:
    """One of two ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return SIZE


def model_of(*, tied: bool = False, vocab: int = VOCAB) -> Any:
    mx.random.seed(3)
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": vocab}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    return llama.Model(llama.ModelArgs(model_type="llama", tie_word_embeddings=tied, **shape, **heads))


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Heads:
    """Collect the heads of all ranks; all_gather computes their parts here."""
    heads: Heads = []
    asked: list[mx.array] = []

    def all_gather(mine: mx.array, *, group: Any) -> mx.array:
        parts = [head.part(asked[-1])[None] for head in heads]
        assert mx.array_equal(parts[group.rank()], mine)
        return mx.concatenate(parts)

    original = ShardedHead.__call__
    monkeypatch.setattr(mx.distributed, "all_gather", all_gather)
    monkeypatch.setattr(ShardedHead, "__call__", lambda self, x: (asked.append(x), original(self, x))[1])
    return heads


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5)])
def test_every_rank_gets_all_logits_in_order(
    shape: tuple[int, int], bias: bool, quantized: bool, gathered: Heads
) -> None:
    mx.random.seed(5)
    head: Any = nn.Linear(HIDDEN, VOCAB, bias=bias)
    if quantized:
        head = head.to_quantized(group_size=32, bits=4)
    gathered += [ShardedHead(head, Group(rank)) for rank in range(SIZE)]
    x = mx.random.normal((*shape, HIDDEN))
    for each in gathered:
        found = each(x)
        assert found.shape == (*shape, VOCAB)
        assert mx.abs(found - head(x)).max().item() < 1e-5
        assert sum(leaf.nbytes for leaf in each.part.parameters().values()) * SIZE == sum(
            leaf.nbytes for leaf in head.parameters().values()
        )


def test_a_head_within_a_language_model_is_found() -> None:
    outer = nn.Module()
    outer.language_model = model_of()
    assert shard_head(outer, Group(0)) and type(outer.language_model.lm_head) is ShardedHead


def test_heads_that_cannot_be_sharded_are_left_unchanged() -> None:
    tied, odd, sharded, again, headless = model_of(tied=True), model_of(vocab=97), model_of(), model_of(), nn.Module()
    sharded.lm_head = shard_linear(sharded.lm_head, "all-to-sharded", group=Group(0))
    assert shard_head(again, Group(0))
    headless.lm_head = None
    for model in (tied, odd, sharded, again, headless, nn.Module()):
        before = [id(module) for module in model.modules()]
        assert not shard_head(model, Group(0))
        assert [id(module) for module in model.modules()] == before
