// Both dialects: the partitions of a row, for the kernel that attends and the one that joins, and the blocks it attends to.

// Tokens of a partition. It grows with what the row itself sees, so it never depends on the rest of the batch.
template <int PART, int SPAN>
FUNCTION int partition_size(int seen) {
  int size = PART;
  while (seen > size / PART * size * SPAN) {
    size *= 2;
  }
  return size;
}

// Where the first partition begins: a multiple of a chunk, fewer than PART tokens before the first visible one. Farther
// away, a partition could hold no visible token: nobody would write its result, and the one that joins would read it.
template <int PART>
FUNCTION int first_partition(int begin) {
  constexpr int ALIGNMENT = PART < 64 ? PART : 64;
  return begin / ALIGNMENT * ALIGNMENT;
}

// The ids of the BLOCKS blocks that a chunk of tokens lies in. Outside of what is visible, [lo, hi), the nearest one inside is
// taken. The table is a template: it may be in either address space on Metal.
template <int CHUNK, int BS, int BLOCKS, typename Table>
FUNCTION void look_up_blocks(Table table, int chunk, int lo, int hi, thread int* blocks) {
  UNROLL
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = table[metal::min(metal::max(chunk * CHUNK / BS + i, lo / BS), (hi - 1) / BS)];
  }
}
