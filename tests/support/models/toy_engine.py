"""An engine without mlx-lm: a model whose tokens NumPy can compute, and requests for it."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.cache.paged_kv_cache import PagedKVCache
from mlx_paged.cache.sequence import SequenceTables
from mlx_paged.drafts import look_up
from mlx_paged.engine.decode_batch import DecodeBatch
from mlx_paged.engine.engine import Engine
from mlx_paged.engine.interfaces import ALONE, Upstream
from mlx_paged.engine.request import Request, RequestOptions
from mlx_paged.engine.sampling.params import SamplingParams
from mlx_paged.errors import RequestFailedError
from mlx_paged.kv.geometry import AttentionParams
from mlx_paged.kv.group import LayerGroup
from mlx_paged.kv.pool import BlockPool
from mlx_paged.prefix.prefix_cache import SharedPrefixes

VOCAB = 24
BLOCK_SIZE = 4
BLOCK_BYTES = BLOCK_SIZE * 2 * VOCAB * 4  # keys and values of the only layer
_RNG = np.random.default_rng(0)
OF_ALL, OF_LAST = (_RNG.standard_normal((VOCAB, VOCAB)).astype(np.float32) for _ in range(2))
OF_ALL = 4 * OF_ALL - 12 * np.eye(VOCAB, dtype=np.float32)  # frequent tokens become less likely, so answers vary
OF_LAST -= 3 * np.eye(VOCAB, dtype=np.float32)


def next_token(tokens: Sequence[int]) -> int:
    """Return the model's next token, by NumPy: it depends on each token and its position."""
    history = np.zeros(VOCAB, np.float32)
    for position, token in enumerate(tokens):
        history[token] += (1 + position / 16) / len(tokens)
    return int(np.argmax(history @ OF_ALL + OF_LAST[tokens[-1]]))


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(100 + seed).integers(0, VOCAB, length)]


class ToyModel:
    """One layer that attends to all tokens alike; a token's value is its one-hot vector, weighted by its position."""

    def __init__(self) -> None:
        self.poison: int | None = None  # a token that the model cannot compute
        self.call_sizes: list[int] = []  # rows of each call

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        self.call_sizes.append(tokens.shape[0])
        if self.poison is not None and mx.any(tokens == self.poison).item():
            raise ValueError("a poisoned token")
        num_new = tokens.shape[1]
        positions = mx.array(cache[0].offset).reshape(-1, 1) + mx.arange(num_new)
        names = mx.eye(VOCAB)[tokens]
        values = (names * (1 + positions[..., None] / 16))[:, None]
        queries = mx.zeros_like(values)
        mask = "causal" if num_new > 1 else None
        history = cache[0].attend(queries, values, values, AttentionParams(1.0, mask))[:, 0]
        return history @ mx.array(OF_ALL) + names @ mx.array(OF_LAST)


class ToyResponse:
    """A token that was delivered."""

    def __init__(self, uid: int, token: int, logits: Any, finish_reason: str | None, *, num_cached: int) -> None:
        self.uid, self.token, self.finish_reason, self.num_cached = uid, token, finish_reason, num_cached
        self.logits = logits
        self.all_tokens: list[int] | None = None
        self.request: Request | None = None

    def attach(self, request: Request) -> None:
        self.request = request

    def drop_cache(self) -> bool:
        row, self.request = self.request, None
        if row is not None:
            row.release()
        return row is not None


class _Tokens:
    """The token buffer that processors are given."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = mx.array(list(tokens), mx.uint32)

    def update_and_fetch(self, tokens: mx.array) -> mx.array:
        self.tokens = mx.concatenate([self.tokens, tokens])
        return self.tokens


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


UPSTREAM = Upstream(
    response=ToyResponse,
    prompt_response=lambda uid, progress, segment_ends, prompt_ends: (uid, progress, prompt_ends),
    token_buffer=_Tokens,
    state_cache=type("NoState", (), {}),
)


def make_pool(num_blocks: int | None = None, window: int | None = None) -> BlockPool:
    """Return a pool with the model's geometry; ``num_blocks`` is its budget, the null block included."""
    budget = {} if num_blocks is None else {"memory_budget": num_blocks * BLOCK_BYTES}
    pool = BlockPool([LayerGroup((0,), window)], block_size=BLOCK_SIZE, **budget)
    x = mx.zeros((1, 1, 1, VOCAB))
    pool.set_geometry(0, x, x, batch=1)
    return pool


def caches_of(pool: BlockPool) -> list[PagedKVCache]:
    return [PagedKVCache(SequenceTables(pool), 0)]


def make_request(
    uid: int,
    prompt: Sequence[int],
    caches: list[Any],
    *,
    max_tokens: int = 8,
    history: Sequence[int] = (),
    sampler: Callable[[mx.array], mx.array] = greedy,
    processors: Sequence[Callable[..., mx.array]] = (),
    stops_at: Callable[[int], bool] = lambda token: False,
    client: str | None = None,
    sampling: SamplingParams | None = None,
) -> Request:
    return Request(
        uid,
        [list(prompt)],
        max_tokens=max_tokens,
        caches=caches,
        history=history,
        sampler=None if sampler is greedy else sampler,
        processors=processors,
        matcher=SimpleNamespace(advance=stops_at),
        options=RequestOptions(client=client, sampling=sampling),
    )


class ToyEngine:
    """An engine over a pool, and its deliveries."""

    def __init__(self, pool: BlockPool, *, prefixes: SharedPrefixes | None = None, **options: int) -> None:
        self.pool, self.model = pool, ToyModel()
        sizes = {"prefill_step_size": 16, "completion_batch_size": 8, "prefill_batch_size": 4, **options}
        counters = SimpleNamespace(
            prompt_tokens=0, prompt_time=0.0, decode_time=0.0, generation_tokens=0, generation_steps=0
        )
        self.engine = Engine(
            DecodeBatch(self.model, UPSTREAM),
            counters,
            prefixes=prefixes,
            factory=lambda: caches_of(pool),
            proposer=look_up.LookUp(look_up.depth_of(pool, ALONE)),
            **sizes,
        )
        self.responses: dict[int, list[ToyResponse]] = {}
        self.progress: dict[int, list[tuple[int, int]]] = {}
        self.failures: dict[int, RequestFailedError] = {}

    def add(self, prompt: Sequence[int], *, caches: list[Any] | None = None, **options: Any) -> int:
        """Check and queue a request; return its uid."""
        uid = len(self.responses)
        row = make_request(uid, prompt, caches_of(self.pool) if caches is None else caches, **options)
        self.engine.check(row)
        self.responses[uid], self.progress[uid] = [], []
        self.engine.add(row)
        return uid

    def step(self) -> bool:
        """Take a step; return whether there was anything to do."""
        try:
            prompts, generated = self.engine.next()
        except RequestFailedError as error:
            assert error.uid not in self.failures, "reported twice"
            self.failures[error.uid] = error
            return True
        for uid, progress, _ in prompts:
            self.progress[uid].append(progress)
        for response in generated:
            self.responses[response.uid].append(response)
        return bool(prompts or generated)

    def run(self) -> None:
        while self.step():
            pass

    def tokens(self, uid: int) -> list[int]:
        return [response.token for response in self.responses[uid]]
