// CUDA only: paged_decode for 16-bit types on the tensor cores (mma.sync m16n8k16, float accumulators).
// Same partitions as paged_decode. A thread group takes a run of 1, 2 or 4 (2^params[3]) of them, and the last group
// of a row and kv head to finish joins the runs: no second kernel. Partitions are always joined as the same tree, four
// by four, so the result has the same bits for every length of runs.
// Each warp takes whole chunks of 16 * U tokens:
//   scores  S[token, head]  = K[token, dim] Q[dim, head]     K rows go from memory straight into the A fragments
//   output  O[dim, head]   += V^T[dim, token] P[token, head]  V rows are paired by byte permutes into A fragments
// Heads are the 8 columns (NT column tiles for more than 8). The order of dims inside a fragment is ours to choose as
// long as both factors agree, so every load is 16 bytes: a lane holds dims 8c.. of a key row, 8r.. of a value row.
// A probability is split into two 16-bit halves (high and remainder), so P keeps float's precision to about 2^-16.
constexpr int NT = (G + 7) / 8;
constexpr int KT = (D + 31) / 32;    // 32 dims of a key row per load
constexpr int VT = (DV + 63) / 64;   // 64 dims of a value row per load
constexpr int CHUNK = 16 * U;
constexpr float NOTHING = -3.0e38f;
constexpr float LOG2E = 1.44269504088896341f;

__shared__ float tg_m[SG * NT * 8];
__shared__ float tg_l[SG * NT * 8];
// Outputs are kept with dim 8 a + b at b * DV / 8 + a, which spreads the stores below over all banks.
__shared__ __align__(16) float tg_o[SG * HR][DV + 4];
// A first half that waits for its second: [0] a partition, [1] a pair of partitions.
__shared__ State wait[2][G];
__shared__ float4 wait_o[2][G][DV / 4];
__shared__ bool tg_last;

const int n_kv = k_pool_shape[1];
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int kv_head = blockIdx.x;
const int row = blockIdx.y;
const int run = blockIdx.z;
const int n_runs = gridDim.z;
const int run_shift = static_cast<int>(params[3]);
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int r = lane / 4;
const int c = lane % 4;
const int sequence = row / q_len;
const int64_t line0 = static_cast<int64_t>(sequence * n_kv + kv_head) * G * q_len + row % q_len;
// Partitions grow with what the row itself sees, so they never depend on the rest of the batch.
const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
int doublings = 0;
while (end - begin > (SPAN * PART) << 2 * doublings) doublings++;
const int size = PART << doublings;
const int origin = begin / 64 * 64;
const int n_live = begin < end ? (end - origin + size - 1) / PART >> doublings : 0;
const int first = run << run_shift;
const int last = metal::min(first + (1 << run_shift), n_live) - 1;
const int lo = metal::max(begin, origin + first * size);
const int hi = metal::min(end, origin + (last + 1) * size);
const int64_t unit = static_cast<int64_t>(row) * n_kv + kv_head;
// With params[2] set (q_len is 1 then), the row's newest token comes with the call and is stored into its slot first.
const int fresh = params[2] != 0.0f ? end - 1 : -1;
float2* stats = reinterpret_cast<float2*>(partial + static_cast<int64_t>(gridDim.y) * n_kv * n_runs * (G * DV));

if (kv_head + row + run + lane + warp == 0) {
  fence_out[0] = fence[0] + 1u;
}

// The head's sink enters here.
auto finish = [&](int head, int at, State whole, float4 o) {
  if (SINKS) join({static_cast<float>(sinks[kv_head * G + head]) * LOG2E, 1.0f}, make_float4(0.0f, 0.0f, 0.0f, 0.0f), whole, o);
  const float values[4] = {o.x, o.y, o.z, o.w};
  UNROLL
  for (int i = 0; i < 4; i++) {
    const int place = at * 4 + i;
    out[(line0 + head * q_len) * DV + place % (DV / 8) * 8 + place / (DV / 8)] = static_cast<T>(values[i] / whole.l);
  }
};

