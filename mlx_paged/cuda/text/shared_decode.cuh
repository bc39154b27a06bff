// CUDA only, part of shared_decode_tensor (tensor_decode.cuh): a partition that several rows see. Its keys and values pass through shared memory, once for all
// warps. A warp handles 16 columns, and if DV > 128 half of the values' dims. It processes the chunks of
// paged_decode_tensor's first warp, then those of the second, and so on, and joins their results.
//   scores  S[column, token]  = Q[column, dim] K^T[dim, token]
//   output  O[column, dim]   += P[column, token] V[token, dim]    pairs of S's accumulators are P's A fragments
// The products are those of paged_decode_tensor with their factors exchanged, over the same tokens and dims. Sums are
// taken in the same order.
constexpr int KW = ((D / 8 + 3) / 8 * 8 + 4) * 8;  // rows of keys and values in shared memory are padded:
constexpr int VW = DV + 8;                         // lanes load from different banks
constexpr int STAGE = KEYS * (KW + VW);
constexpr int CHUNKS = KEYS / CHUNK;  // per stage
constexpr int EIGHTS = KEYS / 8;
constexpr int HALVES = DV > 128 ? 2 : 1;
constexpr int DW = DV / HALVES;  // dims of the values per warp
static_assert(PART % (KEYS * SG) == 0, "a partition has as many stages for each warp");
static_assert(G * ROWS <= 16 * SG / HALVES, "columns are too many");
SHARED_ARRAY(T, staged, STAGE * STAGES);
if (n_rows > 1) {
  const int* table = tables + sequence * max_blocks;
  const int of_warp = size / (KEYS * SG);  // stages per warp of paged_decode_tensor
  AsyncCopies copies;
  const T* k_head = k_pool + kv_head * (BS * D);
  const T* v_head = v_pool + kv_head * (BS * DV);
  // The stage to copy next, the warp of paged_decode_tensor that it belongs to, and the blocks of its tokens.
  int next = 0, next_warp = 0, ids[CHUNKS];
  const int turned = SG - lo / CHUNK % SG;  // its warp w takes the chunks with number % SG == w
  auto token_of = [&](int i) { return lo + ((next * CHUNKS + i) * SG + (next_warp + turned) % SG) * CHUNK; };
  auto look_up = [&] {
    UNROLL
    for (int i = 0; i < CHUNKS; i++) ids[i] = next_warp < SG ? table[token_of(i) / BS] : 0;
  };
  auto copy_next = [&](int stage) {
    if (next_warp < SG) {
      UNROLL
      for (int i = 0; i < CHUNKS; i++) {
        auto copy = [&](auto width, auto row_width, const T* head, T* target) {
          constexpr int LOADS = decltype(width)::value / 8;
          UNROLL
          for (int j = 0; j < CHUNK * LOADS; j += SG * 32) {
            const int item = j + threadIdx.x;
            if (CHUNK * LOADS % (SG * 32) == 0 || item < CHUNK * LOADS) {
              const int own = token_of(i) + item / LOADS;
              const int64_t block = CHUNK <= BS ? ids[i] : table[own / BS];
              const int slot = CHUNK <= BS ? token_of(i) % BS * LOADS + item : own % BS * LOADS + item % LOADS;
              copies.copy(target + item / LOADS * decltype(row_width)::value + item % LOADS * 8, head + block * (n_kv * BS * LOADS * 8) + slot * 8, true);
            }
          }
        };
        T* const keys = staged + stage * STAGE + i * CHUNK * KW;
        T* const values = staged + stage * STAGE + KEYS * KW + i * CHUNK * VW;
        copy(Number<D>(), Number<KW>(), k_head, keys);
        copy(Number<DV>(), Number<VW>(), v_head, values);
      }
      if (++next == of_warp) next = 0, next_warp++;
      look_up();
    }
    copies.commit();
  };
  look_up();
  UNROLL
  for (int stage = 0; stage < STAGES - 1; stage++) copy_next(stage);

  const int columns = n_rows * G;
  const int tile = warp % (SG / HALVES) * 16, first_dim = warp / (SG / HALVES) * DW;
  const int first_column = tile + r;  // the lane's two columns: this, and this + 8
  uint4 query[KT * 2];  // A fragments, two for 32 dims: 32 kt + 8c + 0..3 and + 4..7
  UNROLL
  for (int kt = 0; kt < KT; kt++) {
    uint4 x[2];
    UNROLL
    for (int e = 0; e < 2; e++) {
      const int column = first_column + e * 8;
      x[e] = make_uint4(0, 0, 0, 0);
      if (column < columns && kt * 32 + c * 8 < D) x[e] = load_aligned(q + line_of(column) * D + kt * 32 + c * 8);
    }
    query[kt * 2] = make_uint4(x[0].x, x[1].x, x[0].y, x[1].y);
    query[kt * 2 + 1] = make_uint4(x[0].z, x[1].z, x[0].w, x[1].w);
  }
  const float gain = SOFTCAP ? params[0] / params[1] : params[0] * LOG2E;
  float acc[DW / 8][4];  // dims 8 t + 2c and + 1 of the two columns
  float m[2], l[2][2];   // sums over tokens 2c and 2c + 1 of each eight
  State before[2];       // result of the warps so far; kept: dims 16 t + 2c, + 1, + 8, + 9 of their outputs
  float4 kept[2][DW / 16];
  int stage = 0;
  for (int other = 0; other < SG; other++) {
    UNROLL
    for (int i = 0; i < DW / 2; i++) acc[i / 4][i % 4] = 0.0f;
    UNROLL
    for (int i = 0; i < 2; i++) {
      m[i] = NOTHING;
      l[i][0] = l[i][1] = 0.0f;
    }
    for (int i = 0; i < of_warp; i++) {
      copies.wait_for_all_but<STAGES - 2>();
      __syncthreads();
      copy_next(stage == 0 ? STAGES - 1 : stage - 1);
      const T* const keys = staged + stage * STAGE + r * KW + c * 8;
      const T* const values = staged + stage * STAGE + KEYS * KW + lane % 16 * VW + first_dim + lane / 16 * 8;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      if (tile >= columns) continue;
      float s[EIGHTS][4];  // (column, tokens 2c and 2c + 1 of an eight), then the other column
      UNROLL
      for (int j = 0; j < EIGHTS * 4; j++) s[j / 4][j % 4] = 0.0f;
      UNROLL
      for (int kt = 0; kt < KT; kt++) {
        const uint4 a = query[kt * 2], b = query[kt * 2 + 1];
        uint4 x[EIGHTS];
        UNROLL
        for (int h = 0; h < EIGHTS; h++) {
          x[h] = D % 32 == 0 || kt * 32 + c * 8 < D ? load_aligned(keys + h * 8 * KW + kt * 32) : make_uint4(0, 0, 0, 0);
        }
        UNROLL
        for (int h = 0; h < EIGHTS; h++) mma<T>(s[h], a.x, a.y, a.z, a.w, x[h].x, x[h].y);
        UNROLL
        for (int h = 0; h < EIGHTS; h++) mma<T>(s[h], b.x, b.y, b.z, b.w, x[h].z, x[h].w);
      }
      float shrink[CHUNKS][2];
      UNROLL
      for (int e = 0; e < 2; e++) {
        float tops[CHUNKS];
        UNROLL
        for (int j = 0; j < EIGHTS * 2; j++) {
          float& x = s[j / 2][e * 2 + j % 2];
          x = product(x, gain);
          if (SOFTCAP) x = product(::tanhf(x), params[1] * LOG2E);
          float& top = tops[j / (U * 4)];
          top = j % (U * 4) == 0 ? x : ::fmaxf(top, x);
        }
        UNROLL
        for (int step = 1; step < 4; step *= 2) {
          UNROLL
          for (int j = 0; j < CHUNKS; j++) tops[j] = ::fmaxf(tops[j], __shfl_xor_sync(0xffffffffu, tops[j], step));
        }
        UNROLL
        for (int j = 0; j < CHUNKS; j++) {
          const float top = ::fmaxf(m[e], tops[j]);
          shrink[j][e] = metal::fast::exp2(m[e] - top);
          m[e] = top;
          l[e][0] = product(l[e][0], shrink[j][e]);
          l[e][1] = product(l[e][1], shrink[j][e]);
          UNROLL
          for (int k = 0; k < U * 4; k++) {
            float& x = s[j * U * 2 + k / 2][e * 2 + k % 2];
            x = metal::fast::exp2(x - top);
            l[e][k % 2] += x;
          }
        }
      }
      UNROLL
      for (int u = 0; u < CHUNKS * U; u++) {
        // Most chunks raise no maximum.
        if (u % U == 0 && simd_any(shrink[u / U][0] != 1.0f || shrink[u / U][1] != 1.0f)) {
          UNROLL
          for (int j = 0; j < DW / 2; j++) acc[j / 4][j % 4] *= shrink[u / U][j / 2 % 2];
        }
        uint high[4], rest[4];
        UNROLL
        for (int j = 0; j < 4; j++) {
          const float p0 = s[u * 2 + j / 2][j % 2 * 2], p1 = s[u * 2 + j / 2][j % 2 * 2 + 1];
          high[j] = pack_rounded<T>(p0, p1);
          rest[j] = pack_rounded<T>(p0 - low_of<T>(high[j]), p1 - high_of<T>(high[j]));
        }
        UNROLL
        for (int t0 = 0; t0 < DW / 8; t0 += 8) {
          uint4 x[4];
          UNROLL
          for (int t = 0; t < 4 && t0 + t * 2 < DW / 8; t++) x[t] = load_transposed(values + u * 16 * VW + (t0 + t * 2) * 8);
          UNROLL
          for (int t = 0; t < 4 && t0 + t * 2 < DW / 8; t++) {
            mma<T>(acc[t0 + t * 2], high[0], high[1], high[2], high[3], x[t].x, x[t].y);
            mma<T>(acc[t0 + t * 2 + 1], high[0], high[1], high[2], high[3], x[t].z, x[t].w);
          }
          UNROLL
          for (int t = 0; t < 4 && t0 + t * 2 < DW / 8; t++) {
            mma<T>(acc[t0 + t * 2], rest[0], rest[1], rest[2], rest[3], x[t].x, x[t].y);
            mma<T>(acc[t0 + t * 2 + 1], rest[0], rest[1], rest[2], rest[3], x[t].z, x[t].w);
          }
        }
      }
    }
    // Join the result of this warp of paged_decode_tensor to that of the warps before it.
    UNROLL
    for (int e = 0; e < 2; e++) {
      float sum = l[e][0] + l[e][1];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      State whole = {m[e], sum};
      if (other > 0) {
        UNROLL
        for (int t = 0; t < DW / 8; t += 2) {
          float4 o = make_float4(acc[t][e * 2], acc[t][e * 2 + 1], acc[t + 1][e * 2], acc[t + 1][e * 2 + 1]);
          whole = {m[e], sum};
          join(before[e], kept[e][t / 2], whole, o);
          acc[t][e * 2] = o.x;
          acc[t][e * 2 + 1] = o.y;
          acc[t + 1][e * 2] = o.z;
          acc[t + 1][e * 2 + 1] = o.w;
        }
      }
      before[e] = whole;
      UNROLL
      for (int t = 0; t < DW / 8; t += 2) kept[e][t / 2] = make_float4(acc[t][e * 2], acc[t][e * 2 + 1], acc[t + 1][e * 2], acc[t + 1][e * 2 + 1]);
    }
  }
  UNROLL
  for (int e = 0; e < 2; e++) {
    const int column = first_column + e * 8;
    if (column < columns) {
      float2* const target = reinterpret_cast<float2*>(partial + slot_of(column) * DV + first_dim) + c;
      UNROLL
      for (int t = 0; t < DW / 8; t++) target[t * 4] = make_float2(acc[t][e * 2], acc[t][e * 2 + 1]);
      if (c == 0 && first_dim == 0) reinterpret_cast<float2*>(stats)[slot_of(column)] = make_float2(before[e].m, before[e].l);
    }
  }
}
