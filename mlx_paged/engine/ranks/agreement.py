"""Agreement: what an engine decides, for ranks to compare."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ...errors import RequestFailedError
from ...kv.block_table import BlockTable
from ...kv.pool import BlockPool
from .ranks import Ranks

if TYPE_CHECKING:  # they know this module
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
    """The blocks that the last tokens of a table may be in."""
    return table.block_ids[max(0, table.length - num_tokens) // table.block_size :]
