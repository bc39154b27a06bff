// CUDA only: paged_decode for 16-bit types on the tensor cores (mma.sync m16n8k16, float accumulators).
// Same partitions as paged_decode. A thread group handles a run of 1, 2 or 4 (2^params[3]) of them. The last group of a
// row and KV head to finish joins the runs, so there is no second kernel. Partitions are always joined as the same
// tree, four by four, so the result has the same bits for every length of runs.
// Each warp takes whole chunks of 16 * U tokens:
//   scores  S[token, head]  = K[token, dim] Q[dim, head]     K rows go from memory straight into the A fragments
//   output  O[dim, head]   += V^T[dim, token] P[token, head]  V rows are paired by byte permutes into A fragments
// Heads are the 8 columns (NT column tiles for more than 8). The order of dims inside a fragment is free if both
// factors have the same, so that every load is 16 bytes: a lane holds dims 8c.. of a key row, 8r.. of a value row. A
// probability is split into two 16-bit halves (high and remainder), so P is precise to about 2^-16.
#if COMMON
// shared_decode_tensor is paged_decode_tensor for rows with common blocks. A thread group handles a partition of up to
// ROWS rows that see the same blocks in it, or of a single row, as paged_decode_tensor does. With several rows its
// columns are the query heads of all. Each column is computed as it is for a single row, so it has the same bits.
// `items` lists the rows (shared_runs.py): partition, number of rows, their places in the batch. join_partitions joins
// the partitions. If this kernel did, one thread group would join those of all its rows, after all others have
// finished.
#endif
constexpr int HEADS = G;  // of a single row
constexpr int NT = (G + 7) / 8;
constexpr int KT = (D + 31) / 32;    // 32 dims of a key row per load
constexpr int VT = (DV + 63) / 64;   // 64 dims of a value row per load
// Dim 8 a + b of an output is kept at b * DV / 8 + a of tg_o, which spreads stores over all banks. The inverse:
auto dim_of = [&](int place) { return place % (DV / 8) * 8 + place / (DV / 8); };
#include "tensor_rows.cuh"
#if COMMON
// shared_decode_tensor: a partition that several rows see. Its keys and values pass through shared memory, once for all
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
#endif
// A single row: a warp's chunks, from queries, keys and values to the accumulators of a partition.
if (first <= last && n_rows == 1) {
  const int* table = tables + sequence * max_blocks;
  const float gain = SOFTCAP ? params[0] / params[1] : params[0] * LOG2E;
  uint4 query[NT][KT];  // column r, dims 32 * kt + 8c + 0..7
  UNROLL
  for (int n = 0; n < NT; n++) {
    UNROLL
    for (int kt = 0; kt < KT; kt++) {
      const int dim = kt * 32 + c * 8;
      const int column = n * 8 + r;
      query[n][kt] = make_uint4(0, 0, 0, 0);
      if (column < G && dim < D) query[n][kt] = *reinterpret_cast<const uint4*>(q + line_of(column) * D + dim);
    }
  }
  float acc[NT][VT][4][4];
  float m[NT][2], l[NT][2];

  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const int first_block = lo / BS;
  const int last_block = (hi - 1) / BS;
  // Look up the block ids of a chunk's 8-token halves, once per block. A half or token outside [lo, hi) is replaced by
  // the nearest one inside, so that every address is of a live token.
  auto look_up = [&](int chunk, int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      ids[i] = i == 0 || i * 8 % BS == 0 ? table[metal::min(metal::max((chunk * CHUNK + i * 8) / BS, first_block), last_block)] : ids[i - 1];
    }
  };
  auto slot = [&](int token) { return metal::min(metal::max(token, lo), hi - 1) % BS; };
  const T* k_head = k_pool + kv_head * (BS * D) + c * 8;
  const T* v_head = v_pool + kv_head * (BS * DV) + r * 8;
  uint4 keys[U][2][KT];    // token r of each half
  uint4 values[U][4][VT];  // tokens 2c, 2c + 1 of each half
  auto load_keys = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      const T* source = k_head + static_cast<int64_t>(ids[i]) * (n_kv * BS * D) + slot(chunk * CHUNK + i * 8 + r) * D;
      UNROLL
      for (int kt = 0; kt < KT; kt++) {
        keys[i / 2][i % 2][kt] = D % 32 == 0 || kt * 32 + c * 8 < D ? stream_load(source + kt * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  auto load_values = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 4; i++) {
      const T* source = v_head + static_cast<int64_t>(ids[i / 2]) * (n_kv * BS * DV) + slot(chunk * CHUNK + i / 2 * 8 + c * 2 + i % 2) * DV;
      UNROLL
      for (int vt = 0; vt < VT; vt++) {
        values[i / 4][i % 4][vt] = DV % 64 == 0 || vt * 64 + r * 8 < DV ? stream_load(source + vt * 64) : make_uint4(0, 0, 0, 0);
      }
    }
  };

  // Software pipeline: the registers of a chunk's keys are refilled as soon as its scores are known, those of its
  // values at the end, so that loads are always in flight; block ids are fetched two chunks ahead.
  int ids[U * 2];
  if (fresh >= lo && fresh < hi && fresh / CHUNK % SG == warp) {
    // Stored by the warp that loads it again below.
    const int64_t at = (static_cast<int64_t>(table[fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
    for (int dim = lane * 8; dim < D; dim += 256) *reinterpret_cast<uint4*>(const_cast<T*>(k_pool) + at * D + dim) = *reinterpret_cast<const uint4*>(k_new + unit * D + dim);
    for (int dim = lane * 8; dim < DV; dim += 256) *reinterpret_cast<uint4*>(const_cast<T*>(v_pool) + at * DV + dim) = *reinterpret_cast<const uint4*>(v_new + unit * DV + dim);
    __syncwarp();
  }
  int chunk = first_chunk + (warp + SG - first_chunk % SG) % SG;
  if (chunk <= last_chunk) {
    look_up(chunk, ids);
    load_keys(chunk, ids);
    load_values(chunk, ids);
    look_up(chunk + SG, ids);
  }
  for (int part = 0; first + part <= last; part++) {
    UNROLL
    for (int n = 0; n < NT; n++) {
      UNROLL
      for (int i = 0; i < VT * 16; i++) acc[n][i / 16][i / 4 % 4][i % 4] = 0.0f;
      m[n][0] = m[n][1] = NOTHING;
      l[n][0] = l[n][1] = 0.0f;
    }
    const int part_end = metal::min(last_chunk, (origin + (first + part + 1) * size) / CHUNK - 1);
    for (; chunk <= part_end; chunk += SG) {
      const bool more = chunk + SG <= last_chunk;
      float scores[NT][U][4];  // (token r, columns 2c and 2c + 1), then token r + 8
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) scores[n][u][i] = 0.0f;
          UNROLL
          for (int kt = 0; kt < KT; kt++) {
            const uint4 a = keys[u][0][kt];
            const uint4 b = keys[u][1][kt];
            const uint4 x = query[n][kt];
            mma<T>(scores[n][u], a.x, b.x, a.y, b.y, x.x, x.y);
            mma<T>(scores[n][u], a.z, b.z, a.w, b.w, x.z, x.w);
          }
        }
      }
      if (more) load_keys(chunk + SG, ids);

      float top[NT][2], shrink[NT][2];
      UNROLL
      for (int n = 0; n < NT; n++) {
        top[n][0] = m[n][0];
        top[n][1] = m[n][1];
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) {
            const int token = chunk * CHUNK + u * 16 + i / 2 * 8 + r;
            float s = product(scores[n][u][i], gain);
            if (SOFTCAP) s = product(::tanhf(s), params[1] * LOG2E);
            scores[n][u][i] = token >= lo && token < hi ? s : NOTHING;
            top[n][i % 2] = ::fmaxf(top[n][i % 2], scores[n][u][i]);
          }
        }
        UNROLL
        for (int i = 0; i < 2; i++) {
          float& x = top[n][i];
          x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
          x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
          x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
          shrink[n][i] = metal::fast::exp2(m[n][i] - x);
          m[n][i] = x;
          l[n][i] = product(l[n][i], shrink[n][i]);
        }
      }
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int i = 0; i < VT * 16; i++) acc[n][i / 16][i / 4 % 4][i % 4] *= shrink[n][i % 2];
      }
      UNROLL
      for (int u = 0; u < U; u++) {
        // 8 tokens x 8 columns, transposed, are the B fragment: column r, tokens 2c and 2c + 1.
        uint high[NT][2], rest[NT][2];
        UNROLL
        for (int n = 0; n < NT; n++) {
          UNROLL
          for (int half = 0; half < 2; half++) {
            float p[2];
            UNROLL
            for (int i = 0; i < 2; i++) {
              const float s = scores[n][u][half * 2 + i];
              p[i] = s > NOTHING ? metal::fast::exp2(s - top[n][i]) : 0.0f;
              l[n][i] += p[i];
            }
            const uint rounded = pack_rounded<T>(p[0], p[1]);
            high[n][half] = transpose8x8(rounded);
            rest[n][half] = transpose8x8(pack_rounded<T>(p[0] - low_of<T>(rounded), p[1] - high_of<T>(rounded)));
          }
        }
        UNROLL
        for (int vt = 0; vt < VT; vt++) {
          UNROLL
          for (int j = 0; j < 4; j++) {
            const uint v0 = word(values[u][0][vt], j), v1 = word(values[u][1][vt], j);
            const uint v2 = word(values[u][2][vt], j), v3 = word(values[u][3][vt], j);
            // Dim 2j of the lane's eight is row r of the tile, dim 2j + 1 row r + 8.
            const uint a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
            const uint a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
            UNROLL
            for (int n = 0; n < NT; n++) {
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, high[n][0], high[n][1]);
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, rest[n][0], rest[n][1]);
            }
          }
        }
      }
      if (more) {
        load_values(chunk + SG, ids);
        look_up(chunk + 2 * SG, ids);
      }
    }
    if (part > 0) __syncthreads();
    store_sums(m, l);
    UNROLL
    for (int h0 = 0; h0 < HEADS; h0 += HR) {
      if (h0 > 0) __syncthreads();
      // Store a warp's outputs of a round for the other warps.
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int i = 0; i < VT * 16; i++) {
          const int head = n * 8 + c * 2 + i % 2;
          const int eight = i / 16 * 8 + r;  // of dims
          if (head >= h0 && head < h0 + HR && head < G && eight < DV / 8) tg_o[warp * HR + head - h0][(i / 4 % 4 * 2 + i / 2 % 2) * (DV / 8) + eight] = acc[n][i / 16][i / 4 % 4][i % 4];
        }
      }
#include "join_warps.cuh"
    }
  }
}
#if OWN
#include "join_runs.cuh"
#endif
