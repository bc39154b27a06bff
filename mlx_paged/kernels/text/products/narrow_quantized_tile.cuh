// CUDA only: narrow_matmul_tile.cuh for matrices of affine quantisation, as MLX packs them: BITS (4 or 8) a value in words of
// 32 bits, low bits first, and a scale and a bias for each group of 32, 64 or 128 values of a row. A value is scale * q + bias,
// rounded to T.
// As there, a warp takes 128 of k at a time, here 32 in a row for each of a row's four lanes: all of one group.
constexpr int HALVES = R * 2 / MATRICES;  // eight rows of a matrix each
constexpr int ROWS = 8 * MT;
constexpr int SHARE = 128;
constexpr int LOADS = BITS / 4;  // of 16 bytes, for 32 values
constexpr unsigned MASK = (1u << BITS) - 1;

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
const int row_words = depth / 32 * BITS;
const int shift = depth == groups * 32 ? 5 : depth == groups * 64 ? 6 : 7;
const bool aligned = is_aligned(matrix) && is_aligned(partner);
const bool x_aligned = is_aligned(x);

// Past the last row or column the last one is computed again, and not stored.
int64_t w_rows[R][2];
UNROLL
for (int i = 0; i < R * 2; i++) {
  w_rows[i / 2][i % 2] = metal::min(first_column + i % HALVES * 8 + r, width - 1);
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

// Two of a lane's 32 values, the first of them numbered e. A value is taken out of its half word as it stands there, q times a
// power of two: as the last bits of a float of exponent 23 that is a float at once, and the scale takes the power away.
auto values = [&](const uint4 (&packed)[LOADS], int e, float by, float plus) {
  float value[2];
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int bit = (e + i) * BITS;
    const int place = bit % 16;
    const unsigned q = word(packed[bit / 128], bit / 32 % 4) >> bit % 32 / 16 * 16 & MASK << place;
    const float shifted = float_of(q | 0x4b000000u) - 8388608.0f;
    value[i] = metal::fma(shifted, by * (1.0f / (1 << place)), plus);
  }
  return pack_rounded<T>(value[0], value[1]);
};

for (int first = warp * SHARE; first < depth; first += U * SG * SHARE) {
  uint4 packed[U][R][2][LOADS];
  float scale[U][R][2];
  float offset[U][R][2];
  UNROLL
  for (int u = 0; u < U; u++) {
    const int at = first + u * SG * SHARE + c * 32;
    const bool live = at < depth;
    UNROLL
    for (int i = 0; i < R * 2; i++) {
      const int64_t row = w_rows[i / 2][i % 2];
      const auto* source = (i < HALVES ? matrix : partner) + row * row_words + at / 32 * BITS;
      UNROLL
      for (int l = 0; l < LOADS; l++) {
        packed[u][i / 2][i % 2][l] = !live ? make_uint4(0, 0, 0, 0)
                                   : aligned ? stream_load(source + l * 4)
                                             : make_uint4(source[l * 4], source[l * 4 + 1], source[l * 4 + 2], source[l * 4 + 3]);
      }
      const int64_t group = row * groups + (at >> shift);
      scale[u][i / 2][i % 2] = live ? static_cast<float>((i < HALVES ? matrix_scales : partner_scales)[group]) : 0.0f;
      offset[u][i / 2][i % 2] = live ? static_cast<float>((i < HALVES ? matrix_biases : partner_biases)[group]) : 0.0f;
    }
  }
  UNROLL
  for (int u = 0; u < U; u++) {
    const int at = first + u * SG * SHARE + c * 32;
    const bool live = at < depth;
    UNROLL
    for (int e = 0; e < 32; e += 8) {
      uint4 b[MT];
      UNROLL
      for (int j = 0; j < MT; j++) {
        const T* source = x_rows[j] + at + e;
        b[j] = !live ? make_uint4(0, 0, 0, 0) : x_aligned ? load_aligned(source) : load_words(source);
      }
      UNROLL
      for (int i = 0; i < R; i++) {
        unsigned a[4][2];
        UNROLL
        for (int h = 0; h < 8; h++) {
          a[h / 2][h % 2] = values(packed[u][i][h % 2], e + h / 2 * 2, scale[u][i][h % 2], offset[u][i][h % 2]);
        }
        UNROLL
        for (int j = 0; j < MT; j++) {
          mma<T>(acc[i][j], a[0][0], a[0][1], a[1][0], a[1][1], b[j].x, b[j].y);
          mma<T>(acc[i][j], a[2][0], a[2][1], a[3][0], a[3][1], b[j].z, b[j].w);
        }
      }
    }
  }
}