if (first <= last) {
  const int* table = tables + sequence * max_blocks;
  const float gain = SOFTCAP ? params[0] / params[1] : params[0] * LOG2E;
  uint query[NT][KT][4];  // column (head) r, dims 32 * kt + 8c + 0..7
  UNROLL
  for (int n = 0; n < NT; n++) {
    UNROLL
    for (int kt = 0; kt < KT; kt++) {
      const int dim = kt * 32 + c * 8;
      const int head = n * 8 + r;
      uint4 bits = make_uint4(0, 0, 0, 0);
      if (head < G && dim < D) bits = *reinterpret_cast<const uint4*>(q + (line0 + head * q_len) * D + dim);
      query[n][kt][0] = bits.x;
      query[n][kt][1] = bits.y;
      query[n][kt][2] = bits.z;
      query[n][kt][3] = bits.w;
    }
  }
  float acc[NT][VT][4][4];
  float m[NT][2], l[NT][2];

  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const int first_block = lo / BS;
  const int last_block = (hi - 1) / BS;
  // Block ids of a chunk's 8-token halves, one look-up per block. Dead halves and dead tokens borrow the nearest live
  // one, so that every address is of a live token.
  auto look_up = [&](int chunk, int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      ids[i] = i == 0 || i * 8 % BS == 0 ? table[metal::min(metal::max((chunk * CHUNK + i * 8) / BS, first_block), last_block)] : ids[i - 1];
    }
  };
  auto slot = [&](int token) { return metal::min(metal::max(token, lo), hi - 1) % BS; };
  const T* k_head = k_pool + kv_head * (BS * D) + c * 8;
  const T* v_head = v_pool + kv_head * (BS * DV) + r * 8;
  uint4 keys[U][2][KT];    // tokens r of each half
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
      float scores[NT][U][4];  // (token r, heads 2c and 2c + 1), then token r + 8
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
            mma<T>(scores[n][u], a.x, b.x, a.y, b.y, query[n][kt][0], query[n][kt][1]);
            mma<T>(scores[n][u], a.z, b.z, a.w, b.w, query[n][kt][2], query[n][kt][3]);
          }
        }
      }
      if (more) load_keys(chunk + SG, ids);

      UNROLL
      for (int n = 0; n < NT; n++) {
        auto& score = scores[n];
        float top[2] = {m[n][0], m[n][1]};
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) {
            const int token = chunk * CHUNK + u * 16 + i / 2 * 8 + r;
            float s = score[u][i] * gain;
            if (SOFTCAP) s = ::tanhf(s) * (params[1] * LOG2E);
            score[u][i] = token >= lo && token < hi ? s : NOTHING;
            top[i % 2] = ::fmaxf(top[i % 2], score[u][i]);
          }
        }
        float shrink[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
          top[i] = ::fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 4));
          top[i] = ::fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 8));
          top[i] = ::fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 16));
          shrink[i] = ::exp2f(m[n][i] - top[i]);
          m[n][i] = top[i];
          l[n][i] *= shrink[i];
        }
        UNROLL
        for (int i = 0; i < VT * 16; i++) acc[n][i / 16][i / 4 % 4][i % 4] *= shrink[i % 2];
        UNROLL
        for (int u = 0; u < U; u++) {
          // Rows of 8 tokens x 8 heads become, transposed, the B fragment: column (head) r, tokens 2c and 2c + 1.
          uint high[2], rest[2];
          UNROLL
          for (int half = 0; half < 2; half++) {
            float p[2];
            UNROLL
            for (int i = 0; i < 2; i++) {
              const float s = score[u][half * 2 + i];
              p[i] = s > NOTHING ? ::exp2f(s - top[i]) : 0.0f;
              l[n][i] += p[i];
            }
            const T p0 = static_cast<T>(p[0]);
            const T p1 = static_cast<T>(p[1]);
            high[half] = transpose8x8(pack(p0, p1));
            rest[half] = transpose8x8(pack(static_cast<T>(p[0] - static_cast<float>(p0)), static_cast<T>(p[1] - static_cast<float>(p1))));
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
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, high[0], high[1]);
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, rest[0], rest[1]);
            }
          }
        }
      }
      if (more) {
        load_values(chunk + SG, ids);
        look_up(chunk + 2 * SG, ids);
      }
    }

    // Sums over the eight lanes that share heads 2c and 2c + 1, then over the warps.
    if (part > 0) __syncthreads();
    UNROLL
    for (int n = 0; n < NT; n++) {
      UNROLL
      for (int i = 0; i < 2; i++) {
        l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 4);
        l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 8);
        l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 16);
        if (r == 0) {
          tg_m[warp * NT * 8 + n * 8 + c * 2 + i] = m[n][i];
          tg_l[warp * NT * 8 + n * 8 + c * 2 + i] = l[n][i];
        }
      }
    }
    UNROLL
    for (int h0 = 0; h0 < G; h0 += HR) {
      if (h0 > 0) __syncthreads();
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int i = 0; i < VT * 16; i++) {
          const int head = n * 8 + c * 2 + i % 2;
          const int eight = i / 16 * 8 + r;  // of dims
          if (head >= h0 && head < h0 + HR && head < G && eight < DV / 8) tg_o[warp * HR + head - h0][(i / 4 % 4 * 2 + i / 2 % 2) * (DV / 8) + eight] = acc[n][i / 16][i / 4 % 4][i % 4];
        }
      }
      __syncthreads();
      for (int item = threadIdx.x; item < HR * DV / 4; item += SG * 32) {
        const int head = h0 + item / (DV / 4);
        const int at = item % (DV / 4);
        if (head < G) {
          State whole = {NOTHING, 0.0f};
          UNROLL
          for (int s = 0; s < SG; s++) whole.m = ::fmaxf(whole.m, tg_m[s * NT * 8 + head]);
          float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          UNROLL
          for (int s = 0; s < SG; s++) {
            const float weight = ::exp2f(tg_m[s * NT * 8 + head] - whole.m);
            whole.l = ::fmaf(tg_l[s * NT * 8 + head], weight, whole.l);
            const float4 x = *reinterpret_cast<const float4*>(&tg_o[s * HR + head - h0][at * 4]);
            o = make_float4(::fmaf(x.x, weight, o.x), ::fmaf(x.y, weight, o.y), ::fmaf(x.z, weight, o.z), ::fmaf(x.w, weight, o.w));
          }
          if (part % 2 == 1) join(wait[0][head], wait_o[0][head][at], whole, o);
          if (part == 3 || (part == 2 && first + part == last)) join(wait[1][head], wait_o[1][head][at], whole, o);
          if (first + part < last) {
            wait_o[part % 2][head][at] = o;
            if (at == 0) wait[part % 2][head] = whole;
          } else if (n_live <= 1 << run_shift) {
            finish(head, at, whole, o);
          } else {
            const int64_t slot = (unit * n_runs + run) * G + head;
            reinterpret_cast<float4*>(partial)[slot * (DV / 4) + at] = o;
            if (at == 0) stats[slot] = make_float2(whole.m, whole.l);
          }
        }
      }
    }
  }

  const int n_live_runs = (n_live - 1 >> run_shift) + 1;
  if (n_live_runs > 1) {
    __syncthreads();
    if (threadIdx.x == 0) tg_last = arrive(const_cast<unsigned*>(arrivals) + unit, n_live_runs);
    __syncthreads();
    for (int item = threadIdx.x; tg_last && item < G * DV / 4; item += SG * 32) {
      const int head = item / (DV / 4);
      const float4* parts = reinterpret_cast<const float4*>(partial) + unit * n_runs * (G * DV / 4) + item;
      const float2* pairs = stats + unit * n_runs * G + head;
      State whole;
      float4 o;
      for (int p = 0; p < n_live; p += 8) {
        // Two trees; a run stands in the place of its first partition.
        State leaf[8];
        float4 leaf_o[8];
        UNROLL
        for (int i = 0; i < 8; i++) {
          if ((i & (1 << run_shift) - 1) == 0 && p + i < n_live) {
            const int64_t at = p + i >> run_shift;
            const float2 pair = load_relaxed(pairs + at * G);
            leaf[i] = {pair.x, pair.y};
            leaf_o[i] = load_relaxed(parts + at * (G * DV / 4));
          }
        }
        UNROLL
        for (int i = 0; i < 8; i += 4) {
          State& tree = leaf[i];
          float4& tree_o = leaf_o[i];
          if (run_shift == 0 && p + i + 1 < n_live) join(tree, tree_o, leaf[i + 1], leaf_o[i + 1]), tree = leaf[i + 1], tree_o = leaf_o[i + 1];
          if (run_shift == 0 && p + i + 3 < n_live) join(leaf[i + 2], leaf_o[i + 2], leaf[i + 3], leaf_o[i + 3]), leaf[i + 2] = leaf[i + 3], leaf_o[i + 2] = leaf_o[i + 3];
          if (run_shift <= 1 && p + i + 2 < n_live) join(tree, tree_o, leaf[i + 2], leaf_o[i + 2]), tree = leaf[i + 2], tree_o = leaf_o[i + 2];
          if (p + i > 0 && p + i < n_live) join(whole, o, tree, tree_o);
          if (p + i < n_live) whole = tree, o = tree_o;
        }
      }
      finish(head, item % (DV / 4), whole, o);
    }
  }
} else if (n_live == 0 && run == 0) {
  for (int item = threadIdx.x; item < G * DV; item += SG * 32) {
    out[(line0 + item / DV * q_len) * DV + item % DV] = static_cast<T>(0.0f);
  }
}
