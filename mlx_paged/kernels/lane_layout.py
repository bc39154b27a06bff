"""How a simdgroup of an Apple GPU shares a token and its query heads: by what its registers hold and what it issues.

Plain arithmetic. The counts follow the texts of text/decode and text/quantized.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

# 32-bit registers that the arrays of a lane may take of the 128 that M1 and M2 give a thread when all of them run.
# The rest is addresses and counters: of the layouts compiled so far, none below this limit spills (docs/adr/0018).
MOST_REGISTERS = 108
VEC = 4  # elements of a load
PACKED_VEC = 8  # of a load of codes
_SOFTMAX = 12.0  # instructions of a score's softmax, besides its maxima over lanes


class LaneLayout(NamedTuple):
    """One way to cut the work of a threadgroup of paged_decode or quantized_decode.

    Attributes:
        lanes: that hold one token.
        unroll: steps of ``32 / lanes`` tokens in flight.
        head_split: simdgroups that share the query heads.
        vec: elements of a load; PACKED_VEC of quantised pages, whose elements are of less than a byte or one.
    """

    lanes: int
    unroll: int
    head_split: int
    vec: int = VEC

    def heads(self, gqa: int) -> int:
        """Query heads of a simdgroup."""
        return -(-gqa // self.head_split)

    def elements(self, dim: int) -> int:
        """Of a vector of ``dim`` elements, those of one lane."""
        return -(-dim // (self.vec * self.lanes)) * self.vec

    def _packets(self, dims: int) -> int:
        """Of so many elements, the loads that have a scale and a bias of their own."""
        return dims // self.vec if self.vec == PACKED_VEC else 0

    def _scores(self, gqa: int) -> int:
        """Of a chunk, as they are halved: the heads rounded up to a power of two."""
        return self.unroll << (self.heads(gqa) - 1).bit_length()

    def registers(self, gqa: int, head_dim: int, value_dim: int, itemsize: float) -> float:
        """32-bit registers of a lane's arrays: queries, accumulators, keys and values in flight, scores; of quantised
        pages sums of queries, weighted biases, and the scales and biases in flight."""
        scores = self._scores(gqa)
        dims = self.elements(head_dim) + self.elements(value_dim)
        owned = scores // min(scores, self.lanes)
        factors = (self.heads(gqa) + 2 * self.unroll) * self._packets(dims)
        return self.heads(gqa) * dims + self.unroll * dims * itemsize / 4 + scores + 3 * owned + factors

    def instructions(self, gqa: int, head_dim: int, value_dim: int, itemsize: float) -> float:
        """Simdgroup instructions for one token and kv head. A load counts as many as each lane takes bytes: what a core
        issues meanwhile, if its first-level cache gives 64 bytes a cycle and four simdgroups issue."""
        heads, scores = self.heads(gqa), self._scores(gqa)
        dims = self.elements(head_dim) + self.elements(value_dim)
        owners = min(scores, self.lanes)
        conversions = 2 if itemsize < 2 else int(itemsize == 2)  # of an element
        products = self.unroll * (heads + conversions) * dims + 2 * self.unroll * heads * self._packets(dims)
        halving = 4 * (scores - scores // owners) + 2 * log2(self.lanes // owners)
        softmax = scores // owners * (_SOFTMAX + 2 * log2(self.unroll) + 2 * log2(32 // self.lanes))
        back = heads * (1 + self.elements(value_dim)) + self.unroll * heads
        chunk = products + halving + softmax + back + self.unroll * dims * itemsize + _SOFTMAX
        return self.head_split * chunk * self.lanes / (32 * self.unroll)


def best_layout(gqa: int, head_dim: int, value_dim: int, itemsize: float, vec: int = VEC) -> LaneLayout:
    """Of the layouts that fit the registers, the one that issues least; itemsize in bytes of an element."""
    layouts = [
        LaneLayout(lanes, unroll, head_split, vec)
        for head_split in (1, 2, 4, 8)
        for lanes in (8, 16, 32)
        for unroll in (4, 2, 1)
        if head_split <= gqa
    ]
    shape = gqa, head_dim, value_dim, itemsize
    fitting = [layout for layout in layouts if layout.registers(*shape) <= MOST_REGISTERS]
    return min(fitting or layouts[-1:], key=lambda layout: layout.instructions(*shape))
