"""Prefill: computes the prompt chunks of a step, in as few model calls as pays off."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..by_model import ByModel
from ..cache.batch import NoBlocksError, NotPackableError
from ..cache.composites import leaves
from ..cache.paged_kv_cache import PagedKVCache
from ..errors import device_failed
from ..kernels.availability import backend, on_metal
from ..kernels.fused_attention import has_nax, least_fused_queries
from ..kv.pool import BlockPool
from ..warn import warn_once
from .decode_batch import DecodeBatch
from .model_call import ModelCall
from .request import Request
from .scheduler import Chunk, ChunkCap

LATENCY_MS = 500  # default time for the prompts of a step beside requests that decode or wait
# Prompt tokens of a step beside others: at first, and at least. Fewer take hardly less time, since each step reads all
# weights.
CPU_TOKENS, METAL_TOKENS = (128, 32), (512, 128)
UNCUT_TOKENS = 512  # a prompt is not cut below this while nothing decodes and nobody else waits


class PrefillPace:
    """The prompt tokens of a step beside requests that decode or wait, on a CPU and on Metal (docs/adr/0104).

    A chunk of 2,048 tokens can take seconds or minutes there.

    Half as many after a step that took longer than the latency, twice as many after one that took less than half of it.

    Args:
        latency_ms: time that a step's prompts should take.
        most: most tokens.
    """

    def __init__(self, latency_ms: int = LATENCY_MS, most: int = 2048) -> None:
        self.latency = latency_ms / 1000
        self.tokens, self.least = METAL_TOKENS if on_metal() else CPU_TOKENS
        self.tokens, self.most = min(self.tokens, most), most

    def note(self, num_tokens: int, seconds: float) -> None:
        """Follow the time that a step's prompt tokens took."""
        if seconds > self.latency and num_tokens <= self.tokens:
            self.tokens = max(self.least, self.tokens // 2)
        elif 2 * seconds < self.latency and num_tokens >= self.tokens:
            self.tokens = min(self.most, self.tokens * 2)


# Prompt tokens per step on a GPU without packs: longer chunks take more memory and delay decoding (docs/adr/0006).
# Prompts are cut at multiples of it.
IN_PLACE_STEP_TOKENS = 512
# On Metal prompts are cut at multiples of this, so that a step can stay within its time limit (docs/adr/0063).
METAL_GRID = 128
# New tokens times context of a chunk on Metal, at most: macOS ends a process whose command buffer runs too long. Where
# MLX's attention stores all scores, a quarter: 1 GB of them for 32 heads (docs/adr/0063).
MOST_PAIRS, MOST_STORED_PAIRS = 1 << 26, 1 << 24
# Prompt tokens per step with packs (docs/adr/0023).
STEP_TOKENS = 4096
# On CUDA a single chunk is a pack if it ends within this many tokens: MLX's attention prepares a plan for each length,
# in some 30 ms. At longer contexts attention dominates, and MLX's pays off: once planned, it is faster.
MOST_ALONE = 4096
# mlx-lm's default step size: most tokens of one prompt in a step.
UPSTREAM_STEP_TOKENS = 2048
UPSTREAM_PREFILLING = 8  # mlx-lm's default number of prompts computed at a time


def most_step_tokens() -> int:
    """Return the most prompt tokens of a step with packs, or on a Mac, where the time limit often allows fewer."""
    return UPSTREAM_STEP_TOKENS if on_metal() else STEP_TOKENS


def chunk_cap(pool: BlockPool | None) -> ChunkCap | None:
    """Return the limit of chunks over a pool's blocks by their context; None where there is none, but on Metal.

    It never cuts chunks below what MLX's attention needs to be fused for the heads of every layer.
    """
    if pool is None or not on_metal():
        return None
    least, is_fused = 0, True
    for group in pool.groups:
        if group.geometry is not None and group.heads is not None:
            dims = group.geometry.k_head_dim, group.geometry.v_head_dim
            needed = None if group.heads.softcap else least_fused_queries(*dims, group.heads.num_q_heads, has_nax())
            least, is_fused = max(least, needed or 0), is_fused and needed is not None
    # A chunk that begins between two multiples of the grid ends up to one multiple earlier.
    return ChunkCap(MOST_PAIRS if is_fused else MOST_STORED_PAIRS, least + METAL_GRID)


def grid_tokens() -> int:
    """Return the number of tokens at whose multiples prompts are cut if blocks are in place."""
    return METAL_GRID if on_metal() else IN_PLACE_STEP_TOKENS


_not_packed: ByModel[str] = ByModel("why not packed")  # by model: why it cannot take packs, found out at a call


class Prefill:
    """Computes chunks of prompts: several in one call as a pack, which suits MLX on CUDA, or each by itself, without
    padding and with MLX's fused causal attention.

    Args:
        batch: the decode batch, whose model computes the prompts, too.
        in_place: the caches' blocks are a device's.
        packs: all chunks of a step go through the model together, as a pack.
        pace: follows the time that chunks take; None: nothing does.
    """

    def __init__(
        self, batch: DecodeBatch, *, in_place: bool, packs: bool = False, pace: PrefillPace | None = None
    ) -> None:
        self.batch, self.in_place, self.pace = batch, in_place, pace
        self.packs = packs and _not_packed.get(batch.model) is None
        self._under_way: list[mx.array] = []  # fences of the last chunks
        self._num_launched, self._begin = 0, 0.0  # tokens of the last chunks, and when they began

    def compute(
        self,
        chunks: Sequence[Chunk],
        make_room: Callable[[Request, Exception], None],
        fail: Callable[[Sequence[Request], Exception], None],
    ) -> list[Request]:
        """Compute chunks of running requests. Returns the requests that succeeded, with their new length. If blocks are
        written in place, the device may still be computing: see :meth:`wait`.

        Args:
            chunks: at most one of each request.
            make_room: called if a request finds no block; it makes room, preempts the request or fails it.
            fail: called with the requests of a model call that raised, and its error.
        """
        self.wait()
        begin = time.perf_counter()
        calls = deque([list(chunks)] if self.packs and chunks else [[chunk] for chunk in chunks])
        done: list[Chunk] = []
        while calls:
            call = [chunk for chunk in calls.popleft() if chunk.request.caches is not None]
            if not call:  # they had to make room
                continue
            requests = [request for request, _ in call]
            try:
                self._run(call, requests)
            except NoBlocksError as lack:
                make_room(requests[lack.row], lack.error)
                calls.appendleft(call)
                continue
            except NotPackableError as error:
                self.packs = False
                _not_packed.put(self.batch.model, str(error))
                warn_once(
                    f"prompts are prefilled one at a time for models of {type(self.batch.model).__module__}: {error}"
                )
                calls.extendleft([[chunk] for chunk in reversed(call)])
                continue
            except Exception as error:
                fail(requests, error)
                continue
            for request, num_tokens in call:
                request.length += num_tokens
            done += call
        done = [chunk for chunk in done if chunk.request.caches is not None]
        if self.in_place:  # the host goes on with what comes next, such as a decode step
            fences = _fences([request for request, _ in done])
            mx.async_eval(fences)
            self._under_way, self._begin = fences, begin
            self._num_launched = sum(chunk.num_tokens for chunk in done)
        elif self.pace is not None and len(done) == len(chunks):
            self.pace.note(sum(chunk.num_tokens for chunk in done), time.perf_counter() - begin)
        return [request for request, _ in done]

    def _run(self, call: Sequence[Chunk], requests: Sequence[Request]) -> None:
        """Build the model call of some chunks, one chunk only unless as a pack."""
        made = ModelCall(requests, [num_tokens for _, num_tokens in call], together=self._is_pack(call))
        tokens = [token for request, num_tokens in call for token in request.next_tokens(num_tokens)]
        made.run(self.batch.forward, mx.array(tokens, mx.uint32))
        made.keep_states()
        if not self.in_place:  # states, which have no fence
            mx.eval([cache.state for request in requests for cache in request.caches or ()])

    def wait(self) -> None:
        """Wait for the last chunks, so that at most one step of prompts is under way.

        Raises:
            DeviceError: they were not computed.
        """
        under_way, self._under_way = self._under_way, []
        if not under_way:
            return
        try:
            mx.eval(under_way)
        except Exception as error:  # all else was raised when they were launched
            raise device_failed(error) from error
        if self.pace is not None:
            self.pace.note(self._num_launched, time.perf_counter() - self._begin)

    def _is_pack(self, call: Sequence[Chunk]) -> bool:
        if not self.packs or len(call) > 1:
            return self.packs
        request, num_tokens = call[0]
        return not on_metal() and request.length + num_tokens <= MOST_ALONE


def _fences(requests: Sequence[Request]) -> list[mx.array]:
    """Return arrays that are ready once all writes of these requests are done, if kernels write every layer's blocks.
    Requests of one pool share them."""
    pools = {id(request.sequence.pool): request.sequence.pool for request in requests if request.sequence is not None}
    return [array for pool in pools.values() for array in pool.ready()]


def can_pack(
    caches: Sequence[Any], state_cache: type[Any], *, reads_blocks_only: bool, takes_rows: bool = True
) -> bool:
    """Return whether new tokens of several sequences can go through the model as rows of one token each: every layer
    must be paged, or keep a state.

    Args:
        caches: one sequence's caches.
        state_cache: class of the caches that hold states.
        reads_blocks_only: the model's attention uses keys and values only through attention functions; without effect
            if no layer is paged.
        takes_rows: the model computes several rows in one call.
    """
    of_layers = leaves(caches)
    attends_so = reads_blocks_only or not any(isinstance(cache, PagedKVCache) for cache in of_layers)
    return takes_rows and attends_so and all(isinstance(cache, PagedKVCache | state_cache) for cache in of_layers)


def packs_by_default(pool: BlockPool | None) -> bool:
    """Return whether prompts go through the model as packs by default: blocks are in place on a GPU, where a call of
    few tokens costs as much as one of many."""
    return backend() is not None and (pool is None or all(group.in_place for group in pool.groups))
