// Products of tiles in shared memory by a warpgroup of four warps. A tile has rows of 64 16-bit values. Eighth e of row n
// is stored in place e ^ (n % 8), so that the values of a column lie in different banks.
// Accumulators of 64 rows and N columns: [j][e] of lane 4r + c, warp w is row 16w + r + 8 (e / 2), column 8j + 2c + e %
// 2.

// Return where the values of an eighth of a row begin.
__device__ inline int swizzled(int row, int eighth) { return row * 64 + (eighth ^ row % 8) * 8; }

// d = A B^T, or d += if GOES_ON: 64 rows of A and 8 J rows of B, each in TILES tiles, a_apart and b_apart values apart.
template <int TILES, bool GOES_ON, class T, int J>
__device__ inline void multiply_rows(float (&d)[J][4], const T* a, int a_apart, const T* b, int b_apart, int lane, int warp) {
  UNROLL
  for (int i = 0; i < J * 4; i++) d[i / 4][i % 4] = GOES_ON ? d[i / 4][i % 4] : 0.0f;
  const int a_row = warp * 16 + lane % 16, b_row = lane / 16 * 8 + lane % 8;
  for (int k = 0; k < TILES * 4; k++) {
    const uint4 x = load_matrices(a + k / 4 * a_apart + swizzled(a_row, k % 4 * 2 + lane / 16));
    UNROLL
    for (int j = 0; j < J; j += 2) {
      const uint4 y = load_matrices(b + k / 4 * b_apart + swizzled(j * 8 + b_row, k % 4 * 2 + lane / 8 % 2));
      mma<T>(d[j], x.x, x.y, x.z, x.w, y.x, y.y);
      mma<T>(d[j + 1], x.x, x.y, x.z, x.w, y.z, y.w);
    }
  }
}

// d += A B: the first DEPTH columns of a tile A of 64 rows, and DEPTH rows of B in tiles of 64 columns, b_apart apart.
template <int DEPTH, class T, int J>
__device__ inline void multiply_columns(float (&d)[J][4], const T* a, const T* b, int b_apart, int lane, int warp) {
  const int row = warp * 16 + lane % 16;
#pragma unroll 1  // unrolled, it would spill registers
  for (int k = 0; k < DEPTH / 16; k++) {
    const uint4 x = load_matrices(a + swizzled(row, k * 2 + lane / 16));
    UNROLL
    for (int j = 0; j < J; j += 2) {
      const uint4 y = load_transposed(b + j / 8 * b_apart + swizzled(k * 16 + lane % 16, j % 8 + lane / 16));
      mma<T>(d[j], x.x, x.y, x.z, x.w, y.x, y.y);
      mma<T>(d[j + 1], x.x, x.y, x.z, x.w, y.z, y.w);
    }
  }
}
