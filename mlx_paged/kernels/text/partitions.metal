// Both dialects: a row's partitions, for the decode kernels and merge_partitions, and the look-up of blocks.

// Return the tokens per partition. It depends only on how many tokens the row sees, never on the rest of the batch.
template <int PART, int SPAN>
FUNCTION int partition_size(int seen) {
  int size = PART;
  while (seen > size / PART * size * SPAN) {
    size *= 2;
  }
  return size;
}

// Return where the first partition begins: the first visible token, rounded down to a multiple of min(PART, 64), itself
// a multiple of a chunk. If it began PART tokens or more before the first visible one, the first partition could hold
// no visible token: no thread group would write its output, and merge_partitions would read it.
template <int PART>
FUNCTION int first_partition(int begin) {
  constexpr int ALIGNMENT = PART < 64 ? PART : 64;
  return begin / ALIGNMENT * ALIGNMENT;
}

// Look up the ids of the BLOCKS blocks of a chunk. A block outside the visible tokens [lo, hi) is replaced by the
// nearest one inside. The type of the table is a template parameter: on Metal it may be in either address space.
template <int CHUNK, int BS, int BLOCKS, typename Table>
FUNCTION void look_up_blocks(Table table, int chunk, int lo, int hi, thread int* blocks) {
  UNROLL
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = table[metal::min(metal::max(chunk * CHUNK / BS + i, lo / BS), (hi - 1) / BS)];
  }
}
