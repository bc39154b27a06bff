// CUDA only: out = x w^T, of 1 to 3 matrices w, or of affine-quantised ones. The parts below define the matrix [width,
// depth] of a thread group, a partner of the same shape, the target, the tile (of the target's columns) and finish(column,
// sum, partner_sum), which makes target[m, n] from the sum over k of x[m, k] matrix[n, k] and, with MATRICES = 2, the sum
// over k of x[m, k] partner[n, k].
#if PACKED
const int depth = w_shape[1] / BITS * 32;
const int groups = scales_shape[1];
#else
const int depth = w_shape[1];
#endif
#if GROUP
// The grid covers the tiles of the matrices one after the other, and ends before the third if there are only two.
const int tiles0 = (w_shape[0] + COLUMNS - 1) / COLUMNS;
const int tiles1 = (w1_shape[0] + COLUMNS - 1) / COLUMNS;
const int place = threadgroup_position_in_grid.x;
const int which = place < tiles0 ? 0 : place < tiles0 + tiles1 ? 1 : 2;
const int tile = place - (which == 0 ? 0 : which == 1 ? tiles0 : tiles0 + tiles1);
const int width = which == 0 ? w_shape[0] : which == 1 ? w1_shape[0] : w2_shape[0];
T* const target = which == 0 ? out : which == 1 ? out1 : out2;
const auto* const matrix = which == 0 ? w : which == 1 ? w1 : w2;
#if PACKED
const T* const matrix_scales = which == 0 ? scales : which == 1 ? scales1 : scales2;
const T* const matrix_biases = which == 0 ? biases : which == 1 ? biases1 : biases2;
#endif
#else
const int tile = threadgroup_position_in_grid.x;
const int width = w_shape[0];
T* const target = out;
const auto* const matrix = w;
#if PACKED
const T* const matrix_scales = scales;
const T* const matrix_biases = biases;
#endif
#endif
#if GATE
const auto* const partner = w1;
#else
const auto* const partner = matrix;
#endif
#if PACKED && GATE
const T* const partner_scales = scales1;
const T* const partner_biases = biases1;
#elif PACKED
const T* const partner_scales = matrix_scales;
const T* const partner_biases = matrix_biases;
#endif
#if GATE
// silu(gate) * up, rounded wherever MLX's operations round.
auto rounded = [](float value) { return static_cast<float>(static_cast<T>(value)); };
auto finish = [&](int, float sum, float partner_sum) {
  const float gate = rounded(sum);
  const float power = rounded(metal::fast::exp2((gate < 0.0f ? -gate : gate) * LOG2E));
  const float tail = rounded(1.0f / rounded(1.0f + power));
  const float sigmoid = gate < 0.0f ? tail : rounded(1.0f - tail);
  return static_cast<T>(rounded(gate * sigmoid) * rounded(partner_sum));
};
#elif BIAS
auto finish = [&](int column, float sum, float) { return static_cast<T>(sum + static_cast<float>(bias[column])); };
#else
auto finish = [&](int, float sum, float) { return static_cast<T>(sum); };
#endif
// For few rows m, of 16-bit types, on the tensor cores (mma.sync m16n8k16, float accumulators): rows of w are the A
// operand, rows of x the B operand.
// A thread group computes MT * 8 rows of COLUMNS columns of the target. Its warps split k, 128 at a time with every tile,
// and their sums are added in the order of the warps: a row's bits depend neither on the other rows nor on their number.
// The order of k inside a fragment is free if both factors have the same, so that every load is 16 bytes.
constexpr int ROWS = 8 * MT;
constexpr int HALVES = R * 2 / MATRICES;  // eight rows of a matrix each
constexpr int SHARE = 128;
const int n_rows = x_shape[0];
const int lane = thread_index_in_simdgroup;
const int warp = simdgroup_index_in_threadgroup;
const int first_row = threadgroup_position_in_grid.y * ROWS;
const int r = lane / 4;
const int c = lane % 4;

// Padded, so that the stores below spread over all banks.
threadgroup float sums[SG][ROWS][16 * R + 4];

