// CUDA only, the part that all bodies of narrow_matmul share. Before it, a body names the matrix [width, depth], a partner of
// its shape, the target, the tile (of the target's columns) and finish(row, column, sum, partner_sum): what target[m, n] is
// made from, sum over k of x[m, k] matrix[n, k] and, with MATRICES = 2, sum over k of x[m, k] partner[n, k].
// For few rows m: x has XD dimensions of any sizes, of rows of depth values one after the other.
// 16-bit types on the tensor cores (mma.sync m16n8k16, float accumulators): rows of w are the A operand, rows of x the B.
// A thread group makes MT * 8 rows of COLUMNS columns of the target. Its warps share out k, 128 at a time whatever the tile, and
// their sums are added in the warps' order: a row's bits depend neither on the other rows nor on how many there are.
// The order of k inside a fragment is ours to choose as long as both factors agree, so every load is 16 bytes.
constexpr int HALVES = R * 2 / MATRICES;  // eight rows of a matrix each
constexpr int ROWS = 8 * MT;
constexpr int SHARE = 128;
constexpr int SHARES = (U + 3) / 4;  // of a warp, in flight

// Padded, so that the stores below spread over all banks.
threadgroup float sums[SG][ROWS][16 * R + 4];

int n_rows = 1;
UNROLL
for (int i = 0; i < XD; i++) {
  n_rows *= x_shape[i];
}
n_rows /= depth;
const int lane = thread_index_in_simdgroup;
const int warp = simdgroup_index_in_threadgroup;
const int r = lane / 4;
const int c = lane % 4;
const int first_column = tile * COLUMNS;
const int first_row = threadgroup_position_in_grid.y * ROWS;
const bool aligned = is_aligned(x) && is_aligned(matrix) && is_aligned(partner);

// Past the last row or column the last one is computed again, and not stored.
const T* w_rows[R][2];
UNROLL
for (int i = 0; i < R * 2; i++) {
  const T* const source = i < HALVES ? matrix : partner;
  w_rows[i / 2][i % 2] = source + static_cast<int64_t>(metal::min(first_column + i % HALVES * 8 + r, width - 1)) * depth;
}
const T* x_rows[MT];
UNROLL
for (int j = 0; j < MT; j++) {
  x_rows[j] = x + static_cast<int64_t>(metal::min(first_row + j * 8 + r, n_rows - 1)) * depth;
}
float acc[R][MT][4];
UNROLL
for (int i = 0; i < R * MT * 4; i++) {
  acc[i / (MT * 4)][i / 4 % MT][i % 4] = 0.0f;
}

int k = warp * SHARE;
while (k < depth) {
  uint4 a[U][R][2];
  uint4 b[U][MT];
  UNROLL
  for (int u = 0; u < U; u++) {
    const int at = k + u / 4 * (SG * SHARE) + u % 4 * 32 + c * 8;
    const bool live = at < depth;
    UNROLL
    for (int i = 0; i < R * 2; i++) {
      const T* source = w_rows[i / 2][i % 2] + at;
      a[u][i / 2][i % 2] = !live ? make_uint4(0, 0, 0, 0) : aligned ? stream_load(source) : load_words(source);
    }
    UNROLL
    for (int j = 0; j < MT; j++) {
      const T* source = x_rows[j] + at;
      b[u][j] = !live ? make_uint4(0, 0, 0, 0) : aligned ? load_aligned(source) : load_words(source);
    }
  }
  UNROLL
  for (int u = 0; u < U; u++) {
    UNROLL
    for (int i = 0; i < R; i++) {
      const uint4 low = a[u][i][0];
      const uint4 high = a[u][i][1];
      UNROLL
      for (int j = 0; j < MT; j++) {
        mma<T>(acc[i][j], low.x, high.x, low.y, high.y, b[u][j].x, b[u][j].y);
        mma<T>(acc[i][j], low.z, high.z, low.w, high.w, b[u][j].z, b[u][j].w);
      }
    }
  }
  k += U < 4 ? 32 * U : SHARE;
  if (k % SHARE == 0) k += (SHARES * SG - 1) * SHARE;
}
