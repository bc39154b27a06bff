"""What ranks agree on: values, and the blocks of their pools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import mlx.nn as nn

from ...errors import ConfigError, KernelUnavailableError, RequestFailedError
from ...kernels.build import backend
from ...kv.block_table import BlockTable
from ...kv.pool import BlockPool
from ...kv.storage.attention_params import QueryHeads
from ...kv.storage.base import ChooseStorage, Geometry, StorageChoice
from ...kv.storage.choice import storage_choice
from .ranks import Ranks
from .world import SHARDED

if TYPE_CHECKING:
    from ..request import Request
    from ..scheduler import ScheduledStep
    from ..upstream import TokenResponse


class Agreement:
    """Notes each decision of an engine in the ranks' record, and has the record compared before every step.

    Args:
        ranks: that the engine's model is sharded over.
        pool: of its requests.
    """

    def __init__(self, ranks: Ranks, pool: BlockPool | None) -> None:
        self.ranks = ranks
        self._pool = pool

    def step(self) -> AbstractContextManager[None]:
        """See :meth:`Ranks.step`."""
        return self.ranks.step()

    def begin_step(self) -> None:
        """Have all that was decided compared, unless a message has done so already."""
        if not self.ranks.is_compared:
            self.ranks.broadcast()

    def note_insertion(self, request: Request) -> None:
        self.ranks.record.note(
            "insert", {"request": [request.uid, request.kept, request.max_tokens], "tokens": request.source}
        )

    def note_removal(self, uids: Sequence[int], finished: bool) -> None:
        self.ranks.record.note("finish" if finished else "remove", {"requests": uids})

    def note_step(
        self, plan: ScheduledStep, generated: Sequence[TokenResponse], failures: Collection[RequestFailedError]
    ) -> None:
        """A step is done; of what it wrote, the blocks and lengths of the tables are noted."""
        chunks = [(chunk.request.uid, chunk.num_tokens) for chunk in plan.chunks]
        self.ranks.record.note(
            "step",
            {
                "decode": [request.uid for request in plan.decode],
                "chunks": [each for chunk in chunks for each in chunk],
                "tokens": [each for response in generated for each in (response.uid, response.token)],
                "failed": [failure.uid for failure in failures],
                "blocks": self._blocks(plan),
            },
            "; ".join(map(str, failures)),
        )

    def _blocks(self, plan: ScheduledStep) -> list[int]:
        if self._pool is None:
            return []
        noted = [each for group in self._pool.groups for each in (group.allocator.num_blocks, group.allocator.num_free)]
        for request in plan.decode:
            for table in request.tables or ():
                noted += [table.length, *table.block_ids[-1:]]
        for chunk in plan.chunks:
            for table in chunk.request.tables or ():
                noted += [table.length, *_blocks_of_last(table, chunk.num_tokens)]
        return noted


def _blocks_of_last(table: BlockTable, num_tokens: int) -> Sequence[int]:
    """Return the blocks that the last tokens of a table may be in."""
    return table.block_ids[max(0, table.length - num_tokens) // table.block_size :]


def check_heads(model: nn.Module, ranks: Ranks) -> None:
    """Raise ConfigError if heads of keys and values do not divide by the ranks: mlx-lm shards them all the same."""
    for module in model.modules():
        if not isinstance(getattr(module, "k_proj", None), SHARDED):
            continue
        heads = _first_of(module, "n_kv_heads", "num_key_value_heads")
        queries = _first_of(module, "n_heads", "num_attention_heads", "num_heads")
        rows = module.k_proj.weight.shape[0]
        if heads is None or queries is None:
            continue
        head_dim = getattr(module, "head_dim", None) or module.q_proj.weight.shape[0] // max(1, queries)
        if not heads or heads * head_dim != rows:
            raise ConfigError(
                f"the model's key and value heads do not divide by {ranks.size} ranks: each would have {rows} of their "
                f"values, where a head has {head_dim}"
            )


def _first_of(module: nn.Module, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def agreed_budget(ranks: Ranks, num_bytes: int, options: str) -> int:
    """Return the least of all ranks' budgets for their pools, each of its own part of the heads.

    Args:
        num_bytes: this rank's.
        options: what is configured, in words, which must be the same everywhere.

    Raises:
        ConfigError: it is not.
    """
    configured = ranks.exchange(f"{options} on {backend() or 'the CPU'}")
    for rank, theirs in enumerate(configured):
        if theirs != configured[0]:
            raise ConfigError(f"ranks must be configured alike: rank 0 is {configured[0]}, and rank {rank} is {theirs}")
    return ranks.all_min(num_bytes)


def agreed_storage(ranks: Ranks, choose: ChooseStorage) -> ChooseStorage:
    """Return how pools choose their storage where all ranks have the same: in place if that works on each of them.

    Args:
        choose: how this rank would.
    """
    without_kernel = storage_choice(False)

    def choose_alike(geometry: Geometry, block_size: int, heads: QueryHeads | None, pinned: int) -> StorageChoice:
        mine: StorageChoice | None = None
        error: KernelUnavailableError | None = None
        try:
            mine = choose(geometry, block_size, heads, pinned)
        except KernelUnavailableError as raised:
            error = raised
        functional = without_kernel(geometry, block_size, heads, pinned)
        in_place = mine is not None and mine.form is not functional.form
        found = ranks.exchange([in_place, str(error or ""), "" if mine is None else mine.reason])
        if error is not None:
            raise error
        for rank, (theirs_in_place, why_error, reason) in enumerate(found):
            if why_error:
                raise KernelUnavailableError(f"rank {rank}: {why_error}")
            if in_place and not theirs_in_place:
                return StorageChoice(functional.form, f"rank {rank}: {reason}")
        assert mine is not None
        return mine

    return choose_alike