// Rows and columns past the last repeat the last one, and are not stored.
const T* x_rows[MT];
UNROLL
for (int j = 0; j < MT; j++) {
  x_rows[j] = x + static_cast<int64_t>(metal::min(first_row + j * 8 + r, n_rows - 1)) * depth;
}
auto row_of = [&](int i) { return static_cast<int64_t>(metal::min(tile * COLUMNS + i % HALVES * 8 + r, width - 1)); };
float acc[R][MT][4];
UNROLL
for (int i = 0; i < R * MT * 4; i++) {
  acc[i / (MT * 4)][i / 4 % MT][i % 4] = 0.0f;
}
// Whether addresses are multiples of 16 is asked once, since a branch at each load would keep the loads apart.
auto add_products = [&](auto aligned) {
  auto load_matrix = [](const auto* source) {
    if constexpr (decltype(aligned)::value) return stream_load(source);
    else return load_words(source);
  };
  auto load_x = [](const T* source) {
    if constexpr (decltype(aligned)::value) return load_aligned(source);
    else return load_words(source);
  };
#if PACKED
  // Affine-quantised matrices as MLX packs them: values of BITS (4 or 8) bits in 32-bit words, low bits first, and a scale
  // and a bias for each group of 32, 64 or 128 values of a row. A value is scale * q + bias, rounded to T. Each of a row's
  // four lanes has 32 consecutive ones of a warp's 128, all of one group.
  constexpr int LOADS = BITS / 4;  // of 16 bytes each, for 32 values
  constexpr unsigned MASK = (1u << BITS) - 1;

  const int row_words = depth / 32 * BITS;
  const int shift = depth == groups * 32 ? 5 : depth == groups * 64 ? 6 : 7;

  int64_t w_rows[R][2];
  UNROLL
  for (int i = 0; i < R * 2; i++) w_rows[i / 2][i % 2] = row_of(i);

  // Return two of a lane's values: the codes at bit `at` of a word and 16 bits above it, times the scale, plus the bias.
  // With the bits of a power of two above it a code is the end of a value's mantissa, and subtracting the power is exact.
  // Codes of eight bits need a float for that where T is bfloat16.
  constexpr unsigned POWER = is_half<T> ? 0x64006400u : 0x43004300u;
  constexpr unsigned ONE = is_half<T> ? 0x3c003c00u : 0x3f803f80u;
  auto values = [&](unsigned packed, int at, unsigned by, unsigned plus) {
    if constexpr (BITS == 4 || is_half<T>) {
      const unsigned q = fma2<T>((packed >> at & MASK * 0x10001u) | POWER, ONE, POWER | 0x80008000u);
      return fma2<T>(q, by, plus);
    } else {
      const float low = metal::fma(byte_of(packed, at / 8), low_of<T>(by), low_of<T>(plus));
      const float high = metal::fma(byte_of(packed, at / 8 + 2), low_of<T>(by), low_of<T>(plus));
      return pack_rounded<T>(low, high);
    }
  };

  // What a lane multiplies at a time: 32 values of each row, with a scale and a bias, twice each.
  struct Part {
    uint4 packed[R][2][LOADS];
    unsigned scale[R][2];
    unsigned offset[R][2];
  };
  auto load = [&](int first) {
    Part part;
    const int at = first + c * 32;
    const bool live = at < depth;
    UNROLL
    for (int i = 0; i < R * 2; i++) {
      const int64_t row = w_rows[i / 2][i % 2];
      const auto* source = (i < HALVES ? matrix : partner) + row * row_words + at / 32 * BITS;
      UNROLL
      for (int l = 0; l < LOADS; l++) {
        part.packed[i / 2][i % 2][l] = live ? load_matrix(source + l * 4) : make_uint4(0, 0, 0, 0);
      }
      const int64_t group = row * groups + (at >> shift);
      const T by = live ? (i < HALVES ? matrix_scales : partner_scales)[group] : static_cast<T>(0.0f);
      const T plus = live ? (i < HALVES ? matrix_biases : partner_biases)[group] : static_cast<T>(0.0f);
      part.scale[i / 2][i % 2] = pack(by, by);
      part.offset[i / 2][i % 2] = pack(plus, plus);
    }
    return part;
  };

  // U parts are in flight, also while one is multiplied unless many rows take the registers.
  constexpr bool AHEAD = MT < 4;
  Part parts[U];
  UNROLL
  for (int u = 0; u < U; u++) {
    if (AHEAD) parts[u] = load((warp + u * SG) * SHARE);
  }
  for (int first = warp * SHARE; first < depth; first += U * SG * SHARE) {
    UNROLL
    for (int u = 0; u < U; u++) {
      if (!AHEAD) parts[u] = load(first + u * SG * SHARE);
    }
    UNROLL
    for (int u = 0; u < U; u++) {
      const Part part = parts[u];
      if (AHEAD) parts[u] = load(first + (u + U) * SG * SHARE);
      const int at = first + u * SG * SHARE + c * 32;
      const bool live = at < depth;
      UNROLL
      for (int e = 0; e < 32; e += 8) {
        // Values whose codes lie 16 bits apart go together: e and e + 4 with 4 bits, e and e + 2 with 8.
        unsigned b[MT][4];
        UNROLL
        for (int j = 0; j < MT; j++) {
          const T* source = x_rows[j] + at + e;
          const uint4 x8 = live ? load_x(source) : make_uint4(0, 0, 0, 0);
          UNROLL
          for (int h = 0; h < 4; h += 2) {
            const unsigned near = BITS == 4 ? word(x8, h / 2) : word(x8, h);
            const unsigned far = BITS == 4 ? word(x8, h / 2 + 2) : word(x8, h + 1);
            b[j][h] = low_halves(near, far);
            b[j][h + 1] = high_halves(near, far);
          }
        }
        UNROLL
        for (int i = 0; i < R; i++) {
          unsigned a[4][2];
          UNROLL
          for (int h = 0; h < 8; h++) {
            const int pair = h / 2;
            const int number = e / 8 * BITS / 4 + pair * BITS / 16;  // of the word with the codes
            const unsigned packed = word(part.packed[i][h % 2][number / 4], number % 4);
            a[pair][h % 2] = values(packed, BITS * pair % 16, part.scale[i][h % 2], part.offset[i][h % 2]);
          }
          UNROLL
          for (int j = 0; j < MT; j++) {
            mma<T>(acc[i][j], a[0][0], a[0][1], a[1][0], a[1][1], b[j][0], b[j][1]);
            mma<T>(acc[i][j], a[2][0], a[2][1], a[3][0], a[3][1], b[j][2], b[j][3]);
          }
        }
      }
    }
  }
#else
  const T* w_rows[R][2];
  UNROLL
  for (int i = 0; i < R * 2; i++) w_rows[i / 2][i % 2] = (i < HALVES ? matrix : partner) + row_of(i) * depth;

  int k = warp * SHARE;
  while (k < depth) {
    uint4 a[U][R][2];
    uint4 b[U][MT];
    UNROLL
    for (int u = 0; u < U; u++) {
      const int at = k + u * 32 + c * 8;
      const bool live = at < depth;
      UNROLL
      for (int i = 0; i < R * 2; i++) {
        const T* source = w_rows[i / 2][i % 2] + at;
        a[u][i / 2][i % 2] = live ? load_matrix(source) : make_uint4(0, 0, 0, 0);
      }
      UNROLL
      for (int j = 0; j < MT; j++) {
        const T* source = x_rows[j] + at;
        b[u][j] = live ? load_x(source) : make_uint4(0, 0, 0, 0);
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
    k += 32 * U;
    if (k % SHARE == 0) k += (SG - 1) * SHARE;
  }
#endif
};
if (is_aligned(x) && is_aligned(matrix) && is_aligned(partner)) add_products(Case<true>());
else add_products(Case<false>());

// Add the warps' sums and store the results.
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
  const int column = tile * COLUMNS + e % COLUMNS;
  if (row < n_rows && column < width) {
    float total[2] = {0.0f, 0.0f};
    UNROLL
    for (int s = 0; s < SG; s++) {
      total[0] += sums[s][e / COLUMNS][e % COLUMNS];
      total[1] += sums[s][e / COLUMNS][(MATRICES - 1) * COLUMNS + e % COLUMNS];
    }
    target[static_cast<int64_t>(row) * width + column] = finish(column, total[0], total[1]);
  }
}
