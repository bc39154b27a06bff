"""The batch generator with a model and samplers that fail on demand, compared with solo runs at every step."""

import functools
import weakref
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models import llama

import mlx_paged
from mlx_paged import PagedConfig, PoolExhaustedError, SequenceTables
from mlx_paged.cache.batch_cache import PagedBatchKVCache
from mlx_paged.errors import RequestFailedError
from mlx_paged.patches import registry
from tests.support.models.batch_runs import generator, packing_generator
from tests.support.models.builders import greedy, prompt_of

VOCAB, BLOCK, MOST = 64, 8, 30
PROMPTS = (1, 3, 8, 9, 17, 31, 50)
BYTES_PER_BLOCK = BLOCK * 2 * 2 * 1 * 16 * 4  # two layers, keys and values, one head of 16
FEWEST_BLOCKS = 13  # for the longest request alone: its 80 tokens, the next token, the null block


class FaultyModel(llama.Model):
    """A tiny model that raises for sequences in ``poisoned``, after it has written their keys."""

    poisoned: ClassVar[weakref.WeakSet[SequenceTables]] = weakref.WeakSet()

    def __call__(self, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
        output = super().__call__(inputs, cache, **options)
        if FaultyModel.poisoned:
            first = cache[0]
            rows = first.rows.sequences if isinstance(first, PagedBatchKVCache) else (first.sequence,)
            if any(row in FaultyModel.poisoned for row in rows):
                raise RuntimeError("injected: model")
        return output


class FaultySampler:
    """A greedy sampler that raises from its ``calls``-th call on."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.calls -= 1
        if self.calls <= 0:
            raise ValueError("injected: sampler")
        return mx.argmax(logprobs, axis=-1)


@functools.cache
def model() -> FaultyModel:
    mx.random.seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5}
    made = FaultyModel(llama.ModelArgs(model_type="llama", tie_word_embeddings=False, **shape, **heads))
    mx.eval(made.parameters())
    return made


def prompt(index: int) -> list[int]:
    return (prompt_of(PROMPTS[index], seed=index) % VOCAB).tolist()


@functools.cache
def solos() -> list[list[int]]:
    """Return each prompt's greedy tokens by stock mlx-lm."""
    registry.remove_patches()
    return [greedy(model(), mx.array(prompt(index)), MOST)[0] for index in range(len(PROMPTS))]


class Driver:
    """A generator and the known state of its requests. With ``packs``, prompts run in packs of up to that many
    tokens."""

    def __init__(self, num_blocks: int, packs: int = 0, **options: int) -> None:
        solos()
        registry.remove_patches()  # and with them the pool: every history starts from the same state
        mlx_paged.apply_patches(PagedConfig(block_size=BLOCK, kv_cache_memory=num_blocks * BYTES_PER_BLOCK))
        FaultyModel.poisoned.clear()
        self.gen = packing_generator(model(), packs, **options) if packs else generator(model(), **options)
        self.pool = mlx_paged.pool_of(model())
        self.num_blocks = num_blocks
        self.expected: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.failed: dict[int, BaseException] = {}
        self.may_fail: set[int] = set()
        self.faults = 0
        self.delivered = 0

    @property
    def active(self) -> list[int]:
        return sorted(self.expected)

    def insert(self, index: int, num_tokens: int, sampler: FaultySampler | None = None) -> int:
        samplers = None if sampler is None else [sampler]
        (uid,) = self.gen.insert([prompt(index)], [num_tokens], samplers=samplers)
        self.expected[uid], self.got[uid] = solos()[index][:num_tokens], []
        if sampler is not None:
            self.may_fail.add(uid)
        return uid

    def poison(self, uid: int) -> bool:
        """Make the model raise from now on whenever it computes this request."""
        row = self.gen._engine.requests.get(uid)
        if row is None or row.caches is None:
            return False
        FaultyModel.poisoned.add(row.sequence)
        self.may_fail.add(uid)
        return True

    def fail_next_allocation(self) -> None:
        def allocate(group: int, count: int, after: int | None = None) -> list[int]:
            del self.pool.allocate
            self.faults += 1
            raise OSError("injected: allocation")

        self.pool.allocate = allocate

    def step(self) -> bool:
        """Call next() once; return False when nothing is left to do."""
        try:
            prompts, generated = self.gen.next()
        except RequestFailedError as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                self.faults -= 1
            else:
                assert error.uid in self.may_fail or "injected: model" in str(cause), error  # it was in that call
                assert not isinstance(cause, PoolExhaustedError)
            self.failed[error.uid] = cause
            del self.expected[error.uid]
            self.check()
            return True
        for token in [(r.uid, r.token, r.finish_reason) for r in generated]:
            self.take(*token)
        more = bool(prompts or generated)
        del prompts, generated  # they hold the caches of finished requests
        self.check()
        return more

    def take(self, uid: int, token: int, reason: str | None) -> None:
        self.delivered += 1
        tokens = self.got[uid]
        tokens.append(token)
        assert tokens == self.expected[uid][: len(tokens)]
        if reason is not None:
            assert tokens == self.expected.pop(uid)

    def remove(self, uid: int) -> None:
        self.gen.remove([uid])
        del self.expected[uid]
        self.check()

    def check(self) -> None:
        if "allocate" in self.pool.__dict__:
            return  # a fault is pending
        self.pool.check_integrity()
        rows = self.gen._engine.requests.values()
        held = sum(-(-row.length // BLOCK) for row in rows if row.caches is not None)
        stats = self.pool.stats()
        # A block that the failed step had reserved is freed with its row.
        assert stats.live_blocks == held
        assert stats.live_blocks + stats.free_blocks == stats.total_blocks < self.num_blocks
        assert stats.preemptions == self.gen.preemptions

    def finish(self) -> None:
        while self.step():
            pass
        assert not self.expected, "requests are left over"
        assert self.pool.stats().live_blocks == 0
        assert not self.gen._engine.requests and not len(self.gen._engine.scheduler)
