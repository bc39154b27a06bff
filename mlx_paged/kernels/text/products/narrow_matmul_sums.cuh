// CUDA only, goes after the tiles of narrow_matmul and narrow_quantized: the warps' sums, and what is made from them.
UNROLL
for (int i = 0; i < R; i++) {
  UNROLL
  for (int j = 0; j < MT; j++) {
    UNROLL
    for (int e = 0; e < 4; e++) {
      sums[warp][j * 8 + c * 2 + e % 2][i * 16 + r + e / 2 * 8] = acc[i][j][e];
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int e = thread_position_in_threadgroup.x; e < ROWS * COLUMNS; e += SG * 32) {
  const int row = first_row + e / COLUMNS;
  const int column = first_column + e % COLUMNS;
  if (row < n_rows && column < width) {
    float total[2] = {0.0f, 0.0f};
    UNROLL
    for (int s = 0; s < SG * MATRICES; s++) {
      total[s / SG] += sums[s % SG][e / COLUMNS][s / SG * COLUMNS + e % COLUMNS];
    }
    target[static_cast<int64_t>(row) * width + column] = finish(row, column, total[0], total[1]);
  }
}
