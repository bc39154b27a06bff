"""Checkpoints: which nodes of a radix tree carry states of layers without blocks, and which are dropped first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ..kv.states import StateSlot
from .radix_node import RadixNode

# Most of a pool's budget that checkpoints take: keys and values without a checkpoint behind them serve nobody, and
# neither do checkpoints without keys and values.
MOST_SHARE = 1 / 4


class Checkpoint:
    """The states at the end of a node's prefix.

    Attributes:
        slot: holds them.
        hits: how often a request went on from here.
        priority: see :class:`Checkpoints`.
    """

    __slots__ = ("hits", "priority", "slot")

    def __init__(self, slot: StateSlot) -> None:
        self.slot = slot
        self.hits = 0
        self.priority = 0.0


class Checkpoints:
    """The nodes of one tree that carry a checkpoint, by value. Used under the pool's lock.

    A checkpoint's value is the tokens it saves, times one more than its hits, by its bytes. The tokens are those since
    the nearest checkpoint before it. The priority is the value plus the priority of what was dropped last (GDSF), so
    that a checkpoint that was popular once goes in the end.
    """

    def __init__(self) -> None:
        self.nodes: dict[RadixNode, None] = {}
        self.nbytes = 0
        self.dropped = 0  # for want of room
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self.nodes)

    def put(self, node: RadixNode, slot: StateSlot) -> None:
        """Have a node carry a checkpoint; it has none."""
        node.checkpoint = Checkpoint(slot)
        self.nodes[node] = None
        self.nbytes += slot.nbytes
        self._value(node, node.checkpoint)

    def hit(self, node: RadixNode) -> Checkpoint:
        """Return the node's checkpoint; somebody goes on from it."""
        checkpoint = node.checkpoint
        assert checkpoint is not None
        checkpoint.hits += 1
        self._value(node, checkpoint)
        return checkpoint

    def _value(self, node: RadixNode, checkpoint: Checkpoint) -> None:
        before, saved = node.parent, node.end
        while before is not None:
            if before.checkpoint is not None:
                saved -= before.end
                break
            before = before.parent
        checkpoint.priority = self._clock + saved * (1 + checkpoint.hits) / max(1, checkpoint.slot.nbytes)

    def forget(self, node: RadixNode) -> int:
        """Take the node's checkpoint away, if it has one. Returns its bytes."""
        checkpoint, node.checkpoint = node.checkpoint, None
        if checkpoint is None:
            return 0
        del self.nodes[node]
        self.nbytes -= checkpoint.slot.nbytes
        return checkpoint.slot.nbytes

    def cheapest(self, num_bytes: int) -> list[RadixNode]:
        """Return the nodes, of least value first, whose checkpoints have ``num_bytes`` bytes together, or all that are
        not locked."""
        heap = [
            (node.checkpoint.priority, node.tick, node) for node in self.nodes if node.checkpoint and not node.locks
        ]
        heapq.heapify(heap)
        found: list[RadixNode] = []
        while heap and num_bytes > 0:
            priority, _, node = heapq.heappop(heap)
            assert node.checkpoint is not None
            num_bytes -= node.checkpoint.slot.nbytes
            self._clock = max(self._clock, priority)
            found.append(node)
        return found

    def reset(self, nodes: Iterable[RadixNode]) -> None:
        """Know exactly the checkpoints of these nodes."""
        self.nodes = {node: None for node in nodes if node.checkpoint is not None}
        self.nbytes = sum(node.checkpoint.slot.nbytes for node in self.nodes if node.checkpoint)
